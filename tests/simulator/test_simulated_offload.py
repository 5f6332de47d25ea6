"""What is on the CPU is no longer on the device, and the CPU's update takes its time, hidden or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.offload import OFFLOADS
from zero_ref.simulator.operations import HOST
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario, SimulatedRun

H100 = cluster("h100-ib")
NUMEL = sum(shape.numel for shape in MODELS["llama3-8b"].shapes())
HOST_GB_PER_S = H100.device.host_memory_gb_per_s or 0


def run(strategy: str, ranks: int = 1, **options: Any) -> SimulatedRun:
    given: dict[str, Any] = {"checkpointing": "full", "sequence": 2048, **options}
    return Scenario(MODELS["llama3-8b"], H100, ranks, **given).run(strategy)


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("strategy", ["ddp", "zero-even", "zero-2", "zero-3"])
def test_a_lone_gpu_gets_rid_of_twelve_bytes_an_element_and_of_two_more_with_gradients(strategy: str) -> None:
    host = {offload: run(strategy, offload=offload).memory.host_bytes for offload in OFFLOADS}
    assert host["state"] == pytest.approx(12 * NUMEL, rel=1e-3)
    assert host["gradients"] == host["in_backward"] == pytest.approx(14 * NUMEL, rel=1e-3)
    held = run(strategy, offload="in_backward").memory
    assert (held.master_bytes, held.moment_bytes, held.gradient_bytes) == (0, 0, 0)
    assert held.peak_bytes < run(strategy, offload="state").peak_bytes < run(strategy).peak_bytes


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_fraction_is_a_fraction_of_every_rank(offload: str) -> None:
    whole, half = (run("zero-3", 8, offload=offload, offload_fraction=share) for share in (1.0, 0.5))
    for all_of_it, a_half, here in zip(whole.memories, half.memories, run("zero-3", 8).memories):
        assert a_half.host_bytes == pytest.approx(all_of_it.host_bytes / 2)
        assert a_half.master_bytes == pytest.approx(here.master_bytes / 2)
        assert a_half.moment_bytes == pytest.approx(here.moment_bytes / 2)


def test_gradients_that_add_up_on_the_device_stay_there_until_the_last_pass() -> None:
    alone = run("ddp", offload="gradients", accumulation=2)
    assert alone.memory.gradient_bytes == 2 * NUMEL
    assert run("zero-3", offload="gradients", accumulation=2).memory.gradient_bytes == 0


# ---------------------------------------------------------------------------------------------------- time


def test_an_update_takes_as_long_as_the_cpus_memory_needs() -> None:
    here, there = run("zero-3"), run("zero-3", offload="state")
    update_ms = 28 * NUMEL / HOST_GB_PER_S / 1e6  # 7 numbers of 4 bytes
    assert there.what_if.critical_ms["step"] == pytest.approx(update_ms)
    rest = here.iteration_ms - here.what_if.critical_ms["step"]
    assert there.iteration_ms == pytest.approx(rest + update_ms)


def test_a_half_takes_half_as_long_and_the_gpu_updates_the_other_meanwhile() -> None:
    whole, half = (
        run("zero-3", offload="state", offload_fraction=share).what_if.critical_ms["step"]
        for share in (1.0, 0.5)
    )
    assert half == pytest.approx(whole / 2)
    little = run("zero-3", offload="state", offload_fraction=1e-3).what_if.critical_ms["step"]
    assert little == pytest.approx(run("zero-3").what_if.critical_ms["step"], rel=0.01)


@pytest.mark.parametrize(("strategy", "ranks"), [("zero-2", 8), ("zero-3", 8), ("zero-3", 1), ("ddp", 1)])
def test_during_backward_only_what_is_longer_than_backward_is_seen(strategy: str, ranks: int) -> None:
    here = run(strategy, ranks)
    later, during = (run(strategy, ranks, offload=offload) for offload in ("gradients", "in_backward"))
    assert here.iteration_ms < during.iteration_ms < later.iteration_ms
    # Many tokens: backward is longer than the CPU's update, of which the last part alone is seen.
    many = {"sequence": 8192, "batch": 8}
    update_ms = 28 * NUMEL / ranks / HOST_GB_PER_S / 1e6
    alone, during = run(strategy, ranks, **many), run(strategy, ranks, offload="in_backward", **many)
    assert alone.iteration_ms > 2 * update_ms
    assert during.iteration_ms - alone.iteration_ms < 0.15 * update_ms


def test_the_cpu_adds_the_gradients_of_several_passes_up() -> None:
    once, thrice = (run("zero-3", offload="gradients", accumulation=count) for count in (1, 3))
    on_host = [
        sum(stop - start for lane, _, _, start, stop in one.timeline.events if lane == HOST)
        for one in (once, thrice)
    ]
    assert on_host[0] == pytest.approx(2 * NUMEL / (H100.device.host_link_gb_per_s or 0) / 1e6)
    assert on_host[1] == pytest.approx(3 * 10 * NUMEL / HOST_GB_PER_S / 1e6)  # 2 come, 4 read, 4 written


@pytest.mark.parametrize("offload", ["gradients", "in_backward"])
@pytest.mark.parametrize(("strategy", "ranks"), [("zero-2", 3), ("zero-3", 3), ("zero-3", 1), ("ddp", 1)])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_every_element_is_updated_once(offload: str, strategy: str, ranks: int, share: float) -> None:
    """By the device or by the CPU, which gets as many elements as its share."""
    scenario = Scenario(MODELS["gpt2"], H100, ranks, offload=offload, offload_fraction=share, accumulation=2)
    made, here = scenario.schedule(strategy), replace(scenario, offload=None, offload_fraction=1.0)
    of_rank = [0] * ranks
    came = [0] * ranks
    for one in made.operations:
        if one.label == "step" or one.lane == HOST:
            for rank, numel in one.shares or [(rank, one.numel) for rank in range(ranks)]:
                of_rank[rank] += numel * (one.label == "step")
                came[rank] += numel * (one.lane == HOST)
    (step,) = (one for one in here.schedule(strategy).operations if one.label == "step")
    expected = dict(step.shares or [(rank, step.numel) for rank in range(ranks)])
    passes = 2 if scenario.recipe(strategy).stage > 1 else 1
    for rank in range(ranks):
        assert of_rank[rank] == expected[rank]
        assert came[rank] == pytest.approx(passes * share * expected[rank], abs=2)
    assert made.calls == here.schedule(strategy).calls


def test_the_table_says_how_long_the_cpu_is_busy_beside_the_gpu() -> None:
    here, during = run("zero-3", 8), run("zero-3", 8, offload="in_backward")
    assert "beside it, the CPU" not in here.busy_ms
    update_ms = 28 * NUMEL / 8 / HOST_GB_PER_S / 1e6
    assert during.busy_ms["beside it, the CPU"] == pytest.approx(update_ms, rel=0.01)
    assert during.busy_ms["step"] == 0
    assert during.busy_ms["computing"] == pytest.approx(here.busy_ms["computing"] - here.busy_ms["step"])
    assert during.idle_ms > here.idle_ms


def test_new_parameters_are_sent_when_the_cpu_has_made_them() -> None:
    played = run("zero-2", 8, offload="in_backward").played
    ends = [ms for one, ms in zip(played.schedule.operations, played.end_ms) if one.lane == HOST]
    sent = [ms for one, ms in zip(played.schedule.operations, played.begin_ms) if one.label == "broadcast"]
    assert min(sent) >= max(ends)


# ------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "said"),
    [
        ("local-sgd", 2, {"offload": "state"}, "offload means nothing to local-sgd"),
        ("ddp", 2, {"offload": "gradients"}, "the gradients of ddp lie in DDP's buckets"),
        ("zero-even", 2, {"offload": "in_backward"}, "the gradients of zero-even lie in DDP's buckets"),
        ("zero-2", 2, {"offload": "gradients", "way": "in_forward"}, "the way is 'plain', not 'in_forward'"),
        ("ddp", 1, {"offload": "disk"}, "offload"),
        ("ddp", 1, {"offload_fraction": 0.5}, "of what offload puts on the CPU; got 0.5 with offload None"),
        ("ddp", 1, {"offload": "state", "offload_fraction": 1.5}, "share, at most 1"),
        ("ddp", 1, {"offload": "state", "offload_fraction": 0.0}, "must be above 0"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    strategy: str, ranks: int, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run(strategy, ranks, **options)


def test_a_program_that_reduces_by_itself_may_offload_its_gradients() -> None:
    assert run("ddp", 2, offload="gradients", without_ddp=True).memory.gradient_bytes == 0


def test_a_recipe_says_what_is_offloaded() -> None:
    assert recipe("zero-3", offload="state").title == "zero-3, state offloaded"
    half = recipe("zero-2", offload="in_backward", offload_fraction=0.5)
    assert half.title == "zero-2, 50% of gradients and state in backward offloaded"
    with pytest.raises(ValueError, match="updates in each step of a period"):
        recipe("local-sgd", offload="state")
    with pytest.raises(ValueError, match="has an optimizer of its own"):
        recipe("zero-3-stair", offload="state")
