"""The operations of ZeRO's stage 3: parameters are sharded, and gathered unit by unit before use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

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
    """

    numel: int
    gathered_bytes: int
    reduced_bytes: int
    kept: bool = False
    tensors: int = 0


def stage_3(
    units: Sequence[Unit],
    world_size: int,
    shards: Sequence[int],
    *,
    prefetch: int = 1,
    activation_bytes: int = 0,
) -> tuple[Operation, ...]:
    """Parameters gathered before use, in forward and again in backward; gradients reduced to shards.

    Before a unit computes, all-gathers start for the units up to `prefetch` places further on. So in backward
    the next unit's parameters come before this unit's gradients: the network does first what is needed first.

    >>> units = [Unit(8, 16, 16, kept=True), Unit(10, 20, 20), Unit(10, 20, 20)]
    >>> [f"{one.label} {one.part}" for one in stage_3(units, 2, shards=[14, 14]) if one.op]
    ['gather 0', 'gather 1', 'gather 2', 'gather 2', 'gather 1', 'reduce 2', 'reduce 1', 'reduce 0']

    Args:
        units: in the order of forward; backward takes them in reverse.
        shards: elements that each rank updates.
        prefetch: how many units ahead; with 0 a unit is gathered when it is needed, and no computing hides
            the wait.
        activation_bytes: that forward leaves for backward, on each rank.
    Raises:
        ValueError: `prefetch` is negative.
    Source: ZeRO (arXiv:1910.02054), section 5.3. The order is that of torch's `fully_shard`, as recorded in
        tests/ranks/test_stage_3.py.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch counts units, 0 or more; got {prefetch}.")
    building = _Building(units, world_size, activation_bytes)
    for label, sequence in (("forward", range(len(units))), ("backward", range(len(units))[::-1])):
        to_gather = deque(
            (place, part)
            for place, part in enumerate(sequence)
            if world_size > 1 and not (label == "backward" and units[part].kept)
        )
        for place, part in enumerate(sequence):
            while to_gather and to_gather[0][0] <= place + prefetch:
                building.gather(to_gather.popleft()[1])
            building.compute(label, part)
    building.step(shards)
    return tuple(building.operations)


class _Building:
    """The operations so far, and the positions of those that the next ones wait for."""

    def __init__(self, units: Sequence[Unit], world_size: int, activation_bytes: int) -> None:
        self.units = units
        self.world_size = world_size
        self.activation_bytes = shared_out(activation_bytes, [unit.numel for unit in units])
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
        self.gathered[part] = self._append(gather._replace(takes=nbytes))

    def compute(self, label: str, part: int) -> None:
        """Forward or backward of a unit, and the reduction of the gradients that backward makes."""
        unit = self.units[part]
        whole = unit.gathered_bytes if self.world_size > 1 else 0
        if label == "forward":
            takes, gives = self.activation_bytes[part], 0 if unit.kept else whole
        else:
            takes, gives = unit.reduced_bytes, whole + self.activation_bytes[part]
        after = self.gathered.get(part, ())
        compute = Operation(label, COMPUTE, part, after, unit.numel, takes=takes, gives=gives)
        self.computed = self._append(compute._replace(tensors=unit.tensors))
        if label == "backward" and self.world_size > 1 and unit.reduced_bytes:
            nbytes = unit.reduced_bytes
            reduce = Operation("reduce", NETWORK, part, self.computed, op="reduce_scatter", nbytes=nbytes)
            self.reduced = self._append(reduce._replace(gives=nbytes - nbytes // self.world_size))

    def step(self, shards: Sequence[int]) -> None:
        tensors = sum(unit.tensors for unit in self.units if unit.reduced_bytes)
        step = Operation("step", COMPUTE, None, self.reduced, numel=sum(shards), tensors=tensors)
        self._append(step._replace(shares=tuple(enumerate(shards))))
