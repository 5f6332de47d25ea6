"""The offset of each owned slice in flat tensors: a `BucketLayout`, computed from a `Partition`.

`stairs/owners.py` sends one message for each parameter; this layout allows one for each owner. One flat
tensor for each device and dtype holds the parameters end to end, ordered so that the slices of a rank are
contiguous wherever the partition allows. A contiguous run of one owner is a bucket. A range of which all
ranks own equal shares is a flat tensor of its own, with a bucket for each rank. All of this is plain
arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

from zero_ref.plan.partition import OfEachRank, ParamSpec, Partition, SharedRange, Slice, round_up

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
    """Elements `start` to `stop` of a flat tensor, which one owner sends in one message.

    Args:
        slices: the trained slices in the bucket, in order.
        starts: the offset in the bucket of each slice's first element.
    """

    owner: int
    start: int
    stop: int
    slices: tuple[Slice, ...]
    starts: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Flat:
    """One flat tensor: the offsets of its parameters, and the owner of each run.

    Args:
        device, dtype: the device and dtype of the tensor and of every parameter in it.
        numel: elements, padding included.
        padding: elements that belong to no parameter.
        offset_of_param: the offset of each parameter's first element.
        buckets: the buckets, in order of their offsets.
        shared: the buckets are equal shares of the tensor, one for each rank.
    """

    device: str
    dtype: str
    numel: int
    padding: int
    offset_of_param: dict[int, int]
    buckets: Sequence[Bucket]
    shared: bool = False

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class BucketLayout:
    """All flat tensors of a model.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> layout = lay_out(sorted_greedy([6, 5, 4, 1], 2), [ParamSpec(n) for n in (6, 5, 4, 1)], alignment=8)
    >>> flat = layout.flats[0]
    >>> flat.offset_of_param                    # rank 0 owns 0 and 3; rank 1's run starts on a multiple of 8
    {0: 0, 3: 6, 1: 8, 2: 13}
    >>> [(bucket.owner, bucket.start, bucket.stop) for bucket in flat.buckets], flat.padding
    ([(0, 0, 7), (1, 8, 17)], 8)
    """

    flats: tuple[Flat, ...]


def lay_out(partition: Partition, params: Sequence[ParamSpec], *, alignment: int = 16) -> BucketLayout:
    """Place the trainable parameters in flat tensors: one for each range, device and dtype.

    Frozen parameters are left out: their values do not change, so they are not sent.

    Args:
        partition: the owner of each slice.
        params: the parameters that `partition` was made for, in registration order.
        alignment: a parameter that begins an owner's run has an offset that is a multiple of this many
            elements, as is each flat tensor's size. 16 float32 are one 64-byte cache line.
    Returns:
        The flat tensors of ranges, in the order in which a forward needs them; then the flat tensors of the
        other parameters, in the order of their first parameters. Under `even`, each keeps the registration
        order.
    Raises:
        ValueError: `partition` was made for other parameters, or a dtype is unknown.
    """
    _check_params(partition, params)
    # A model has one flat tensor for each kind of parameter that is in no range.
    in_range = {number for one in partition.ranges for number in one.params}
    members: dict[tuple[str, str], list[int]] = {}
    for index, param in enumerate(params):
        if param.trainable and index not in in_range:
            members.setdefault((param.device, param.dtype), []).append(index)
    # Ranges are listed from the model's end, so reversed for the forward.
    return BucketLayout(
        (
            *(flat for one in partition.ranges[::-1] for flat in _shared_flat(partition, one, params)),
            *(_flat(partition, of_kind, *kind, alignment) for kind, of_kind in members.items()),
        )
    )


def _check_params(partition: Partition, params: Sequence[ParamSpec]) -> None:
    """Refuse parameters that the partition was not made for, or of unknown dtypes.

    Raises:
        ValueError: the sizes differ, or a trainable parameter has a dtype that is not in ITEMSIZE.
    """
    if tuple(param.numel for param in params) != partition.numels:
        raise ValueError(
            f"the partition is for {len(partition.numels)} parameters of {sum(partition.numels):,} elements; "
            f"got {len(params)} of {sum(param.numel for param in params):,}."
        )
    for param in params:
        if param.trainable and param.dtype not in ITEMSIZE:
            raise ValueError(
                f"parameters of dtype {param.dtype} cannot be trained; known are {', '.join(ITEMSIZE)}."
            )


def _shared_flat(partition: Partition, one: SharedRange, params: Sequence[ParamSpec]) -> Iterator[Flat]:
    """Yield the flat tensor of a range; nothing, if all of its parameters are frozen.

    A frozen parameter leaves a gap, so that the offsets and shares of the others stay the same.
    """
    trained = {number for number in one.params if params[number].trainable}
    if not trained:
        return
    places = {number: start for number, start in zip(one.params, one.starts) if number in trained}
    padding = one.numel - sum(partition.numels[number] for number in trained)
    shares = partial(_share, one, trained, partition)
    first = params[one.params[0]]
    yield Flat(
        first.device,
        first.dtype,
        one.numel,
        padding,
        places,
        OfEachRank(shares, partition.world_size),
        shared=True,
    )


def _share(one: SharedRange, trained: Container[int], partition: Partition, rank: int) -> Bucket:
    """Make the bucket of a rank's share of a range."""
    share = one.numel // partition.world_size
    placed = one.slices_of(rank, partition.numels, partition.world_size)
    mine = [(piece, start) for piece, start in placed if piece.param in trained]
    slices, starts = tuple(piece for piece, _ in mine), tuple(start for _, start in mine)
    return Bucket(rank, rank * share, (rank + 1) * share, slices, starts)


def _flat(partition: Partition, members: list[int], device: str, dtype: str, alignment: int) -> Flat:
    """Lay out parameters of one device and dtype that are in no range.

    Args:
        members: the numbers of the parameters.
    """

    def owners(param: int) -> tuple[int, int, int]:
        pieces = partition.pieces_of_param[param]
        return pieces[0][1], pieces[-1][1], param

    end = 0
    offset_of_param: dict[int, int] = {}
    buckets: list[Bucket] = []
    # 1. Sort by first owner, then last owner: the parameters of one rank are adjacent, and a parameter that
    # is split between two ranks comes between the parameters of the two.
    pieces = (piece for param in sorted(members, key=owners) for piece in partition.pieces_of_param[param])
    # 2. Each run of slices of one owner is a bucket.
    for owner, run in groupby(pieces, key=itemgetter(1)):
        slices = tuple([piece for piece, _ in run])
        # A run that begins inside a parameter must directly follow the run with that parameter's beginning.
        start = end = round_up(end, alignment) if slices[0].start == 0 else end
        for piece in slices:
            if piece.start == 0:
                offset_of_param[piece.param] = end
            end += piece.stop - piece.start
        if end > start:
            buckets.append(Bucket(owner, start, end, slices, end_to_end(slices)))
    numel = round_up(end, alignment)
    padding = numel - sum(partition.numels[param] for param in members)
    return Flat(device, dtype, numel, padding, offset_of_param, tuple(buckets))


def end_to_end(slices: Iterable[Slice]) -> tuple[int, ...]:
    """Compute the offsets of slices that follow each other without gaps.

    >>> end_to_end([Slice(0, 0, 6), Slice(3, 0, 1), Slice(5, 0, 4)])
    (0, 6, 7)
    """
    return tuple([0, *accumulate(piece.stop - piece.start for piece in slices)][:-1])


class SliceRun(NamedTuple):
    """Elements `start` to `stop` of a message, and the slices that they hold, end to end."""

    start: int
    stop: int
    slices: tuple[Slice, ...]


def runs_within(slices: Iterable[Slice], starts: Iterable[int], params: Container[int]) -> list[SliceRun]:
    """Find the contiguous runs of `params` in a message that holds these slices at these offsets.

    The optimizer sends these runs when only `params` have new values; the simulator counts their bytes.

    >>> slices = [Slice(0, 0, 6), Slice(3, 0, 1), Slice(5, 0, 4)]
    >>> [run[:2] for run in runs_within(slices, end_to_end(slices), {0, 3})]
    [(0, 7)]
    >>> [run[:2] for run in runs_within(slices, end_to_end(slices), {0, 5})]
    [(0, 6), (7, 11)]
    """
    found: list[tuple[int, list[Slice]]] = []
    end = -1  # of the last run
    for piece, start in zip(slices, starts):
        if piece.param in params and piece.numel:
            if start != end:
                found.append((start, []))
            found[-1][1].append(piece)
            end = start + piece.numel
    return [SliceRun(first, first + sum(piece.numel for piece in run), tuple(run)) for first, run in found]
