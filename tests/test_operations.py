"""The operations of an iteration: their order and what each waits for by hand, what they move by property."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from zero_ref.calls import Call
from zero_ref.partition import ParamSpec, Slice, from_lists, plan_partition
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.operations import (
    COMPUTE,
    NETWORK,
    SIDE_STREAM,
    WAYS,
    Operation,
    Unit,
    data_parallel,
    local_sgd,
    order,
    owned_bytes,
    shared_out,
    stage_3,
)
from zero_ref.simulator.schedule import Schedule, schedule

PARAMS = [ParamSpec(6), ParamSpec(5), ParamSpec(4), ParamSpec(1)]
OWNERS = from_lists([6, 5, 4, 1], [[0, 3], [1, 2]])
BUCKETS = [[3], [2], [1, 0]]


def brief(operations: Sequence[Operation]) -> list[str]:
    return [one.label if one.part is None else f"{one.label} {one.part}" for one in operations]


def waits(operations: Sequence[Operation]) -> dict[str, list[str]]:
    """By name, for what each operation waits beside its lane."""
    names = brief(operations)
    return {
        name: [names[before] for before in one.after] for name, one in zip(names, operations, strict=True)
    }


# ----------------------------------------------------------------------------------------------- example


def test_the_order_of_each_way() -> None:
    def listed(way: str) -> list[tuple[str, tuple[int, ...]]]:
        return [one for one in order(2, way) if one[0] in ("step", "broadcast")]

    assert listed("plain") == [("step", (0, 1)), ("broadcast", (0, 1))]
    assert listed("after_backward") == [("step", (0,)), ("step", (1,)), ("broadcast", (0, 1))]
    assert listed("interleaved") == [(label, (part,)) for part in (0, 1) for label in ("step", "broadcast")]


def test_gradients_are_reduced_behind_backward_and_updates_wait_for_them() -> None:
    operations = data_parallel(PARAMS, 2, OWNERS, BUCKETS, flat=True)
    assert brief(operations) == [
        *("forward", "backward 0", "reduce 0", "backward 1", "reduce 1", "backward 2", "reduce 2"),
        *("step", "broadcast", "broadcast"),
    ]
    assert waits(operations)["reduce 1"] == ["backward 1"]
    assert waits(operations)["step"] == ["reduce 2"]
    assert waits(operations)["broadcast"] == ["step"]
    assert [one.nbytes for one in operations if one.op] == [4, 16, 44, 28, 36]
    assert [one.numel for one in operations if one.label == "backward"] == [1, 4, 11]
    step = operations[-3]
    assert step.shares == ((0, 7), (1, 9)), "elements that each rank updates"


def test_an_interleaved_update_is_of_one_bucket() -> None:
    operations = data_parallel(PARAMS, 2, OWNERS, BUCKETS, way="interleaved", side_stream=True)
    steps = [one for one in operations if one.label == "step"]
    assert [one.part for one in steps] == [0, 1, 2]
    assert [one.shares for one in steps] == [((0, 1),), ((1, 4),), ((0, 6), (1, 5))]
    assert {one.lane for one in steps} == {SIDE_STREAM}
    assert waits(operations)["broadcast 1"] == ["step 1"]
    assert waits(operations)["step 1"] == ["reduce 1"]
    assert brief(operations)[4:8] == ["reduce 1", "step 0", "broadcast 0", "backward 2"]


def test_what_is_reduced_to_owners_is_kept_by_them_only() -> None:
    operations = data_parallel(PARAMS, 2, OWNERS, BUCKETS, to_owners=True)
    last = next(one for one in operations if one.label == "reduce" and one.part == 2)
    assert (last.op, last.nbytes, last.gives) == ("exchange", 44, 44)
    assert last.shares == ((0, 24), (1, 20))
    assert last.calls_of(0, 2) == [Call("send", 20, 1), Call("recv", 24, 1)]
    assert owned_bytes(OWNERS, PARAMS) == (28, 36)


def test_a_librarys_own_collectives() -> None:
    operations = data_parallel(PARAMS, 2, OWNERS, BUCKETS, flat=True, to_owners=True, native=True)
    calls = [call for one in operations for call in one.calls_of(0, 2)]
    assert calls == [
        *(Call("reduce", 4, 0), Call("reduce", 16, 1), Call("reduce", 24, 0), Call("reduce", 20, 1)),
        Call("all_gather", 64),
    ]


def test_stage_3_fetches_ahead_and_frees_what_is_computed() -> None:
    units = [Unit(8, 40, 32, kept=True), Unit(10, 40, 40), Unit(10, 40, 0)]
    operations = stage_3(units, 4, shards=[5, 5, 5, 3])
    assert brief(operations) == [
        *("gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "forward 2"),
        *("gather 2", "gather 1", "backward 2", "backward 1", "reduce 1", "backward 0", "reduce 0", "step"),
    ], "unit 2 is frozen: nothing to reduce"
    by_name = dict(zip(brief(operations)[:6], operations, strict=False))
    assert by_name["gather 2"].after == (operations.index(by_name["forward 0"]),)
    assert (by_name["forward 0"].gives, by_name["forward 1"].gives) == (0, 40), "the root's are kept"
    backward = dict(zip(brief(operations)[6:], operations[6:], strict=True))
    assert (backward["backward 1"].takes, backward["backward 1"].gives) == (40, 40)
    assert backward["reduce 1"].gives == 30, "a quarter of it stays"
    assert backward["step"].shares == ((0, 5), (1, 5), (2, 5), (3, 3))


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (0, "g0 f0 g1 f1 g2 f2 g2 b2 r2 g1 b1 r1 b0 r0 step"),
        (1, "g0 g1 f0 g2 f1 f2 g2 g1 b2 r2 b1 r1 b0 r0 step"),
        (2, "g0 g1 g2 f0 f1 f2 g2 g1 b2 r2 b1 r1 b0 r0 step"),
        (9, "g0 g1 g2 f0 f1 f2 g2 g1 b2 r2 b1 r1 b0 r0 step"),
    ],
)
def test_how_far_ahead_stage_3_fetches(prefetch: int, expected: str) -> None:
    operations = stage_3([Unit(2, 8, 8, kept=not i) for i in range(3)], 2, [3, 3], prefetch=prefetch)
    short = [one.label if one.part is None else f"{one.label[0]}{one.part}" for one in operations]
    assert " ".join(short) == expected


def test_stage_3_on_one_rank_gathers_nothing_and_keeps_its_gradients() -> None:
    operations = stage_3([Unit(2, 8, 8)], 1, [2])
    assert brief(operations) == ["forward 0", "backward 0", "step"]
    assert sum(one.takes - one.gives for one in operations) == 8


def test_local_sgd_averages_what_is_trained_in_one_tensor() -> None:
    params = [ParamSpec(10, "bfloat16"), ParamSpec(5, "float32"), ParamSpec(7, trainable=False)]
    operations = local_sgd(params, [[1], [0]], period=2)
    assert [one for one in operations if one.lane == NETWORK] == [
        Operation("average", NETWORK, None, (7,), op="all_reduce", nbytes=15 * 4)
    ]
    frees = [one.gives for one in operations if one.label == "step"]
    assert frees == [40, 0], "the last gradients are there until the next forward"


@pytest.mark.parametrize(
    ("dtypes", "itemsize"),
    [
        (["float16", "bfloat16"], 4),  # neither takes the other
        (["bfloat16", "bfloat16"], 2),
        (["float16", "float32"], 4),
        (["float64", "bfloat16"], 8),
    ],
)
def test_local_sgd_averages_in_the_dtype_that_takes_all(dtypes: list[str], itemsize: int) -> None:
    params = [ParamSpec(3, dtype) for dtype in dtypes]
    assert local_sgd(params, [[1], [0]], period=1)[-1].nbytes == 6 * itemsize


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: list(order(1, "soon")),
            "unknown way 'soon'; choose one of plain, after_backward, interleaved",
        ),
        (lambda: stage_3([Unit(2, 8, 8)], 2, [1, 1], prefetch=-1), "prefetch counts units"),
        (lambda: local_sgd(PARAMS, BUCKETS, period=0), "at least 1 iteration, got 0"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------------------------------------- property

params_of_model = st.lists(
    st.builds(
        lambda numel, dtype, trainable: ParamSpec(numel, dtype, trainable=trainable),
        st.integers(0, 10**5),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=10,
)
ranks = st.integers(1, 6)
sharded = st.sampled_from(["zero", "zero-bucket", "zero-even"])
ways = st.sampled_from(list(WAYS))
LABELS = ("forward", "backward", "reduce", "step", "broadcast")


def psi_of(params: Sequence[ParamSpec]) -> int:
    """Bytes of what is trained, Ψ."""
    return sum(nbytes_of(param) for param in params if param.trainable)


def one_bucket_each(params: Sequence[ParamSpec]) -> list[list[int]]:
    return [[number] for number, param in enumerate(params) if param.trainable][::-1]


@given(params_of_model, ranks, sharded, ways, st.booleans(), st.booleans())
def test_each_gradient_and_parameter_is_computed_and_moved_as_often_as_the_strategy_says(
    params: list[ParamSpec], world_size: int, strategy: str, way: str, to_owners: bool, native: bool
) -> None:
    buckets = one_bucket_each(params)
    plan = schedule(
        *(strategy, params, world_size),
        ddp_buckets=buckets, to_owners=to_owners, way=way, native=native,
    )  # fmt: skip
    trained = sum(param.numel for param in params if param.trainable)
    of_label = {label: [one for one in plan.operations if one.label == label] for label in LABELS}
    assert sum(one.numel for one in of_label["backward"]) == trained
    updated = [share for one in of_label["step"] for share in one.shares or ()]
    assert sum(numel for _, numel in updated) == trained, "each element by one rank"
    assert all(0 <= rank < world_size for rank, _ in updated)
    assert sum(one.nbytes for one in of_label["reduce"]) == psi_of(params)
    sent = sum(one.nbytes for one in of_label["broadcast"])
    assert sent == (psi_of(params) if world_size > 1 else 0)
    for part, bucket in enumerate(buckets):
        of_part = [one for one in of_label["reduce"] if one.part == part]
        assert sum(one.nbytes for one in of_part) == nbytes_of(params[bucket[0]])


@given(params_of_model, ranks, sharded, ways)
def test_what_is_sent_to_owners_is_received(
    params: list[ParamSpec], world_size: int, strategy: str, way: str
) -> None:
    plan = schedule(strategy, params, world_size, to_owners=True, way=way)
    messages: dict[str, list[tuple[int, int | None, int]]] = {"send": [], "recv": []}
    for rank in range(world_size):
        for call in plan.calls_of(rank):
            if call.op == "send":
                messages["send"].append((rank, call.peer, call.nbytes))
            elif call.op == "recv":
                messages["recv"].append((call.peer or 0, rank, call.nbytes))
    assert sorted(messages["send"]) == sorted(messages["recv"])
    assert sum(nbytes for _, _, nbytes in messages["send"]) == psi_of(params) * (world_size - 1)
    others = [[call for call in plan.calls_of(rank) if call.op not in messages] for rank in range(world_size)]
    assert all(calls == others[0] for calls in others), "collectives are the same on all ranks"


@given(params_of_model, ranks, sharded, ways, st.booleans(), st.sampled_from(["nccl", "gloo"]))
def test_stage_1_sends_2_psi_to_owners_and_3_psi_with_all_reduces(
    params: list[ParamSpec], world_size: int, strategy: str, way: str, native: bool, backend: str
) -> None:
    # Of each rank that is (N-1)/N times as much; here of all N together, exactly.
    rest = (world_size - 1) * psi_of(params)

    def wire(name: str, **options: Any) -> int:
        return schedule(name, params, world_size, **options).wire_bytes(backend)

    assert wire("ddp") == 2 * rest
    assert wire(strategy, way=way) == 3 * rest
    assert wire(strategy, way=way, to_owners=True) == 2 * rest
    if backend == "nccl":
        assert wire(strategy, way=way, to_owners=True, native=native) == 2 * rest
        assert wire("local-sgd", period=3) == (
            2 * (world_size - 1) * sum(p.numel for p in params if p.trainable) * widest(params)
        )


def widest(params: Sequence[ParamSpec]) -> int:
    sizes = {nbytes_of(ParamSpec(1, param.dtype)) for param in params if param.trainable}
    return max(sizes, default=0)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(2, 6), st.integers(0, 3))
def test_stage_3_sends_3_psi_where_sizes_divide(rows: list[int], world_size: int, prefetch: int) -> None:
    params = [ParamSpec(row * world_size) for row in rows]

    def wire(blocks: list[list[int]], backend: str = "nccl") -> int:
        return schedule("zero-3", params, world_size, blocks=blocks, prefetch=prefetch).wire_bytes(backend)

    each = [[number] for number in range(len(params))]
    rest = (world_size - 1) * psi_of(params)
    assert wire([[], *each]) == 3 * rest
    assert wire([list(range(len(params)))]) == 2 * rest, "what the root has is gathered once"
    root = (world_size - 1) * nbytes_of(params[0])
    assert wire(each) == 3 * rest - root
    assert wire([[], *each], "gloo") == 4 * rest, "its reduce-scatter is an all-reduce inside"


@given(params_of_model, st.integers(1, 6), st.integers(0, 3))
def test_stage_3_gathers_all_twice_and_reduces_what_is_trained_once(
    params: list[ParamSpec], world_size: int, prefetch: int
) -> None:
    blocks = [[], *([number] for number in range(len(params)))]
    plan = schedule("zero-3", params, world_size, blocks=blocks, prefetch=prefetch)
    moved = {
        op: sum(call.nbytes for call in plan.calls if call.op == op)
        for op in ("all_gather", "reduce_scatter")
    }
    if world_size > 1:
        padding = world_size * 4 * len(params)  # at most one row less than the ranks for each
        assert 0 <= moved["all_gather"] - 2 * sum(nbytes_of(param) for param in params) <= 2 * padding
        assert 0 <= moved["reduce_scatter"] - psi_of(params) <= padding
    else:
        assert not plan.calls
    trained = sum(param.numel for param in params if param.trainable)
    assert sum(numel for _, numel in plan.operations[-1].shares or ()) == trained


@given(params_of_model, ranks, st.sampled_from(["ddp", "zero-even", "zero-3", "local-sgd"]))
def test_one_lane_computes_and_one_sends(params: list[ParamSpec], world_size: int, strategy: str) -> None:
    plan: Schedule = schedule(strategy, params, world_size)
    assert {one.lane for one in plan.operations} <= {COMPUTE, NETWORK}
    for place, one in enumerate(plan.operations):
        assert bool(one.op) == (one.lane == NETWORK)
        assert all(before < place for before in one.after)
        assert min(one.numel, one.nbytes, one.takes, one.gives) >= 0


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**6), max_size=10))
def test_nothing_is_lost_when_a_number_is_shared_out(amount: int, weights: list[int]) -> None:
    parts = shared_out(amount, weights)
    assert sum(parts) == (amount if sum(weights) else 0)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - amount * weight / max(sum(weights), 1)) <= 1


@given(params_of_model, ranks, st.booleans())
def test_owned_bytes_add_up_to_what_is_trained(params: list[ParamSpec], world_size: int, cut: bool) -> None:
    partition = plan_partition("even" if cut else "sorted_greedy", params, world_size)
    assert sum(owned_bytes(partition, params)) == psi_of(params)


def test_a_parameter_that_is_cut_gives_each_owner_its_bytes() -> None:
    cut = from_lists([10], [[Slice(0, 0, 4)], [Slice(0, 4, 10)]])
    assert owned_bytes(cut, [ParamSpec(10, "bfloat16")]) == (8, 12)
