"""The norm of gradients whose owners are different ranks, and clipping by it."""
