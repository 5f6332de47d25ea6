"""ZeRO on paper: what a run costs, for any number of ranks, without a tensor or a network.

Standard library only, so it runs where torch is not installed, and inside a web page. Reading order:

- `ledger`: bytes a rank holds, by stage and convention, and exactly for a partition;
- `models`: the parameter shapes of published models, or of a module at hand;
- `schedule`: what a strategy sends in one iteration, call by call;
- `timeline`: when each part of an iteration happens, and what hides behind what.
"""
