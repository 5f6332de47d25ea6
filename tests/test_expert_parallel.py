"""Expert parallelism: who has which experts, what travels to them, and what is left on each rank."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from zero_ref.lab.simulated import as_json
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import Cluster, cluster
from zero_ref.simulator.device import Device
from zero_ref.simulator.dispatch import SharedExperts
from zero_ref.simulator.expert_parallel import parts_of
from zero_ref.simulator.groups import SplitOwners, owners_of
from zero_ref.simulator.layers import is_of_experts
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.network import NetworkLane
from zero_ref.simulator.operations import Operation
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref.simulator.schedule import schedule

QWEN = Scenario(MODELS["qwen3-30b-a3b"], cluster("h100-ib"), world_size=64, sequence=4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_parallel": 3, "world_size": 66}, "3 ranks cannot share 128 experts, whole ones each"),
        ({"expert_parallel": 128}, "64 ranks cannot be divided into groups of 128 that share the experts"),
        ({"expert_parallel": 0}, "expert_parallel must be at least 1, got 0"),
        ({"expert_parallel": 8, "expert_load": 0.5}, "expert_load must be at least 1, got 0.5"),
        ({"expert_parallel": 8, "expert_load": 9}, "from 1 to 8 times the average; got expert_load=9"),
        ({"expert_load": 1.5}, "expert_load=1.5 is of ranks that share experts"),
        (
            {"expert_parallel": 8, "architecture": MODELS["llama3-8b"]},
            "expert_parallel=8: the model has no experts",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_with_its_values(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(QWEN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("local-sgd", {}, "'local-sgd' is not combined with experts that several ranks share"),
        ("zero-even", {"way": "interleaved"}, "'zero-even, interleaved' is not combined with experts"),
        ("zero-2", {"way": "in_forward"}, "'zero-2, in forward' is not combined with experts"),
        ("zero-3", {"shard_group": 4}, "give a shard_group that is a multiple of 8"),
    ],
)
def test_a_strategy_that_is_not_combined_says_which_are(
    strategy: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(QWEN, expert_parallel=8, **changes).run(strategy)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- who has what


def spread(ranks: int, **changes: object) -> Scenario:
    return replace(QWEN, expert_parallel=ranks, **changes)  # type: ignore[arg-type]


def of_experts(scenario: Scenario) -> int:
    return sum(shape.numel for shape in scenario.shapes if is_of_experts(shape.name))


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_has_its_part_of_the_experts_and_all_else(ranks: int) -> None:
    scenario = spread(ranks)
    experts = of_experts(scenario)
    assert scenario.numel == QWEN.numel == 30_532_122_624
    assert scenario.numel_of_rank == scenario.numel - experts + experts // ranks
    assert scenario.run("ddp").schedule.parameter_bytes == (2 * scenario.numel_of_rank,) * 64


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("strategy", ["zero", "zero-bucket", "zero-even", "zero-2", "zero-3"])
def test_each_element_of_the_model_is_updated_by_one_of_all_ranks(strategy: str, ranks: int) -> None:
    run = spread(ranks).run(strategy)
    (step,) = (one for one in run.schedule.operations if one.label == "step")
    assert sum(numel for _, numel in step.shares or ()) == QWEN.numel
    # 32-bit copies and two moments, and a few scalars.
    state = sum(run.schedule.state_bytes)
    assert state == pytest.approx(12 * QWEN.numel, rel=1e-4)
    assert state >= 12 * QWEN.numel


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_in_shard_groups_each_group_has_all_of_the_state(strategy: str) -> None:
    run = spread(4, shard_group=16).run(strategy)
    (step,) = (one for one in run.schedule.operations if one.label == "step")
    assert sum(numel for _, numel in step.shares or ()) == 4 * QWEN.numel
    assert step.shares[:16] == tuple((rank - 16, numel) for rank, numel in step.shares[16:32])  # type: ignore[index]


def test_experts_are_shared_among_the_ranks_that_have_the_same() -> None:
    """Of 8 ranks that share experts in pairs, the even ones have half of them."""
    params = [ParamSpec(800, name="h.0.attn"), ParamSpec(400, name="h.0.mlp.experts.up")]
    dense, experts = parts = parts_of(params, 8, 8, SharedExperts(2, 1000, 4))
    owners = (
        owners_of([[0]] + [[]] * 7, [params[0]], [dense]),
        owners_of([[0], [], [], []], params, [experts]),
    )
    assert owners[0].totals([1]) == (800, 0, 0, 0, 0, 0, 0, 0)
    both = SplitOwners(parts, (owners[0].partitions[0], owners[1].partitions[0]))
    assert both.totals([1, 1]) == (1200, 400, 0, 0, 0, 0, 0, 0)  # rank 1 has the other half of the experts
    assert both.numels == (800, 400)


# ----------------------------------------------------------------------------------------- what travels


def calls_of(run: SimulatedRun, op: str) -> list[Operation]:
    return [one for one in run.schedule.operations if one.op == op]


@pytest.mark.parametrize("strategy", ["ddp", "zero", "zero-even", "zero-2", "zero-3"])
@pytest.mark.parametrize(
    ("checkpointing", "a_block"), [("none", 5), ("full", 8), ("by-operation", 5), ("every-other-block", 6.5)]
)
def test_each_block_sends_its_rows_there_and_back(strategy: str, checkpointing: str, a_block: float) -> None:
    run = spread(8, checkpointing=checkpointing, batch=2).run(strategy)
    calls = calls_of(run, "all_to_all")
    assert len(calls) == 48 * a_block
    assert {(call.ranks, call.stride) for call in calls} == {(8, 1)}
    # 8,192 tokens, each to 8 experts, 2,048 wide, in 16 bits; and a 64-bit number for each of 128 experts.
    sizes = Counter((call.label, call.nbytes) for call in calls)
    rows = 8192 * 8 * 2048 * 2
    forwards = 1 + (a_block - 5) / 3
    assert sizes == {
        ("count", 1024): 48 * forwards,
        ("dispatch", rows): 48 * (1 + forwards),
        ("combine", rows): 48 * (1 + forwards),
    }


@pytest.mark.parametrize("strategy", ["ddp", "zero-even", "zero-2", "zero-3"])
def test_each_pass_sends_rows_again(strategy: str) -> None:
    calls = [len(calls_of(spread(8, accumulation=n).run(strategy), "all_to_all")) for n in (1, 3)]
    assert calls == [240, 720]


def test_without_sharing_nothing_is_sent_to_experts() -> None:
    assert not calls_of(QWEN.run("zero-3"), "all_to_all")


def test_gradients_are_reduced_by_the_ranks_that_have_the_parameters() -> None:
    scenario = spread(8)
    experts = of_experts(scenario)
    for strategy, op in (("ddp", "all_reduce"), ("zero-2", "reduce_shares"), ("zero-3", "reduce_scatter")):
        run = scenario.run(strategy)
        reduced = Counter[tuple[int | None, int]]()
        for one in calls_of(run, op):
            if one.label == "reduce":
                reduced[one.ranks, one.stride] += one.nbytes
        assert reduced.keys() == {(None, 1), (8, 8)}
        assert reduced[8, 8] == pytest.approx(2 * experts / 8, rel=1e-3)
        assert reduced[None, 1] == pytest.approx(2 * (scenario.numel - experts), rel=1e-3)


def test_experts_of_one_rank_are_not_reduced() -> None:
    for strategy in ("ddp", "zero-even", "zero-3"):
        operations = spread(64).run(strategy).schedule.operations
        of_dense = sum(one.nbytes for one in operations if one.label == "reduce")
        assert of_dense == pytest.approx(2 * (QWEN.numel - of_experts(QWEN)), rel=1e-2)


def test_few_experts_are_cut_along_their_width_and_not_padded() -> None:
    """8 experts on each rank, 64 ranks that have the same: cut by experts, 7 of 8 ranks would have none."""
    run = replace(spread(16), world_size=1024).run("zero-3")
    held = sum(run.schedule.parameter_bytes)
    assert held == pytest.approx(2 * QWEN.numel, rel=0.02)


def test_a_bucket_of_several_blocks_is_computed_block_by_block() -> None:
    params = [ParamSpec(10, name=f"h.{n}.{kind}") for n in range(2) for kind in ("attn", "experts.up")]
    plan = schedule("ddp", params, 4, experts=SharedExperts(2, 1000, 4), ddp_buckets=[[3, 1], [2, 0]])
    said = [f"{one.label} {one.numel or one.nbytes}" for one in plan.operations if one.label != "count"]
    forward = ["forward 10", "dispatch 1000", "forward 10", "combine 1000"]
    backward = ["dispatch 1000", "backward 10", "combine 1000"]
    assert said == [
        *forward,
        *forward,
        *backward,
        *backward,
        "reduce 80",
        "backward 20",
        "reduce 80",
        "step 40",
    ]


def test_experts_and_others_in_one_bucket_are_refused() -> None:
    params = [ParamSpec(10, name=name) for name in ("h.0.attn", "h.0.experts.up")]
    with pytest.raises(ValueError, match="gradient bucket 0 has experts beside other parameters"):
        schedule("ddp", params, 4, experts=SharedExperts(2, 1000, 4), ddp_buckets=[[1, 0]])


def test_frozen_experts_that_are_shared_are_refused() -> None:
    params = [ParamSpec(10, name="h.0.attn"), ParamSpec(10, name="h.0.experts.up", trainable=False)]
    with pytest.raises(ValueError, match="frozen experts that several ranks share are not simulated"):
        schedule("zero-3", params, 4, experts=SharedExperts(2, 1000, 4))


# -------------------------------------------------------------------------------------------- how long


@pytest.mark.parametrize("strategy", ["ddp", "zero-even", "zero-2", "zero-3"])
def test_the_busiest_rank_sets_time_and_memory(strategy: str) -> None:
    runs = [spread(8, expert_load=load).run(strategy) for load in (1.0, 1.5, 3.0)]
    times, peaks = [one.iteration_ms for one in runs], [one.peak_bytes for one in runs]
    assert times == sorted(times)
    assert times[1] > 1.02 * times[0]
    assert peaks == sorted(peaks)
    # Payloads are those of the average: what one rank gets more, others get less.
    assert len({one.sent_bytes for one in runs}) == 1


def test_the_busiest_rank_keeps_what_its_rows_make() -> None:
    """The row itself, gate and up, the activation, and its product with up. An expert is 768 wide."""
    kept = [spread(8, expert_load=load).activations.blocks for load in (1.0, 2.0)]
    of_row = 2048 + 2 * 768 + 768 + 768
    assert kept[1] - kept[0] == 48 * 4096 * 8 * 2 * of_row
    # By operation, instead, the rows alone are kept as they came, and all results.
    by_operation = [
        spread(ranks, expert_load=load, checkpointing="by-operation").activations.blocks
        for ranks, load in ((1, 1.0), (8, 1.0), (8, 2.0))
    ]
    rows = 48 * 4096 * 8 * 2 * 2048
    assert [one - by_operation[0] for one in by_operation] == [0, 2 * rows, 3 * rows]


def test_rows_reach_the_busiest_rank_as_many_times_later() -> None:
    """Within a node: 134 MB of rows, of which 7 of 8 leave the rank."""
    even, uneven = (spread(8, expert_load=load).run("ddp") for load in (1.0, 2.0))
    ms = [
        next(
            cost.ms
            for one, cost in zip(run.schedule.operations, run.played.prices)
            if one.label == "dispatch"
        )
        for run in (even, uneven)
    ]
    link = QWEN.cluster.within
    assert ms[0] == pytest.approx(134_217_728 * 7 / 8 / (link.gb_per_s * link.reached * 1e6), rel=0.15)
    assert ms[1] == pytest.approx(2 * ms[0], rel=0.1)


def test_experts_with_the_rows_of_several_ranks_waste_less_on_reading_weights() -> None:
    """The same arithmetic: fewer experts, with more rows each."""
    kernels = [spread(ranks).kernels for ranks in (1, 8, 64)]
    assert all(kernels)
    flops = [one.forward.flops for one in kernels if one]
    assert flops == pytest.approx([flops[0]] * 3, rel=1e-3)
    device = QWEN.cluster.device
    ms = [one.parts_ms(device)["matrix products"] for one in kernels if one]
    assert ms == sorted(ms, reverse=True)
    assert ms[0] > 1.5 * ms[2]


@pytest.mark.parametrize("strategy", ["ddp", "zero", "zero-even", "zero-2", "zero-3"])
@pytest.mark.parametrize("name", ["h100-ib", "loopback"])
def test_the_critical_path_still_adds_up(strategy: str, name: str) -> None:
    run = replace(spread(8), cluster=cluster(name)).run(strategy)
    assert sum(run.what_if.critical_ms.values()) == pytest.approx(run.iteration_ms)
    assert {"dispatch", "combine"} <= run.what_if.critical_ms.keys()
    ends, begins = run.played.end_ms, run.played.begin_ms
    for place, one in enumerate(run.schedule.operations):
        assert ends[place] >= begins[place]
        assert all(ends[before] <= begins[place] + 1e-6 for before in one.after)


def test_a_call_beside_others_delays_them_by_what_both_have_in_common() -> None:
    lane = NetworkLane([], [])
    lane.one_after_another(0.0, [10.0, 10.0])
    lane.beside(4.0, 30.0)  # both have half until the queue is empty: 16 ms of each take 32
    assert (lane.begin_ms, lane.end_ms) == ([0.0, 16.0, 4.0], [16.0, 36.0, 50.0])
    lane.one_after_another(5.0, [1.0])
    assert (lane.begin_ms[-1], lane.end_ms[-1]) == (50.0, 51.0)


# ------------------------------------------------------------------------------------------ much at once


def test_a_trillion_parameters_on_1024_ranks_take_no_more_work_than_on_128(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand operations are listed and priced, whatever the number of ranks."""
    counted: Counter[str] = Counter()

    def count(place: Any, name: str) -> None:
        uncounted = getattr(place, name)

        def call(*args: Any, **options: Any) -> Any:
            counted[name] += 1
            return uncounted(*args, **options)

        monkeypatch.setattr(place, name, call)

    count(Cluster, "ms")
    count(Device, "touch_ms")
    count(SplitOwners, "totals")
    kimi = replace(
        QWEN, architecture=MODELS["kimi-k2"], expert_parallel=64, checkpointing="full", world_size=128
    )
    assert kimi.numel == 1_026_408_209_408
    work = []
    for ranks in (128, 1024):
        counted.clear()
        run = replace(kimi, world_size=ranks).run("zero-3")
        as_json("kimi-k2", run.scenario, [run])
        assert len(run.schedule.operations) < 1200
        work.append(counted.total())
    assert work[1] <= 1.1 * work[0]
