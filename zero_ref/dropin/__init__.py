"""Interfaces of other libraries.

- `oss`: FairScale's `OSS`;
- `clients`: state gathered before accelerate's and transformers' saves;
- `rpc_optimizer`: an optimizer over RPC, on each worker for the parameters that live there.
"""
