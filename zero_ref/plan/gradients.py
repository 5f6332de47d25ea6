"""Buckets of gradients that are reduced together without DDP, and the part of each rank.

`stairs/owners.py` leaves this to DDP. Here the parameters of a range are one bucket, whose gradients a single
call reduces to equal shares. Other parameters are collected in buckets of a given size, in about the order in
which backward reaches them; each rank sends its gradients of them to their owners. `ShardedDataParallel`
executes these plans, and the simulator estimates their times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from zero_ref.plan.partition import ParamSpec, Partition, SharedRange, Slice

BUCKET_NUMEL = 2**23
"""Elements of a bucket, about. FairScale's default."""

SMALL_NUMEL = 2**14
"""Up to so many elements, copying a gradient takes less time than sending one more message."""


class Cut(NamedTuple):
    """An owner's part of one of a bucket's tensors.

    Args:
        tensor: the tensor's number in `GradientTensors`.
        start, stop: the owner's elements of the tensor.
        place: the offset of the first of these elements in the owner's part of the bucket.
    """

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def within(self) -> slice:
        """The elements' range in the owner's part of the bucket."""
        return slice(self.place, self.place + self.stop - self.start)


@dataclass(frozen=True)
class GradientPlan:
    """The places of a bucket's gradients, and their owners.

    Args:
        numels: by parameter number the elements of each parameter, in the order of their places.
        starts: by parameter number the offset of each parameter's first element in the bucket.
        numel: elements of the bucket, gaps between parameters included.
        pieces: the slices in order, each with its owner. Empty if ranks own equal shares.
        world_size: the number of ranks.
    """

    numels: Mapping[int, int]
    starts: Mapping[int, int]
    numel: int
    pieces: tuple[tuple[Slice, int], ...]
    world_size: int

    @classmethod
    def of_range(cls, one: SharedRange, params: Sequence[ParamSpec], world_size: int) -> GradientPlan:
        """The places of a range's trained parameters are the range's."""
        starts = {number: start for number, start in zip(one.params, one.starts) if params[number].trainable}
        return cls({number: params[number].numel for number in starts}, starts, one.numel, (), world_size)

    @classmethod
    def of_params(cls, numbers: Sequence[int], partition: Partition) -> GradientPlan:
        """Make a bucket of these parameters, end to end."""
        numels = {number: partition.numels[number] for number in numbers}
        ends = list(accumulate(numels.values(), initial=0))
        pieces = tuple(one for number in numbers for one in partition.pieces_of_param[number])
        return cls(numels, dict(zip(numbers, ends)), ends[-1], pieces, partition.world_size)

    @property
    def is_shared(self) -> bool:
        """Return whether the ranks own equal shares, in the order of ranks."""
        return not self.pieces

    def own_numel(self, rank: int) -> int:
        """Count the elements of a rank's part, gaps included."""
        return sum(len(run) for run in self.runs(rank))

    def runs(self, rank: int) -> list[range]:
        """List the contiguous ranges of the bucket that a rank owns."""
        if self.is_shared:
            share = self.numel // self.world_size
            return [range(rank * share, (rank + 1) * share)]
        runs: list[range] = []
        for piece, owner in self.pieces:
            first = self.starts[piece.param] + piece.start
            if owner != rank:
                continue
            # A slice that directly follows the one before extends its run.
            if runs and runs[-1].stop == first:
                first = runs.pop().start
            runs.append(range(first, self.starts[piece.param] + piece.stop))
        return runs

    def own(self, rank: int) -> Iterator[tuple[Slice, int]]:
        """Yield a rank's slices, each with the offset of its first element in the rank's part."""
        if not self.is_shared:
            owned = [piece for piece, owner in self.pieces if owner == rank]
            yield from zip(owned, accumulate((piece.numel for piece in owned), initial=0))
            return
        (share,) = self.runs(rank)
        for number, begin in self.starts.items():
            start = max(share.start - begin, 0)
            stop = min(share.stop - begin, self.numels[number])
            if start < stop:
                yield Slice(number, start, stop), begin + start - share.start

    def tensors(self, *, as_one: bool = False) -> GradientTensors:
        """Choose the tensors in which the gradients lie until they are sent.

        Args:
            as_one: one tensor for the whole bucket, as a backend's own reduce-scatter takes it. Otherwise
                small neighbours share a tensor, and each large gradient is a tensor itself.
        """
        if as_one:
            of_param = {number: (0, start) for number, start in self.starts.items()}
            return GradientTensors((range(self.numel),), (True,), of_param)
        extents: list[range] = []
        joint: list[bool] = []
        of_param = {}
        for number, start in self.starts.items():
            numel = self.numels[number]
            small = numel <= SMALL_NUMEL
            # A small gradient joins the tensor before, if that has small gradients too.
            if small and joint[-1:] == [True]:
                extents[-1] = range(extents[-1].start, start + numel)
            else:
                extents.append(range(start, start + numel))
                joint.append(small)
            of_param[number] = len(extents) - 1, start - extents[-1].start
        return GradientTensors(tuple(extents), tuple(joint), of_param)

    def sent_numels(self, rank: int) -> list[int]:
        """Count the elements of each message that other ranks send to this owner, in the order of messages.

        Args:
            rank: the owner.
        """
        return [cut.stop - cut.start for cut in self._tensors.cuts(self.runs(rank))]

    @cached_property
    def _tensors(self) -> GradientTensors:
        return self.tensors()


class GradientTensors(NamedTuple):
    """The tensors in which a bucket's gradients lie.

    Args:
        extents: the range of the bucket that each tensor has.
        joint: for each tensor whether gradients are copied into it; otherwise it is a gradient itself.
        of_param: by parameter number (number of the tensor with its gradient, offset of the gradient there).
    """

    extents: tuple[range, ...]
    joint: tuple[bool, ...]
    of_param: Mapping[int, tuple[int, int]]

    def cuts(self, runs: Iterable[range]) -> Iterator[Cut]:
        """Cut the tensors for an owner of these runs; yield the owner's parts, in their order.

        Args:
            runs: the ranges of the bucket that the owner has. In its part of the bucket they lie end to end.
        """
        end = 0  # of the runs so far, in the owner's part
        for run in runs:
            for number, extent in enumerate(self.extents):
                start, stop = max(run.start, extent.start), min(run.stop, extent.stop)
                if start < stop:
                    yield Cut(number, start - extent.start, stop - extent.start, end + start - run.start)
            end += len(run)


def gradient_plans(
    partition: Partition, params: Sequence[ParamSpec], cap: int = BUCKET_NUMEL
) -> list[GradientPlan]:
    """Plan the buckets of a model's gradients, in the order in which all ranks reduce them: the last first.

    >>> from zero_ref.plan.choice import plan_partition
    >>> params = [ParamSpec(640), ParamSpec(64, shape=(8, 8), whole=True), ParamSpec(128)]
    >>> [list(plan.starts) for plan in gradient_plans(plan_partition("equal_shares", params, 2), params)]
    [[1], [0, 2]]

    Args:
        params: the parameters that `partition` was made for. Frozen parameters are in no bucket.
        cap: a bucket of parameters that are in no range is full when it has so many elements.
    """
    # 1. Collect parameters that are in no range, the last first: about the order in which backward reaches
    # them. A bucket has one dtype and device, so several may be filling at a time.
    in_range = {number for one in partition.ranges for number in one.params}
    filling: dict[tuple[str, str], tuple[list[int], int]] = {}
    listed: list[list[int]] = []
    for number in reversed(range(len(params))):
        param = params[number]
        if not param.trainable or number in in_range:
            continue
        kind = param.dtype, param.device
        members, numel = filling.pop(kind, ([], 0))
        if not members:
            listed.append(members)
        members.append(number)
        if numel + param.numel < cap:
            filling[kind] = members, numel + param.numel
    # 2. Make all plans. A bucket is complete when backward reaches its first parameter, and the bucket whose
    # first parameter comes last in the model is complete first.
    plans = [
        *(GradientPlan.of_range(one, params, partition.world_size) for one in partition.ranges),
        *(GradientPlan.of_params(numbers, partition) for numbers in listed),
    ]
    return sorted((plan for plan in plans if plan.starts), key=lambda plan: -min(plan.starts))
