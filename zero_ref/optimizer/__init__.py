"""`stairs/owners.py` made complete: read `zero_redundancy_optimizer.py` first, then `shard/shard.py`."""
