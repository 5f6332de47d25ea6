"""The part of one rank: its parameters and slices, their gradients, and the optimizer that steps them."""
