"""A trace of an iteration on several ranks: how much of the communication hides behind computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.profiler import profile, supported_activities

from benchmarks import contenders, training
from benchmarks.gpu.budget import Budget, Found, Skipped
from zero_ref.comm import devices
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT, passages
from zero_ref.simulator.timeline import Event, covered_ms

OVERLAPPED = (
    contenders.REFERENCE,
    contenders.OWN_HOOKS_BEST,
    f"{contenders.TO_OWNERS}, interleaved",
)

TRACED = GPTConfig(layers=12, heads=16, width=1024, context=512)


def overlap(
    device: torch.device,
    budget: Budget,
    *,
    world_size: int | None = None,
    config: GPTConfig = TRACED,
    names: Sequence[str] = OVERLAPPED,
) -> Found:
    """A trace of one iteration on all accelerators: how much of the communication hides behind computing.

    Args:
        world_size: ranks; None for one on each accelerator.
    Raises:
        Skipped: there is one accelerator, so a single rank, which sends nothing.
    """
    world_size = world_size or devices.accelerator_count()
    if world_size < 2:
        raise Skipped(
            "there is one accelerator, and a single rank sends nothing that could be hidden. Two ranks that "
            "share an accelerator would take its time from each other."
        )
    rows: list[Found] = []
    try:
        for name in names:
            if budget.over:
                rows.append({"way": name, "left_out": "no time was left"})
                continue
            rows.append(ranks.run(traced, world_size, name, config, timeout=max(1.0, budget.left_s))[0])
    finally:
        ranks.shutdown()
    return {"ranks": world_size, "traces": rows}


def traced(name: str, config: GPTConfig) -> Found:
    """Trace an iteration of one of `training.ways`, as this rank's device sees it.

    Where there is an accelerator, spans are those of its kernels; on a CPU those of torch's operations and of
    Gloo. Collective: all ranks of the default group.
    """
    model, optimizer = training.wrapped(GPT(config).to(ranks.device()), training.ways()[name])
    given = passages(config, 4, seed=0, step=0, rank=dist.get_rank())
    loss = model(*given)

    def iterate() -> None:
        """From one backward to the next, since what `gather_in_forward` sends arrives in the next forward."""
        nonlocal loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model(*given)

    for _ in range(4):
        iterate()
    devices.synchronize()
    dist.barrier()
    for _ in range(2):  # the first trace has the profiler's own start in it
        spans = _spans(iterate)
    return {"way": name, **hidden(spans)}


def _spans(run: Callable[[], object]) -> list[tuple[str, bool, float, float]]:
    """What torch's profiler sees of a call: name, whether the host did it, start and end in microseconds.

    Whatever `run` sends must have arrived when it returns: if a message of Gloo ends under a later profile,
    torch 2.13 writes its end to freed memory.
    """
    with profile(activities=supported_activities()) as profiler:
        run()
        devices.synchronize()
    # Here, and not after another profile: torch 2.13 then reads freed memory.
    return [
        (event.name, event.device_type.name == "CPU", event.time_range.start, event.time_range.end)
        for event in profiler.events()
    ]


def hidden(spans: Sequence[tuple[str, bool, float, float]]) -> Found:
    """The share of communication during which the device also computes.

    >>> found = hidden([("nccl", False, 0, 4000), ("gemm", False, 1000, 3000), ("aten::mm", True, 0, 9000)])
    >>> found["communication_ms"], found["computing_ms"], found["hidden_share"]
    (4.0, 2.0, 0.5)

    Args:
        spans: (name, whether the host did it, start, end), microseconds. The host's count only if there are
            no others.
    Returns:
        Milliseconds in all, with overlapping spans once; a share of None where nothing was sent.
    """
    if any(not on_host for _, on_host, _, _ in spans):
        spans = [span for span in spans if not span[1]]
    communication, computing = list[Event](), list[Event]()
    for name, on_host, start, end in spans:
        when = start / 1e3, end / 1e3
        if "nccl" in name or name.startswith("gloo:"):
            communication.append(Event("network", "sent", None, *when))
        elif not on_host or name.startswith("aten::"):
            computing.append(Event("compute", "computed", None, *when))
    sent_ms, computed_ms = covered_ms(communication), covered_ms(computing)
    both_ms = sent_ms + computed_ms - covered_ms([*communication, *computing])
    return {
        "communication_ms": sent_ms,
        "computing_ms": computed_ms,
        "hidden_share": both_ms / sent_ms if sent_ms else None,
    }
