"""Five whole optimizers, each with one idea more.

- `owners`: each parameter is updated by its owner and broadcast;
- `buckets`: one flat bucket for each owner, sent as one message;
- `overlap`: gradients averaged, and parameters updated, during backward;
- `shards`: gradients averaged on owners alone, and equal shares of them kept: stage 2;
- `checkpoint`: state to whole and back at any number of ranks, parameter groups, and 32-bit masters.
"""

STAIRS = ("owners", "buckets", "overlap", "shards", "checkpoint")
"""The files of this folder, in the order in which they are read."""
