"""Communication between ranks: the calls, and the agreements that ranks reach before and between them.

- `collectives`: what the optimizer asks of other ranks, and observers of it;
- `process_group`: that on a process group of any backend, such as NCCL;
- `pairwise`: what Gloo on CPUs needs in addition: early receives, sums around a ring, an alarm;
- `backend`: which of the two a group gets;
- `objects`: texts and JSON between ranks;
- `agreement`: all ranks raise or none;
- `devices`: the one module that knows kinds of accelerators.
"""
