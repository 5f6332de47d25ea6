"""The operations of ZeRO's stage 3: parameters are sharded, and gathered unit by unit before use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from zero_ref.simulator.groups import Groups
from zero_ref.simulator.operations import COMPUTE, NETWORK, Operation, shared_out


class Unit(NamedTuple):
    """Parameters that stage 3 gathers together.

    Args:
        numel: elements of the unit, all of which each rank computes with.
        gathered_bytes: of the whole unit, padded so that all ranks have equal parts.
        reduced_bytes: of its gradients, padded in the same way; frozen parameters have none.
        kept: the unit is not freed between its forward and its backward. The root unit is kept, since the
            model begins and ends with its parameters.
        tensors: the number of parameters.
        gradient_bytes: of its gradients as backward makes them, where they travel in another dtype; None for
            `reduced_bytes`.
    """

    numel: int
    gathered_bytes: int
    reduced_bytes: int
    kept: bool = False
    tensors: int = 0
    gradient_bytes: int | None = None

    @property
    def own_gradient_bytes(self) -> int:
        """Of its gradients as backward makes them."""
        return self.reduced_bytes if self.gradient_bytes is None else self.gradient_bytes


def stage_3(
    units: Sequence[Unit],
    world_size: int,
    shards: Sequence[int],
    *,
    prefetch: int = 1,
    activation_bytes: int = 0,
    group: int | None = None,
    accumulation: int = 1,
    no_sync: bool = False,
) -> tuple[Operation, ...]:
    """Parameters gathered before use, in forward and again in backward; gradients reduced to shards.

    Before a unit computes, all-gathers start for the units up to `prefetch` places further on. So in backward
    the next unit's parameters come before this unit's gradients: the network does first what is needed first.

    >>> units = [Unit(8, 16, 16, kept=True), Unit(10, 20, 20), Unit(10, 20, 20)]
    >>> [f"{one.label} {one.part}" for one in stage_3(units, 2, shards=[14, 14]) if one.op]
    ['gather 0', 'gather 1', 'gather 2', 'gather 2', 'gather 1', 'reduce 2', 'reduce 1', 'reduce 0']

    Args:
        units: in the order of forward; backward takes them in reverse.
        world_size: ranks; of several groups, of all of them.
        shards: elements that each rank updates.
        prefetch: how many units ahead; with 0 a unit is gathered when it is needed, and no computing hides
            the wait.
        activation_bytes: that forward leaves for backward, on each rank.
        group: how many consecutive ranks share the parameters, and gather and reduce among themselves. Then
            the groups all-reduce each shard of the gradients. None for all ranks.
        accumulation: forwards and backwards before the update. Each gathers the parameters, and reduces its
            gradients, which add up in the shards.
        no_sync: only the last backward reduces; until then each rank keeps whole gradients.
    Raises:
        ValueError: `prefetch` is negative.
    Source: ZeRO (arXiv:1910.02054), section 5.3. The order is that of torch's `fully_shard`, as recorded in
        tests/simulator/test_stage_3.py.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch counts units, 0 or more; got {prefetch}.")
    groups = Groups(world_size, group or world_size)
    building = _Building(units, groups, activation_bytes, no_sync)
    for number in range(accumulation):
        building.is_first, building.reduces = not number, not no_sync or number == accumulation - 1
        for label, way in (("forward", 1), ("backward", -1)):
            to_gather = deque(
                part
                for part in range(len(units))[::way]
                if groups.ranks > 1 and not (label == "backward" and units[part].kept)
            )
            for part in range(len(units))[::way]:
                while to_gather and way * (to_gather[0] - part) <= prefetch:
                    building.gather(to_gather.popleft())
                building.compute(label, part)
    building.step(shards)
    return tuple(building.operations)


class _Building:
    """The operations so far, and the positions of those that the next ones wait for."""

    def __init__(self, units: Sequence[Unit], groups: Groups, activation_bytes: int, no_sync: bool) -> None:
        self.units, self.groups, self.no_sync = units, groups, no_sync
        # Blocks keep activations, and the root keeps none, if there are blocks.
        weights = [0 if unit.kept and len(units) > 1 else unit.numel for unit in units]
        self.activation_bytes = shared_out(activation_bytes, weights)
        self.is_first, self.reduces = True, True
        self.operations: list[Operation] = []
        self.gathered: dict[int, tuple[int, ...]] = {}  # the last all-gather of each unit
        self.computed: tuple[int, ...] = ()  # the last computation
        self.reduced: tuple[int, ...] = ()  # the last reduce-scatter

    def _append(self, operation: Operation) -> tuple[int, ...]:
        self.operations.append(operation)
        return (len(self.operations) - 1,)

    def gather(self, part: int) -> None:
        nbytes = self.units[part].gathered_bytes
        gather = Operation("gather", NETWORK, part, self.computed, op="all_gather", nbytes=nbytes)
        self.gathered[part] = self._append(self.groups.within(gather._replace(takes=nbytes)))

    def compute(self, label: str, part: int) -> None:
        """Forward or backward of a unit, and the reduction of the gradients that backward makes."""
        unit = self.units[part]
        whole = unit.gathered_bytes if self.groups.ranks > 1 else 0
        if label == "forward":
            takes, gives = self.activation_bytes[part], 0 if unit.kept else whole
        else:
            takes, gives = self._gradient_bytes(part), whole + self.activation_bytes[part]
        after = self.gathered.get(part, ())
        compute = Operation(label, COMPUTE, part, after, unit.numel, takes=takes, gives=gives)
        self.computed = self._append(compute._replace(tensors=unit.tensors))
        if label == "backward" and unit.reduced_bytes and self.reduces:
            self._reduce(part)

    def _gradient_bytes(self, part: int) -> int:
        """What the backward of a unit allocates for its gradients."""
        unit = self.units[part]
        alone = self.groups.world_size == 1
        if self.no_sync:  # they add up in the dtype in which they will travel
            return unit.reduced_bytes if self.is_first else 0
        return 0 if alone and not self.is_first else unit.own_gradient_bytes

    def _reduce(self, part: int) -> None:
        """The gradients of a unit are reduced among the ranks that share it, and then between the groups."""
        unit, groups = self.units[part], self.groups
        whole = unit.reduced_bytes if self.no_sync else unit.own_gradient_bytes
        shard = (
            unit.own_gradient_bytes // groups.ranks if self.is_first or self.no_sync else 0
        )  # else it is there
        reduce = Operation("reduce", NETWORK, part, self.computed, op="reduce_scatter")
        if groups.ranks > 1:
            scatter = reduce._replace(nbytes=unit.reduced_bytes, gives=whole - shard)
            self.reduced = self._append(groups.within(scatter))
        if groups.replicas > 1:
            after, gives = (self.reduced, 0) if groups.ranks > 1 else (self.computed, whole - shard)
            between = reduce._replace(op="all_reduce", nbytes=unit.reduced_bytes // groups.ranks, gives=gives)
            self.reduced = self._append(groups.between(between._replace(after=after)))

    def step(self, shards: Sequence[int]) -> None:
        tensors = sum(unit.tensors for unit in self.units if unit.reduced_bytes)
        step = Operation("step", COMPUTE, None, self.reduced, numel=sum(shards), tensors=tensors)
        self._append(step._replace(shares=tuple(enumerate(shards))))
