"""A schedule played on a cluster: by hand on tiny ones, by property on any, and what is late or missing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from library.scheduled import scheduled

import zero_ref
from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.calls import REDUCED_BY
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import Cluster, Link, cluster
from zero_ref.simulator.device import Device
from zero_ref.simulator.models import shapes, specs
from zero_ref.simulator.operations import COMPUTE, NETWORK, SIDE_STREAM, WAYS_OF_DDP
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import RECIPES, recipe
from zero_ref.simulator.schedule import Schedule, schedule
from zero_ref.simulator.timeline import Timeline

# An element takes 1 ms forward, 2 ms backward, 1 ms to update. A message takes half a millisecond, and 1 ms
# for each element of 4 bytes.
BY_HAND = Cluster(
    "by hand",
    Device("by hand", tflops=1, reached=1, memory_gb=None, memory_gb_per_s=1),
    ranks_per_node=2,
    within=Link(latency_us=500, gb_per_s=4e-6),
    between=Link(latency_us=500, gb_per_s=4e-6),
)
WORK = Workload(tokens=500_000_000, step_bytes=1e6)
PARAMS = [ParamSpec(2), ParamSpec(1), ParamSpec(3)]
BUCKETS = [[2], [1], [0]]
# sorted_greedy: rank 0 owns parameter 2, rank 1 owns parameters 0 and 1, three elements each.


def by_hand(strategy: str, *, overlaps: bool = True, slow: Any = None, **options: Any) -> Played:
    plan = scheduled(strategy, PARAMS, 2, ddp_buckets=BUCKETS, **options)
    return play(plan, replace(BY_HAND, overlaps=overlaps), WORK, slow=slow)


def marks(timeline: Timeline, lane: str) -> list[tuple[str, int | None, float, float]]:
    return [
        (one.label, one.bucket, round(one.start_ms, 9), round(one.stop_ms, 9)) for one in timeline.on(lane)
    ]


# ----------------------------------------------------------------------------------------------- example


def test_ddp_by_hand() -> None:
    played = by_hand("ddp")
    for rank in range(2):
        assert marks(played.timeline(rank), COMPUTE) == [
            ("forward", None, 0, 6),
            ("backward", 0, 6, 12),
            ("backward", 1, 12, 14),
            ("backward", 2, 14, 18),
            ("step", None, 21, 27),
        ]
        # An all-reduce on two ranks: two messages, and 2(N-1)/N = 1 times the payload.
        assert marks(played.timeline(rank), NETWORK) == [
            ("reduce", 0, 12, 16),
            ("reduce", 1, 16, 18),  # ready at 14, and the network is busy
            ("reduce", 2, 18, 21),
        ]
    assert played.makespan_ms == played.iteration_ms == pytest.approx(27)
    assert played.timeline().exposed_ms == pytest.approx(3)
    assert played.timeline().idle_ms == pytest.approx(3)


def test_interleaved_by_hand() -> None:
    played = by_hand("zero", way="interleaved")
    assert marks(played.timeline(0), COMPUTE) == [
        ("forward", None, 0, 6),
        ("backward", 0, 6, 12),
        ("backward", 1, 12, 14),
        ("step", 0, 16, 19),  # once bucket 0 is reduced; backward waits for the update
        ("backward", 2, 19, 23),
    ]
    assert marks(played.timeline(1), COMPUTE)[3:] == [
        ("backward", 2, 16, 20),  # it owns nothing of bucket 0, but waits for its reduction too
        ("step", 1, 20, 21),
        ("step", 2, 26, 28),
    ]
    assert marks(played.timeline(1), NETWORK) == [
        ("reduce", 0, 12, 16),
        ("reduce", 1, 16, 18),
        ("broadcast", 0, 19, 22.5),
        ("reduce", 2, 23, 26),
        ("broadcast", 1, 26, 27.5),
        ("broadcast", 2, 28, 30.5),
    ]
    assert played.makespan_ms == pytest.approx(30.5)


def test_a_side_stream_updates_beside_backward() -> None:
    timeline = by_hand("zero", way="interleaved", side_stream=True).timeline(0)
    assert marks(timeline, COMPUTE)[3:] == [("backward", 2, 14, 18)]
    assert marks(timeline, SIDE_STREAM) == [("step", 0, 16, 19)]
    # Bucket 0 is sent before bucket 2 is reduced: the calls keep their order.
    assert marks(timeline, NETWORK)[2:4] == [("broadcast", 0, 19, 22.5), ("reduce", 2, 22.5, 25.5)]


def test_stage_3_by_hand() -> None:
    params = [ParamSpec(2), ParamSpec(4), ParamSpec(4)]
    plan = schedule("zero-3", params, 2, blocks=[[0], [1], [2]])
    timeline = play(plan, BY_HAND, WORK).timeline()
    assert marks(timeline, COMPUTE) == [
        ("forward", 0, 1.5, 3.5),
        ("forward", 1, 4, 8),
        ("forward", 2, 8, 12),
        ("backward", 2, 14.5, 22.5),
        ("backward", 1, 22.5, 30.5),
        ("backward", 0, 30.5, 34.5),
        ("step", None, 36, 41),
    ]
    assert marks(timeline, NETWORK) == [
        ("gather", 0, 0, 1.5),  # one message, half of the unit
        ("gather", 1, 1.5, 4),
        ("gather", 2, 4, 6.5),  # when unit 0 is computed, so that unit 1 hides it
        ("gather", 2, 12, 14.5),
        ("gather", 1, 14.5, 17),
        ("reduce", 2, 22.5, 25),
        ("reduce", 1, 30.5, 33),
        ("reduce", 0, 34.5, 36),
    ]


def test_local_sgd_meets_in_the_warm_up_and_then_at_its_averages() -> None:
    played = by_hand("local-sgd", averaging=AveragingSchedule.periodic(2, warmup_steps=1), steps=range(4))
    of_ddp = by_hand("ddp")
    warm_up_ms, step_ms = of_ddp.makespan_ms, 6 + 12 + 6
    averaged_ms = warm_up_ms + step_ms + 15.5
    assert marks(played.timeline(), NETWORK) == [
        *marks(of_ddp.timeline(), NETWORK),
        ("agree", None, averaged_ms - 15.5, averaged_ms - 7),
        ("average", None, averaged_ms - 7, averaged_ms),
        ("agree", None, averaged_ms + 2 * step_ms, averaged_ms + 2 * step_ms + 8.5),
        ("average", None, averaged_ms + 2 * step_ms + 8.5, averaged_ms + 2 * step_ms + 15.5),
    ]
    forwards = [start for label, _, start, _ in marks(played.timeline(), COMPUTE) if label == "forward"]
    assert forwards == [0, warm_up_ms, averaged_ms, averaged_ms + step_ms], (
        "with the average, once it is there"
    )
    assert set(played.critical_ms()) == {"forward", "backward", "reduce", "step", "agree", "average"}
    assert sum(played.critical_ms().values()) == pytest.approx(played.makespan_ms)


@pytest.mark.parametrize("way", WAYS_OF_DDP)
@pytest.mark.parametrize("side_stream", [False, True])
def test_where_nothing_overlaps_one_thing_happens_after_another(way: str, side_stream: bool) -> None:
    played = by_hand("zero", overlaps=False, way=way, side_stream=side_stream, broadcast_buffer_size=0)
    for rank in range(2):
        events = sorted(played.timeline(rank).events, key=lambda event: event.start_ms)
        assert all(before.stop_ms <= after.start_ms for before, after in pairwise(events))
        assert SIDE_STREAM not in played.timeline(rank).lanes
    # Forward, backward, reductions, broadcasts; and updates, which the ranks make at once, 3 ms each, unless
    # calls between them make one wait for the other.
    updates = {"plain": 3, "after_backward": 3, "interleaved": 6}[way]
    assert played.makespan_ms == pytest.approx(6 + 12 + 9 + updates + 7.5)


# --------------------------------------------------------------------------------------------- stragglers


def test_everyone_waits_for_a_slow_rank() -> None:
    played = by_hand("ddp", slow={1: 2.0})
    assert marks(played.timeline(1), NETWORK) == marks(played.timeline(0), NETWORK)
    assert marks(played.timeline(1), COMPUTE)[:2] == [("forward", None, 0, 12), ("backward", 0, 12, 24)]
    assert marks(played.timeline(0), COMPUTE)[3:] == [("backward", 2, 14, 18), ("step", None, 39, 45)]
    assert marks(played.timeline(0), NETWORK) == [
        ("reduce", 0, 24, 28),
        ("reduce", 1, 28, 30),
        ("reduce", 2, 36, 39),
    ]
    assert played.makespan_ms == pytest.approx(39 + 12)
    assert played.timeline(0).idle_ms == pytest.approx(45 - 24)
    assert played.timeline(1).idle_ms == pytest.approx(3)
    assert {wait.rank for wait in played.critical_path} == {1, None}, "nothing is up to the fast rank"


def test_jitter_is_the_same_for_the_same_seed_and_only_then() -> None:
    plan = schedule("zero-even", PARAMS * 50, 4)

    def played(seed: int, jitter: float = 0.2) -> Played:
        return play(plan, BY_HAND, WORK, jitter=jitter, seed=seed)

    assert played(1).end_ms == played(1).end_ms
    assert played(1).timeline(3) == played(1).timeline(3)
    assert played(1).end_ms != played(2).end_ms
    assert played(1).timeline(2).on(COMPUTE) != played(1).timeline(3).on(COMPUTE), "each rank has its own"
    assert played(1, jitter=0.0).end_ms == play(plan, BY_HAND, WORK).end_ms


# ------------------------------------------------------------------------------------------------ property

H100 = cluster("h100-ib")
LOOPBACK = cluster("loopback")

params_of_model = st.lists(
    st.builds(
        lambda numel, dtype, trainable: ParamSpec(numel, dtype, trainable=trainable),
        st.integers(0, 10**5),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def plans(draw: st.DrawFn, max_ranks: int = 5) -> Schedule:
    """Any strategy with any options, on a few ranks."""
    strategy = draw(st.sampled_from(list(RECIPES)))
    params, world_size = draw(params_of_model), draw(st.integers(1, max_ranks))
    options: dict[str, Any] = {"activation_bytes": draw(st.integers(0, 1000))}
    if RECIPES[strategy].without_ddp:
        sizes = [None, *(size for size in (1, 2, 3) if world_size % size == 0)]
        options["shard_group"] = draw(st.sampled_from(sizes))
    elif RECIPES[strategy].partition:
        options |= {"to_owners": draw(st.booleans()), "side_stream": draw(st.booleans())}
        if options["to_owners"]:
            options["reduced_by"] = draw(st.sampled_from(REDUCED_BY))
    elif strategy == "zero-3":
        cut = draw(st.integers(0, len(params)))
        rest = [[number] for number in range(cut, len(params))]
        options |= {"blocks": [list(range(cut)), *rest], "prefetch": draw(st.integers(0, 3))}
    elif strategy == "local-sgd":
        period, warmup_steps = draw(st.integers(1, 4)), draw(st.integers(0, 2))
        groups = [size for size in (1, 2, 3) if world_size % size == 0]
        options["averaging"] = AveragingSchedule.periodic(
            period, warmup_steps=warmup_steps, gradient_group=draw(st.sampled_from(groups))
        )
        options["steps"] = range(draw(st.integers(0, 2)), draw(st.integers(3, 6)))
    options["way"] = draw(st.sampled_from(RECIPES[strategy].ways))
    if strategy != "zero-3":
        trainable = [number for number, param in enumerate(params) if param.trainable]
        options["ddp_buckets"] = [[number] for number in reversed(trainable)]
    return scheduled(strategy, params, world_size, **options)


clusters = st.builds(
    lambda chosen, per_node: replace(chosen, ranks_per_node=per_node),
    st.sampled_from([H100, LOOPBACK, BY_HAND]),
    st.integers(1, 5),
)
works = st.builds(Workload, st.integers(0, 10**6), st.booleans())


@st.composite
def plays(draw: st.DrawFn) -> Played:
    plan = draw(plans())
    slow = draw(st.dictionaries(st.integers(0, plan.world_size - 1), st.floats(0.5, 3), max_size=2))
    jitter = draw(st.sampled_from([0.0, 0.3]))
    return play(plan, draw(clusters), draw(works), slow=slow, jitter=jitter, seed=draw(st.integers(0, 9)))


@given(plans(max_ranks=1), clusters, works)
def test_one_rank_costs_no_communication(plan: Schedule, chosen: Cluster, work: Workload) -> None:
    assert plan.wire_bytes("nccl") == plan.wire_bytes("gloo") == 0
    timeline = play(plan, chosen, work).timeline()
    assert timeline.exposed_ms == 0
    assert all(event.start_ms == event.stop_ms for event in timeline.on(NETWORK))
    assert timeline.idle_ms == pytest.approx(0)


@given(plays())
def test_memory_is_never_negative_and_ends_with_what_is_kept(played: Played) -> None:
    plan = played.schedule
    shared = [one for one in plan.operations if one.op == "reduce_shares"]
    owned = [one for one in plan.operations if one.op == "exchange"]
    for rank in range(plan.world_size):
        curve = played.memory(rank)
        gradient_bytes = plan.gradient_bytes[rank]
        if shared:  # over time, every rank holds a share of each range, also one that is only padding
            gradient_bytes = sum(one.nbytes // (one.ranks or plan.world_size) for one in shared)
            at = rank % (shared[0].ranks or plan.world_size)
            gradient_bytes += sum(dict(one.shares or ()).get(at, 0) for one in owned)
            assert plan.gradient_bytes[rank] <= gradient_bytes
        kept = plan.parameter_bytes[rank] + plan.state_bytes[rank]
        assert min(held for _, held in curve) >= kept
        assert curve[-1][1] == kept + gradient_bytes
        assert [moment for moment, _ in curve] == sorted({moment for moment, _ in curve})
        assert played.memory(rank, held_bytes=0)[-1][1] == gradient_bytes


@given(plays())
def test_every_ranks_own_timeline_agrees_with_what_all_ranks_saw(played: Played) -> None:
    ends = []
    for rank in range(played.schedule.world_size):
        timeline = played.timeline(rank)
        ends.append(timeline.makespan_ms)
        lanes = timeline.lanes if played.overlaps else ["all"]
        for lane in lanes:
            events = list(timeline.events) if lane == "all" else timeline.on(lane)
            ordered = sorted(events, key=lambda event: (event.start_ms, event.stop_ms))
            assert all(a.stop_ms <= b.start_ms for a, b in pairwise(ordered)), "a lane does one thing at once"
    assert max(ends) == played.makespan_ms


@given(plans(), clusters, works)
def test_ranks_go_to_another_cluster_at_their_pace(plan: Schedule, chosen: Cluster, work: Workload) -> None:
    options: dict[str, Any] = {"slow": {0: 2.0}, "jitter": 0.3, "seed": 1}
    moved = play(plan, H100, Workload(5), **options).on(chosen, work)
    assert moved == play(plan, chosen, work, **options)


@given(plays())
def test_the_critical_path_has_no_gap_and_adds_up_to_the_makespan(played: Played) -> None:
    path = played.critical_path
    if not path:
        assert played.makespan_ms == 0
        return
    assert path[0].start_ms == 0
    assert path[-1].stop_ms == played.makespan_ms
    assert all(before.stop_ms == after.start_ms for before, after in pairwise(path))
    assert sum(played.critical_ms().values()) == pytest.approx(played.makespan_ms)
    for wait in path:
        one = played.schedule.operations[wait.operation]
        assert (wait.rank is None) == (one.lane == NETWORK)


# ---------------------------------------------------------------------------------------- large, and wrong


MISTAKES = {
    "no ranks": (lambda: schedule("ddp", PARAMS, 0), "at least 1 rank, got 0"),
    "strategy": (
        lambda: schedule("zero-4", PARAMS, 2),
        "unknown strategy 'zero-4'; choose one of ddp, zero,",
    ),
    "way": (
        lambda: schedule(recipe("zero", way="late"), PARAMS, 2),
        "unknown way 'late'; choose one of plain, ",
    ),
    "way of ddp": (
        lambda: schedule(recipe("ddp", way="interleaved"), PARAMS, 2),
        "'ddp' updates after backward",
    ),
    "way without ddp": (
        lambda: schedule(recipe("zero-2", way="interleaved"), PARAMS, 2),
        "'zero-2' takes a way of plain or in_forward, not 'interleaved': it has no DDP",
    ),
    "way with ddp": (
        lambda: schedule(recipe("zero", way="in_forward"), PARAMS, 2),
        "'zero' takes a way of plain or after_backward or interleaved, not 'in_forward': it has DDP",
    ),
    "no owners without ddp": (
        lambda: schedule(recipe("zero-2", to_owners=False), PARAMS, 2),
        "'zero-2' is without DDP, which reduces gradients to owners",
    ),
    "reduced by what": (
        lambda: schedule(recipe("zero", to_owners=True, reduced_by="tree"), PARAMS, 2),
        "unknown reduced_by 'tree'; choose",
    ),
    "reduced by reduce, to nobody": (
        lambda: schedule(recipe("zero", reduced_by="reduce"), PARAMS, 2),
        "those of 'zero' do not. Give it to zero, zero-bucket or zero-even, with to_owners=True",
    ),
    "reduced by reduce, without ddp": (
        lambda: schedule(recipe("zero-2", reduced_by="reduce"), PARAMS, 2),
        "those of 'zero-2' do not",
    ),
    "groups with ddp": (
        lambda: schedule(recipe("zero-even", shard_group=2), PARAMS, 2),
        "shard_group= is for strategies without DDP and for zero-3; 'zero-even' has no owners in groups",
    ),
    "groups without shards": (
        lambda: schedule(recipe("ddp", shard_group=2), PARAMS, 2),
        "'ddp' has no owners",
    ),
    "groups that do not fit": (
        lambda: schedule(recipe("zero-2", shard_group=3), PARAMS, 4),
        "4 ranks cannot be divided into groups of 3 that share the state",
    ),
    "groups of nobody": (
        lambda: schedule(recipe("zero-2", shard_group=0), PARAMS, 4),
        "at least 1 rank, got shard_group=0",
    ),
    "owners of ddp": (lambda: schedule(recipe("ddp", to_owners=True), PARAMS, 2), "'ddp' has no owners"),
    "owners of stage 3": (
        lambda: schedule(recipe("zero-3", to_owners=True), PARAMS, 2),
        "'zero-3' has no owners",
    ),
    "missed by blocks": (
        lambda: schedule("zero-3", PARAMS, 2, blocks=[[0], [1]]),
        "each of the 3 parameters",
    ),
    "twice in blocks": (
        lambda: schedule("zero-3", PARAMS, 2, blocks=[[0, 1], [1, 2]]),
        "the 3 parameters once",
    ),
    "prefetch": (
        lambda: schedule(recipe("zero-3", prefetch=-1), PARAMS, 2),
        "prefetch counts units, 0 or more; got -1",
    ),
    "period": (
        lambda: schedule(recipe("local-sgd", averaging=AveragingSchedule.periodic(0)), PARAMS, 2),
        "period must be at least 1, got 0",
    ),
    "jitter": (lambda: play(schedule("ddp", PARAMS, 2), H100, WORK, jitter=-0.1), "0 or more; got -0.1"),
    "slow rank": (lambda: by_hand("ddp", slow={2: 1.5}), "ranks 0 to 1 and factors above 0; got 1.5 for 2"),
    "slow by nothing": (lambda: by_hand("ddp", slow={1: 0.0}), "factors above 0; got 0 for 1"),
    "tokens": (lambda: Workload(-1), "must be 0 or more, got -1"),
    "no such rank": (lambda: by_hand("ddp").timeline(2), "ranks 0 to 1, and no rank 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        call()


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from zero_ref.simulator import activations, cluster, ledger, memory, models, schedule
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
plan = schedule.schedule("zero-even", models.specs(models.shapes("gpt2"), "bfloat16"), world_size=16)
print(play(plan, cluster.cluster("h100-ib"), Workload(tokens=4096)).makespan_ms)
print(sorted(name for name in ("torch", "numpy", "matplotlib", "rich") if name in sys.modules))
"""


def test_a_simulation_needs_the_standard_library_only() -> None:
    root = str(Path(zero_ref.__file__).parents[1])
    # -I and -S: no site-packages, no environment, no user's folder; so the package's own path comes along.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, root], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    makespan, loaded = done.stdout.splitlines()
    plan = schedule("zero-even", specs(shapes("gpt2"), "bfloat16"), world_size=16)
    assert float(makespan) == play(plan, H100, Workload(tokens=4096)).makespan_ms
    assert loaded == "[]"
