"""Ranks that average their parameters once in a while instead of their gradients in every step."""
