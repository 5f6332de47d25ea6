"""Interfaces of others on the same engine: FairScale's OSS, and torch's optimizer over RPC."""
