"""Everything that a rank holds, item by item: on average by the formula, and exactly for a partition.

`ledger` counts what a stage divides. This module adds buffers, activations, scalars and padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from zero_ref.plan.layout import lay_out
from zero_ref.plan.partition import ParamSpec, Partition, check_world_size
from zero_ref.simulator.ledger import (
    EIGHT_BIT_BLOCK,
    UNITS,
    Convention,
    StateRule,
    check_fits,
    check_stage,
    convention_named,
    itemsize_of,
    state_rule,
)
from zero_ref.simulator.models import blocks
from zero_ref.simulator.offload import gradients_leave
from zero_ref.simulator.updates import update_kernels

FIRST_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}
"""The ZeRO stage from which each part of the model's state is divided among the ranks."""


@dataclass(frozen=True)
class MemorySettings:
    """The settings that decide how much memory a run needs.

    >>> MemorySettings(stage=2).convention
    'mixed-16'

    Args:
        stage: of ZeRO. 0 is plain data parallelism; at 0 and 1 DDP reduces the gradients.
        convention: bytes an element: the name of one of `ledger.CONVENTIONS`, or a Convention. None for
            torch.optim's own: gradients and moments in each parameter's dtype, no master copy.
        optimizer: a name in `ledger.STATE_RULES`, or a rule. Its tensors take the place of the two moments
            that the convention counts.
        update: one of `updates.UPDATES`: what the update needs while it lasts.
        gradient_as_bucket_view: as in DDP. False, DDP's default, costs a second copy of the gradients.
        bucket_bytes: of the buffer for messages at stage 1, and of the two buckets of gradients that are on
            their way at stage 2; 0 if tensors are sent without a copy.
        live_numel: at stage 3, gathered elements that stay whole, if the model has so many.
        gathered_units: at stage 3, how many blocks of `models.blocks` are whole at one time beside the root:
            the one that computes, and those that are gathered ahead.
        flat: at stages 1 and 2, trainable parameters are views of the flat tensors of `layout.lay_out`, and
            new parameters are sent from these.
        activation_bytes: of one rank, what forward leaves for backward.
        head_bytes: of these, what is kept outside of the blocks, and freed before backward comes to one.
        forward_bytes: more at the end of forward.
        loss_bytes: more while the loss's backward lasts.
        output_bytes: more from the loss to the end of backward: logits that the caller keeps.
        block_bytes: more while backward is in a block.
        last_block_bytes: of the activations, what one block keeps, which is there when backward ends.
        ddp: at stages 0 and 1. False for a rank alone, which has no buckets: its gradients are freed after
            the update.
        tied: the output head is the embedding, whose gradient is made in two parts.
        accumulates: several backwards before an update: in forward the gradients of earlier ones are there.
        no_sync: at stages 2 and 3, such gradients are whole on every rank until the last backward.
        reduced_itemsize: bytes of an element of gradients on their way; None for those of the gradients.
        masters_apart: the optimizer steps 32-bit copies, for which it converts the gradients of its shard.
        offload: one of `offload.OFFLOADS`: masters, moments and scalars are on the CPU, and gradients too
            unless they add up on the device.
        offload_fraction: the part of them that is there.
        scales: the convention's moments have one byte an element, and `ledger.EIGHT_BIT_BLOCK` elements share
            a float32 scale, which comes on top.
    Raises:
        ValueError: a stage, name or number is not accepted.
    """

    stage: int
    convention: str | Convention | None = "mixed-16"
    optimizer: str | StateRule = "AdamW"
    update: str = "fused"
    gradient_as_bucket_view: bool = False
    bucket_bytes: int = 25 * UNITS["MiB"]
    gathered_units: int = 2
    flat: bool = False
    activation_bytes: int = 0
    head_bytes: int = 0
    forward_bytes: int = 0
    loss_bytes: int = 0
    output_bytes: int = 0
    block_bytes: int = 0
    last_block_bytes: int = 0
    live_numel: int = 0
    ddp: bool = True
    tied: bool = False
    accumulates: bool = False
    no_sync: bool = False
    reduced_itemsize: int | None = None
    masters_apart: bool = False
    offload: str | None = None
    offload_fraction: float = 1.0
    scales: bool = False

    def __post_init__(self) -> None:
        check_stage(self.stage)
        update_kernels(self.optimizer, self.update)
        if self.convention is not None:
            _ = convention_named(self.convention).master
        sizes = (
            "bucket_bytes",
            "activation_bytes",
            "head_bytes",
            "forward_bytes",
            "loss_bytes",
            "block_bytes",
            "last_block_bytes",
        )
        for name, least in (*((size, 0) for size in sizes), ("gathered_units", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.flat and self.stage not in (1, 2):
            raise ValueError(f"flat tensors are for stages 1 and 2; stage {self.stage} keeps none.")

    @property
    def gradients_leave(self) -> bool:
        """Gradients go to the CPU in every pass. At stages 0 and 1 those of several passes add up first."""
        return gradients_leave(self.offload) and not (self.accumulates and self.stage < 2)

    @property
    def gradients_stay(self) -> bool:
        """Gradients lie in DDP's buckets, which are never freed."""
        return self.ddp and self.stage < 2 and self.gradient_as_bucket_view

    def with_scales(self, moment_bytes: int) -> int:
        """The bytes of moments with those of their scales."""
        return moment_bytes + self.scales * 4 * -(-moment_bytes // EIGHT_BIT_BLOCK)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, each item at its largest.

    The items are not at their largest at the same time: activations are freed before new parameters are sent.
    So the total is a bound, and `peak_bytes` is what is there at one time.

    Args:
        master_bytes: fp32 copies of parameters, and of gradients where the convention counts them.
        moment_bytes: the optimizer's other state of each element, and the scales of what has 8 bits.
        scalar_bytes: the optimizer's state of each tensor, such as `step`.
        padding_bytes: elements of flat tensors that belong to no parameter.
        gradient_bucket_bytes: DDP's buckets, where they are a second copy of the gradients.
        communication_bytes: buffers of messages: a bucket of new parameters at stage 1, two of gradients
            at stage 2; at stage 3 the gathered units, and the largest unit's whole gradients.
        whole_gradient_bytes: of gradients that add up and are not reduced yet, where a rank keeps a shard.
        temporary_bytes: the most that comes and goes beside activations: in the loss, a block or the step.
        allocator_bytes: reserved by the allocator at the peak, and not in tensors.
        library_bytes: the driver's context and kernels, and the buffers of communicators.
        phase_bytes: of tensors in each of PHASES.
        peak_items: bytes by item at the peak, which add up to it.
        host_bytes: on the CPU, and no item of the device.
        left_gradient_bytes: of these, gradients, which leave the device while backward makes them.
    """

    parameter_bytes: float
    gradient_bytes: float
    master_bytes: float
    moment_bytes: float
    scalar_bytes: float
    padding_bytes: float
    gradient_bucket_bytes: float
    communication_bytes: float
    activation_bytes: float
    whole_gradient_bytes: float = field(default=0, kw_only=True)
    temporary_bytes: float = field(default=0, kw_only=True)
    allocator_bytes: float = field(default=0, kw_only=True)
    library_bytes: float = field(default=0, kw_only=True)
    phase_bytes: Mapping[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    peak_items: Mapping[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    host_bytes: float = field(default=0, kw_only=True)
    left_gradient_bytes: float = field(default=0, kw_only=True)

    @property
    def items(self) -> dict[str, float]:
        """Bytes by the names of the items."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "master copies": self.master_bytes,
            "moments": self.moment_bytes,
            "scalars": self.scalar_bytes,
            "padding": self.padding_bytes,
            "gradient buckets": self.gradient_bucket_bytes,
            "communication": self.communication_bytes,
            "whole gradients": self.whole_gradient_bytes,
            "activations": self.activation_bytes,
            "temporaries": self.temporary_bytes,
            "allocator": self.allocator_bytes,
            "libraries": self.library_bytes,
        }

    @cached_property
    def total_bytes(self) -> float:
        return sum(self.items.values())

    @property
    def state_bytes(self) -> float:
        """Bytes that are there all the time: the model's and the optimizer's state, and DDP's buckets."""
        of_model = self.parameter_bytes + self.padding_bytes + self.gradient_bucket_bytes
        return of_model + self.master_bytes + self.moment_bytes + self.scalar_bytes

    @property
    def phase(self) -> str:
        """The one of PHASES in which most is there; the first of several."""
        return max(self.phase_bytes, key=lambda phase: self.phase_bytes[phase], default="forward")

    @property
    def allocated_bytes(self) -> float:
        """The most that is in tensors at one time, as torch's `max_memory_allocated`."""
        return max(self.phase_bytes.values(), default=0)

    @property
    def reserved_bytes(self) -> float:
        """The same with what the allocator holds beside tensors, as torch's `max_memory_reserved`."""
        return self.allocated_bytes + self.allocator_bytes

    @property
    def peak_bytes(self) -> float:
        """The most that the device holds at one time, as its driver counts."""
        return self.reserved_bytes + self.library_bytes


def average_memory(params: Sequence[ParamSpec], world_size: int, settings: MemorySettings) -> Memory:
    """Count the memory of a rank if all that the stage divides is divided evenly. Padding is not counted.

    >>> from zero_ref.simulator.ledger import format_bytes
    >>> from zero_ref.simulator.models import shapes, specs
    >>> memory = average_memory(specs(shapes("llama3-70b")), 512, MemorySettings(stage=3))
    >>> {item: format_bytes(nbytes, "GB") for item, nbytes in memory.items.items() if nbytes > 1e6}
    {'parameters': '0.28 GB', 'gradients': '0.28 GB', 'master copies': '0.55 GB', 'moments': '1.10 GB',
     'communication': '11.83 GB'}

    Args:
        params: in registration order; their names decide the units of stage 3.
    Raises:
        ValueError: `world_size` is below 1.
    Source: ZeRO (arXiv:1910.02054), table 1, for parameters, gradients, master copies and moments; DDP's
        `gradient_as_bucket_view`; torch.distributed.fsdp for what stage 3 gathers.
    """
    check_world_size(world_size)
    whole = whole_bytes(params, settings)
    ranks = {part: world_size if settings.stage >= first else 1 for part, first in FIRST_STAGE.items()}
    memory = Memory(
        parameter_bytes=whole.params / ranks["parameters"],
        gradient_bytes=whole.grads / ranks["gradients"],
        master_bytes=whole.master / ranks["optimizer"],
        moment_bytes=settings.with_scales(whole.moments) / ranks["optimizer"],
        scalar_bytes=whole.scalars / ranks["optimizer"],
        padding_bytes=0,
        gradient_bucket_bytes=_gradient_bucket_bytes(whole, settings),
        communication_bytes=_communication_bytes(params, world_size, settings),
        activation_bytes=settings.activation_bytes,
        whole_gradient_bytes=_whole_gradient_bytes(params, world_size, settings),
    )
    return offloaded(memory, settings)


def memory_of_ranks(
    partition: Partition,
    params: Sequence[ParamSpec],
    settings: MemorySettings,
    *,
    padding_bytes: int | None = None,
) -> tuple[Memory, ...]:
    """Count the memory of each rank of a partition, in whole bytes.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> params = [ParamSpec(1000), ParamSpec(24)]
    >>> settings = MemorySettings(stage=1, convention=None, gradient_as_bucket_view=True, bucket_bytes=0)
    >>> for memory in memory_of_ranks(sorted_greedy([1000, 24], 2), params, settings):
    ...     print(memory.parameter_bytes, memory.gradient_bytes, memory.moment_bytes, memory.scalar_bytes)
    4096 4096 8000 4
    4096 4096 192 4

    Args:
        partition: who owns what of the parts that the stage divides. At stage 0 only its ranks are counted.
        params: in registration order, the ones that `partition` was made for.
        padding_bytes: of flat tensors, if the caller has laid them out; None to lay them out here.
    Raises:
        ValueError: `params` is not what `partition` was made for.
    """
    check_fits(partition, params)
    if padding_bytes is None:
        padding_bytes = _padding_bytes(partition, params, settings)
    whole = whole_bytes(params, settings)
    cost_of_param = costs(params, settings)
    on_every_rank: dict[str, Any] = {
        "padding_bytes": padding_bytes,
        "gradient_bucket_bytes": _gradient_bucket_bytes(whole, settings),
        "communication_bytes": _communication_bytes(params, partition.world_size, settings),
        "activation_bytes": settings.activation_bytes,
        "whole_gradient_bytes": _whole_gradient_bytes(params, partition.world_size, settings),
    }
    *of_element, of_slice = (
        [cost[part] for cost in cost_of_param] for part in range(len(StateBytes._fields))
    )
    owned_of_part = [*(partition.totals(amounts) for amounts in of_element)]
    owned_of_part.append(partition.totals([0] * len(params), of_slice))

    @cache  # most ranks own as much as others
    def memory_of(owned: StateBytes) -> Memory:
        held = {part: owned if settings.stage >= first else whole for part, first in FIRST_STAGE.items()}
        memory = Memory(
            parameter_bytes=held["parameters"].params,
            gradient_bytes=held["gradients"].grads,
            master_bytes=held["optimizer"].master,
            moment_bytes=settings.with_scales(held["optimizer"].moments),
            scalar_bytes=held["optimizer"].scalars,
            **on_every_rank,
        )
        return offloaded(memory, settings)

    return tuple(memory_of(StateBytes(*owned)) for owned in zip(*owned_of_part))


def offloaded(memory: Memory, settings: MemorySettings) -> Memory:
    """The memory with what the settings put on the CPU taken off the device."""
    if settings.offload is None:
        return memory
    there = settings.offload_fraction
    gradients = there * memory.gradient_bytes if settings.gradients_leave else 0
    return replace(
        memory,
        gradient_bytes=memory.gradient_bytes - gradients,
        master_bytes=(1 - there) * memory.master_bytes,
        moment_bytes=(1 - there) * memory.moment_bytes,
        scalar_bytes=(1 - there) * memory.scalar_bytes,
        host_bytes=there * (memory.master_bytes + memory.moment_bytes + memory.scalar_bytes) + gradients,
        left_gradient_bytes=gradients,
    )


class StateBytes(NamedTuple):
    """Bytes of a model's state; or of one element, where `scalars` is the bytes of each tensor."""

    params: int
    grads: int
    master: int
    moments: int
    scalars: int


def costs(params: Sequence[ParamSpec], settings: MemorySettings) -> list[StateBytes]:
    """The bytes of one element of each parameter. A frozen parameter has no gradient and no master copy.

    >>> costs([ParamSpec(10), ParamSpec(3, trainable=False)], MemorySettings(stage=1))
    [StateBytes(params=2, grads=2, master=4, moments=8, scalars=4),
     StateBytes(params=2, grads=0, master=0, moments=0, scalars=0)]
    """
    rule = state_rule(settings.optimizer)
    convention = None if settings.convention is None else convention_named(settings.convention)

    def cost_of(param: ParamSpec) -> StateBytes:
        if convention is None:
            element = gradient = moment = itemsize_of(param.dtype)
            master = 0
        else:
            element, gradient = convention.params, convention.grads
            master, moment = convention.master, convention.moment
        its = rule.of(param)
        trained, has_state = param.trainable, param.trainable or its.for_frozen
        moments, scalars = its.tensors * moment * has_state, its.scalar_bytes * has_state
        return StateBytes(element, gradient * trained, master * trained, moments, scalars)

    kinds = [(param.dtype, param.trainable, param.whole) for param in params]
    some = dict(zip(kinds, params))
    cost_of_kind = {kind: cost_of(param) for kind, param in some.items()}
    return [cost_of_kind[kind] for kind in kinds]


def whole_bytes(params: Sequence[ParamSpec], settings: MemorySettings) -> StateBytes:
    """The state of the whole model, undivided."""
    return _whole_bytes(tuple(params), _costing(settings))


def _costing(settings: MemorySettings) -> MemorySettings:
    """Return the settings on which the bytes of an element depend; many settings have these in common."""
    return MemorySettings(0, settings.convention, settings.optimizer)


@lru_cache(maxsize=16)
def _whole_bytes(params: tuple[ParamSpec, ...], settings: MemorySettings) -> StateBytes:
    return _total((param.numel, cost) for param, cost in zip(params, costs(params, settings), strict=True))


def _total(pieces: Iterable[tuple[int, StateBytes]]) -> StateBytes:
    """The bytes of pieces of parameters: (elements, bytes of one element) each."""
    numel_of: dict[StateBytes, int] = {}  # most parameters cost the same
    scalars = 0
    for numel, cost in pieces:
        numel_of[cost] = numel_of.get(cost, 0) + numel
        scalars += cost.scalars
    params, grads, master, moments = (
        sum(cost[part] * numel for cost, numel in numel_of.items()) for part in range(4)
    )
    return StateBytes(params, grads, master, moments, scalars)


def _gradient_bucket_bytes(whole: StateBytes, settings: MemorySettings) -> int:
    twice = settings.ddp and settings.stage < 2 and not settings.gradient_as_bucket_view
    return whole.grads if twice else 0


def _communication_bytes(params: Sequence[ParamSpec], world_size: int, settings: MemorySettings) -> int:
    if world_size == 1 or settings.stage == 0:  # DDP reduces in its buckets
        return 0
    cost_of_param = costs(params, settings)
    if settings.stage == 3:
        return gathered_bytes(params, settings) + _reducing_bytes(params, settings)
    trainable = [i for i, param in enumerate(params) if param.trainable]
    sent = 0 if settings.flat else sum(params[i].numel * cost_of_param[i].params for i in trainable)
    reduced = whole_bytes(params, settings).grads if settings.stage == 2 else 0
    return min(settings.bucket_bytes, max(sent, reduced))


def _whole_gradient_bytes(params: Sequence[ParamSpec], world_size: int, settings: MemorySettings) -> int:
    """Return bytes of gradients that are whole until the last backward, in the dtype in which they travel."""
    if not (settings.no_sync and settings.accumulates and settings.stage > 1):
        return 0
    if world_size == 1 and (settings.stage == 2 or settings.reduced_itemsize is None):
        return 0
    if settings.stage == 3 and settings.reduced_itemsize is not None:
        return settings.reduced_itemsize * sum(param.numel for param in params if param.trainable)
    return whole_bytes(params, settings).grads


def unit_bytes(params: Sequence[ParamSpec], settings: MemorySettings) -> Sequence[StateBytes]:
    """The state of the root and of each block of `models.blocks`, undivided."""
    return _units_of(tuple(params), _costing(settings))


@lru_cache(maxsize=16)
def _units_of(params: tuple[ParamSpec, ...], settings: MemorySettings) -> Sequence[StateBytes]:
    cost_of_param = costs(params, settings)
    return [_total((params[i].numel, cost_of_param[i]) for i in unit) for unit in blocks(params)]


def gathered_bytes(params: Sequence[ParamSpec], settings: MemorySettings) -> int:
    """The root and as many of the largest blocks as are whole at one time; or more, that are kept so."""
    root, *others = unit_bytes(params, settings)
    gathered = sorted((unit.params for unit in others), reverse=True)[: settings.gathered_units]
    whole = root.params + sum(unit.params for unit in others)
    numel = max(1, sum(param.numel for param in params))
    return max(root.params + sum(gathered), min(whole, settings.live_numel * whole // numel))


def _reducing_bytes(params: Sequence[ParamSpec], settings: MemorySettings) -> int:
    """A unit's whole gradients; and their copy, if they travel in another dtype."""
    of_unit = []
    for unit, members in zip(unit_bytes(params, settings), blocks(params)):
        numel = sum(params[i].numel for i in members if params[i].trainable)
        of_unit.append(unit.grads + numel * (settings.reduced_itemsize or 0))
    return max(of_unit)


def _padding_bytes(partition: Partition, params: Sequence[ParamSpec], settings: MemorySettings) -> int:
    if not settings.flat:
        return 0
    convention = settings.convention
    return sum(
        flat.padding * (flat.itemsize if convention is None else convention_named(convention).params)
        for flat in lay_out(partition, params).flats
    )
