"""ZeRO on paper: what a run costs, for any number of ranks, without a tensor or a network.

Standard library only, so it runs where torch is not installed, and inside a web page. Reading order:

- `ledger`: bytes a rank holds, by stage and convention, and exactly for a partition;
- `models`: the parameter shapes of published models, of a configuration, or of a module at hand;
- `activations`: what the forward pass keeps for the backward pass, with and without checkpointing;
- `memory`: everything that lies on a rank, item by item, on average and exactly for a partition;
- `shortfall`: why that is more than 1/N of what one rank alone would hold;
- `recipe`: a strategy as one value: what is sharded, who gets gradients, when updates are made, what travels;
- `operations`: one iteration in order: what is computed, what is sent, what waits for what;
- `schedule`: the iteration of a strategy, its calls one by one, and what each rank holds;
- `timeline`: when each part of an iteration happens on a rank, and what hides behind what;
- `cluster`: links and devices, and what each collective costs on them;
- `play`: a schedule on a cluster: times, memory over time, the critical path, slow ranks;
- `trace`: timelines as a file that Perfetto shows;
- `sensitivity`: which circumstance changes the conclusion, and what would make an iteration faster;
- `calibrate`: from measured times to a cluster, with bounds on the error;
- `scenario`: all of it together, from a model's name to memory, traffic and time.
"""
