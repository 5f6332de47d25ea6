"""Which small tensors travel together when the state of an optimizer is gathered."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

PARCEL_NBYTES = 2**18
"""The size up to which tensors are joined into one message: copying takes less time than more messages."""


def parcels(tensors: Iterable[tuple[str, int]], limit: int = PARCEL_NBYTES) -> list[list[int]]:
    """Divide an owner's tensors into messages, as lists of their numbers: small ones of a dtype together.

    Large tensors come last: ranks wait for each parcel of small ones, which would queue behind a large one.

    >>> parcels([("float32", 40), ("float32", 4_000_000), ("float32", 80), ("float32", 20)])
    [[0, 2, 3], [1]]

    Args:
        tensors: of each tensor its dtype and its bytes, in the order in which it is sent.
        limit: the most bytes of a parcel, and of a tensor that is put into one.
    """
    large: list[list[int]] = []
    small: dict[str, list[list[int]]] = {}  # by dtype, its parcels
    left: dict[str, int] = {}  # by dtype, the bytes that its last parcel has room for
    for number, (dtype, nbytes) in enumerate(tensors):
        if nbytes > limit:
            large.append([number])
            continue
        if nbytes > left.get(dtype, -1):
            small.setdefault(dtype, []).append([])
            left[dtype] = limit
        small[dtype][-1].append(number)
        left[dtype] -= nbytes
    return [*chain.from_iterable(small.values()), *large]
