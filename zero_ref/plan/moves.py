"""The elements that change owner between two partitions, in integers.

In `stairs/owners.py` an owner never changes. A state that is loaded at another world size or partition has
new owners: `moves` lists each run of elements with its old and its new owner. It needs no torch, so a laptop
can plan the resharding of 4,096 ranks' state onto 512.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zero_ref.plan.partition import Partition, Slice


class Move(NamedTuple):
    """A run of elements that rank `src` owned and rank `dst` will own.

    >>> Move(Slice(param=3, start=0, stop=10), src=0, dst=2)
    Move(piece=Slice(param=3, start=0, stop=10), src=0, dst=2)
    """

    piece: Slice
    src: int
    dst: int


def moves(old: Partition, new: Partition, *, staying: bool = False) -> list[Move]:
    """List the moves that turn `old` into `new`: each element whose owner changes is in exactly one.

    A move is the longest run of elements that belongs to one slice of `old` and one slice of `new`. Moves are
    in the order of parameters, then of elements, so all ranks that know both partitions list the same moves
    without communicating.

    >>> from zero_ref.plan.rules import even, from_lists
    >>> old, new = from_lists([256], [[0], []]), even([256], 2)
    >>> moves(old, new)
    [Move(piece=Slice(param=0, start=128, stop=256), src=0, dst=1)]

    The world sizes may differ, as when training continues on 3 ranks instead of 2. The moves then tell what
    each new rank needs and which old rank has it; list the elements that keep their owner too:

    >>> for move in moves(even([384], 2), even([384], 3), staying=True):
    ...     print(move.piece[1:], "from", move.src, "to", move.dst)
    (0, 128) from 0 to 0
    (128, 192) from 0 to 1
    (192, 256) from 1 to 1
    (256, 384) from 1 to 2

    Args:
        old, new: partitions of the same parameters, at any world sizes.
        staying: also list the elements that keep their owner, as moves with `src == dst`.
    Returns:
        The moves. A parameter without elements has a move without elements, since its state may hold a step
        counter.
    Raises:
        ValueError: the partitions are not of the same parameters.
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
    """Count the elements that each rank sends to each other rank, by (src, dst).

    Multiply by the bytes of state per element (8 for Adam in float32) to get the bytes on the wire.

    >>> from zero_ref.plan.rules import even
    >>> numels_between(moves(even([384], 2), even([384], 3), staying=True))
    {(0, 0): 128, (0, 1): 64, (1, 1): 64, (1, 2): 128}
    """
    totals: dict[tuple[int, int], int] = {}
    for piece, src, dst in planned:
        totals[src, dst] = totals.get((src, dst), 0) + piece.numel
    return totals


def _runs(before: Sequence[tuple[Slice, int]], after: Sequence[tuple[Slice, int]]) -> Iterator[Move]:
    """Cut one parameter at the borders of both partitions.

    Args:
        before, after: (slice, owner) in the order of elements, in the old and in the new partition.
    """
    # The pieces begin together at (before[i], after[j]). Each step goes to the next border of either.
    i = j = 0
    while i < len(before) and j < len(after):
        (had, src), (has, dst) = before[i], after[j]
        piece = Slice(had.param, max(had.start, has.start), min(had.stop, has.stop))
        yield Move(piece, src, dst)
        i += piece.stop == had.stop
        j += piece.stop == has.stop
