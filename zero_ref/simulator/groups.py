"""Groups of ranks, and owners where some parameters are shared by fewer ranks than others.

All ranks have the same router and attention, but an expert is on some of them only. So its gradients are
reduced, and its optimizer state is sharded, in smaller groups of ranks that do not lie next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_ref.plan.choice import Choice, plan_partition
from zero_ref.plan.gradients import GradientPlan, gradient_plans
from zero_ref.plan.layout import Flat, lay_out
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.simulator.operations import Operation


class Groups(NamedTuple):
    """Groups into which all ranks are divided, each of which shares what is sharded.

    Eight ranks, of which each second one is in a group with 3 others:

    >>> groups = Groups(world_size=8, ranks=4, stride=2)
    >>> [groups.place(rank) for rank in range(8)], groups.replicas
    ([0, 0, 1, 1, 2, 2, 3, 3], 1)

    Args:
        ranks: of one group.
        stride: from one rank of a group to the next.
    """

    world_size: int
    ranks: int
    stride: int = 1

    @property
    def replicas(self) -> int:
        """How many groups have a copy of the same."""
        return self.world_size // self.period

    @property
    def period(self) -> int:
        """After so many consecutive ranks places are the same again."""
        return self.ranks * self.stride

    def place(self, rank: int) -> int:
        """The place of a rank in its group."""
        return rank // self.stride % self.ranks

    def within(self, call: Operation) -> Operation:
        """The call, made by each group for itself."""
        everyone = self.ranks == self.world_size
        return call._replace(ranks=None if everyone else self.ranks, stride=self.stride)

    def between(self, call: Operation) -> Operation:
        """The call, made by the ranks that have the same place in groups with a copy of the same."""
        return call._replace(ranks=self.replicas, stride=self.period)


class Part(NamedTuple):
    """Parameters of a model that the same ranks share.

    Args:
        numbers: of the model's parameters, in ascending order.
        groups: the ranks that share them.
    """

    numbers: Sequence[int]
    groups: Groups

    def of(self, params: Sequence[ParamSpec]) -> list[ParamSpec]:
        """The part's parameters."""
        return [params[number] for number in self.numbers]


@dataclass(frozen=True)
class SplitOwners:
    """Who owns what, part by part.

    Parameter 0 is divided among four ranks. As parameter 1 the even ranks have another one than the odd
    ranks, and divide it among themselves:

    >>> from zero_ref.plan.rules import even
    >>> dense, experts = Part([0], Groups(4, 4)), Part([1], Groups(4, 2, stride=2))
    >>> owners = SplitOwners((dense, experts), (even([512], 4), even([256], 2)))
    >>> owners.numels, owners.totals([1, 1])
    ((512, 256), (256, 256, 256, 256))

    Args:
        partitions: of each part; owners are places in a group.
    """

    parts: tuple[Part, ...]
    partitions: tuple[Partition, ...]

    @property
    def world_size(self) -> int:
        """After so many consecutive ranks amounts are the same again."""
        return max(part.groups.period for part in self.parts)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each of the parameters that one rank has."""
        pairs = zip(self.parts, self.partitions, strict=True)
        numel_of = {number: numel for part, one in pairs for number, numel in zip(part.numbers, one.numels)}
        return tuple(numel_of[number] for number in range(len(numel_of)))

    def totals(self, of_element: Sequence[int], of_slice: Sequence[int] | None = None) -> tuple[int, ...]:
        """Sum an amount over what each rank owns, as `Partition.totals`."""
        of_part = [
            partition.totals(
                [of_element[number] for number in part.numbers],
                None if of_slice is None else [of_slice[number] for number in part.numbers],
            )
            for part, partition in zip(self.parts, self.partitions)
        ]
        if len(of_part) == 1:
            return of_part[0]
        places = [part.groups.place for part in self.parts]
        return tuple(
            sum(amounts[place(rank)] for amounts, place in zip(of_part, places))
            for rank in range(self.world_size)
        )

    def slices_of(self, rank: int) -> list[Slice]:
        """What a rank owns, by the numbers of the parameters."""
        return [
            piece._replace(param=part.numbers[piece.param])
            for part, partition in zip(self.parts, self.partitions)
            for piece in partition.slices_of_rank[part.groups.place(rank)]
        ]

    def gradient_plans(self, params: Sequence[ParamSpec]) -> list[tuple[GradientPlan, Groups]]:
        """The buckets of all gradients in the order of their reductions, and who reduces each of them."""
        found = [
            (_renumbered(plan, part.numbers), part.groups)
            for part, partition in zip(self.parts, self.partitions)
            for plan in gradient_plans(partition, part.of(params))
        ]
        return sorted(found, key=lambda one: -min(one[0].starts))

    def flats(self, params: Sequence[ParamSpec]) -> list[Flat]:
        """The flat tensors of all parameters."""
        return [
            flat
            for part, partition in zip(self.parts, self.partitions)
            for flat in lay_out(partition, part.of(params)).flats
        ]


def owners_of(choice: Choice, params: Sequence[ParamSpec], parts: Sequence[Part]) -> SplitOwners:
    """Owners of each part by one rule: its parameters are partitioned as if they were a model of their own.

    Raises:
        ValueError: as `plan_partition`.
    """
    partitions = (plan_partition(choice, part.of(params), part.groups.ranks) for part in parts)
    return SplitOwners(tuple(parts), tuple(partitions))


def _renumbered(plan: GradientPlan, numbers: Sequence[int]) -> GradientPlan:
    """The plan of a part with the numbers that the model's parameters have."""
    if isinstance(numbers, range):  # of all parameters
        return plan
    return GradientPlan(
        {numbers[number]: numel for number, numel in plan.numels.items()},
        {numbers[number]: start for number, start in plan.starts.items()},
        plan.numel,
        tuple((piece._replace(param=numbers[piece.param]), owner) for piece, owner in plan.pieces),
        plan.world_size,
    )


def split(owners: Partition | SplitOwners, world_size: int) -> SplitOwners:
    """The owners as parts: of a partition there is one, which as many ranks share as it has.

    >>> from zero_ref.plan.rules import even
    >>> split(even([512], 2), world_size=4).parts[0].groups
    Groups(world_size=4, ranks=2, stride=1)

    Raises:
        ValueError: the ranks cannot be divided into such groups.
    """
    if isinstance(owners, SplitOwners):
        return owners
    group = owners.world_size
    if world_size % group:
        raise ValueError(f"{world_size} ranks cannot be divided into groups of {group}.")
    return SplitOwners((Part(range(len(owners.numels)), Groups(world_size, group)),), (owners,))
