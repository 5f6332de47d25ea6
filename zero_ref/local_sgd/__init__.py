"""Local SGD: ranks average their parameters after some steps, instead of their gradients in every step."""
