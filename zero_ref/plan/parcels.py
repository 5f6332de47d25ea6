"""Which small tensors travel together: new parameters in a step, and state that is gathered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain

PARCEL_NBYTES = 2**18
"""The size up to which tensors are joined into one message: copying takes less time than more messages."""

BROADCAST_NUMEL = 2**18
"""Elements of a buffer in which small parameters travel, in a step without flat tensors."""

PACKED_NUMEL = 2**14
"""Up to so many elements, copying a parameter takes less time than sending one more message."""


def parcels(
    tensors: Iterable[tuple[Hashable, int]], limit: int = PARCEL_NBYTES, small: int | None = None
) -> list[list[int]]:
    """Divide tensors into messages, as lists of their numbers: small ones of a kind together.

    Large tensors come last: ranks wait for each parcel of small ones, which would queue behind a large one.

    >>> parcels([("float32", 40), ("float32", 4_000_000), ("float32", 80), ("float32", 20)])
    [[0, 2, 3], [1]]

    Args:
        tensors: of each tensor its kind, such as its dtype, and its size, in the order in which it is sent.
        limit: the largest size of a parcel.
        small: the largest size of a tensor that is put into one; None for `limit`.
    """
    most = limit if small is None else min(small, limit)
    large: list[list[int]] = []
    joined: dict[Hashable, list[list[int]]] = {}  # by kind, its parcels
    left: dict[Hashable, int] = {}  # by kind, the room that its last parcel has
    for number, (kind, size) in enumerate(tensors):
        if size > most:
            large.append([number])
            continue
        if size > left.get(kind, -1):
            joined.setdefault(kind, []).append([])
            left[kind] = limit
        joined[kind][-1].append(number)
        left[kind] -= size
    return [*chain.from_iterable(joined.values()), *large]
