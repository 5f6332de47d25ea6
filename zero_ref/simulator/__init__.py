"""ZeRO on paper: what a run costs, for any number of ranks, without a tensor or a network.

Standard library only, so it runs where torch is not installed, and inside a web page. Reading order:

- `ledger`: bytes a rank holds, by stage and convention, and exactly for a partition;
- `models`: the parameter shapes of published models, of a configuration, or of a module at hand;
- `activations`: what the forward pass keeps for the backward pass, with and without checkpointing;
- `memory`: everything that lies on a rank, item by item, on average and exactly for a partition;
- `shortfall`: why that is more than 1/N of what one rank alone would hold;
- `schedule`: what a strategy sends in one iteration, call by call;
- `timeline`: when each part of an iteration happens, and what hides behind what.
"""
