"""Every strategy on real ranks: calls, state and bytes on the wire of an iteration, beside their schedule."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs_hook
from torch.distributed.algorithms.model_averaging import averagers as torchs_averagers
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import HeldBytes, held_bytes, recording_all_reduce, recording_distributed, sent_bytes
from zero_ref.lab.model import GPT
from zero_ref.lab.strategies import trainable
from zero_ref.local_sgd.averagers import ModelAverager
from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.local_sgd.optimizer import PostLocalSGDOptimizer, PostLocalSGDState, post_localSGD_hook
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call, ordinary
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import equal_shares
from zero_ref.simulator.models import from_module, ready_order
from zero_ref.simulator.recipe import RECIPES, Recipe, recipe
from zero_ref.simulator.schedule import MIB, Schedule, ddp_buckets, schedule

pytestmark = pytest.mark.ranks


# ------------------------------------------------------------------------------------------------ the models


class Mixture(nn.Module):
    """A few layers of random kinds and sizes, some frozen, maybe of several dtypes. The seed says which."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        dtypes = [torch.float32] if seed % 2 else [torch.float32, torch.float64, torch.bfloat16]
        widths = [rng.randint(1, 40) for _ in range(rng.randint(2, 7))]
        self.layers = nn.ModuleList()
        for inputs, outputs in itertools.pairwise(widths):
            dtype = rng.choice(dtypes)
            self.layers.append(nn.Linear(inputs, outputs, bias=rng.random() < 0.7, dtype=dtype))
            if rng.random() < 0.3:
                self.layers.append(nn.LayerNorm(outputs, dtype=dtype))
        self.scale = nn.Parameter(torch.ones(())) if rng.random() < 0.5 else None
        for param in rng.sample(list(self.parameters()), len(list(self.parameters())) // 4):
            param.requires_grad_(False)
        self.inputs = widths[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype))
        return x.float().square().mean() * (1.0 if self.scale is None else self.scale)


class Case(NamedTuple):
    """A model, and DDP's `bucket_cap_mb` for it; None for its default."""

    make: Callable[[], nn.Module]
    cap_mb: float | None

    def loss(self, model: Any) -> torch.Tensor:
        wrapped = isinstance(model, (DistributedDataParallel, ShardedDataParallel))
        module = model.module if wrapped else model
        if isinstance(module, GPT):
            tokens = torch.arange(64).view(1, 64)
            return model(tokens, tokens)  # type: ignore[no-any-return]
        return model(torch.ones(2, module.inputs))  # type: ignore[no-any-return]

    def wrap(self, model: nn.Module) -> Any:
        return DistributedDataParallel(
            model, **({} if self.cap_mb is None else {"bucket_cap_mb": self.cap_mb})
        )


CASES = {
    "demo": Case(functools.partial(GPT, GPTConfig()), None),
    **{
        f"mixture-{seed}": Case(
            functools.partial(Mixture, seed), random.Random(seed).choice([None, 0.01, 0.002, 0.0003])
        )
        for seed in (0, 2, 3, 6, 9)  # of many kinds: see below
    },
}

# --------------------------------------------------------------------------------------------- the strategies


class Run(NamedTuple):
    """A strategy.

    Args:
        to_owners: gradients are reduced to owners only.
        way: when updates are made and sent.
        shard_group: how many ranks share the state; None for all.
        range_numel: of equal shares, elements from which on a range is full; None for the usual.
        by: how gradients go to owners; None for the usual, pairs.
    """

    strategy: str
    to_owners: bool
    way: str
    shard_group: int | None = None
    range_numel: int | None = None
    by: str | None = None

    @property
    def recipe(self) -> Recipe:
        how = recipe(self.strategy, to_owners=self.to_owners, way=self.way, shard_group=self.shard_group)
        if self.by is not None:
            return recipe(how, reduced_by=self.by)
        if self.range_numel is None:
            return how
        return recipe(how, partition=functools.partial(equal_shares, range_numel=self.range_numel))

    def foreseen(self, name: str, world_size: int) -> Schedule:
        params, buckets = foreseen_buckets(name)
        return schedule(self.recipe, params, world_size, ddp_buckets=buckets)

    @property
    def title(self) -> str:
        return "-".join(str(one) for one in self if one is not None)


@functools.cache
def foreseen_buckets(name: str) -> tuple[list[ParamSpec], list[list[int]]]:
    """Made in one process, from shapes and the order in which one backward goes."""
    case = CASES[name]
    model = case.make()
    params = from_module(model)
    order = ready_order(model, lambda: case.loss(model).backward())
    return params, ddp_buckets(params, order, None if case.cap_mb is None else int(case.cap_mb * MIB))


HOOKS = {"after_backward": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
RUNS = [
    Run("ddp", False, "plain"),
    *itertools.starmap(
        Run, itertools.product(["zero", "zero-bucket", "zero-even"], [False, True], ["plain", *HOOKS])
    ),
    *itertools.starmap(
        functools.partial(Run, by="reduce"),
        itertools.product(["zero", "zero-even"], [True], ["plain", "interleaved"]),
    ),
    *(
        Run("zero-2", True, way, shard_group, range_numel)
        for way in RECIPES["zero-2"].ways
        for shard_group, range_numel in [(None, None), (None, 1000), (2, 1000), (1, 1000)]
    ),
]


class Seen(NamedTuple):
    calls: list[Call]
    held: HeldBytes
    sent_bytes: int | None


def recorded(case: Case, run: Run) -> Seen:
    """On a rank: the second iteration, from which on DDP has its final buckets. Of the demo two more."""
    if run.recipe.without_ddp:
        return recorded_without_ddp(case, run)
    model = case.make()
    ddp = case.wrap(model)
    calls: list[Call] = []
    reduce = recording_all_reduce(calls)
    plan = RECIPES[run.strategy]
    if plan.partition is None:
        optimizer: Any = torch.optim.AdamW(model.parameters())
        ddp.register_comm_hook(None, reduce)
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            overlap_with_ddp=run.way in HOOKS,
            partition=plan.partition,
            parameters_as_bucket_view=plan.flat,
        )
        optimizer.collectives.observers.append(calls.append)
        hook = reduce_to_owners(optimizer, by=run.by) if run.to_owners else reduce
        ddp.register_comm_hook(None, HOOKS[run.way](hook, ddp, optimizer) if run.way in HOOKS else hook)

    def iterate() -> None:
        calls.clear()
        optimizer.zero_grad()
        case.loss(ddp).backward()
        optimizer.step()

    iterate()
    iterate()
    sent = sent_in(iterate) if isinstance(model, GPT) else None
    return Seen(ordinary(calls), held_bytes(model.parameters(), optimizer), sent)


def recorded_without_ddp(case: Case, run: Run) -> Seen:
    made = trainable(run.recipe, case.make())
    assert isinstance(made.model, ShardedDataParallel)
    sharded = made.model

    def iterate() -> None:
        with made.recording():
            made.optimizer.zero_grad()
            case.loss(sharded).backward()
            made.optimizer.step()

    def until_all_is_here() -> None:
        iterate()
        sharded.wait_for_parameters()

    iterate()
    iterate()
    calls = list(made.calls)
    sharded.wait_for_parameters()
    held = made.held()
    return Seen(calls, held, sent_in(until_all_is_here) if isinstance(sharded.module, GPT) else None)


ITERATIONS = 2


def sent_in(iterate: Callable[[], None], times: int = ITERATIONS) -> int | None:
    """Return the bytes that this rank sends in some iterations; barriers keep others out of the count."""
    dist.barrier()
    before = sent_bytes()
    for _ in range(times):
        iterate()
    dist.barrier()
    after = sent_bytes()
    dist.barrier()
    return None if before is None or after is None else after - before


def all_recorded() -> dict[tuple[str, Run], Seen]:
    return {(name, run): recorded(case, run) for name, case in CASES.items() for run in RUNS}


OfRanks = list[dict[tuple[str, Run], Seen]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def of_ranks(request: pytest.FixtureRequest) -> OfRanks:
    return ranks.run(all_recorded, request.param, timeout=120, backend="gloo")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.title)
def test_each_ranks_calls_and_what_it_holds_are_those_of_the_schedule(of_ranks: OfRanks, run: Run) -> None:
    for name in CASES:
        plan = run.foreseen(name, len(of_ranks))
        for rank, seen in enumerate(of_ranks):
            assert seen[name, run].calls == list(plan.calls_of(rank)), (name, rank)
            held = seen[name, run].held
            assert held.optimizer_state == plan.state_bytes[rank], (name, rank)
            assert held.parameters == plan.parameter_bytes[rank], (name, rank)
            assert held.gradients == plan.left_gradient_bytes[rank], (name, rank)
            assert run.way != "plain" or held.gradients >= plan.gradient_bytes[rank], "what it owns"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.title)
def test_bytes_on_the_wire_are_those_of_the_schedule(of_ranks: OfRanks, run: Run) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel's counters are Linux's")
    sent = sum(seen["demo", run].sent_bytes or 0 for seen in of_ranks)
    # Beside 3.2 MB of parameters the headers of Gloo's messages and three barriers are some kilobytes.
    foreseen = ITERATIONS * run.foreseen("demo", len(of_ranks)).wire_bytes("gloo")
    assert sent == pytest.approx(foreseen, rel=0.01)


def test_the_models_are_of_many_kinds() -> None:
    models = {name: case.make() for name, case in CASES.items()}
    plans = [Run("ddp", False, "plain").foreseen(name, 2) for name in CASES]
    assert len({plan.collectives for plan in plans}) > 4, "DDP's buckets: one, or many"
    kinds = [{param.dtype for param in model.parameters()} for model in models.values()]
    assert max(map(len, kinds)) == 3
    assert any(not param.requires_grad for model in models.values() for param in model.parameters())
    assert min(len(list(model.parameters())) for model in models.values()) < 4, "fewer than ranks"


# ------------------------------------------------------------------------------------------- post-local SGD

WARM_UP, PERIOD = 2, 3
STEPS = range(1, 9)
"""The steps counted: the second of the warm-up, with DDP's final buckets, and then several averages."""


def averagings(world_size: int) -> dict[str, AveragingSchedule]:
    levels = {2: 2, 4: world_size} if world_size > 2 else {2: 2}
    return {
        "flat": AveragingSchedule.periodic(PERIOD, warmup_steps=WARM_UP),
        "in pairs": AveragingSchedule.hierarchical(levels, warmup_steps=WARM_UP, gradient_group=2),
    }


def local_sgd(case: Case, averaging: AveragingSchedule) -> Seen:
    """On a rank: this package's local SGD, in STEPS."""
    model = case.make()
    ddp = case.wrap(model)
    averager = ModelAverager(averaging)
    ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters()), averager)

    def iterate(steps: range) -> None:
        for _ in steps:
            optimizer.zero_grad()
            case.loss(ddp).backward()
            optimizer.step()

    iterate(range(STEPS.start))
    with recording_distributed() as calls:
        sent = sent_in(lambda: iterate(STEPS), times=1)
    return Seen(calls, held_bytes(model.parameters(), optimizer), sent)


def torchs_local_sgd(case: Case) -> Seen:
    """On a rank: torch's own post-local SGD, the second period after the warm-up."""
    model = case.make()
    ddp = case.wrap(model)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = torchs_hook.PostLocalSGDState(None, alone, WARM_UP, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, torchs_hook.post_localSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters())
    averager = torchs_averagers.PeriodicModelAverager(PERIOD, warmup_steps=WARM_UP)

    def iterate() -> None:
        optimizer.zero_grad()
        case.loss(ddp).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())

    def period() -> None:
        for _ in range(PERIOD):
            iterate()

    for _ in range(WARM_UP):
        iterate()
    period()
    with recording_distributed() as calls:
        period()
    held = held_bytes(model.parameters(), optimizer)
    return Seen(calls, held, sent_in(period) if isinstance(model, GPT) else None)


def all_local_sgd() -> dict[tuple[str, str], Seen]:
    ours = averagings(dist.get_world_size())
    return {
        (name, averaging): local_sgd(case, ours[averaging])
        for name, case in CASES.items()
        for averaging in ours
    }


def all_torchs_local_sgd() -> dict[str, Seen]:
    return {name: torchs_local_sgd(case) for name, case in CASES.items()}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_local_sgd_makes_the_calls_of_the_schedule_from_the_warm_up_on(world_size: int) -> None:
    of_ranks = ranks.run(all_local_sgd, world_size, timeout=60, backend="gloo")
    for name, (kind, averaging) in itertools.product(CASES, averagings(world_size).items()):
        params, buckets = foreseen_buckets(name)
        plan = schedule(
            recipe("local-sgd", averaging=averaging), params, world_size, ddp_buckets=buckets, steps=STEPS
        )
        assert plan.calls
        for rank, seen in enumerate(of_ranks):
            assert seen[name, kind].calls == list(plan.calls_of(rank)), (name, kind, rank)
            assert seen[name, kind].held.optimizer_state == plan.state_bytes[rank], (name, kind)
            assert seen[name, kind].held.parameters == plan.parameter_bytes[rank], (name, kind)
        if name == "demo" and sys.platform == "linux":
            sent = sum(seen[name, kind].sent_bytes or 0 for seen in of_ranks)
            assert sent == pytest.approx(plan.wire_bytes("gloo"), rel=0.01), kind


def test_local_sgd_of_one_rank_makes_the_calls_of_the_schedule() -> None:
    name, averaging = "mixture-0", averagings(2)["flat"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        seen = local_sgd(CASES[name], averaging)
    finally:
        dist.destroy_process_group()
    params, buckets = foreseen_buckets(name)
    plan = schedule(recipe("local-sgd", averaging=averaging), params, 1, ddp_buckets=buckets, steps=STEPS)
    assert seen.calls == list(plan.calls)
    assert {call.op for call in seen.calls} == {"all_reduce"}, "of the warm-up, by DDP"


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 4])
def test_torchs_local_sgd_makes_the_same_calls_but_for_the_agreement(world_size: int) -> None:
    of_ranks = ranks.run(all_torchs_local_sgd, world_size, timeout=60, backend="gloo")
    for name in CASES:
        params, _ = foreseen_buckets(name)
        plan = schedule(recipe("local-sgd", averaging=AveragingSchedule.periodic(PERIOD)), params, world_size)
        without_agreement = [call for call in plan.calls if call != Call("all_gather", 32)]
        for rank, seen in enumerate(of_ranks):
            assert seen[name].calls == without_agreement, name
            assert seen[name].held.optimizer_state == plan.state_bytes[rank], name
        if name == "demo" and sys.platform == "linux":
            sent = sum(seen["demo"].sent_bytes or 0 for seen in of_ranks)
            assert sent == pytest.approx(ITERATIONS * plan.wire_bytes("gloo"), rel=0.01)
