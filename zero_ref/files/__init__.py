"""Checkpoints in files, of which each rank writes its own part.

- `sharded`: `save_sharded` and `load_sharded`;
- `contents`: what a rank stores;
- `shard_files`: its two files, with checksums;
- `saves`: the folders of saves;
- `save_owner`: which job saves there;
- `durable`: files that survive a loss of power;
- `dcp`: the same for torch.distributed.checkpoint;
- `flat_slices`: slices of flat tensors, as that checkpoint sees them.
"""
