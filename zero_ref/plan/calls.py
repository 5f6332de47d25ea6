"""A call to the other ranks, as a value that can be predicted, recorded and compared.

This module adds to `stairs/owners.py` a way to count its calls. The simulator predicts a list of `Call`s,
`lab.meter` records one, and the two must be equal: the same operations, in the same order and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CHECK = "check"
"""The op of the 32-byte all-gather in which ranks compare options before steps 1, 2, 4, 8 and so on."""


PAIRWISE_RANKS = 8
"""The largest number of ranks for which Gloo's collectives are replaced by messages between pairs of ranks.

A broadcast is then one send to each rank, and a reduction to shares is one message between each pair. Many
small broadcasts at once take a fraction of the time of Gloo's own, and large ones take no longer
(benchmarks/NOTES.md). More ranks have not been measured.
"""

REDUCED_BY = ("pairs", "reduce")
"""The ways in which DDP's buckets of gradients get to their owners.

"pairs": every rank sends each owner its part of a bucket, and the owner adds what it receives. An owner of
the whole bucket receives it N-1 times. "reduce": one call of the backend's own reduce for each owner of a
part. NCCL passes sums along a chain of ranks, so that no link carries a part more than once.
"""


class Call(NamedTuple):
    """One operation that a rank issues.

    >>> Call("broadcast", nbytes=4096, peer=0)
    Call(op='broadcast', nbytes=4096, peer=0)

    Args:
        op: "broadcast", "all_reduce", "all_gather", "reduce", "reduce_shares" (this package's
            reduce-scatter, see `Collectives.reduce_shares`), "reduce_scatter" (a backend's own), "send",
            "recv", or "check".
        nbytes: payload in bytes: the size of the tensor that this rank passes in, or of the output of an
            all-gather into a single tensor. The bytes on the wire are a multiple of the payload that depends
            on the operation and the number of ranks.
        peer: the source of a broadcast, the owner that a reduce gives the sum to, or the other rank of a send
            or recv; None for other operations.
    """

    op: str
    nbytes: int
    peer: int | None = None


def ordinary(calls: Iterable[Call]) -> list[Call]:
    """Leave out the checks, which only some steps make: the rest can be compared with the plan of a step.

    >>> ordinary([Call("check", 32), Call("broadcast", 4096, 0)])
    [Call(op='broadcast', nbytes=4096, peer=0)]
    """
    return [call for call in calls if call.op != CHECK]
