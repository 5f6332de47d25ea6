"""Plans in integers, beyond `assign_owners` of `stairs/owners.py`: owners, offsets, calls. No torch."""
