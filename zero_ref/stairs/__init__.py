"""Six whole optimizers, each with one idea more.

- `owners`: each parameter is updated by its owner and broadcast;
- `buckets`: one flat bucket for each owner, sent as one message;
- `overlap`: gradients averaged, and parameters updated, during backward;
- `in_step`: no stair, but stage 2 in its shortest form, all of it in `step`;
- `shards`: gradients averaged on owners alone, and equal shares of them kept: stage 2;
- `checkpoint`: state to whole and back at any number of ranks, parameter groups, and 32-bit masters;
- `parameters`: equal shares of each block's parameters kept, and gathered before use: stage 3.
"""

STAIRS = ("owners", "buckets", "overlap", "shards", "checkpoint", "parameters")
"""The files of this folder, in the order in which they are read."""

BEFORE = {**dict(zip(STAIRS[1:], STAIRS)), "parameters": "shards"}
"""The stair that each one changes. The first changes none, and the last goes on from stage 2."""
