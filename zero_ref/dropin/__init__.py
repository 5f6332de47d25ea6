"""Interfaces of other libraries: FairScale's OSS, torch's optimizer over RPC, hooks for trainers."""
