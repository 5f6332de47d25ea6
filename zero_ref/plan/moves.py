"""What changes owner between two partitions: the plan of a repartition, as arithmetic on integers.

A repartition need not gather the optimizer's state and cut it anew: most of it is where it belongs already.
`moves` lists the rest, run by run, with the rank that has it and the rank that is to have it. No torch, so a
laptop can plan the resharding of 4,096 ranks' state onto 512.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zero_ref.plan.partition import Partition, Slice


class Move(NamedTuple):
    """Elements that rank `src` owned and rank `dst` is to own.

    >>> Move(Slice(param=3, start=0, stop=10), src=0, dst=2)
    Move(piece=Slice(param=3, start=0, stop=10), src=0, dst=2)
    """

    piece: Slice
    src: int
    dst: int


def moves(old: Partition, new: Partition, *, staying: bool = False) -> list[Move]:
    """What has to be handed over so that `old` becomes `new`: each element whose owner changes, once.

    Nothing less would do, for a rank cannot make up state that it never had. A move is a run of elements as
    long as can be: it lies in one slice of `old` and in one of `new`. Moves come in the order of parameters,
    then of elements, so all ranks that know both partitions list the same moves without communicating.

    >>> from zero_ref.plan.partition import even, from_lists
    >>> old, new = from_lists([256], [[0], []]), even([256], 2)
    >>> moves(old, new)
    [Move(piece=Slice(param=0, start=128, stop=256), src=0, dst=1)]

    Between other numbers of ranks, as when a run goes on with 3 ranks in place of 2, it tells what each new
    rank needs, and which old rank has it. There, and for a picture of the whole, ask for what stays too:

    >>> for move in moves(even([384], 2), even([384], 3), staying=True):
    ...     print(move.piece[1:], "from", move.src, "to", move.dst)
    (0, 128) from 0 to 0
    (128, 192) from 0 to 1
    (192, 256) from 1 to 1
    (256, 384) from 1 to 2

    Args:
        old, new: partitions of the same parameters, over any numbers of ranks.
        staying: list what keeps its owner too, as moves with `src == dst`.
    Returns:
        The moves. A parameter without elements moves too, as a piece without elements: it may have a step
        counter.
    Raises:
        ValueError: the partitions are of other parameters.
    """
    if old.numels != new.numels:
        raise ValueError(
            f"one partition is of {len(old.numels)} parameters ({sum(old.numels):,} elements), the other of "
            f"{len(new.numels)} ({sum(new.numels):,} elements); only the owners may differ."
        )
    return [
        move
        for before, after in zip(old.pieces_of_param, new.pieces_of_param, strict=True)
        for move in _runs(before, after)
        if staying or move.src != move.dst
    ]


def numels_between(planned: Iterable[Move]) -> dict[tuple[int, int], int]:
    """Elements that go from one rank to another, by (src, dst): the table of a resharding.

    Times the bytes of state that an element has (8 for Adam in float32), these are the bytes on the wire.

    >>> from zero_ref.plan.partition import even
    >>> numels_between(moves(even([384], 2), even([384], 3), staying=True))
    {(0, 0): 128, (0, 1): 64, (1, 1): 64, (1, 2): 128}
    """
    totals: dict[tuple[int, int], int] = {}
    for piece, src, dst in planned:
        totals[src, dst] = totals.get((src, dst), 0) + piece.numel
    return totals


def _runs(before: Sequence[tuple[Slice, int]], after: Sequence[tuple[Slice, int]]) -> Iterator[Move]:
    """Walk along one parameter, from each border of either partition to the next."""
    i = j = 0
    while i < len(before) and j < len(after):
        (had, src), (has, dst) = before[i], after[j]
        piece = Slice(had.param, max(had.start, has.start), min(had.stop, has.stop))
        yield Move(piece, src, dst)
        i += piece.stop == had.stop
        j += piece.stop == has.stop
