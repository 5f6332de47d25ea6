"""Ranges of a tensor's memory as boxes of the n-dimensional tensor.

A shard here is a range of a parameter's memory. torch.distributed.checkpoint and FSDP describe a shard as a
box, by its offset and its size in each dimension. `stairs/owners.py` needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor whose elements are next to each other in memory.

    Args:
        offsets, sizes: the offset and the size of the box in each dimension of the tensor.
        start: the number of the box's first element in the flat tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Divide elements [start, stop) of a row-major tensor into boxes, in the order of their elements.

    A range takes the end of a row, then whole rows, then the beginning of a row; rows of more than one
    dimension are cut likewise. So there are at most 2 * len(shape) - 1 boxes.

    >>> for box in boxes(2, 11, (4, 3)):                    # rows 0 to 3 begin at elements 0, 3, 6 and 9
    ...     print(box)
    Box(offsets=(0, 2), sizes=(1, 1), start=2)
    Box(offsets=(1, 0), sizes=(2, 3), start=3)
    Box(offsets=(3, 0), sizes=(1, 2), start=9)

    Args:
        start, stop: numbers of elements of the flat tensor, in row-major order.
        shape: the tensor's shape.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]  # a scalar, or an element of a row
    row_numel = prod(shape[1:])
    first, last = -(-start // row_numel), stop // row_numel  # rows [first, last) are complete

    def in_row(row: int, start: int, stop: int) -> list[Box]:
        begin = row * row_numel
        parts = boxes(start - begin, stop - begin, shape[1:])
        return [Box((row, *part.offsets), (1, *part.sizes), begin + part.start) for part in parts]

    # The range lies within one row, which is cut in turn.
    if first > last:
        return in_row(last, start, stop)
    # The complete rows are one box; the range may begin and end inside the rows beside them.
    rows = Box((first, *[0] * len(shape[1:])), (last - first, *shape[1:]), first * row_numel)
    before, after = in_row(first - 1, start, first * row_numel), in_row(last, last * row_numel, stop)
    return [*before, *[rows] * (last > first), *after]


def boxes_in_memory(start: int, stop: int, shape: Sequence[int], strides: Sequence[int]) -> list[Box]:
    """Divide elements [start, stop) of a tensor's memory into boxes, for any strides, such as channels_last.

    >>> boxes_in_memory(0, 3, (2, 3), strides=(1, 2))       # transposed: columns are next to each other
    [Box(offsets=(0, 0), sizes=(2, 1), start=0), Box(offsets=(0, 1), sizes=(1, 1), start=2)]

    Args:
        start, stop: numbers of elements in memory.
        shape, strides: the tensor's. It fills its memory without gaps.
    """
    # With its dimensions in memory order the tensor is row-major. Put those of each box back in their places.
    order = memory_order(strides)
    place = [order.index(dim) for dim in range(len(order))]
    return [
        Box(tuple(box.offsets[at] for at in place), tuple(box.sizes[at] for at in place), box.start)
        for box in boxes(start, stop, [shape[dim] for dim in order])
    ]


def memory_order(strides: Sequence[int]) -> list[int]:
    """Sort the dimensions by decreasing stride: in this order the tensor is row-major.

    >>> memory_order((48, 1, 12, 3))                        # channels_last: N, H, W, C
    [0, 2, 3, 1]
    """
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])
