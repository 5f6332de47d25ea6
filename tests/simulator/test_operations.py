"""The operations of an iteration: their order and what each waits for by hand, what they move by property."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from library.scheduled import scheduled

from zero_ref.local_sgd.averaging import AveragingSchedule, Level
from zero_ref.plan.calls import REDUCED_BY, Call
from zero_ref.plan.partition import ParamSpec, Slice
from zero_ref.plan.rules import from_lists
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.operations import (
    NETWORK,
    SIDE_STREAM,
    WAYS_OF_DDP,
    Operation,
    order,
    shared_out,
)
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.schedule import Schedule, schedule

PARAMS = [ParamSpec(6), ParamSpec(5), ParamSpec(4), ParamSpec(1)]
OWNERS = from_lists([6, 5, 4, 1], [[0, 3], [1, 2]])
BUCKETS = [[3], [2], [1, 0]]


def of_owners(**options: Any) -> Schedule:
    return scheduled("zero", PARAMS, 2, partition=OWNERS, ddp_buckets=BUCKETS, **options)


def local_sgd(
    params: Sequence[ParamSpec],
    buckets: Sequence[Sequence[int]],
    averaging: AveragingSchedule,
    world_size: int,
    steps: range | None = None,
    **options: Any,
) -> tuple[Operation, ...]:
    options.update(averaging=averaging, ddp_buckets=buckets, steps=steps)
    return scheduled("local-sgd", params, world_size, **options).operations


def brief(operations: Sequence[Operation]) -> list[str]:
    return [one.label if one.part is None else f"{one.label} {one.part}" for one in operations]


def waits(operations: Sequence[Operation]) -> dict[str, list[str]]:
    """By name, for what each operation waits beside its lane."""
    names = brief(operations)
    return {
        name: [names[before] for before in one.after] for name, one in zip(names, operations, strict=True)
    }


# ----------------------------------------------------------------------------------------------- example


def test_gradients_are_reduced_behind_backward_and_updates_wait_for_them() -> None:
    operations = of_owners(flat=True).operations
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
    operations = of_owners(way="interleaved", side_stream=True).operations
    steps = [one for one in operations if one.label == "step"]
    assert [one.part for one in steps] == [0, 1, 2]
    assert [one.shares for one in steps] == [((0, 1),), ((1, 4),), ((0, 6), (1, 5))]
    assert {one.lane for one in steps} == {SIDE_STREAM}
    assert waits(operations)["broadcast 1"] == ["step 1"]
    assert waits(operations)["step 1"] == ["reduce 1"]
    assert brief(operations)[4:8] == ["reduce 1", "step 0", "broadcast 0", "backward 2"]


def test_what_is_reduced_to_owners_is_kept_by_them_only() -> None:
    plan = of_owners(to_owners=True)
    last = next(one for one in plan.operations if one.label == "reduce" and one.part == 2)
    assert (last.op, last.nbytes, last.gives) == ("exchange", 44, 44)
    assert last.shares == ((0, 24), (1, 20))
    assert last.calls_of(0, 2) == [Call("send", 20, 1), Call("recv", 24, 1)]
    assert plan.gradient_bytes == (28, 36)


def test_by_reduce_each_owner_of_a_bucket_gets_its_part_in_one_call_of_all_ranks() -> None:
    operations = of_owners(to_owners=True, reduced_by="reduce").operations
    first, second = (one for one in operations if one.label == "reduce" and one.part == 2)
    assert (first.op, first.owner, first.nbytes, first.gives) == ("reduce", 0, 24, 24)
    assert (second.op, second.owner, second.nbytes, second.gives) == ("reduce", 1, 20, 20)
    for rank in range(2):
        assert first.calls_of(rank, 2) + second.calls_of(rank, 2) == [
            Call("reduce", 24, 0),
            Call("reduce", 20, 1),
        ]
    step = next(one for one in operations if one.label == "step")
    assert [operations[place] for place in step.after] == [second], "the last of the calls"


def test_stage_3_fetches_ahead_and_frees_what_is_computed() -> None:
    params = [ParamSpec(8), ParamSpec(10), ParamSpec(10, trainable=False)]
    operations = schedule("zero-3", params, 4, blocks=[[0], [1], [2]]).operations
    assert brief(operations) == [
        *("gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "forward 2"),
        *("gather 2", "gather 1", "backward 2", "backward 1", "reduce 1", "backward 0", "reduce 0", "step"),
    ], "unit 2 is frozen: nothing to reduce"
    by_name = dict(zip(brief(operations)[:6], operations, strict=False))
    assert by_name["gather 2"].after == (operations.index(by_name["forward 0"]),)
    assert (by_name["forward 0"].gives, by_name["forward 1"].gives) == (0, 48), "the root's are kept"
    backward = dict(zip(brief(operations)[6:], operations[6:], strict=True))
    assert (backward["backward 1"].takes, backward["backward 1"].gives) == (48, 48)
    assert backward["reduce 1"].gives == 36, "a quarter of it stays"
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
    operations = scheduled(
        "zero-3", [ParamSpec(2)] * 3, 2, blocks=[[0], [1], [2]], prefetch=prefetch
    ).operations
    short = [one.label if one.part is None else f"{one.label[0]}{one.part}" for one in operations]
    assert " ".join(short) == expected


def test_local_sgd_averages_what_is_trained_in_one_tensor() -> None:
    params = [ParamSpec(10, "bfloat16"), ParamSpec(5, "float32"), ParamSpec(7, trainable=False)]
    operations = local_sgd(params, [[1], [0]], AveragingSchedule.periodic(2), world_size=4)
    assert [one for one in operations if one.lane == NETWORK] == [
        Operation("agree", NETWORK, None, (7,), op="all_gather", nbytes=4 * 32, passed=32),
        Operation("average", NETWORK, None, (8,), op="all_reduce", nbytes=15 * 4),
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
    when = AveragingSchedule.periodic(1)
    assert local_sgd(params, [[1], [0]], when, 2)[-1].nbytes == 6 * itemsize
    assert local_sgd(params, [[1], [0]], when, 2, averaged_itemsize=4)[-1].nbytes == 6 * 4


def test_local_sgd_averages_once_for_each_device() -> None:
    params = [ParamSpec(3), ParamSpec(4, "float64", device="cuda"), ParamSpec(5)]
    operations = local_sgd(params, [[0], [1], [2]], AveragingSchedule.periodic(1), 2)
    assert [one.nbytes for one in operations if one.label == "average"] == [8 * 4, 4 * 8]
    assert [one.label for one in operations].count("agree") == 1


def test_local_sgd_waits_for_what_it_computes_with() -> None:
    averaging = AveragingSchedule.periodic(2, warmup_steps=1, gradient_group=2)
    operations = local_sgd(PARAMS, [[3, 2], [1, 0]], averaging, 4, range(3))
    names = brief(operations)
    of_step = ["forward", "backward 0", "reduce 0", "backward 1", "reduce 1", "step"]
    # The warm-up lasts for step 0, so step 1 averages, and step 3 would.
    assert names == [*of_step, *of_step, "agree", "average", *of_step]
    waits_of = [[names[before] for before in one.after] for one in operations]
    assert waits_of[2:6] == [["backward 0"], [], ["backward 1"], ["reduce 1"]]
    assert waits_of[12:15] == [["step"], ["agree"], ["average"]], "the next forward is with the average"
    assert [place for place, one in enumerate(operations) if one.label == "reduce" and one.ranks] == [
        *(8, 10, 16, 18)
    ]
    assert [one.gives for one in operations if one.label == "step"] == [64, 64, 0]


def of_steps(steps: range) -> tuple[Operation, ...]:
    return local_sgd(PARAMS, BUCKETS, AveragingSchedule.periodic(2), 2, steps)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: list(order(1, "soon")),
            "unknown way 'soon'; choose one of plain, after_backward, interleaved",
        ),
        (lambda: list(order(1, "in_forward")), "unknown way 'in_forward'; choose one of plain, "),
        (lambda: scheduled("zero-3", PARAMS, 2, prefetch=-1), "prefetch counts units"),
        (lambda: of_steps(range(0)), r"counted from 0, as in range\(8\); got range\(0, 0\)"),
        (lambda: of_steps(range(-1, 3)), r"got range\(-1, 3\)"),
        (lambda: of_steps(range(0, 8, 2)), r"steps follow one another .* got range\(0, 8, 2\)"),
        (
            lambda: local_sgd(PARAMS, BUCKETS, AveragingSchedule.periodic(1, gradient_group=3), 4),
            "4 ranks cannot be divided into groups of 3",
        ),
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
ways = st.sampled_from(WAYS_OF_DDP)
LABELS = ("forward", "backward", "reduce", "step", "broadcast")


def psi_of(params: Sequence[ParamSpec]) -> int:
    """Bytes of the Ψ parameters that are trained."""
    return sum(nbytes_of(param) for param in params if param.trainable)


def one_bucket_each(params: Sequence[ParamSpec]) -> list[list[int]]:
    return [[number] for number, param in enumerate(params) if param.trainable][::-1]


@given(params_of_model, ranks, sharded, ways, st.sampled_from(["", *REDUCED_BY]))
def test_each_gradient_and_parameter_is_computed_and_moved_as_often_as_the_strategy_says(
    params: list[ParamSpec], world_size: int, strategy: str, way: str, to_owners: str
) -> None:
    buckets = one_bucket_each(params)
    how = recipe(strategy, way=way)
    if to_owners:
        how = recipe(how, to_owners=True, reduced_by=to_owners)
    plan = schedule(how, params, world_size, ddp_buckets=buckets)
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
    plan = schedule(recipe(strategy, to_owners=True, way=way), params, world_size)
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


@given(params_of_model, ranks, sharded, ways, st.sampled_from(["nccl", "gloo"]))
def test_stage_1_sends_2_psi_to_owners_and_3_psi_with_all_reduces(
    params: list[ParamSpec], world_size: int, strategy: str, way: str, backend: str
) -> None:
    # Of each rank that is (N-1)/N times as much; here of all N together, exactly.
    rest = (world_size - 1) * psi_of(params)

    def wire(name: str, **options: Any) -> int:
        return scheduled(name, params, world_size, **options).wire_bytes(backend)

    assert wire("ddp") == 2 * rest
    assert wire(strategy, way=way) == 3 * rest
    assert wire(strategy, way=way, to_owners=True) == 2 * rest
    if backend == "nccl":  # Gloo's reduce sends more
        assert wire(strategy, way=way, to_owners=True, reduced_by="reduce") == 2 * rest
    averaged = 2 * (world_size - 1) * averaged_bytes(params)
    assert wire("local-sgd", averaging=AveragingSchedule.periodic(3)) == averaged + 32 * world_size * (
        world_size - 1
    )


def averaged_bytes(params: Sequence[ParamSpec]) -> int:
    """Return the bytes of all trained parameters, in the widest dtype among them."""
    trained = [param for param in params if param.trainable]
    widest = max((nbytes_of(ParamSpec(1, param.dtype)) for param in trained), default=0)
    return widest * sum(param.numel for param in trained)


@st.composite
def averagings(draw: st.DrawFn) -> tuple[AveragingSchedule, int]:
    """Any schedule, and ranks that it fits."""
    gradient_group = draw(st.sampled_from([1, 1, 2, 3]))
    sizes = [gradient_group * draw(st.sampled_from([1, 2, 3]))]
    sizes += [sizes[-1] * factor for factor in draw(st.lists(st.sampled_from([2, 3]), max_size=1))]
    periods = draw(st.lists(st.integers(1, 4), min_size=len(sizes), max_size=len(sizes), unique=True))
    levels = [Level(*one) for one in zip(sorted(periods), sizes, strict=True)]
    if draw(st.booleans()):
        levels[-1] = levels[-1]._replace(group_size=None)
    warmup_steps, origin = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return AveragingSchedule(tuple(levels), warmup_steps, origin, gradient_group), sizes[-1]


@given(params_of_model, averagings(), st.sampled_from(["nccl", "gloo"]), st.booleans())
def test_a_cycle_of_local_sgd_sends_what_its_averages_and_gradient_groups_take(
    params: list[ParamSpec], fitting: tuple[AveragingSchedule, int], backend: str, warm_up_too: bool
) -> None:
    averaging, world_size = fitting
    steps = range(averaging.steady.stop) if warm_up_too else averaging.steady
    plan = schedule(recipe("local-sgd", averaging=averaging), params, world_size, steps=steps)
    assert plan.iterations == len(steps)
    # A group of g sends 2 (g - 1) of a tensor to all-reduce it, and there are N / g groups.
    expected = 0
    for step in steps:
        local = averaging.is_local(step)
        group = averaging.gradient_group if local else world_size
        expected += 2 * (group - 1) * (world_size // group) * psi_of(params)
        level = averaging.level(step)
        group = 1 if level is None else level.group_size or world_size
        expected += (2 * averaged_bytes(params) + 32 * group) * (group - 1) * (world_size // group)
    assert plan.wire_bytes(backend) == expected


@given(params_of_model, ranks, st.integers(0, 100))
def test_a_step_of_the_warm_up_is_a_step_of_ddp(
    params: list[ParamSpec], world_size: int, activation_bytes: int
) -> None:
    buckets = one_bucket_each(params)
    averaging = AveragingSchedule.periodic(3, warmup_steps=2)
    options: dict[str, Any] = {"activation_bytes": activation_bytes, "ddp_buckets": buckets}
    of_ddp = schedule("ddp", params, world_size, **options).operations
    for step in (0, 1):
        steps = range(step, step + 1)
        of_step = scheduled(
            "local-sgd", params, world_size, averaging=averaging, steps=steps, **options
        ).operations
        assert of_step == of_ddp


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(2, 6), st.integers(0, 3))
def test_stage_3_sends_3_psi_where_sizes_divide(rows: list[int], world_size: int, prefetch: int) -> None:
    params = [ParamSpec(row * world_size) for row in rows]

    def wire(blocks: list[list[int]], backend: str = "nccl") -> int:
        return schedule(recipe("zero-3", prefetch=prefetch), params, world_size, blocks=blocks).wire_bytes(
            backend
        )

    each = [[number] for number in range(len(params))]
    rest = (world_size - 1) * psi_of(params)
    assert wire([[], *each]) == 3 * rest
    assert wire([list(range(len(params)))]) == 2 * rest, "what the root has is gathered once"
    root = (world_size - 1) * nbytes_of(params[0])
    assert wire(each) == 3 * rest - root
    assert wire([[], *each], "gloo") == 4 * rest, "its reduce-scatter is an all-reduce inside"


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**6), max_size=10))
def test_nothing_is_lost_when_a_number_is_shared_out(amount: int, weights: list[int]) -> None:
    parts = shared_out(amount, weights)
    assert sum(parts) == (amount if sum(weights) else 0)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - amount * weight / max(sum(weights), 1)) <= 1


def test_a_parameter_that_is_cut_gives_each_owner_its_bytes() -> None:
    cut = from_lists([10], [[Slice(0, 0, 4)], [Slice(0, 4, 10)]])
    plan = scheduled("zero", [ParamSpec(10, "bfloat16")], 2, partition=cut, to_owners=True)
    assert plan.gradient_bytes == (8, 12)
