"""The plan of gradients without DDP: which are reduced together, and which part of them each rank gets.

`minimal.py` leaves this to DDP. Here the parameters of a range are one bucket, whose gradients a single call
reduces to equal shares. Other parameters are collected in buckets of some size, in about the order in which
backward comes to them; their gradients are sent straight to their owners. `ShardedDataParallel` executes
these plans, and the simulator prices them.
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
"""Up to this size, copying a gradient takes less time than one more message."""


class Cut(NamedTuple):
    """The elements of one tensor of a bucket that one owner has.

    Args:
        tensor: the number of the tensor.
        start, stop: the elements in the tensor.
        place: the place of element `start` in the owner's part of the bucket.
    """

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def within(self) -> slice:
        """The places of the elements in the owner's part."""
        return slice(self.place, self.place + self.stop - self.start)


@dataclass(frozen=True)
class GradientPlan:
    """The places of the gradients of a bucket, and their owners.

    Args:
        numels: by number the elements of each parameter, in the order of their places.
        starts: by number the place of each parameter's first element.
        numel: elements, gaps between parameters included.
        pieces: the slices in order, each with its owner. Empty if ranks own equal shares.
        world_size: ranks.
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
        """These parameters, end to end."""
        numels = {number: partition.numels[number] for number in numbers}
        ends = list(accumulate(numels.values(), initial=0))
        pieces = tuple(one for number in numbers for one in partition.pieces_of_param[number])
        return cls(numels, dict(zip(numbers, ends)), ends[-1], pieces, partition.world_size)

    @property
    def is_shared(self) -> bool:
        """The ranks own equal shares, in the order of ranks."""
        return not self.pieces

    def own_numel(self, rank: int) -> int:
        """Elements of a rank's part, gaps included."""
        return sum(len(run) for run in self.runs(rank))

    def runs(self, rank: int) -> list[range]:
        """The places of the elements that a rank owns."""
        if self.is_shared:
            share = self.numel // self.world_size
            return [range(rank * share, (rank + 1) * share)]
        runs: list[range] = []
        for piece, owner in self.pieces:
            first = self.starts[piece.param] + piece.start
            if owner != rank:
                continue
            if runs and runs[-1].stop == first:
                first = runs.pop().start
            runs.append(range(first, self.starts[piece.param] + piece.stop))
        return runs

    def own(self, rank: int) -> Iterator[tuple[Slice, int]]:
        """A rank's slices, each with the place of its first element in the rank's part."""
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
        """The tensors in which the gradients lie until they are sent.

        Args:
            as_one: one tensor for the whole bucket, as a backend's own reduce-scatter takes it. Otherwise
                only small neighbours are together.
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
            if small and joint[-1:] == [True]:
                extents[-1] = range(extents[-1].start, start + numel)
            else:
                extents.append(range(start, start + numel))
                joint.append(small)
            of_param[number] = len(extents) - 1, start - extents[-1].start
        return GradientTensors(tuple(extents), tuple(joint), of_param)

    def sent_numels(self, rank: int) -> list[int]:
        """Elements of each message that a rank sends to an owner, in their order."""
        return [cut.stop - cut.start for cut in self._tensors.cuts(self.runs(rank))]

    @cached_property
    def _tensors(self) -> GradientTensors:
        return self.tensors()


class GradientTensors(NamedTuple):
    """The tensors of a bucket.

    Args:
        extents: for each tensor, its places in the bucket.
        joint: for each tensor, whether gradients are copied into it; otherwise the tensor is a gradient.
        of_param: by number, the tensor that holds the gradient, and the place of its first element there.
    """

    extents: tuple[range, ...]
    joint: tuple[bool, ...]
    of_param: Mapping[int, tuple[int, int]]

    def cuts(self, runs: Iterable[range]) -> Iterator[Cut]:
        """The parts of the tensors that the owner of these runs has."""
        end = 0
        for run in runs:
            for number, extent in enumerate(self.extents):
                start, stop = max(run.start, extent.start), min(run.stop, extent.stop)
                if start < stop:
                    yield Cut(number, start - extent.start, stop - extent.start, end + start - run.start)
            end += len(run)


def gradient_plans(
    partition: Partition, params: Sequence[ParamSpec], cap: int = BUCKET_NUMEL
) -> list[GradientPlan]:
    """The buckets of a model's gradients, in the order in which all ranks reduce them: the last ones first.

    >>> from zero_ref.plan.choice import plan_partition
    >>> params = [ParamSpec(640), ParamSpec(64, shape=(8, 8), whole=True), ParamSpec(128)]
    >>> [list(plan.starts) for plan in gradient_plans(plan_partition("equal_shares", params, 2), params)]
    [[1], [0, 2]]

    Args:
        params: the parameters that `partition` was made for. Frozen ones are in no bucket.
        cap: elements at which a bucket of parameters that are in no range is full.
    """
    in_range = {number for one in partition.ranges for number in one.params}
    filling: dict[tuple[str, str], tuple[list[int], int]] = {}
    listed: list[list[int]] = []
    for number in reversed(range(len(params))):  # about the order in which backward comes to them
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
    plans = [
        *(GradientPlan.of_range(one, params, partition.world_size) for one in partition.ranges),
        *(GradientPlan.of_params(numbers, partition) for numbers in listed),
    ]
    return sorted((plan for plan in plans if plan.starts), key=lambda plan: -min(plan.starts))
