"""Measured iterations have the events of the simulated ones, in the same order."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_to_owners,
)
from zero_ref.lab import ranks
from zero_ref.lab.recorder import IterationRecorder
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import from_module
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.schedule import ddp_buckets, schedule
from zero_ref.simulator.timeline import Timeline

pytestmark = pytest.mark.ranks

WIDTH = 24
BUCKET = 2 * 4 * WIDTH * WIDTH  # two layers
OVERLAP = {"after_backward": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


class Mode(NamedTuple):
    strategy: str
    way: str = "plain"
    to_owners: bool = False
    by: str = "pairs"


MODES = [
    Mode("ddp"),
    *(Mode("zero-even", way, to_owners) for way in ("plain", *OVERLAP) for to_owners in (False, True)),
    Mode("zero", "interleaved"),
    Mode("zero", "plain", True, "reduce"),
    Mode("zero-even", "interleaved", True, "reduce"),
]


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)))


def wrapped(mode: Mode) -> tuple[DistributedDataParallel, torch.optim.Optimizer, IterationRecorder]:
    ddp = DistributedDataParallel(tower(), bucket_cap_mb=BUCKET / 2**20)
    if mode.strategy == "ddp":
        adam = torch.optim.Adam(ddp.parameters())
        return ddp, adam, IterationRecorder(ddp, adam)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(),
        torch.optim.Adam,
        partition="even" if mode.strategy == "zero-even" else "sorted_greedy",
        parameters_as_bucket_view=mode.strategy == "zero-even",
        overlap_with_ddp=mode.way != "plain",
    )
    reduce = reduce_to_owners(zero, by=mode.by) if mode.to_owners else None
    return ddp, zero, IterationRecorder(ddp, zero, overlap=OVERLAP.get(mode.way), reduce=reduce)


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(torch.ones(3, WIDTH)).square().mean().backward()
    optimizer.step()


def recorded(modes: list[Mode]) -> list[Timeline]:
    """The third iteration of each: DDP has its final buckets from the second on."""
    timelines = []
    for mode in modes:
        ddp, optimizer, recorder = wrapped(mode)
        for _ in range(3):
            with recorder:
                train(ddp, optimizer)
        assert len(recorder.timelines) == 3
        timelines.append(recorder.timelines[-1])
    return timelines


def simulated(mode: Mode, rank: int) -> Timeline:
    params = from_module(tower())
    plan = schedule(
        recipe(mode.strategy, optimizer="Adam", way=mode.way, to_owners=mode.to_owners, reduced_by=mode.by),
        params,
        2,
        ddp_buckets=ddp_buckets(params, cap_bytes=BUCKET),
    )
    return play(plan, cluster("loopback"), Workload(3)).timeline(rank)


def order(timeline: Timeline, lane: str) -> list[tuple[str, int | None]]:
    return [(event.label, event.bucket) for event in timeline.on(lane)]


def test_every_mode_is_recorded_in_the_order_of_its_simulation() -> None:
    of_ranks = ranks.run(recorded, 2, MODES, backend="gloo")
    for rank, timelines in enumerate(of_ranks):
        for mode, timeline in zip(MODES, timelines, strict=True):
            expected = simulated(mode, rank)
            for lane in ("compute", "network"):
                assert order(timeline, lane) == order(expected, lane), (mode, rank)
            assert set(timeline.lanes) == {"compute", "network"}


def test_what_one_thread_computes_does_not_overlap_and_calls_follow_their_reasons() -> None:
    modes = [Mode("ddp"), Mode("zero-even"), Mode("zero-even", "interleaved")]
    for timelines in ranks.run(recorded, 2, modes, backend="gloo"):
        for timeline in timelines:
            free_ms = 0.0
            for event in timeline.on("compute"):
                assert free_ms <= event.start_ms <= event.stop_ms
                free_ms = event.stop_ms
            ready = {event.bucket: event.stop_ms for event in timeline.events if event.label == "backward"}
            reduces = [event for event in timeline.on("network") if event.label == "reduce"]
            assert all(event.start_ms >= ready[event.bucket] for event in reduces)


def values_with_and_without() -> list[bool]:
    equal = []
    for mode in (Mode("zero-even"), Mode("zero-even", "interleaved"), Mode("zero", to_owners=True)):
        ddp, optimizer, recorder = wrapped(mode)
        plain = tower()
        reference = DistributedDataParallel(plain)
        adam = torch.optim.Adam(plain.parameters())
        for iteration in range(3):
            train(reference, adam)
            if iteration == 1:  # the hooks stay, and outside of `with` they note nothing
                train(ddp, optimizer)
            else:
                with recorder:
                    train(ddp, optimizer)
        assert len(recorder.timelines) == 2
        equal.append(all(torch.equal(p, q) for p, q in zip(ddp.parameters(), plain.parameters())))
    return equal


def test_recording_changes_no_value() -> None:
    assert ranks.run(values_with_and_without, 2, backend="gloo") == [[True] * 3] * 2


def interrupted() -> tuple[int, bool, str]:
    ddp, optimizer, recorder = wrapped(Mode("zero-even"))
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    collectives = optimizer.collectives
    with pytest.raises(KeyError), recorder:
        raise KeyError
    put_back = optimizer.collectives is collectives
    with recorder:
        with pytest.raises(RuntimeError) as nested, recorder:
            pass
        train(ddp, optimizer)
    return len(recorder.timelines), put_back, str(nested.value)


def test_an_iteration_that_fails_is_not_kept_and_leaves_the_optimizer_as_it_was() -> None:
    for kept, put_back, answer in ranks.run(interrupted, 2, backend="gloo"):
        assert (kept, put_back) == (1, True)
        assert "leave it before the next" in answer


def refused() -> list[str]:
    ddp = DistributedDataParallel(tower())
    adam = torch.optim.Adam(ddp.parameters())
    with pytest.raises(TypeError) as of_overlap:
        IterationRecorder(ddp, adam, overlap=hook_with_zero_step)
    with pytest.raises(ValueError, match=r"torch\.profiler") as of_device:
        IterationRecorder(_OnMeta(ddp), adam)  # type: ignore[arg-type]
    return [str(of_overlap.value), str(of_device.value)]


class _OnMeta:
    """Stands for a model on a GPU, which the machine that runs the tests may not have."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp

    def parameters(self) -> list[torch.Tensor]:
        return [param.to("meta") for param in self.ddp.parameters()]


def test_what_cannot_be_recorded_is_refused() -> None:
    (of_overlap, of_device), _ = ranks.run(refused, 2, backend="gloo")
    assert "overlap= takes a ZeroRedundancyOptimizer, not Adam" in of_overlap
    assert "the model is on meta" in of_device
