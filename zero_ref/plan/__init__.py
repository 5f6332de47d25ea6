"""Plans in integers, beyond `assign_owners` of `minimal.py`: owners, offsets, moves and calls. No torch."""
