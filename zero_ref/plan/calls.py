"""One call to the other ranks, as a plan foresees it and as a recorder sees it.

The simulator predicts a list of these, `lab.meter` records one, and the two must be equal: the same
operations, in the same order, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CHECK = "check"
"""The op of the all-gather of 32 bytes by which ranks compare options before steps 1, 2, 4, 8 and so on."""


class Call(NamedTuple):
    """What one rank asks of the network.

    >>> Call("broadcast", nbytes=4096, peer=0)
    Call(op='broadcast', nbytes=4096, peer=0)

    Args:
        op: "broadcast", "all_reduce", "all_gather", "reduce_scatter", "send", "recv", or "check".
        nbytes: payload in bytes: the size of the tensor that this rank passes in, or of the one that an
            all-gather into a single tensor gives. What travels on the wire is a multiple of it that depends
            on the operation and the number of ranks.
        peer: the source of a broadcast, the other end of a send or recv; None where all ranks are alike.
    """

    op: str
    nbytes: int
    peer: int | None = None


def ordinary(calls: Iterable[Call]) -> list[Call]:
    """The calls but for those that only some steps make, to be held against the plan of a step.

    >>> ordinary([Call("check", 32), Call("broadcast", 4096, 0)])
    [Call(op='broadcast', nbytes=4096, peer=0)]
    """
    return [call for call in calls if call.op != CHECK]
