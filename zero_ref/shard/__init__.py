"""What one rank holds: its parameters and slices, their gradients, and the optimizer that steps them."""
