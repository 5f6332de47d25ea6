"""Sums of gradients under all options of ShardedDataParallel together, on integers: they are exact."""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from library.training import in_groups, owned_gradients
from torch import nn, optim

from zero_ref import ShardedDataParallel
from zero_ref.backward.gradient_buckets import GradientBucket, Phases, average_into
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.gradients import SMALL_NUMEL
from zero_ref.plan.rules import equal_shares
from zero_ref.shard.buckets import flat_like

LARGE = SMALL_NUMEL + 8  # such a gradient is sent from where autograd has put it


class Case(NamedTuple):
    """The options that a run combines. `zeroing` is the call that resets gradients before each update."""

    reduce_dtype: torch.dtype | None
    dtype: torch.dtype
    accumulation: str
    world_size: int
    replicas: int
    native: bool
    zeroing: str
    partition: Any
    flat: bool
    bucket: int
    shown: str
    freezes: bool


CROSSED: dict[str, list[Any]] = {
    "reduce_dtype": [None, torch.float32, torch.bfloat16, torch.float16, torch.float64],
    "dtype": [torch.float32, torch.bfloat16],
    "accumulation": ["none", "in the shard", "no_sync", "both"],
}
DRAWN: dict[str, list[Any]] = {
    "world_size": [1, 2, 3, 4],
    "replicas": [1, 1, 2],
    "native": [False, True],
    "zeroing": ["optimizer", "optimizer to zeros", "model", "wrapper", "never"],
    "partition": ["sorted_greedy", "even", "equal_shares", partial(equal_shares, range_numel=LARGE)],
    "flat": [False, True],
    "bucket": [0, 100, 10**6],
    "shown": ["", "scaled", "may_change"],
    "freezes": [False, True],
}


class Batches:
    """Integers by which a rank multiplies each parameter; None for one that it does not use."""

    def __init__(self, case: Case, params: list[nn.Parameter]) -> None:
        self.params, self.ranks = params, case.world_size * case.replicas

    def of(self, rank: int, batch: int) -> list[torch.Tensor | None]:
        used = random.Random(100 * batch + rank)
        numbers = torch.Generator().manual_seed(100 * batch + rank)
        return [
            self.ranks * torch.randint(-1, 2, param.shape, generator=numbers).to(param.dtype)
            if number and used.random() < 0.8
            else None
            for number, param in enumerate(self.params)
        ]

    def mean(self, batch: int) -> list[torch.Tensor]:
        of_ranks = zip(*(self.of(rank, batch) for rank in range(self.ranks)), strict=True)
        return [
            sum((factor for factor in factors if factor is not None), torch.zeros_like(param)) / self.ranks
            for param, factors in zip(self.params, of_ranks, strict=True)
        ]


class Scaled(nn.Module):
    """The sum of all parameters, each times some factors: these are the gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [(3,), (5,), (LARGE,), (64,), (2, LARGE), (9, 6), (1,)]
        self.params = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
        self.params.append(torch.zeros(6, 10, dtype=dtype).t())
        self.params.append(torch.zeros(70, dtype=torch.float32))  # beside those of another dtype

    def forward(self, factors: list[torch.Tensor | None]) -> torch.Tensor:
        of_params = zip(self.params, factors, strict=True)
        return sum((p * f).sum().float() for p, f in of_params if f is not None)  # type: ignore[return-value]


def sums_are_exact(case: Case, comm: Any, others: Any, group: int) -> None:
    if case.native:
        comm.goes_pairwise = lambda device: False
    model = Scaled(case.dtype)
    params: list[nn.Parameter] = list(model.params)
    zero = ZeroRedundancyOptimizer(params, optim.SGD, comm, case.flat, partition=case.partition, lr=1.0)
    sharded = ShardedDataParallel(
        model,
        zero,
        reduce_buffer_size=case.bucket,
        reduce_dtype=case.reduce_dtype,
        scaled=case.shown == "scaled",
        may_change=case.shown == "may_change",
        replicas=others if case.replicas > 1 else None,
    )
    reset = {
        "optimizer": zero.zero_grad,
        "optimizer to zeros": partial(zero.zero_grad, set_to_none=False),
        "model": model.zero_grad,
        "wrapper": sharded.zero_grad,
        "never": lambda: None,
    }[case.zeroing]
    under_no_sync = {"none": [False], "in the shard": [False] * 3, "no_sync": [True, True, False]}
    batches, values = Batches(case, params), [torch.zeros_like(param) for param in params]
    sums = [torch.zeros_like(param) for param in params]
    for step in range(3):
        reset()
        if case.zeroing != "never":
            sums = [torch.zeros_like(param) for param in params]
        pattern = under_no_sync.get(case.accumulation, [True, False, False])
        if case.zeroing == "never" and step:  # under no_sync nothing may be added to averages
            pattern = [False] * len(pattern)
        local: list[list[torch.Tensor]] = []
        for number, without in enumerate(pattern):
            # Frozen between two backwards, whose buckets then differ.
            frozen = case.freezes and not any(pattern) and step == 1 and number == len(pattern) - 1
            for param in params[2:5]:
                param.requires_grad_(not frozen)
            batch = 10 * step + number
            with sharded.no_sync() if without else contextlib.nullcontext():
                sharded(batches.of(group * comm.world_size + comm.rank, batch)).backward()
            local.append(
                [mean * param.requires_grad for mean, param in zip(batches.mean(batch), params, strict=True)]
            )
            if without:
                continue
            for means in local:
                sums = [total + mean for total, mean in zip(sums, means, strict=True)]
            local = []
            for piece, found in owned_gradients(zero).items():
                if params[piece.param].requires_grad:
                    right = flat_like(sums[piece.param], params[piece.param])[piece.start : piece.stop]
                    assert torch.equal(found, right), (case, step, number, piece)
        zero.step()
        for number, (value, total) in enumerate(zip(values, sums, strict=True)):
            if params[number].requires_grad:
                value -= total
        for number, (param, value) in enumerate(zip(params, values, strict=True)):
            assert torch.equal(param, value), (case, step, number)
        for param in params:
            param.requires_grad_(True)


@pytest.mark.parametrize("accumulation", CROSSED["accumulation"])
def test_sums_are_exact_under_all_options_together(accumulation: str) -> None:
    at = CROSSED["accumulation"].index(accumulation)
    for number, reduce_dtype in enumerate(CROSSED["reduce_dtype"]):
        dtype = CROSSED["dtype"][(number + at) % 2]
        rng = random.Random(f"{number} {accumulation}")
        drawn = {name: rng.choice(values) for name, values in DRAWN.items()}
        case = Case(reduce_dtype, dtype, accumulation, **drawn)
        in_groups(partial(sums_are_exact, case), case.world_size, case.replicas)


@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
def test_a_gradient_that_is_sent_never_lies_where_averages_are(
    partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reset to zeros, a gradient lies in the memory of the last average, to which autograd then adds."""
    reduce, goes_on = GradientBucket.reduce, []

    def watched(bucket: GradientBucket) -> Phases:
        sent = [one.untyped_storage() for one in bucket.tensors if one is not None]
        goes_on.append(bucket.own.gradient is not None)
        yield from reduce(bucket)
        assert bucket.own.gradient is not None
        memory = bucket.own.gradient.untyped_storage().data_ptr()
        assert not memory or memory not in [one.data_ptr() for one in sent]

    monkeypatch.setattr(GradientBucket, "reduce", watched)
    usual = Case(None, torch.float32, "none", 3, 1, False, "optimizer", partition, False, 100, "", False)
    ways = itertools.product(["optimizer to zeros", "never"], ["in the shard", "both"], [False, True])
    for zeroing, accumulation, freezes in ways:
        case = usual._replace(zeroing=zeroing, accumulation=accumulation, freezes=freezes)
        in_groups(partial(sums_are_exact, case), case.world_size, case.replicas)
    assert {*goes_on} == {True, False}, "with averages of earlier backwards, and without"


def test_an_average_of_large_float16_numbers_is_finite() -> None:
    """Their sum is not: each is divided first."""
    parts = [torch.full((3,), 60_000.0, dtype=torch.float16) for _ in range(4)]
    average_into(result := torch.empty(3, dtype=torch.float16), parts)
    assert result.tolist() == [60_000.0] * 3


def test_a_gradient_set_to_none_between_two_backwards_begins_anew() -> None:
    """By the user, of one parameter: the others go on to add up in the same memory."""

    def on_rank(comm: Collectives) -> list[torch.Tensor | None]:
        model = Scaled(torch.float32)
        params = list(model.params)
        zero = ZeroRedundancyOptimizer(params, optim.SGD, comm, lr=1.0)
        sharded = ShardedDataParallel(model, zero)
        for batch in range(2):
            params[3].grad = None
            sharded([torch.full_like(param, comm.rank + 10.0 * batch) for param in params]).backward()
        return [param.grad for param in params]

    first, second = virtual.run(on_rank, 2)
    for number, both in enumerate(zip(first, second, strict=True)):
        (found,) = [grad for grad in both if grad is not None]
        assert found.eq(10.5 if number == 3 else 11.0).all()
