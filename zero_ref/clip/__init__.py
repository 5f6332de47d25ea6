"""The norm of gradients whose owners are different ranks, and clipping by it.

- `grad_norm`: clipping by the norm of all shards;
- `norms`: the norms that one rank computes;
- `among_ranks`: on every rank those of all.
"""
