"""The offset of each owned slice in flat tensors: computes a `BucketLayout` from a `Partition`.

`minimal.py` sends one message for each parameter; this layout allows one for each owner. One flat tensor for
each device and dtype holds the parameters end to end, ordered so that the slices of a rank are contiguous
wherever the partition allows. A contiguous run of one owner is a bucket. Plain arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from zero_ref.plan.partition import ParamSpec, Partition, Slice

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element, by the dtype's name."""


class Bucket(NamedTuple):
    """Elements `start` to `stop` of a flat tensor, which one owner sends in one message."""

    owner: int
    start: int
    stop: int
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Flat:
    """One flat tensor: the offsets of its parameters, and the owner of each run.

    Args:
        device, dtype: those of the tensor and of every parameter in it.
        numel: elements, padding included.
        offset_of_param: the offset of each parameter's first element.
        buckets: in order of their offsets.
    """

    device: str
    dtype: str
    numel: int
    offset_of_param: dict[int, int]
    buckets: tuple[Bucket, ...]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @cached_property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum([bucket.stop - bucket.start for bucket in self.buckets])


@dataclass(frozen=True)
class BucketLayout:
    """All flat tensors of a model.

    >>> from zero_ref.plan.partition import sorted_greedy
    >>> layout = lay_out(sorted_greedy([6, 5, 4, 1], 2), [ParamSpec(n) for n in (6, 5, 4, 1)], alignment=8)
    >>> flat = layout.flats[0]
    >>> flat.offset_of_param                    # rank 0 owns 0 and 3; rank 1's run starts on a multiple of 8
    {0: 0, 3: 6, 1: 8, 2: 13}
    >>> [(bucket.owner, bucket.start, bucket.stop) for bucket in flat.buckets], flat.padding
    ([(0, 0, 7), (1, 8, 17)], 8)
    """

    flats: tuple[Flat, ...]


def lay_out(partition: Partition, params: Sequence[ParamSpec], *, alignment: int = 16) -> BucketLayout:
    """Place the trainable parameters in flat tensors, one for each device and dtype.

    Frozen parameters are left out: their values do not change, so they are not sent.

    Args:
        partition: the owner of each slice.
        params: the parameters that `partition` was made for, in registration order.
        alignment: a parameter that begins an owner's run has an offset that is a multiple of this many
            elements, as is each flat tensor's size. 16 float32 are one 64-byte cache line.
    Returns:
        Flats in order of their first parameter. Under `even`, each flat keeps the registration order.
    Raises:
        ValueError: `partition` was made for other parameters, or a dtype is unknown.
    """
    if tuple(param.numel for param in params) != partition.numels:
        raise ValueError(
            f"the partition is for {len(partition.numels)} parameters of {sum(partition.numels):,} elements; "
            f"got {len(params)} of {sum(param.numel for param in params):,}."
        )
    members: dict[tuple[str, str], list[int]] = {}
    for index, param in enumerate(params):
        if param.trainable:
            members.setdefault((param.device, param.dtype), []).append(index)
    return BucketLayout(
        tuple(_flat(partition, of_kind, *kind, alignment) for kind, of_kind in members.items())
    )


def _flat(partition: Partition, members: list[int], device: str, dtype: str, alignment: int) -> Flat:
    if dtype not in ITEMSIZE:
        raise ValueError(f"parameters of dtype {dtype} cannot be trained; known are {', '.join(ITEMSIZE)}.")

    def owners(param: int) -> tuple[int, int, int]:
        pieces = partition.pieces_of_param[param]
        return pieces[0][1], pieces[-1][1], param

    end = 0
    offset_of_param: dict[int, int] = {}
    buckets: list[Bucket] = []
    # Sort by first owner, then last owner: the parameters of one rank are adjacent, and a parameter that is
    # split between two ranks comes between those of the two.
    pieces = (piece for param in sorted(members, key=owners) for piece in partition.pieces_of_param[param])
    for owner, run in groupby(pieces, key=itemgetter(1)):
        slices = tuple([piece for piece, _ in run])
        # A run that begins inside a parameter must directly follow the run with that parameter's beginning.
        start = end = _round_up(end, alignment) if slices[0].start == 0 else end
        for piece in slices:
            if piece.start == 0:
                offset_of_param[piece.param] = end
            end += piece.stop - piece.start
        if end > start:
            buckets.append(Bucket(owner, start, end, slices))
    return Flat(device, dtype, _round_up(end, alignment), offset_of_param, tuple(buckets))


class SliceRun(NamedTuple):
    """Elements `start` to `stop` of a message, and the slices that they hold, end to end."""

    start: int
    stop: int
    slices: tuple[Slice, ...]


def runs_within(slices: Iterable[Slice], params: Container[int]) -> list[SliceRun]:
    """The contiguous runs of `params`, in a message that holds these slices end to end.

    The optimizer sends these runs when only `params` have new values; the simulator counts their bytes.

    >>> [run[:2] for run in runs_within([Slice(0, 0, 6), Slice(3, 0, 1), Slice(5, 0, 4)], {0, 3})]
    [(0, 7)]
    >>> [run[:2] for run in runs_within([Slice(0, 0, 6), Slice(3, 0, 1), Slice(5, 0, 4)], {0, 5})]
    [(0, 6), (7, 11)]
    """
    found: list[tuple[int, list[Slice]]] = []
    start, end = 0, -1  # the start of this piece, the end of the last run
    for piece in slices:
        if piece.param in params and piece.numel:
            if start != end:
                found.append((start, []))
            found[-1][1].append(piece)
            end = start + piece.numel
        start += piece.numel
    return [SliceRun(first, first + sum(piece.numel for piece in run), tuple(run)) for first, run in found]


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
