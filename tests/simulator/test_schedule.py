"""The schedule: calls and bytes by hand, by property, and equal to what the optimizer really does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from library.scheduled import scheduled
from library.training import filled

from zero_ref.lab import virtual
from zero_ref.lab.meter import held_bytes, recording
from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import from_lists
from zero_ref.simulator.models import from_module
from zero_ref.simulator.recipe import RECIPES, recipe
from zero_ref.simulator.schedule import (
    calls_of_rank,
    ddp_buckets,
    schedule,
)

MIB = 2**20

reducing = [name for name, plan in RECIPES.items() if plan.stage < 2 and name != "local-sgd"]
sharded = [name for name in reducing if RECIPES[name].partition]


def broadcasts(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.op == "broadcast"]


# ----------------------------------------------------------------------------------------------- example


def test_zero_then_sends_each_parameter_from_its_owner_owner_by_owner() -> None:
    params = [ParamSpec(n) for n in (600, 500, 400, 100)]
    plan = schedule(recipe("zero", broadcast_buffer_size=0), params, world_size=2)
    assert plan.calls == (
        Call("all_reduce", 6400),
        Call("broadcast", 2400, peer=0),
        Call("broadcast", 400, peer=0),
        Call("broadcast", 2000, peer=1),
        Call("broadcast", 1600, peer=1),
    )
    assert plan.collectives == 5
    assert plan.payload_bytes == 2 * 6400
    assert plan.state_bytes == (2 * 4 * 700 + 8, 2 * 4 * 900 + 8)
    assert plan.state_bytes_max == 7208


def test_zero_sends_small_parameters_of_an_owner_and_a_dtype_together() -> None:
    params = [ParamSpec(n) for n in (2**14 + 1, 500, 400, 100)] + [ParamSpec(7, "bfloat16")]
    plan = schedule(recipe("zero", partition=[[0, 1, 3], [2, 4]]), params, world_size=2)
    assert [(call.nbytes, call.peer) for call in plan.calls if call.op == "broadcast"] == [
        (4 * 600, 0),
        (4 * 400, 1),
        (2 * 7, 1),
        (4 * (2**14 + 1), 0),
    ]


def test_buckets_send_one_message_an_owner_and_pad_the_parameters() -> None:
    params = [ParamSpec(n) for n in (600, 500, 400, 101)]
    plan = schedule("zero-bucket", params, world_size=2)
    assert broadcasts(plan.calls) == [Call("broadcast", 4 * 701, peer=0), Call("broadcast", 4 * 900, peer=1)]
    # 701 is padded to 704 so that rank 1's run begins on a multiple of 16, and 704 + 900 to 1616.
    assert plan.parameter_bytes == (4 * 1616,) * 2
    assert plan.parameter_bytes_max == 4 * 1616
    assert plan.gradient_bytes_max == 4 * 1601


def test_frozen_parameters_have_no_gradient_no_state_and_are_not_sent() -> None:
    params = [ParamSpec(600), ParamSpec(500, trainable=False), ParamSpec(100)]
    for strategy in reducing:
        plan = schedule(strategy, params, world_size=2)
        assert plan.gradient_bytes == (2800, 2800)
        assert min(plan.parameter_bytes) >= 4800
        assert sum(call.nbytes for call in plan.calls) == 2800 * (1 if strategy == "ddp" else 2)
    assert sum(schedule("zero", params, world_size=2).state_bytes) == 2 * 2800 + 8


def test_a_partition_of_ones_own_takes_the_place_of_the_strategys() -> None:
    params = [ParamSpec(6), ParamSpec(5)]
    plan = schedule(recipe("zero", partition=[[1], [0]]), params, world_size=2)
    assert broadcasts(plan.calls) == [Call("broadcast", 20, peer=0), Call("broadcast", 24, peer=1)]
    assert schedule(recipe("zero", partition=from_lists([6, 5], [[1], [0]])), params, 2) == plan


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: schedule("zero3", [ParamSpec(1)], 1),
            "'zero3'; choose one of ddp, zero, zero-bucket, zero-even",
        ),
        (lambda: schedule("zero", [ParamSpec(1)], 0), "world_size must be at least 1 rank"),
        (lambda: schedule(recipe("zero", optimizer="Adan"), [ParamSpec(1)], 1), "unknown optimizer 'Adan'"),
        (lambda: schedule(recipe("ddp", partition="even"), [ParamSpec(1)], 1), "'ddp' shards nothing"),
        (lambda: ddp_buckets([ParamSpec(1)] * 3, order=[0, 1]), "each of the 3 .* lists 2, 2 of them"),
        (
            lambda: ddp_buckets([ParamSpec(1)] * 3, order=[0, 1, 1]),
            "lists 3, 2 of them trainable and different",
        ),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_by_default_the_first_bucket_is_one_mib_and_the_others_25() -> None:
    params = [ParamSpec(MIB // 4) for _ in range(60)]  # 1 MiB each
    assert [len(bucket) for bucket in ddp_buckets(params)] == [1, 25, 25, 9]
    assert [len(bucket) for bucket in ddp_buckets(params, cap_bytes=25 * MIB)] == [25, 25, 10]


def test_each_dtype_has_buckets_of_its_own_and_frozen_parameters_none() -> None:
    params = [
        ParamSpec(10),
        ParamSpec(10, "bfloat16"),
        ParamSpec(10, trainable=False),
        ParamSpec(10),
        ParamSpec(10, "bfloat16"),
    ]
    assert ddp_buckets(params, cap_bytes=80) == [[3, 0], [4, 1]]
    # What never reaches the cap comes last, the dtype met last first.
    assert ddp_buckets(params, cap_bytes=1000) == [[3, 0], [4, 1]]
    assert ddp_buckets(params, order=[3, 4, 0, 1], cap_bytes=1000) == [[4, 1], [3, 0]]


def test_stage_2_keeps_the_gradients_that_a_rank_owns() -> None:
    params = [ParamSpec(1024), ParamSpec(1024)]
    plan = schedule("zero-2", params, world_size=4)
    assert plan.gradient_bytes == (4 * 512,) * 4
    assert plan.left_gradient_bytes == (4 * 512 + 4 * 1024,) * 4, "who owns none whole has one of zeros"
    assert schedule("zero-2", params, world_size=2).left_gradient_bytes == (4 * 1024,) * 2
    assert plan.calls_of(1) == (Call("reduce_shares", 8192), Call("all_reduce", 8), Call("all_gather", 8192))
    assert plan.state_bytes == schedule("zero-even", params, world_size=4).state_bytes
    in_forward = schedule(recipe("zero-2", way="in_forward"), params, world_size=4)
    assert in_forward.left_gradient_bytes == plan.left_gradient_bytes
    padded = schedule("zero-2", [ParamSpec(100), ParamSpec(1)], world_size=2)
    assert padded.gradient_bytes == (4 * 100, 4), "what they own"
    assert padded.left_gradient_bytes == (4 * 128, 4 * 128), "shares, with what belongs to no parameter"
    assert padded.parameter_bytes == (4 * 256, 4 * 256)


def test_gradients_that_ddp_reduces_to_owners_leave_what_the_schedule_says() -> None:
    params = [ParamSpec(1024), ParamSpec(1024)]
    to_owners = recipe("zero-even", to_owners=True)
    plan = schedule(to_owners, params, world_size=4)
    assert plan.gradient_bytes == (4 * 512,) * 4
    assert plan.left_gradient_bytes == (4 * 1024,) * 4, "of a parameter that is cut each owner keeps it all"
    one_owner = schedule(recipe(to_owners, partition="sorted_greedy"), params, world_size=4)
    assert one_owner.left_gradient_bytes == (4096, 4096, 4096, 4096), "ranks 2 and 3 keep one of zeros"
    in_backward = schedule(recipe(to_owners, way="interleaved"), params, world_size=4)
    assert in_backward.left_gradient_bytes == (0, 0, 0, 0)
    assert plan.state_bytes == schedule("zero-even", params, world_size=4).state_bytes
    assert [call for call in plan.calls_of(1) if call.op == "send"] == [
        Call("send", 2048, peer) for peer in (0, 2, 3)
    ]


def test_stage_3_cuts_each_parameter_along_its_rows_and_pads_the_last_ranks() -> None:
    # (5, 3) on 4 ranks: 2, 2, 1 and 0 rows, each rank with memory for 2; (2,): 1, 1, 0, 0.
    params = [ParamSpec(15, shape=(5, 3)), ParamSpec(2, shape=(2,))]
    plan = schedule("zero-3", params, world_size=4, blocks=[[1], [0]])
    assert plan.parameter_bytes == plan.gradient_bytes == (4 * (6 + 1),) * 4
    assert plan.state_bytes == tuple(8 * numel + 2 * 4 for numel in (7, 7, 3, 0))
    assert plan.calls == (
        Call("all_gather", 16),
        Call("all_gather", 96),
        Call("all_gather", 96),
        Call("reduce_scatter", 96),
        Call("reduce_scatter", 16),
    )


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (
            "zero",
            {"averaging": AveragingSchedule.periodic(2)},
            "averaging= is for 'local-sgd'; strategy 'zero'",
        ),
        ("local-sgd", {"averaging": None}, "'local-sgd' needs an averaging="),
        ("zero", {"partition": None}, "is of stage 1, which takes a partition="),
        (
            "zero-2",
            {"averaging": AveragingSchedule.periodic(2)},
            "averaging= is for 'local-sgd'; strategy 'zero-2'",
        ),
        ("zero-3", {"steps": range(4)}, "steps= is for 'local-sgd'; strategy 'zero-3'"),
        ("local-sgd", {"steps": range(0)}, "counted from 0"),
        (
            "local-sgd",
            {"averaging": AveragingSchedule.hierarchical({2: 8})},
            "averages over 8 ranks and there",
        ),
    ],
)
def test_an_averaging_that_makes_no_sense_is_refused(
    strategy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scheduled(strategy, [ParamSpec(4)], 4, **options)


# ------------------------------------------------------------------------------------------------ parity


@given(st.randoms(use_true_random=False))
def test_buckets_are_those_of_ddps_own_rule(rng: random.Random) -> None:
    dtypes = rng.sample(["float32", "bfloat16", "float64", "float16", "complex64"], rng.randint(1, 5))
    params = [ParamSpec(rng.choice([0, 1, 5, rng.randint(1, 200)]), rng.choice(dtypes)) for _ in range(30)]
    order = rng.sample(range(30), 30)
    first_cap, cap = rng.randint(1, 400), rng.randint(1, 1500)
    tensors = [torch.empty(params[i].numel, dtype=getattr(torch, params[i].dtype)) for i in order]
    # What the Reducer calls when it rebuilds its buckets.
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap, cap], [], order)
    assert ddp_buckets(params, order, cap, first_cap) == theirs


def model_of_many_kinds() -> torch.nn.Module:
    model = filled(
        torch.nn.Sequential(
            torch.nn.Linear(40, 30),
            torch.nn.LayerNorm(30),
            torch.nn.Linear(30, 25, dtype=torch.bfloat16),
            torch.nn.Linear(25, 20, dtype=torch.bfloat16),
            torch.nn.Linear(20, 17),
        )
    )
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0)))
    model[1].bias.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


def measured(comm: Any, strategy: str, optimizer_class: type[torch.optim.Optimizer]) -> tuple[Any, Any]:
    plan = RECIPES[strategy]
    model = model_of_many_kinds()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class,
        comm,
        parameters_as_bucket_view=plan.flat,
        partition=plan.partition,
        lr=0.01,
    )
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    with recording(comm) as calls:
        optimizer.step()
    return calls, held_bytes(model.parameters(), optimizer)


@pytest.mark.parametrize(
    ("world_size", "optimizer_class"),
    [(1, torch.optim.SGD), (5, torch.optim.AdamW), (16, torch.optim.Adagrad)],
)
@pytest.mark.parametrize("strategy", sharded)
def test_the_optimizer_does_on_virtual_ranks_what_the_schedule_says(
    strategy: str, world_size: int, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    params = from_module(model_of_many_kinds())
    plan = schedule(recipe(strategy, optimizer=optimizer_class.__name__), params, world_size)
    of_rank = virtual.run(measured, world_size, strategy, optimizer_class)
    for rank, (calls, held) in enumerate(of_rank):
        assert tuple(calls) == tuple(broadcasts(plan.calls))
        assert held.parameters == plan.parameter_bytes[rank]
        assert held.gradients == plan.gradient_bytes[rank]
        assert held.optimizer_state == plan.state_bytes[rank]


# ------------------------------------------------------------------------------------ overlapped, to owners


def test_reductions_to_owners_by_hand() -> None:
    params = [ParamSpec(6), ParamSpec(5, "bfloat16"), ParamSpec(4), ParamSpec(2)]
    plan = from_lists([6, 5, 4, 2], [[0], [1, 2], [3]])

    def reductions(rank: int, bucket: list[int]) -> list[Call]:
        calls = calls_of_rank(plan, params, rank, buckets=[bucket], to_owners=True)
        return [call for call in calls if call.op != "broadcast"]

    assert reductions(0, [2, 0]) == [Call("send", 16, 1), Call("recv", 24, 1), Call("recv", 24, 2)]
    assert reductions(1, [1]) == [Call("recv", 10, 0), Call("recv", 10, 2)]
    assert reductions(2, [1]) == [Call("send", 10, 1)]


def test_interleaved_parameters_follow_the_next_reduction() -> None:
    params = [ParamSpec(n) for n in (6, 5, 4, 1)]
    plan, buckets = from_lists([6, 5, 4, 1], [[0, 3], [1, 2]]), [[3], [2], [1, 0]]
    calls = calls_of_rank(plan, params, 0, buckets=buckets, flat=True, interleaved=True)
    assert [(call.op, call.nbytes, call.peer) for call in calls] == [
        ("all_reduce", 4, None),
        ("all_reduce", 16, None),
        ("broadcast", 4, 0),
        ("all_reduce", 44, None),
        ("broadcast", 16, 1),
        ("broadcast", 24, 0),
        ("broadcast", 20, 1),
    ]
    plain = calls_of_rank(plan, params, 0, buckets=buckets, flat=True)
    assert [call[:2] for call in plain[3:]] == [("broadcast", 28), ("broadcast", 36)], "flat: one an owner"
