"""Gradients on their way to their owners, and the update made while backward runs.

- `sharded_data_parallel`: the wrapper of a model, in DDP's place;
- `hooks`: what autograd calls;
- `shard_reduction`: the buckets of one optimizer in a backward;
- `gradient_buckets`: a bucket: on native collectives, or pairwise;
- `arguments`: the wrapper's options, and its checks;
- `reduction`: a bucket of DDP, reduced to all ranks or only to owners;
- `overlap`: the update made while DDP's backward runs.
"""
