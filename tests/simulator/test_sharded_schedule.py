"""ShardedDataParallel on paper: its calls and its clock by hand, what it moves by property."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from zero_ref.plan.calls import Call
from zero_ref.plan.gradients import SMALL_NUMEL, gradient_plans
from zero_ref.plan.partition import ALIGNMENT, ParamSpec
from zero_ref.plan.rules import equal_shares, from_lists, newton_schulz_operations
from zero_ref.simulator.cluster import CLUSTERS, Cluster, Link
from zero_ref.simulator.device import Device
from zero_ref.simulator.ledger import itemsize_of, nbytes_of
from zero_ref.simulator.operations import COMPUTE, NETWORK, Operation
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.schedule import Schedule, schedule

PARAMS = [ParamSpec(300), ParamSpec(50)]
EACH_A_RANGE = partial(equal_shares, range_numel=1)
# On 2 ranks the ranges have 384 and 128 elements, 1536 and 512 bytes. Of parameter 0 rank 0 owns 192 elements
# and rank 1 the other 108; all 50 of parameter 1 are in rank 0's share of 64.


def of_ranges(world_size: int, **changes: Any) -> Schedule:
    return schedule(recipe("zero-2", partition=EACH_A_RANGE, **changes), PARAMS, world_size)


def brief(operations: Sequence[Operation]) -> list[str]:
    return [one.label if one.part is None else f"{one.label} {one.part}" for one in operations]


def waits(operations: Sequence[Operation]) -> list[list[int]]:
    return [list(one.after) for one in operations]


# ----------------------------------------------------------------------------------------------- example


def test_gradients_go_to_shares_and_parameters_come_out_of_them() -> None:
    plan = of_ranges(2)
    assert brief(plan.operations) == [
        *("forward", "backward 0", "reduce 0", "backward 1", "reduce 1"),
        *("agree", "step", "broadcast", "broadcast"),
    ]
    assert waits(plan.operations) == [[], [], [1], [], [3], [4], [2, 4, 5], [6], [6]]
    for rank in range(2):
        assert plan.calls_of(rank) == (
            *(Call("reduce_shares", 512), Call("reduce_shares", 1536)),
            Call("all_reduce", 2 * 4),
            *(Call("all_gather", 1536), Call("all_gather", 512)),  # in the order in which forward needs them
        )
    backwards = [one for one in plan.operations if one.label == "backward"]
    assert [(one.numel, one.tensors, one.takes) for one in backwards] == [(50, 1, 200), (300, 1, 1200)]
    reduced = [(one.takes, one.gives) for one in plan.operations if one.label == "reduce"]
    assert reduced == [(256, 200), (768, 1200)], "a share with its padding, for the gradients"
    step = plan.operations[6]
    assert (step.numel, step.shares, step.tensors) == (350, ((0, 242), (1, 108)), 2)
    assert plan.state_bytes == (8 * 242 + 2 * 4, 8 * 108 + 4)
    assert plan.gradient_bytes == (4 * 242, 4 * 108)
    # Rank 1's share of the first range is only padding. It has no gradient of a whole parameter, so it keeps
    # one of zeros, of the smallest.
    assert plan.left_gradient_bytes == (256 + 768, 768 + 4 * 50)
    assert plan.parameter_bytes == (2048, 2048)
    assert plan.wire_bytes() == plan.wire_bytes("gloo") == 2 * 2048 + 2 * 8


def test_backward_waits_for_the_reduction_before_the_last() -> None:
    def waiting(shard_group: int | None) -> list[tuple[int, ...]]:
        how = recipe("zero-2", partition=EACH_A_RANGE, shard_group=shard_group)
        plan = schedule(how, [ParamSpec(64)] * 4, 4)
        return [one.after for one in plan.operations if one.label == "backward"]

    # The operations: forward, then backward and reduction of each range.
    assert waiting(None) == [(), (), (2,), (4,)]
    # In groups: forward, two ranges, 5: the average of the first one; the next range, 8: that of the second.
    assert waiting(2) == [(), (), (2,), (5,)]


def test_in_forward_an_iteration_begins_with_what_the_step_before_has_sent() -> None:
    plan = of_ranges(2, way="in_forward")
    assert brief(plan.operations) == [
        *("broadcast", "broadcast", "forward 0", "forward 1"),
        *("backward 0", "reduce 0", "backward 1", "reduce 1", "agree", "step"),
    ]
    assert waits(plan.operations) == [[], [], [0], [1], [], [4], [], [6], [7], [5, 7, 8]]
    assert Counter(plan.calls) == Counter(of_ranges(2).calls)
    assert [call.nbytes for call in plan.calls[:2]] == [1536, 512]
    # Of 350 elements three quarters, as of the bytes.
    assert [(one.numel, one.tensors) for one in plan.operations[2:4]] == [(262, 1), (88, 1)]
    assert plan.state_bytes == of_ranges(2).state_bytes


def test_one_rank_reduces_to_itself_and_sends_nothing() -> None:
    for way in ("plain", "in_forward"):
        plan = of_ranges(1, way=way)
        assert brief(plan.operations) == [
            *("forward", "backward 0", "reduce 0", "backward 1", "reduce 1", "step")
        ]
        assert plan.calls == (Call("reduce_shares", 256), Call("reduce_shares", 1280))
        assert plan.wire_bytes() == plan.wire_bytes("gloo") == 0
        assert plan.state_bytes == schedule("ddp", PARAMS, 1).state_bytes


def test_groups_share_the_state_and_average_shares_between_them() -> None:
    plan = of_ranges(4, shard_group=2)
    pair = of_ranges(2)
    assert brief(plan.operations) == [
        *("forward", "backward 0", "reduce 0", "backward 1", "reduce 1", "reduce 0"),
        *("agree", "reduce 1", "agree", "step", "broadcast", "broadcast"),
    ]
    # Between groups a range is averaged when it is there, and the next one on its way.
    assert waits(plan.operations) == [[], [], [1], [], [3], [2], [4], [4], [6], [2, 4, 5, 6, 7, 8], [9], [9]]
    for rank in range(4):
        assert plan.calls_of(rank) == (
            *(Call("reduce_shares", 512), Call("reduce_shares", 1536), Call("all_reduce", 256)),
            *(Call("all_reduce", 8), Call("all_reduce", 768), Call("all_reduce", 8)),
            *(Call("all_gather", 1536), Call("all_gather", 512)),
        )
    groups = [(one.ranks, one.stride) for one in plan.operations if one.op]
    within, between = (2, 1), (2, 2)
    assert groups == [within, within, between, within, between, between, within, within]
    reduced = [(one.takes, one.gives) for one in plan.operations if one.label == "reduce"]
    assert reduced == [(256, 200), (768, 1200), (0, 0), (0, 0)], "shares are averaged in their place"
    assert plan.state_bytes == pair.state_bytes * 2
    assert plan.gradient_bytes == pair.gradient_bytes * 2
    assert plan.left_gradient_bytes == pair.left_gradient_bytes * 2
    step = next(one for one in plan.operations if one.label == "step")
    assert step.shares == ((0, 242), (1, 108), (2, 242), (3, 108))
    in_each_group = 2 * 2048 + 2 * 8
    of_each_place = 2 * 1024 + 2 * 8
    assert plan.wire_bytes() == 2 * in_each_group + 2 * of_each_place
    in_forward = of_ranges(4, shard_group=2, way="in_forward")
    assert in_forward.calls == plan.calls[-2:] + plan.calls[:-2]


def test_a_parameter_without_elements_is_counted_and_not_sent() -> None:
    plan = schedule(recipe("zero-2", shard_group=2), [ParamSpec(0)], 4)
    assert plan.calls == (Call("all_reduce", 4), Call("all_reduce", 4))


# ------------------------------------------------------------------------------------- what must stay whole

MATRICES = [
    ParamSpec(100, shape=(100,)),
    ParamSpec(16, shape=(4, 4), whole=True),
    ParamSpec(36, shape=(6, 6), whole=True),
    ParamSpec(4, shape=(4,)),
]


def test_muon_gets_whole_gradients_by_an_exchange() -> None:
    plan = schedule(recipe("zero-2", optimizer="Muon+AdamW"), MATRICES, 2)
    calls = {
        0: [Call("send", 64, 1), Call("recv", 144, 1)],
        1: [Call("send", 144, 0), Call("recv", 64, 0)],
    }
    for rank, exchanged in calls.items():
        assert list(plan.calls_of(rank)) == [
            *exchanged,
            *(Call("reduce_shares", 4 * 256), Call("all_reduce", 4 * 4), Call("all_gather", 4 * 256)),
            *(Call("broadcast", 144, 0), Call("broadcast", 64, 1)),
        ]
    exchange = plan.operations[2]
    assert (exchange.nbytes, exchange.shares, exchange.gives) == (208, ((0, 144), (1, 64)), 208)
    step = next(one for one in plan.operations if one.label == "step")
    assert step.flops == newton_schulz_operations(MATRICES[2]), "of the rank with the larger matrix"
    assert step.shares == ((0, 136), (1, 20))
    assert step.tensors == 2, "the range, and a matrix"
    # Muon keeps one tensor for each matrix and no counter, AdamW two and a counter.
    assert plan.state_bytes == (4 * 36 + 8 * 100 + 4, 4 * 16 + 8 * 4 + 4)
    assert plan.left_gradient_bytes == (144 + 4 * 128, 64 + 4 * 128)
    assert plan.wire_bytes() == 2 * 208 + 2 * 1024 + 2 * 16


def test_an_owner_gets_small_neighbours_in_one_message_and_a_large_gradient_in_its_own() -> None:
    numels = [SMALL_NUMEL + 1, 2, 3, SMALL_NUMEL + 2]
    params = [ParamSpec(numel, whole=True) for numel in numels]
    owners = from_lists(numels, [[0, 1, 2], [3], []])
    operations = schedule(recipe("zero-2", partition=owners), params, 3).operations
    exchange = next(one for one in operations if one.op == "exchange")
    large = [4 * (SMALL_NUMEL + 1), 4 * (SMALL_NUMEL + 2)]
    assert exchange.shares == ((0, 4 * 5), (0, large[0]), (1, large[1]))
    assert exchange.calls_of(0, 3) == [
        Call("send", large[1], 1),
        *(Call("recv", 20, 1), Call("recv", large[0], 1), Call("recv", 20, 2), Call("recv", large[0], 2)),
    ]
    assert exchange.calls_of(2, 3) == [
        Call("send", 20, 0),
        Call("send", large[0], 0),
        Call("send", large[1], 1),
    ]


# ----------------------------------------------------------------------------------------------- by the clock

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


def marks(played: Played, lane: str, rank: int = 0) -> list[tuple[str, int | None, float, float]]:
    return [
        (one.label, one.bucket, round(one.start_ms, 6), round(one.stop_ms, 6))
        for one in played.timeline(rank).on(lane)
    ]


def test_plain_by_hand() -> None:
    played = play(of_ranges(2), BY_HAND, WORK)
    assert marks(played, COMPUTE) == [
        ("forward", None, 0, 350),
        ("backward", 0, 350, 450),
        ("backward", 1, 450, 1050),
        ("step", None, 1245.5, 1487.5),
    ]
    assert marks(played, NETWORK) == [
        ("reduce", 0, 450, 514.5),  # to the other rank half of 128 elements
        ("reduce", 1, 1050, 1242.5),
        ("agree", None, 1242.5, 1245.5),  # 8 bytes in two rounds
        ("broadcast", None, 1487.5, 1680),
        ("broadcast", None, 1680, 1744.5),
    ]
    assert marks(played, COMPUTE, rank=1)[-1] == ("step", None, 1245.5, 1245.5 + 108)
    assert played.makespan_ms == pytest.approx(1744.5)


def test_in_forward_by_hand() -> None:
    played = play(of_ranges(2, way="in_forward"), BY_HAND, WORK)
    assert marks(played, COMPUTE) == [
        ("forward", 0, 192.5, 454.5),
        ("forward", 1, 454.5, 542.5),  # its parameters came during the first part
        ("backward", 0, 542.5, 642.5),
        ("backward", 1, 642.5, 1242.5),
        ("step", None, 1438, 1680),
    ]
    assert marks(played, NETWORK)[:3] == [
        ("broadcast", None, 0, 192.5),
        ("broadcast", None, 192.5, 257),
        ("reduce", 0, 642.5, 707),
    ]
    assert played.makespan_ms == pytest.approx(1680), "the second gather is hidden"


# ---------------------------------------------------------------------------------------------- property

params_of_model = st.lists(
    st.builds(
        lambda numel, dtype, trainable: ParamSpec(numel, dtype, trainable=trainable),
        st.integers(0, 3000),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=8,
)
with_matrices = params_of_model.flatmap(
    lambda params: st.lists(st.booleans(), min_size=len(params), max_size=len(params)).map(
        lambda whole: [param._replace(whole=flag) for param, flag in zip(params, whole, strict=True)]
    )
)
groups = st.integers(1, 4)
ways = st.sampled_from(recipe("zero-2").ways)
rules = st.integers(1, 4000).map(lambda numel: partial(equal_shares, range_numel=numel))


def padded_bytes(params: Sequence[ParamSpec], rule: Any, group: int) -> int:
    """Bytes of what is trained, and of what pads it."""
    return sum(
        plan.numel * itemsize_of(params[next(iter(plan.starts))].dtype)
        for plan in gradient_plans(rule(params, group), params)
    )


@given(params_of_model, groups, groups, rules, ways, st.sampled_from(["nccl", "gloo"]))
def test_a_group_sends_2_psi_and_its_places_2_shares_to_the_other_groups(
    params: list[ParamSpec], group: int, replicas: int, rule: Any, way: str, backend: str
) -> None:
    how = recipe("zero-2", partition=rule, way=way, shard_group=group)
    psi = padded_bytes(params, rule, group)
    trained = [param for param in params if param.trainable]
    assert 0 <= psi - sum(map(nbytes_of, trained)) <= 4 * ALIGNMENT * len(trained) * (1 + group)
    count = 4 * len(trained)
    within = 2 * (group - 1) * (psi + count)
    between = 2 * (replicas - 1) * (psi // group + count)
    wire_bytes = schedule(how, params, group * replicas).wire_bytes(backend)
    assert wire_bytes == replicas * within + group * between


@given(with_matrices, groups, groups, rules, ways)
def test_each_element_is_computed_reduced_updated_and_sent_as_often_as_there_are_groups(
    params: list[ParamSpec], group: int, replicas: int, rule: Any, way: str
) -> None:
    world_size = group * replicas
    plan = schedule(recipe("zero-2", partition=rule, way=way, shard_group=group), params, world_size)
    of_label = {
        label: [one for one in plan.operations if one.label == label]
        for label in ("forward", "backward", "reduce", "step", "broadcast")
    }
    trained = sum(param.numel for param in params if param.trainable)
    assert sum(one.numel for one in of_label["forward"]) == sum(param.numel for param in params)
    assert sum(one.tensors for one in of_label["forward"]) == len(params)
    assert sum(one.numel for one in of_label["backward"]) == trained
    (step,) = of_label["step"]
    updated = Counter[int]()
    for rank, numel in step.shares or ():
        updated[rank // group] += numel
    assert [updated[one] for one in range(replicas)] == [trained] * replicas
    psi = padded_bytes(params, rule, group)
    assert sum(one.nbytes for one in of_label["reduce"] if one.stride == 1 and one.op != "all_reduce") == psi
    sent = sum(one.nbytes for one in of_label["broadcast"])
    assert sent == (psi if group > 1 else 0)
    averaged = [one for one in plan.operations if one.op == "all_reduce" and one.label == "reduce"]
    assert bool(averaged) == (replicas > 1 and psi >= group)
    for place, one in enumerate(plan.operations):
        assert all(before < place for before in one.after)
        assert min(one.numel, one.nbytes, one.takes, one.gives) >= 0
        assert bool(one.op) == (one.lane == NETWORK)
        if one.label == "step":
            calls = {at for at, other in enumerate(plan.operations[:place]) if other.op}
            assert set(one.after) == (
                calls if way == "plain" else calls - set(range(len(of_label["broadcast"])))
            )


clusters = st.builds(
    lambda chosen, per_node, overlaps: replace(chosen, ranks_per_node=per_node, overlaps=overlaps),
    st.sampled_from([*CLUSTERS.values(), BY_HAND]),
    st.integers(1, 5),
    st.booleans(),
)


@given(with_matrices, groups, groups, rules, clusters, st.integers(0, 10**6))
def test_parameters_that_arrive_in_forward_never_cost_time(
    params: list[ParamSpec], group: int, replicas: int, rule: Any, chosen: Cluster, tokens: int
) -> None:
    plain, in_forward = (
        play(
            schedule(recipe("zero-2", partition=rule, way=way, shard_group=group), params, group * replicas),
            chosen,
            Workload(tokens),
        ).makespan_ms
        for way in ("plain", "in_forward")
    )
    # Sums in another order; parts of forward are rounded to whole elements and tensors, not their sum.
    assert in_forward <= plain * (1 + 1e-9)
