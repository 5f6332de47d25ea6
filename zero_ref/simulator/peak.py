"""The most that a rank holds at one time: what is there in each phase of an iteration.

`memory` counts each item at its largest. The items are not all there at once: activations are freed while
gradients are made, and an update begins when both are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator._checks import check_name
from zero_ref.simulator.device import Device
from zero_ref.simulator.ledger import state_rule
from zero_ref.simulator.memory import Memory, MemorySettings, costs, gathered_bytes, unit_bytes, whole_bytes
from zero_ref.simulator.models import blocks
from zero_ref.simulator.updates import update_kernels

PHASES = ("forward", "loss", "backward", "last block", "reduction", "step", "sending")
"""When a rank may hold most: at the end of forward, in the backward of the loss, in the block with which
backward begins, in the block with which it ends, at the end of backward, in the update, and while new
parameters are sent."""

ALLOCATORS = {
    "expandable": "segments that grow, as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "segments": "segments as torch makes them unless told otherwise, for batches of one length",
    "varying": "the same, for batches of varying lengths",
}
"""The ways in which PyTorch's caching allocator takes memory from the device."""

SHARES = {"segments": 0.15, "varying": 0.68}
"""What the allocator reserves on top, as a share of what comes and goes within an iteration.

Tensors that are made once leave nothing unused but the end of a segment, which is rounded up to 2 MiB. What
comes and goes finds gaps that are too small. With segments that grow the share is `Device.allocator_share`.
The others are medians over seven steps of Llamas, whose tensors went through the rules of torch's allocator
(tests/simulator/test_allocator.py): of 4% to 94% where all batches are alike, and of 28% to 169% where not.

Source: c10/cuda/CUDACachingAllocator.cpp in torch.
"""

COME_AND_GO = ("gradients", "whole gradients", "communication", "activations", "temporaries")
"""The items that are not there in every phase."""


def with_peak(
    memory: Memory,
    params: Sequence[ParamSpec],
    settings: MemorySettings,
    *,
    allocator_share: float = 0.0,
    library_bytes: float = 0.0,
) -> Memory:
    """A rank's memory with what is there in each phase, and an allowance for allocator and libraries.

    >>> from zero_ref.simulator.memory import average_memory
    >>> settings = MemorySettings(0, gradient_as_bucket_view=True, activation_bytes=100, loss_bytes=30)
    >>> memory = with_peak(average_memory([ParamSpec(10)], 1, settings), [ParamSpec(10)], settings)
    >>> for phase, nbytes in memory.phase_bytes.items():
    ...     print(phase, nbytes)
    forward 264.0
    loss 294.0
    backward 264.0
    last block 164.0
    reduction 164.0
    step 164.0
    sending 164.0
    >>> memory.phase, memory.peak_bytes, memory.total_bytes
    ('loss', 294.0, 294.0)

    Args:
        allocator_share: of what comes and goes within an iteration, what the allocator reserves on top.
        library_bytes: what libraries take.
    Source: torch's `max_memory_reserved`. At stage 3, FSDP2 makes the shards of gradients in one stream
        and gathers parameters in another, and the caching allocator gives a stream no memory of another: so
        the shards of the gradients, and one more copy of the largest gathered unit, are reserved all the time
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, and the caching allocator in c10).
        At 2 ranks these shards are half of all gradients, so that stage 3 may reserve more than stage 2,
        whose shards lie in the stream that computes. It is true of what FSDP2 reserves, and not of what it
        needs: before the allocator runs out it gives back what no tensor uses, in the pools of all streams.
    """
    phases = _phases(params, memory, settings)
    found = replace(
        memory,
        temporary_bytes=max(items.get("temporaries", 0) for items in phases.values()),
        phase_bytes={
            phase: float(memory.state_bytes + sum(items.values())) for phase, items in phases.items()
        },
        library_bytes=library_bytes,
    )
    at_peak = phases[found.phase]
    if allocator_share:
        in_other_streams = 0.0
        if settings.stage == 3 and memory.communication_bytes:
            missing = memory.gradient_bytes - at_peak.get("gradients", 0)
            in_other_streams = max(unit.params for unit in unit_bytes(params, settings)) + missing
        stays = memory.state_bytes + (memory.gradient_bytes if settings.gradients_stay else 0)
        comes_and_goes = found.allocated_bytes - stays + in_other_streams
        found = replace(found, allocator_bytes=round(in_other_streams + allocator_share * comes_and_goes))
    come_and_go = dict.fromkeys(COME_AND_GO, 0.0) | at_peak
    return replace(
        found, peak_items={item: come_and_go.get(item, nbytes) for item, nbytes in found.items.items()}
    )


def share_reserved(allocator: str, device: Device) -> float:
    """Return the share of what comes and goes that an allocator reserves on top, on a device.

    >>> from zero_ref.simulator.cluster import cluster
    >>> h100, cpu = (cluster(name).device for name in ("h100-ib", "loopback"))
    >>> share_reserved("expandable", h100), share_reserved("segments", h100), share_reserved("segments", cpu)
    (0.12, 0.15, 0.0)

    Raises:
        ValueError: the name is none of ALLOCATORS.
    """
    check_name("allocator", allocator, ALLOCATORS)
    share = device.allocator_share
    return share if not share or allocator == "expandable" else SHARES[allocator]


class _Gradients(NamedTuple):
    """Bytes of whole gradients, by when backward makes them.

    Args:
        head: of the output head, which is the embedding where the two are tied.
        block: of the largest block.
        embedding: of all that backward makes after the blocks.
        twice: of the embedding's gradient that is added to the head's, where the two are tied.
    """

    head: int
    block: int
    embedding: int
    twice: int


def _gradients(params: Sequence[ParamSpec], settings: MemorySettings) -> _Gradients:
    root, *others = blocks(params)
    cost = costs(params, settings)
    nbytes = [params[number].numel * cost[number].grads for number in range(len(params))]
    if not root or not others:
        return _Gradients(0, 0, 0, 0)
    head = sum(nbytes[number] for number in root if number > max(others[-1]))
    twice = max(nbytes[number] for number in root) if settings.tied else 0
    of_block = max(sum(nbytes[number] for number in unit) for unit in others)
    of_root = sum(nbytes[number] for number in root)
    return _Gradients(head + twice, of_block, of_root - head - twice, twice)


def _phases(
    params: Sequence[ParamSpec], memory: Memory, settings: MemorySettings
) -> dict[str, dict[str, float]]:
    """Bytes by phase and item of what comes and goes."""
    buffers, gathered, sending = _buffer_bytes(params, memory, settings)
    made, gradients, kept = _gradients(params, settings), memory.gradient_bytes, memory.activation_bytes
    whole = max(1, whole_bytes(params, settings).grads)
    before: dict[str, float] = {
        "gradients": gradients if settings.gradients_stay or settings.accumulates else 0.0
    }
    if memory.whole_gradient_bytes:
        before = {"whole gradients": memory.whole_gradient_bytes}
    in_forward = before | {"communication": gathered, "activations": kept}

    leaving = _leaving_bytes(made, memory, whole)

    def in_block(done: int, activations: float) -> dict[str, float]:
        """While backward is in a block, when it has made so many bytes of whole gradients before.

        A block's temporaries are there before its gradients.
        """
        held = before if sum(before.values()) else {"gradients": gradients * done / whole}
        on_the_way = gathered + (_reduced_block(params, settings) + made.head if gathered else buffers)
        on_the_way += leaving
        return held | {
            "communication": on_the_way,
            "activations": activations,
            "temporaries": settings.block_bytes + settings.output_bytes,
        }

    shared = settings.stage == 3 and bool(gathered)  # then the root's gradients stay whole until the end
    first = 0 if shared else made.head
    last = whole - made.embedding - made.block - (made.head if shared else 0)
    after: dict[str, float] = {"gradients": gradients}
    return {
        "forward": in_forward | {"temporaries": settings.forward_bytes},
        "loss": in_forward | {"temporaries": settings.loss_bytes + settings.output_bytes},
        "backward": in_block(first, kept - settings.head_bytes),
        "last block": in_block(last, settings.last_block_bytes),
        "reduction": (after if sum(before.values()) < gradients else before)
        | {"communication": gathered + buffers + leaving, "temporaries": made.twice + settings.output_bytes},
        "step": after | {"temporaries": _step_bytes(params, memory, settings)},
        "sending": after | {"communication": sending},
    }


def _buffer_bytes(
    params: Sequence[ParamSpec], memory: Memory, settings: MemorySettings
) -> tuple[float, float, float]:
    """Return bytes of a rank's buffers for gradients in backward, gathered parameters and new parameters."""
    buffers = memory.communication_bytes
    if settings.stage < 2:
        return 0, 0, buffers
    if settings.stage == 2:
        return buffers, 0, 0
    gathered = gathered_bytes(params, settings) if buffers else 0
    return buffers - gathered, gathered, 0


def _leaving_bytes(made: _Gradients, memory: Memory, whole: int) -> float:
    """Return bytes of the rank's gradients that are on their way to the CPU: those of the largest unit."""
    return max(made.head, made.block, made.embedding) * memory.left_gradient_bytes / whole


def _reduced_block(params: Sequence[ParamSpec], settings: MemorySettings) -> int:
    """The flat copy of the largest block's gradients, which is there until those of the next block are made.

    Source: reduce_scatter_state in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    of_block = []
    for unit, members in zip(unit_bytes(params, settings)[1:], blocks(params)[1:], strict=True):
        numel = sum(params[i].numel for i in members if params[i].trainable)
        of_block.append(
            unit.grads if settings.reduced_itemsize is None else numel * settings.reduced_itemsize
        )
    return max(of_block, default=0)


def _step_bytes(params: Sequence[ParamSpec], memory: Memory, settings: MemorySettings) -> float:
    """Return the bytes that the update needs on the device while it lasts.

    32-bit masters need a 32-bit copy of 16-bit gradients; the kernels need the copies of `updates`.
    """
    whole = whole_bytes(params, settings)
    in_32_bits = memory.master_bytes if settings.masters_apart and whole.master else 0
    copies = update_kernels(settings.optimizer, settings.update).copies
    if not copies or not whole.moments:
        return in_32_bits
    of_all = memory.moment_bytes / state_rule(settings.optimizer).tensors
    if settings.update == "foreach":
        return in_32_bits + copies * of_all
    cost = costs(params, settings)
    largest = max(
        (one.numel * its.moments for one, its in zip(params, cost, strict=True) if one.trainable), default=0
    ) / state_rule(settings.optimizer).tensors  # fmt: skip
    if settings.stage == 3:  # each is cut
        largest *= memory.moment_bytes / whole.moments
    return in_32_bits + copies * min(largest, of_all)
