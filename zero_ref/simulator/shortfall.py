"""Why a rank holds more than 1/N of what one rank alone would: an ideal share, and reasons for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.simulator.groups import SplitOwners, split
from zero_ref.simulator.ledger import format_bytes, state_rule
from zero_ref.simulator.memory import (
    FIRST_STAGE,
    Memory,
    MemorySettings,
    StateBytes,
    costs,
    memory_of_ranks,
    whole_bytes,
)


class Reason(NamedTuple):
    """Bytes of one rank that an equal share of the model's state does not explain.

    Args:
        name: "parameters", "gradients" or "optimizer", which the stage does not divide; "largest tensor" or
            "uneven"; another item of `memory.Memory`; or "not at one time".
        sentence: what causes the bytes, and what can be done about them.
    """

    name: str
    nbytes: int
    sentence: str


@dataclass(frozen=True)
class Shortfall:
    """A rank's bytes, explained: an ideal share, and the reasons for the rest.

    Args:
        ideal_bytes: 1/N of all parameters, gradients, master copies and moments, in whole bytes; of experts,
            of which a rank has some, N are the ranks that have the same.
        reasons: in the order in which `Reason` lists the names; reasons without bytes are left out.
    """

    rank: int
    ideal_bytes: int
    reasons: tuple[Reason, ...]

    @property
    def total_bytes(self) -> int:
        """The bytes that the rank holds: at its peak, where the phases of its memory are known."""
        return self.ideal_bytes + sum(reason.nbytes for reason in self.reasons)


def why_not_smaller(
    partition: Partition | SplitOwners,
    params: Sequence[ParamSpec],
    settings: MemorySettings,
    *,
    rank: int | None = None,
    memories: Sequence[Memory] | None = None,
) -> Shortfall:
    """Why a rank holds more than 1/N of what one rank alone would.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> params = [ParamSpec(1000, name="embedding"), ParamSpec(24, name="head")]
    >>> why = why_not_smaller(sorted_greedy([1000, 24], 2), params, MemorySettings(stage=1, bucket_bytes=0))
    >>> why.rank, why.ideal_bytes, why.total_bytes
    (0, 8192, 18148)
    >>> for name, nbytes, sentence in why.reasons:
    ...     print(f"{nbytes:5} {name}: {sentence}")
     1024 parameters: stage 1 keeps all of them on every rank; stage 3 divides them.
     1024 gradients: stage 1 keeps all of them on every rank; stage 2 divides them.
     5856 largest tensor: embedding is not cut, and takes 12.00 kB where a share is 6.14 kB; cut it.
        4 scalars: the optimizer keeps 4 bytes for each tensor, however small.
     2048 gradient buckets: DDP keeps a second copy of gradients; gradient_as_bucket_view=True saves it.

    Args: as `memory_of_ranks`, and
        rank: None for the fullest (ties: the lowest).
        memories: the result of `memory_of_ranks` for these arguments, if the caller has it.
    Returns:
        A shortfall whose `total_bytes` is exactly that of `memory_of_ranks`, or `peak_bytes` of memories with
        phases. "uneven" can be negative, for a rank that owns less than its share, and "not at one time" is.
    Raises:
        ValueError: `params` is not what `partition` was made for, or there is no such rank.
    """
    if memories is None:
        memories = memory_of_ranks(partition, params, settings)
    if rank is None:
        rank = max(range(len(memories)), key=lambda r: memories[r].total_bytes)
    if not 0 <= rank < len(memories):
        raise ValueError(f"there is no rank {rank}; ranks are 0 to {len(memories) - 1}.")
    whole = whole_bytes(params, settings)
    on_device = [part for part in FIRST_STAGE if not (part == "optimizer" and settings.offload)]
    whole_of_part = {part: _of_parts(whole, [part]) for part in on_device}
    owners = split(partition, partition.world_size)
    share_of_part = {
        part: sum(
            _of_parts(whole_bytes(some.of(params), settings), [part]) // some.groups.ranks
            for some in owners.parts
        )
        for part in on_device
    }
    divided = [part for part in on_device if settings.stage >= FIRST_STAGE[part]]
    reasons = [
        Reason(
            part,
            whole_of_part[part] - share_of_part[part],
            f"stage {settings.stage} keeps all of them on every rank; "
            f"stage {FIRST_STAGE[part]} divides them.",
        )
        for part in whole_of_part
        if part not in divided
    ]
    if divided:
        share = sum(share_of_part[part] for part in divided)
        reasons += _of_the_partition(owners, params, settings, divided, share, rank)
    reasons += _on_top(memories[rank], settings)
    return Shortfall(rank, sum(share_of_part.values()), tuple(reason for reason in reasons if reason.nbytes))


def _of_the_partition(
    owners: SplitOwners,
    params: Sequence[ParamSpec],
    settings: MemorySettings,
    divided: Sequence[str],
    share: int,
    rank: int,
) -> list[Reason]:
    """Bytes that this rank owns beyond its share of the parts that are divided."""
    cost_of_param = costs(params, settings)
    owned = [
        (piece.numel * _of_parts(cost_of_param[piece.param], divided), piece.param)
        for piece in owners.slices_of(rank)
    ]
    excess = sum(nbytes for nbytes, _ in owned) - share
    if not all(partition.is_whole for partition in owners.partitions):
        cut = "shares are rounded, and cuts fall where the partition puts them, not at 1/N to the byte."
        return [Reason("uneven", excess, cut)]
    uneven = "parameters that are not cut do not pack into equal parts, and shares are rounded."
    nbytes, largest = max(owned, default=(0, 0))
    if nbytes <= share:
        return [Reason("uneven", excess, uneven)]
    name = params[largest].name or f"parameter {largest}"
    return [
        Reason(
            "largest tensor",
            nbytes - share,
            f"{name} is not cut, and takes {format_bytes(nbytes)} where a share is "
            f"{format_bytes(share)}; cut it.",
        ),
        Reason("uneven", excess - (nbytes - share), uneven),
    ]


def _of_parts(state: StateBytes, parts: Sequence[str]) -> int:
    """Bytes of these parts of the model's state."""
    optimizer = state.master + state.moments
    bytes_of_part = {"parameters": state.params, "gradients": state.grads, "optimizer": optimizer}
    return sum(bytes_of_part[part] for part in parts)


def _on_top(memory: Memory, settings: MemorySettings) -> list[Reason]:
    """Bytes that are no part of the model's state."""
    scalar_bytes = state_rule(settings.optimizer).scalar_bytes
    what_travels = {
        0: "",
        1: "a bucket of new parameters is on its way.",
        2: "up to two buckets of gradients are on their way.",
        3: f"up to {settings.gathered_units} units are whole while they are used, and one unit's gradients.",
    }
    sentences = {
        "scalars": f"the optimizer keeps {scalar_bytes} bytes for each tensor, however small.",
        "padding": "in flat tensors each owner's run begins at a multiple of some elements.",
        "gradient buckets": "DDP keeps a second copy of gradients; gradient_as_bucket_view=True saves it.",
        "communication": what_travels[settings.stage],
        "whole gradients": "gradients that add up are not reduced before the last backward.",
        "activations": "they grow with the batch and the sequence; no stage divides them.",
        "temporaries": "the most that the loss, a block's backward or the step needs while it lasts.",
        "allocator": "reserved in pieces that no tensor has; a share of what tensors take is supposed.",
        "libraries": "the driver's context, kernels and the buffers of a communicator.",
    }
    reasons = [Reason(item, int(memory.items[item]), sentence) for item, sentence in sentences.items()]
    if memory.phase_bytes:
        apart = int(memory.peak_bytes) - int(memory.total_bytes)
        when = f"most is there at one time in the phase {memory.phase!r}, where some of this is not."
        reasons.append(Reason("not at one time", apart, when))
    return reasons
