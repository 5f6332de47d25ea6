"""The strategies of ZeRO's stage 3: parameters are sharded, and gathered unit by unit before use.

`ZeroStage3` is torch's `fully_shard`, and `ZeroStage3Flat` is the last of the stairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.groups import Groups
from zero_ref.simulator.ledger import itemsize_of, nbytes_of, state_rule
from zero_ref.simulator.operations import COMPUTE, NETWORK, Operation, shared_out
from zero_ref.simulator.strategy import Strategy


class Cut(NamedTuple):
    """A parameter cut along its first dimension. Each rank has room for as many rows as the fullest.

    >>> Cut.of(ParamSpec(12, shape=(3, 4)), ranks=2)
    Cut(rows=3, chunk=2, width=4, padded=32)

    Args:
        rows: the size of the dimension.
        chunk: rows of the fullest rank.
        width: elements of a row.
        padded: bytes on each rank.
    """

    rows: int
    chunk: int
    width: int
    padded: int

    @classmethod
    def of(cls, param: ParamSpec, ranks: int) -> Cut:
        """Cut along the first dimension, as torch's `fully_shard` does."""
        rows = param.rows
        chunk, width = -(-rows // ranks), param.numel // max(rows, 1)
        return cls(rows, chunk, width, chunk * width * itemsize_of(param.dtype))

    def amounts(self) -> tuple[tuple[int, int], ...]:
        """(place, change of the elements from this place on): first full chunks, then the rest, then none.

        >>> Cut.of(ParamSpec(12, shape=(3, 4)), ranks=2).amounts()
        ((0, 8), (1, -4), (2, -4))
        """
        full_ranks, rest = divmod(self.rows, self.chunk) if self.chunk else (0, 0)
        full, part = self.chunk * self.width, rest * self.width
        return (0, full), (full_ranks, part - full), (full_ranks + 1, -part)


class Unit(NamedTuple):
    """Parameters that stage 3 gathers together.

    Args:
        numel: elements of the unit, all of which each rank computes with.
        gathered_bytes: of the whole unit, padded so that all ranks have equal parts.
        reduced_bytes: of its gradients, padded in the same way; frozen parameters have none.
        kept: the unit is not freed between its forward and its backward. The root unit is kept, since the
            model begins and ends with its parameters.
        tensors: the number of parameters.
        gradient_bytes: of its gradients as backward makes them, perhaps in another dtype than they travel in.
    """

    numel: int
    gathered_bytes: int
    reduced_bytes: int
    kept: bool
    tensors: int
    gradient_bytes: int


class ZeroStage3(Strategy):
    """Each parameter is cut along its first dimension into as many parts as a group has ranks.

    torch's `fully_shard` cuts them in the same way. Parameters are gathered before use, in forward and again
    in backward; gradients are reduced to shards, and between groups all-reduced shard by shard, in each
    backward or in the last alone.

    Before a unit computes, all-gathers start for the units up to `prefetch` places further on. So in backward
    the next unit's parameters come before this unit's gradients: the network does first what is needed first.

    >>> from zero_ref.simulator.schedule import schedule
    >>> plan = schedule("zero-3", [ParamSpec(8), ParamSpec(10), ParamSpec(10)], 2, blocks=[[0], [1], [2]])
    >>> [f"{one.label} {one.part}" for one in plan.operations if one.op]
    ['gather 0', 'gather 1', 'gather 2', 'gather 2', 'gather 1', 'reduce 2', 'reduce 1', 'reduce 0']

    Source: ZeRO (arXiv:1910.02054), section 5.3. The order is that of torch's `fully_shard`, as recorded in
        tests/simulator/test_stage_3.py.
    """

    def _list_operations(self) -> None:
        units = self._units
        if self.how.prefetch < 0:
            raise ValueError(f"prefetch counts units, 0 or more; got {self.how.prefetch}.")
        # Blocks keep activations, and the root keeps none, if there are blocks.
        weights = [0 if unit.kept and len(units) > 1 else unit.numel for unit in units]
        self._kept_bytes = shared_out(self.activation_bytes, weights)
        self._gathered: dict[int, tuple[int, ...]] = {}  # the last all-gather of each unit
        self._computed: tuple[int, ...] = ()  # the last computation
        self._reduced: tuple[int, ...] = ()  # the last reduction
        self._waiting: list[int] = []  # units whose gradients are not yet reduced
        for number in range(self.how.accumulation):
            self._is_first = not number
            self._is_last = number == self.how.accumulation - 1
            self._reduces = self._is_last or not self._no_sync
            for label, way in (("forward", 1), ("backward", -1)):
                if label == "backward":
                    self._begin_backward()
                to_gather = deque(
                    part
                    for part in range(len(units))[::way]
                    if self._sends(part) and not (label == "backward" and units[part].kept)
                )
                for part in range(len(units))[::way]:
                    while to_gather and self._is_near(part, to_gather[0]):
                        self._gather(to_gather.popleft())
                    self._compute(label, part)
        self._step()

    def _is_near(self, part: int, ahead: int) -> bool:
        """Whether a unit is gathered before another one computes."""
        if abs(ahead - part) <= self.how.prefetch:
            return True
        before = self._numel_before
        between = before[ahead] - before[part + 1] if ahead > part else before[part] - before[ahead + 1]
        return between < self.how.prefetch_numel

    @cached_property
    def _numel_before(self) -> list[int]:
        """Elements of the units before each one."""
        return list(accumulate((unit.numel for unit in self._units), initial=0))

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.world_size, self.how.group_of(self.world_size))

    @property
    def _no_sync(self) -> bool:
        """Only the last of several backwards reduces; until then each rank keeps whole gradients."""
        return self.how.no_sync and self.how.accumulation > 1

    @cached_property
    def _units(self) -> list[Unit]:
        """The units in the order of forward; the root's parameters are the first block."""
        blocks = [range(len(self.params))] if self.blocks is None else self.blocks
        if sorted(number for block in blocks for number in block) != list(range(len(self.params))):
            raise ValueError(f"blocks must list each of the {len(self.params)} parameters once.")
        return [self._unit(block, kept=not place) for place, block in enumerate(blocks) if block]

    @cached_property
    def _cuts(self) -> list[Cut]:
        return [Cut.of(param, self.groups.ranks) for param in self.params]

    def _unit(self, numbers: Sequence[int], *, kept: bool) -> Unit:
        """The unit of some parameters."""
        ranks, cuts, itemsize = self.groups.ranks, self._cuts, self._reduced_itemsize
        trained = [number for number in numbers if self.params[number].trainable]
        own = ranks * sum(cuts[number].padded for number in trained)
        reduced = own
        if itemsize is not None:
            reduced = ranks * itemsize * sum(cuts[number].chunk * cuts[number].width for number in trained)
        return Unit(
            sum(self.params[number].numel for number in numbers),
            ranks * sum(cuts[number].padded for number in numbers),
            reduced,
            kept,
            len(numbers),
            own,
        )

    def _sends(self, part: int) -> bool:
        """Whether the ranks make calls for a unit."""
        return self.groups.ranks > 1

    def _begin_backward(self) -> None:
        """The root is still gathered: append nothing."""

    def _gather(self, part: int) -> None:
        nbytes = self._units[part].gathered_bytes
        gather = Operation("gather", NETWORK, part, self._computed, op="all_gather", nbytes=nbytes)
        self._gathered[part] = (self._append(self.groups.within(gather._replace(takes=nbytes))),)

    def _compute(self, label: str, part: int) -> None:
        """Forward or backward of a unit, and the reduction of the gradients that backward makes."""
        unit = self._units[part]
        whole = unit.gathered_bytes if self._sends(part) else 0
        if label == "forward":
            takes, gives = self._kept_bytes[part], 0 if unit.kept else whole
        else:
            takes, gives = self._gradient_bytes(part), whole + self._kept_bytes[part]
        after = self._gathered.get(part, ())
        compute = Operation(label, COMPUTE, part, after, unit.numel, takes=takes, gives=gives)
        self._computed = (self._append(compute._replace(tensors=unit.tensors)),)
        if label == "backward" and self._reduces:
            self._reduce_in_buckets(part)

    def _gradient_bytes(self, part: int) -> int:
        """Bytes that the backward of a unit allocates for its gradients."""
        unit = self._units[part]
        alone = self.groups.world_size == 1
        if self._no_sync:  # they add up in the dtype in which they will travel
            return unit.reduced_bytes if self._is_first else 0
        return 0 if alone and not self._is_first else unit.gradient_bytes

    def _reduce_in_buckets(self, part: int) -> None:
        """Put a unit's gradients into a bucket, and reduce a full one: as a rule, each unit by itself."""
        units, waiting = self._units, self._waiting
        if sum(units[one].numel for one in waiting) + units[part].numel > self.how.reduce_numel and waiting:
            self._reduce(waiting)
            waiting.clear()
        if units[part].reduced_bytes:
            waiting.append(part)
        full = sum(units[one].numel for one in waiting) >= self.how.reduce_numel
        if waiting and (full or part == 0):
            self._reduce(waiting)
            waiting.clear()

    def _reduce(self, parts: Sequence[int]) -> None:
        """The gradients of units are reduced among the ranks that share them, and then between the groups."""
        groups, part = self.groups, parts[-1]
        reduced_bytes = sum(self._units[one].reduced_bytes for one in parts)
        gradient_bytes = sum(self._units[one].gradient_bytes for one in parts)
        whole = reduced_bytes if self._no_sync else gradient_bytes
        is_new = self._is_first or self._no_sync  # else gradients are added to the shard
        shard = gradient_bytes // groups.ranks if is_new else 0
        reduce = Operation("reduce", NETWORK, part, self._computed, op="reduce_scatter")
        if self._sends(part):
            scatter = reduce._replace(nbytes=reduced_bytes, gives=whole - shard)
            self._reduced = (self._append(groups.within(scatter)),)
        if groups.replicas > 1 and (self._is_last or not self.how.all_reduce_last):
            after, gives = (self._reduced, 0) if groups.ranks > 1 else (self._computed, whole - shard)
            between = reduce._replace(op="all_reduce", nbytes=reduced_bytes // groups.ranks, gives=gives)
            self._reduced = (self._append(groups.between(between._replace(after=after))),)

    def _step(self) -> None:
        shards = self._held[0] * self.groups.replicas
        tensors = sum(unit.tensors for unit in self._units if unit.reduced_bytes)
        step = Operation("step", COMPUTE, None, self._reduced, numel=sum(shards), tensors=tensors)
        self._append(step._replace(shares=tuple(enumerate(shards))))

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        return (sum(cut.padded for cut in self._cuts),) * self.world_size

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        trained = (cut.padded for param, cut in zip(self.params, self._cuts) if param.trainable)
        return (sum(trained),) * self.world_size

    @property
    def state_bytes(self) -> tuple[int, ...]:
        return tuple(self._held[1]) * self.groups.replicas

    @cached_property
    def _held(self) -> tuple[list[int], list[int]]:
        """Elements that each place of a group updates, and bytes that it holds as state."""
        ranks, rule = self.groups.ranks, state_rule(self.how.optimizer)
        # The first have full chunks, one the rest, others nothing: note where that changes, then add up.
        shard_changes = [0] * (ranks + 2)
        state_changes: list[float] = [0] * (ranks + 2)
        for param, cut in zip(self.params, self._cuts):
            its = rule.of(param)
            has_state = param.trainable or its.for_frozen
            of_element = its.element_bytes(itemsize_of(param.dtype))
            for place, change in cut.amounts():
                shard_changes[place] += change * param.trainable
                if has_state:
                    state_changes[place] += change * of_element
            if has_state:
                state_changes[0] += its.scalar_bytes  # on every rank, also where it has no rows
        return list(accumulate(shard_changes))[:ranks], list(map(ceil, accumulate(state_changes)))[:ranks]


class ZeroStage3Flat(ZeroStage3):
    """The trained parameters of each unit lie in a flat tensor, which is cut into equal shares.

    So `zero_ref/stairs/parameters.py` has it. It differs from `ZeroStage3` in two things: padding comes once
    for each unit; and the root is freed after forward, and gathered again when backward begins. Frozen
    parameters are whole on every rank. A rank that is alone makes its calls as well.

    >>> from zero_ref.simulator.schedule import schedule
    >>> params = [ParamSpec(8), ParamSpec(10), ParamSpec(10)]
    >>> plan = schedule("zero-3-stair", params, 2, blocks=[[0], [1], [2]])
    >>> [f"{one.label} {one.part}" for one in plan.operations if one.op]     # doctest: +NORMALIZE_WHITESPACE
    ['gather 0', 'gather 1', 'gather 2',
     'gather 0', 'gather 2', 'reduce 2', 'gather 1', 'reduce 1', 'reduce 0']
    """

    def _sends(self, part: int) -> bool:
        return self._units[part].gathered_bytes > 0

    def _begin_backward(self) -> None:
        if self._units[0].kept and self._sends(0):
            self._gather(0)
            self._listed[-1] = self._listed[-1]._replace(takes=0)  # in the memory that it has had in forward

    @cached_property
    def _flats(self) -> list[list[ParamSpec]]:
        """The trained parameters of each unit."""
        blocks = [range(len(self.params))] if self.blocks is None else self.blocks
        of_units = ([self.params[number] for number in block] for block in blocks)
        return [[param for param in unit if param.trainable] for unit in of_units]

    def _share(self, flat: Sequence[ParamSpec]) -> int:
        """Elements of a rank's share of a unit, those that only fill it up included."""
        return -(-sum(param.numel for param in flat) // self.groups.ranks)

    @property
    def _share_bytes(self) -> int:
        return sum(self._share(flat) * itemsize_of(flat[0].dtype) for flat in self._flats if flat)

    def _unit(self, numbers: Sequence[int], *, kept: bool) -> Unit:
        params = [self.params[number] for number in numbers]
        flat = [param for param in params if param.trainable]
        nbytes = self.groups.ranks * self._share(flat) * itemsize_of(flat[0].dtype) if flat else 0
        return Unit(sum(param.numel for param in params), nbytes, nbytes, kept, len(numbers), nbytes)

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        frozen = sum(nbytes_of(param) for param in self.params if not param.trainable)
        return (self._share_bytes + frozen,) * self.world_size

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        return (self._share_bytes,) * self.world_size

    @cached_property
    def _held(self) -> tuple[list[int], list[int]]:
        rule = state_rule(self.how.optimizer)
        numels, state = [0] * self.groups.ranks, [0] * self.groups.ranks
        for flat in self._flats:
            share, place = self._share(flat), 0
            for param in flat:
                end = place + param.numel
                for rank in range(place // share, -(-end // share)):  # those that have a piece of it
                    piece = min(end, (rank + 1) * share) - max(place, rank * share)
                    numels[rank] += piece
                    state[rank] += rule.of(param).nbytes(piece, itemsize_of(param.dtype))
                place = end
        return numels, state
