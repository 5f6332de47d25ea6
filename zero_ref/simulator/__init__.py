"""A simulator: what a run with ZeRO costs, for any number of ranks, without tensors or a network.

It needs the standard library only, so it runs without torch, and inside a web page. Reading order:

- `ledger`: bytes a rank holds, by stage and convention, and exactly for a partition;
- `layers`: what activations and kernels of a model depend on, layer by layer;
- `architectures`: what the simulator asks of a model; GPT-2, Llama, two mixtures and an MLP;
- `configuration`: reads one of these from a configuration, without transformers;
- `models`: the parameter shapes of published models by name, or of a module at hand;
- `traced`: a model whose program `lab.tracing` has run on the meta device, as rules for any batch and length;
- `lora`: adapters beside frozen weights;
- `autocast`: what is cast to 16 bits of a model whose parameters are in 32;
- `activations`: what the forward pass keeps for the backward pass, with and without checkpointing;
- `updates`: what an update needs and moves, in one kernel or in many;
- `norms`: what norms that are computed by separate operations keep in addition;
- `peak`: the moments of an iteration at which most may be held;
- `memory`: everything that a rank holds, item by item, on average and exactly for a partition;
- `operations`: what is computed, what is sent, and what waits for what;
- `offload`: state and gradients on the CPU, which makes a part of the update;
- `messages`: what carries new parameters from their owners to all ranks;
- `strategy`: the base class of all strategies, which list their operations in order and say what they hold;
- `data_parallel`, `sharded`, `stage_3`, `local_sgd`: a class for each strategy;
- `groups`: groups of ranks that share what is sharded;
- `recipe`: a strategy as one value: what is sharded, who gets gradients, when updates are made, what is sent;
- `schedule`: the iteration of a strategy, its calls one by one, and what each rank holds;
- `timeline`: when each part of an iteration happens on a rank, and what is hidden behind computing;
- `traffic`: how many messages and bytes a collective makes;
- `devices`, `presets`: known GPUs, links and clusters, as tables to extend;
- `device`: what one rank computes with, and how long products and touching memory take on it;
- `cluster`: links between devices, and how long each collective takes on them;
- `costs`: bytes that norms, gates and other such kernels touch, and what is computed again, as tables;
- `kernels`: what a transformer computes, and what limits it: arithmetic, attention, memory;
- `price`: how long each operation of a schedule takes on a cluster;
- `held`: what a rank holds during an iteration, by kind;
- `play`: a schedule on a cluster: times, memory over time, the critical path, slow ranks;
- `saved`, `checkpoints`: what saving and loading take, in several ways;
- `trace`: timelines as a file that Perfetto shows;
- `sensitivity`: which circumstance changes the conclusion, and what would make an iteration faster;
- `spread`: how far a prediction may be off, from published runs;
- `like`: the options that suit a program, by its name;
- `training`: what is trained, on what and how, as one value; `rank_work`: what a rank computes for that;
- `bill`: days, GPU-hours and cost of a whole training;
- `scenario`: all of it together, from a model's name to memory, traffic and time;
- `stages`: one such run under DDP and each stage, to choose among them;
- `tree`: a decision tree as a value: questions, and an advice at each end;
- `which`: every way to train a model compared, the questions that decide, and how far their advice is off;
- `search`: every way to train a model on a cluster, and the best of them;
- `options`: an option of such a run, defined once: with the field that keeps its value.
"""
