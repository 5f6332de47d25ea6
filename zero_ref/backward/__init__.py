"""Gradients on their way to their owners, and the update made while backward runs."""
