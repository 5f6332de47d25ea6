"""State from shards to whole and back, between owners, and in files that each rank writes its part of."""
