"""The sensitivity of a comparison to its inputs: by hand, and by property."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import CLUSTERS, Cluster, Link, cluster
from zero_ref.simulator.device import Device
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import RECIPES
from zero_ref.simulator.schedule import Schedule, ddp_buckets, schedule
from zero_ref.simulator.sensitivity import (
    FACTORS,
    SCALES,
    SWITCH,
    Setting,
    scaled,
    sensitivity,
    what_if,
)

PARAMS = [ParamSpec(10**6, "bfloat16", name=f"{i}.weight") for i in range(12)]
# 1 ms of latency and 1 GB/s; 10^9 operations and 10^6 bytes a millisecond: lengths can be worked by hand.
PLAIN = Cluster(
    "plain",
    Device("plain", tflops=1, reached=1, memory_gb=None, memory_gb_per_s=1),
    ranks_per_node=4,
    within=Link(1000, 1),
    between=Link(2000, 0.5),
)


def make(strategy: str, setting: Setting) -> Schedule:
    buckets = ddp_buckets(PARAMS, cap_bytes=setting.bucket_bytes)
    return schedule(strategy, PARAMS, setting.world_size, ddp_buckets=buckets)


# ----------------------------------------------------------------------------------------------- example


def test_each_factor_changes_what_it_says_and_nothing_else() -> None:
    setting = Setting(PLAIN, world_size=8, bucket_bytes=100)
    device = PLAIN.device
    expected = {
        "latency": replace(PLAIN, within=Link(500, 1), between=Link(1000, 0.5)),
        "bandwidth within nodes": replace(PLAIN, within=Link(1000, 0.5)),
        "bandwidth between nodes": replace(PLAIN, between=Link(2000, 0.25)),
        "compute": replace(PLAIN, device=replace(device, tflops=0.5)),
        "memory bandwidth": replace(PLAIN, device=replace(device, memory_gb_per_s=0.5)),
        "share of links": replace(PLAIN, within=Link(1000, 1, 0.5), between=Link(2000, 0.5, 0.5)),
        "share of products": replace(PLAIN, device=replace(device, reached=0.5)),
        "share of attention": PLAIN,  # which is as that of products
        "share of memory": PLAIN,  # which is not known
    }
    assert set(FACTORS) == {*expected, "bucket size", "ranks"}
    for factor, changed in expected.items():
        assert scaled(setting, factor, 0.5) == replace(setting, cluster=changed)
    assert scaled(setting, "ranks", 0.5) == replace(setting, world_size=4)
    assert scaled(setting, "bucket size", 0.5) == replace(setting, bucket_bytes=50)


def test_measured_links_and_overheads_are_scaled_too() -> None:
    slow = replace(PLAIN.device, overhead_us=8, update_overhead_us=6)
    measured = replace(PLAIN, device=slow, link_of_op={"broadcast": Link(10, 3)})
    setting = Setting(measured, 2)
    assert scaled(setting, "latency", 2).cluster.link_of_op == {"broadcast": Link(20, 3)}
    assert scaled(setting, "bandwidth within nodes", 2).cluster.link_of_op == {"broadcast": Link(10, 6)}
    assert scaled(setting, "compute", 2).cluster.device.overhead_us == 4
    assert scaled(setting, "memory bandwidth", 2).cluster.device.update_overhead_us == 3


def test_a_switch_that_adds_is_an_improvement_of_nccls_alone() -> None:
    plan = make("ddp", Setting(PLAIN, 4))
    found = what_if(plan, PLAIN, Workload(0, step_bytes=0))
    with_it = replace(PLAIN, nvls=True)
    assert found.improved_ms[SWITCH] == play(plan, with_it, Workload(0, step_bytes=0)).iteration_ms
    assert found.improved_ms[SWITCH] < found.iteration_ms
    assert SWITCH not in what_if(plan, with_it, Workload(0)).improved_ms
    assert SWITCH not in what_if(plan, replace(PLAIN, backend="gloo"), Workload(0)).improved_ms


def test_the_winner_changes_where_the_step_is_cheaper_than_its_broadcasts() -> None:
    # On 2 ranks: DDP steps 12 million elements, 336 ms. ZeRO steps half, 168 ms, and then sends two
    # messages of 12 MB in 1 ms + 12 ms each. Memory 16 times as fast: 21 ms against 10.5 ms and 26 ms.
    setting = Setting(PLAIN, world_size=2)
    found = sensitivity(
        make,
        ("ddp", "zero-even"),
        setting,
        Workload(tokens=1),
        factors=["memory bandwidth"],
        scales=[1, 4, 16],
    )
    assert [(one.scale, one.winner, one.changes_winner) for one in found] == [
        (1, "zero-even", False),
        (4, "zero-even", False),
        (16, "ddp", True),
    ]
    assert found[0].first_ms - found[0].second_ms == pytest.approx(168 - 26)
    assert found[2].first_ms - found[2].second_ms == pytest.approx(10.5 - 26)
    assert found[0].ratio == found[0].second_ms / found[0].first_ms


def test_without_work_or_network_neither_wins() -> None:
    factors = [factor for factor in FACTORS if factor != "ranks"]
    idle = Workload(0, step_bytes=0)
    found = sensitivity(make, ("ddp", "zero-even"), Setting(PLAIN, 1), idle, factors=factors)
    assert {(one.winner, one.changes_winner, one.ratio) for one in found} == {(None, False, 1.0)}


def test_what_helps_most_is_what_the_time_goes_into() -> None:
    plan = make("zero-even", Setting(PLAIN, 4))
    computing = what_if(plan, PLAIN, Workload(tokens=10**6))
    assert computing.best == "compute"
    assert computing.iteration_ms - computing.improved_ms["compute"] == pytest.approx(36_000)
    sending = what_if(plan, PLAIN, Workload(tokens=0, step_bytes=0))
    assert sending.best == "bandwidth within nodes"
    far = replace(
        PLAIN, within=Link(10**6, 1), nvls=True
    )  # the sums in the switch have a latency of their own
    assert what_if(plan, far, Workload(0)).best == "latency"
    stepping = what_if(make("ddp", Setting(PLAIN, 4)), PLAIN, Workload(0))
    assert stepping.best == "memory bandwidth"
    assert stepping.improved_ms["bandwidth between nodes"] == stepping.iteration_ms, "there is one node"


def test_nothing_helps_where_nothing_takes_time() -> None:
    assert what_if(make("ddp", Setting(PLAIN, 1)), PLAIN, Workload(0, step_bytes=0)).best is None


@pytest.mark.parametrize(
    ("factor", "scale", "answer"),
    [
        ("latnecy", 1, "unknown factor 'latnecy'; choose one of latency, bandwidth within nodes"),
        ("ranks", 0, "ranks can be multiplied by what is above 0, got 0"),
        ("latency", -1, "above 0, got -1"),
        ("compute", float("nan"), "above 0, got nan"),
    ],
)
def test_a_mistake_is_refused(factor: str, scale: float, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        scaled(Setting(PLAIN, 2), factor, scale)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_setting_has_ranks_and_buckets(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Setting(PLAIN, *sizes)


# ----------------------------------------------------------------------------------------------- property

names = st.sampled_from([name for name in RECIPES if name != "zero-3"])


@given(names, st.sampled_from(list(CLUSTERS)), st.integers(1, 20))
def test_nothing_gets_slower_when_one_thing_gets_better(strategy: str, name: str, world_size: int) -> None:
    setting = Setting(cluster(name), world_size)
    found = what_if(make(strategy, setting), setting.cluster, Workload(100))
    # The same sum in another order may differ in its last bits.
    assert all(ms <= found.iteration_ms * (1 + 1e-9) for ms in found.improved_ms.values())
    factors = [factor for factor in FACTORS if factor not in ("ranks", "bucket size", "latency")]
    varied = sensitivity(make, (strategy, strategy), setting, Workload(100), factors=factors)
    for start in range(0, len(varied), len(SCALES)):
        times = [one.first_ms for one in varied[start : start + len(SCALES)]]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))
