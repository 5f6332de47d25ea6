"""`minimal.py` made complete: read `zero_redundancy_optimizer.py` first, then `built.py` and `shard.py`."""
