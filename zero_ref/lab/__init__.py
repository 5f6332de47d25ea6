"""Running, measuring, looking: everything a notebook needs beside the optimizer itself.

- `ranks`: a function on real ranks, from a notebook cell too; `virtual`: on ranks that are threads;
- `placement`: which backend and devices ranks use; `patience`: time-outs on a slow machine;
- `meter`, `tensor_peak`, `recorder`, `drift`: what really happened: calls, bytes, memory, when,
  and how far ranks came apart;
- `config`, `model`, `strategies`, `stage_3`: a small GPT, and the strategies to train it under;
- `train`, `outcome`, `checkpoints`: the training job, what it took beside its prediction, and its saves;
- `settings`, `dry_run`, `commands`: its options in a file, its prediction alone, and how to type it;
- `tracing`, `noted_run`, `on_meta`: any program on the meta device, as rules for the simulator; `built`: what
  builds a model there;
- `compare`, `demo`, `report`: strategies side by side;
- `simulated`, `simulated_checkpoints`, `searched`, `advised`: the simulator's results, as tables and as JSON;
- `own`: the reader's own optimizer, loaded from its file and trained;
- `source`, `stairs`: code as the book shows it, and what a stair changes in the one before;
- `plots`, `widgets`: pictures, and the explorers in a notebook.
"""
