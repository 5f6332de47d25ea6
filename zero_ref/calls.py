"""One call to the other ranks, as a plan foresees it and as a recorder sees it.

The simulator predicts a list of these, `lab.meter` records one, and the two must be equal: the same
operations, in the same order, with the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """What one rank asks of the network.

    >>> Call("broadcast", nbytes=4096, peer=0)
    Call(op='broadcast', nbytes=4096, peer=0)

    Args:
        op: "broadcast", "all_reduce", "all_gather", "reduce_scatter", "send" or "recv".
        nbytes: payload in bytes: the size of the tensor that this rank passes in. What travels on the
            wire is a multiple of it that depends on the operation and the number of ranks.
        peer: the source of a broadcast, the other end of a send or recv; None where all ranks are alike.
    """

    op: str
    nbytes: int
    peer: int | None = None
