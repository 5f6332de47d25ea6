"""Five whole optimizers, each with one idea more.

- `owners`: each parameter is updated by its owner and broadcast;
- `buckets`: flat buckets, and parameter groups;
- `shards`: equal shards, also of gradients: stage 2;
- `overlap`: the update made during backward;
- `checkpoint`: state to whole and back at any number of ranks, and 32-bit masters.
"""
