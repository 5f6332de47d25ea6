"""A short name for the first of the stairs: see `stairs/owners.py`."""

from zero_ref.stairs.owners import MinimalZero as MinimalZero, assign_owners as assign_owners
