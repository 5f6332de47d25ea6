"""Integers: who owns what, where it lies, what changes hands, and the calls. Standard library only."""
