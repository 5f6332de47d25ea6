"""Checkpoints in files, of which each rank writes its own part."""
