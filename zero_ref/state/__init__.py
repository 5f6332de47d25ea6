"""The state dict of the unsharded optimizer, gathered from all shards and cut into them.

- `whole`: the state of the unsharded optimizer;
- `gather`: state from shards onto one rank or all;
- `checkpoint`: what a checkpoint must have to be loaded;
- `entries`: how state travels and is stored.
"""
