"""Updates made in backward, on real ranks: after each iteration the parameters of DDP with torch's optimizer.

A `Job` runs once with the plain optimizer and once with ours and a hook, each rank on its own data, and every
parameter must be equal at every step. Where gradients are reduced to their owners, more than two of them are
summed in another order than by Gloo's all-reduce; the plain run then sums in that order too, and is equal to
the last bit again (tests/backward/test_reduction.py holds the two orders against each other).
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import re
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import (
    NEVER_S,
    OnMasters,
    Snapshot,
    Tangle,
    all_parameters,
    assert_same,
    caught,
    filled,
    loss_on_own_data,
    snapshot,
    sum_in_rank_order,
)
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.clip.grad_norm import clip_grad_norm_
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording_all_reduce
from zero_ref.lab.ranks import RankError, run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import Partition
from zero_ref.plan.rules import bucket_round_robin, bucket_threshold, from_lists
from zero_ref.shard.groups import specs_of
from zero_ref.simulator.schedule import calls_of_rank

pytestmark = pytest.mark.ranks


# ------------------------------------------------------------------------------------------------- the jobs

SMALL_BUCKETS = {"bucket_cap_mb": 0.0003}  # a Tangle then has four
STEP, INTERLEAVED = hook_with_zero_step, hook_with_zero_step_interleaved
OWNERS, SCALED, MAY_CHANGE = "reduce_to_owners", "reduce_to_owners, scaled", "reduce_to_owners, may_change"
BY_REDUCE, SCALED_BY_REDUCE = "reduce_to_owners, by reduce", "reduce_to_owners, scaled, by reduce"
TO_OWNERS = {
    OWNERS: reduce_to_owners,
    # A sum of two is the same in any order: on two ranks also these train as `sum_in_rank_order`, bit for
    # bit.
    BY_REDUCE: partial(reduce_to_owners, by="reduce"),
    SCALED_BY_REDUCE: partial(reduce_to_owners, scaled=True, by="reduce"),
    SCALED: partial(reduce_to_owners, scaled=True),
    MAY_CHANGE: partial(reduce_to_owners, may_change=True),
}

Loop = Callable[["Job", Any, Any], Iterator[None]]


def as_usual(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):
        optimizer.zero_grad()
        job.loss(ddp, dist.get_rank(job.group), step).backward()
        optimizer.step()
        yield


@dataclass
class Job:
    """A training, and its way. `loop` is the user's program; it yields after each update.

    Args:
        way: makes the hook that steps; None if gradients only go to their owners.
        reduction: the hook that reduces, or a key of TO_OWNERS.
        zero: options of ZeroRedundancyOptimizer.
        state: of the hooks, when they are registered.
        moves_at_once: the first update moves all parameters that are trained in the end, but `never_used`.
    """

    way: Any = STEP
    reduction: Any = allreduce_hook
    shard_buckets: bool | None = None
    optimizer_class: Any = optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    groups: Callable[[Any], Any] = all_parameters
    make_model: Callable[[], nn.Module] = Tangle
    loss: Callable[[Any, int, int], torch.Tensor] = loss_on_own_data
    loop: Loop = as_usual
    steps: int = 4
    ddp: dict[str, Any] = field(default_factory=lambda: dict(SMALL_BUCKETS))
    zero: dict[str, Any] = field(default_factory=dict)
    state: Callable[[], Any] = lambda: None
    group: Any = None
    moves_at_once: bool = True
    never_used: tuple[str, ...] = ()
    unsharded_class: Any = None  # of the plain run, where it is another one

    def wrap(self, model: nn.Module, optimizer: Any, seen: list[list[int]] | None = None) -> Any:
        """DDP on the model, with the hook for this optimizer. The plain run notes DDP's buckets in `seen`."""
        ddp: Any = DDP(model, process_group=self.group, **self.ddp)
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            to_owners = TO_OWNERS.get(self.reduction)
            hook = to_owners(optimizer) if to_owners else self.reduction
            if self.way is not None:
                hook = self.way(hook, ddp, optimizer, self.shard_buckets)
        else:
            hook = sum_in_rank_order if self.reduction in TO_OWNERS else self.reduction
            if seen is not None:
                hook = noting_buckets(hook, optimizer, seen)
        state = self.state()
        if state is None and hook in (allreduce_hook, sum_in_rank_order):
            state = self.group
        ddp.register_comm_hook(state, hook)
        return ddp

    def run(self, sharded: bool, seen: list[list[int]] | None = None) -> tuple[list[Snapshot], Any]:
        """The parameters after each update, and the optimizer."""
        model = self.make_model()
        options = copy.deepcopy(self.options)
        if sharded:
            optimizer: Any = ZeroRedundancyOptimizer(
                self.groups(model), self.optimizer_class, self.group, overlap_with_ddp=self.way is not None,
                **self.zero, **options,
            )  # fmt: skip
        else:
            optimizer = (self.unsharded_class or self.optimizer_class)(self.groups(model), **options)
        before = snapshot(model)
        snapshots = [snapshot(model) for _ in self.loop(self, self.wrap(model, optimizer, seen), optimizer)]
        after = snapshots[0 if self.moves_at_once else -1]
        for (name, param), old, new in zip(model.named_parameters(), before, after, strict=True):
            moves = param.requires_grad and param.numel() and name not in self.never_used
            assert torch.equal(old, new) != moves, name
        return snapshots, optimizer

    def __str__(self) -> str:
        way = getattr(self.way, "__name__", self.way)
        reduction = getattr(self.reduction, "__name__", self.reduction)
        return (
            f"{way}, {reduction}, shard_buckets={self.shard_buckets}, {self.optimizer_class.__name__} "
            f"{self.options}, {self.loop.__name__}, {self.make_model}, {self.ddp}, {self.zero}"
        )


def noting_buckets(hook: Any, optimizer: Any, seen: list[list[int]]) -> Any:
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def note(state, bucket):  # type: ignore[no-untyped-def]
        if bucket.index() == 0:
            seen.clear()
        seen.append([next(i for i, p in enumerate(params) if p is param) for param in bucket.parameters()])
        return hook(state, bucket)

    return note


def assert_ranks_hold_the_same(snapshots: list[Snapshot], group: Any = None) -> None:
    flat = torch.cat([param.reshape(-1).double() for of_step in snapshots for param in of_step])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, flat, group=group)
    assert all(torch.equal(flat, other) for other in others), "ranks differ"


def assert_equals_plain(*jobs: Job) -> int:
    """On each rank. One plain run serves all jobs that differ only in how ours are run."""
    plain: dict[str, list[Snapshot]] = {}
    for job in jobs:
        unsharded = replace(job, way=None, shard_buckets=None, zero={})
        if repr(unsharded) not in plain:
            plain[repr(unsharded)] = unsharded.run(sharded=False)[0]
        ours = job.run(sharded=True)[0]
        assert_same(ours, plain[repr(unsharded)], str(job))
        assert_ranks_hold_the_same(ours, job.group)
    return len(jobs)


BOTH_WAYS = [STEP, INTERLEAVED]
BOTH_REDUCTIONS = [allreduce_hook, OWNERS]
WAYS = list(itertools.product(BOTH_WAYS, BOTH_REDUCTIONS))


def each_way(**job: Any) -> list[Job]:
    """Both hooks with both reductions."""
    return [Job(way=way, reduction=reduction, **job) for way, reduction in WAYS]


# --------------------------------------------------------------------- every way, from the first iteration


def two_groups(model: nn.Module) -> Any:
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.03}]


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {"lr": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]


def expected_partition(job: Job, buckets: list[list[int]]) -> Partition:
    """torch's rule on DDP's buckets; what is frozen, and so in no bucket, stays with its owner."""
    model = job.make_model()
    before = ZeroRedundancyOptimizer(
        job.groups(model), job.optimizer_class, **job.zero, **job.options
    ).partition
    members = sorted(number for bucket in buckets for number in bucket)
    rule = bucket_threshold if job.shard_buckets else bucket_round_robin
    of_members = rule(
        [before.numels[number] for number in members], before.world_size,
        buckets=[[members.index(number) for number in bucket] for bucket in buckets],
    )  # fmt: skip
    owned = [[members[piece.param] for piece in slices] for slices in of_members.slices_of_rank]
    for number in set(range(len(before.numels))) - set(members):
        owned[before.pieces_of_param[number][0][1]].append(number)
    return from_lists(before.numels, owned)


def every_way() -> list[str]:
    """Six iterations each. Returns what was compared."""
    compared = []
    for (optimizer_class, options), reduction in itertools.product(OPTIMIZERS, BOTH_REDUCTIONS):
        job = Job(None, reduction, None, optimizer_class, options, two_groups, steps=6)
        buckets: list[list[int]] = []
        plain, _ = job.run(sharded=False, seen=buckets)
        assert len(buckets) == 4
        for way, shard_buckets in itertools.product(BOTH_WAYS, (None, False, True)):
            job = replace(job, way=way, shard_buckets=shard_buckets)
            ours, optimizer = job.run(sharded=True)
            label = f"{optimizer_class.__name__}, {reduction}, {way.__name__}, {shard_buckets}"
            assert_same(ours, plain, label)
            assert_ranks_hold_the_same(ours)
            if shard_buckets is not None:
                assert optimizer.partition == expected_partition(job, buckets), label
            compared.append(label)
    return compared


def test_each_of_six_iterations_equals_ddp_and_the_plain_optimizer() -> None:
    compared = run(every_way, 2, timeout=60)
    assert [len(set(of_rank)) for of_rank in compared] == [24] * 2


# ------------------------------------------------------------------- partitions, views, and DDP's own modes


PARTITIONS: list[Any] = [("sorted_greedy", False), ("even", True)]
DDP_MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


def every_mode() -> int:
    return assert_equals_plain(
        *(
            job
            for mode, (partition, as_view) in itertools.product(DDP_MODES, PARTITIONS)
            for job in each_way(
                ddp=SMALL_BUCKETS | mode,
                zero={"partition": partition, "parameters_as_bucket_view": as_view},
                steps=3,
            )
        )
    )


def test_partitions_bucket_views_and_the_modes_of_ddp() -> None:
    assert run(every_mode, 2, timeout=60) == [len(DDP_MODES) * len(PARTITIONS) * 4] * 2


def shard_buckets_in_other_modes() -> None:
    """DDP rebuilds its buckets after the first or the second iteration, or never."""
    for mode in DDP_MODES:
        plain: list[Snapshot] = []
        for job in each_way(
            ddp=SMALL_BUCKETS | mode, shard_buckets=True, steps=5, zero={"partition": "even"}
        ):
            buckets: list[list[int]] = []
            if job.way is STEP:
                plain, _ = job.run(sharded=False, seen=buckets)
                last = buckets
            ours, optimizer = job.run(sharded=True)
            assert_same(ours, plain, str(job))
            assert optimizer.partition.is_whole
            assert optimizer.partition == expected_partition(job, last)


def test_shard_buckets_in_the_modes_of_ddp() -> None:
    run(shard_buckets_in_other_modes, 2, timeout=60)


class Branches(nn.Module):
    """A trunk, and branches of which each forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.trunk = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for param in self.parameters():
            nn.init.normal_(param, std=0.3, generator=generator)

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return x + sum((self.branches[branch](x) for branch in used), start=torch.zeros(()))


def inputs_of(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of_branches(ddp: Any, rank: int, step: int) -> torch.Tensor:
    """In the second step nobody uses branches 0 and 1, in the third only one rank uses each."""
    used = [(0, 1, 2), (2,), (rank % 2,), (0, 2), (1,) if rank == 0 else ()][step % 5]
    return ddp(inputs_of(rank, step, 4, 8), used).square().mean()


def loss_of_the_same_branches(ddp: Any, rank: int, step: int) -> torch.Tensor:
    return ddp(inputs_of(rank, step, 4, 8), (0, 2)).square().mean()


def with_momentum(**job: Any) -> list[Job]:
    """Adam moves a parameter with a gradient of zero, and one with none stays; so does momentum."""
    momentum = {"lr": 0.1, "momentum": 0.9}
    return [*each_way(**job), *each_way(optimizer_class=optim.SGD, options=momentum, **job)]


def unused_parameters() -> int:
    modes = [{"find_unused_parameters": True} | view for view in ({}, {"gradient_as_bucket_view": True})]
    return assert_equals_plain(
        *(
            job
            for mode, partition in zip(modes, ["sorted_greedy", "even"], strict=True)
            for job in with_momentum(
                make_model=Branches,
                loss=loss_of_branches,
                ddp=SMALL_BUCKETS | mode,
                zero={"partition": partition},
                steps=7,
            )
        ),
        *(
            job
            for job in with_momentum(
                make_model=Branches,
                loss=loss_of_the_same_branches,
                ddp=SMALL_BUCKETS | {"static_graph": True},
                never_used=("branches.1.weight", "branches.1.bias"),
            )
        ),
    )


def test_parameters_that_no_rank_or_one_rank_uses() -> None:
    run(unused_parameters, 2, timeout=60)


# ---------------------------------------------------------------------------------------- what users do


def calls_step(job: Job, optimizer: Any) -> bool:
    return job.way is None or not isinstance(optimizer, ZeroRedundancyOptimizer)


def iterate(job: Job, ddp: Any, optimizer: Any, steps: range, group: Any = None) -> Iterator[None]:
    for step in steps:
        optimizer.zero_grad()
        job.loss(ddp, dist.get_rank(group), step).backward()
        optimizer.step()
        yield


def step_left_out(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    """The update is made all the same, and a scheduler has no reason to warn."""
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    for step in range(job.steps):
        (optimizer if step % 2 else ddp).zero_grad()
        job.loss(ddp, dist.get_rank(), step).backward()
        if calls_step(job, optimizer):
            optimizer.step()
        scheduler.step()
        yield
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != 0.01


def gradients_zeroed_in_place(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):
        job.loss(ddp, dist.get_rank(), step).backward()
        if calls_step(job, optimizer):
            optimizer.step()
        ddp.zero_grad(set_to_none=False)
        yield


def step_called_again(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    """The second makes another update from the same gradients."""
    for _ in as_usual(job, ddp, optimizer):
        yield
        optimizer.step()
        yield


def gradients_never_zeroed(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):
        job.loss(ddp, dist.get_rank(), step).backward()
        optimizer.step()
        yield


def accumulating(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):
        optimizer.zero_grad()
        with ddp.no_sync():
            for half in (0.25, 0.75):
                (half * job.loss(ddp, dist.get_rank(), 2 * step)).backward()
        job.loss(ddp, dist.get_rank(), 2 * step + 1).backward()
        optimizer.step()
        yield


def with_a_closure(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = job.loss(ddp, dist.get_rank(), step)
            loss.backward()
            return loss.detach()

        assert optimizer.step(closure) > 0
        yield


def scaler_that_is_off(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(job.steps):
        optimizer.zero_grad()
        scaler.scale(job.loss(ddp, dist.get_rank(), step)).backward()
        scaler.step(optimizer)
        scaler.update()
        yield


def freezing_and_thawing(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    """DDP must be constructed anew; a gradient from before may be left over."""
    model = ddp.module
    model.up.requires_grad_(False)
    yield from iterate(job, job.wrap(model, optimizer), optimizer, range(2))
    model.up.requires_grad_(True)
    model.shift.requires_grad_(True)
    model.conv.requires_grad_(False)
    yield from iterate(job, job.wrap(model, optimizer), optimizer, range(2, 5))
    model.conv.requires_grad_(True)
    yield from iterate(job, job.wrap(model, optimizer), optimizer, range(5, 8))


def adding_a_group(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    model = ddp.module
    yield from iterate(job, ddp, optimizer, range(2))
    model.norm.requires_grad_(True)
    optimizer.add_param_group({"params": model.norm.parameters(), "lr": 0.2})
    yield from iterate(job, job.wrap(model, optimizer), optimizer, range(2, 5))


def without_norm() -> nn.Module:
    model = Tangle()
    model.norm.requires_grad_(False)
    return model


def all_but_norm(model: nn.Module) -> Any:
    return [param for name, param in model.named_parameters() if "norm" not in name]


def what_users_do() -> int:
    loops: list[Loop] = [
        step_left_out,
        gradients_zeroed_in_place,
        with_a_closure,
        accumulating,
        scaler_that_is_off,
    ]
    modes = [{}, {"gradient_as_bucket_view": True}]
    return assert_equals_plain(
        *(
            job
            for number, loop in enumerate(loops)
            for job in each_way(loop=loop, ddp=SMALL_BUCKETS | modes[number % 2], zero={"partition": "even"})
        ),
        *(
            Job(way, loop=loop, ddp=SMALL_BUCKETS | mode)
            for way, mode in itertools.product(BOTH_WAYS, modes)
            for loop in (step_called_again, gradients_never_zeroed)
        ),
        *(
            job
            for job in [
                *each_way(
                    loop=freezing_and_thawing,
                    zero={"partition": "even", "parameters_as_bucket_view": True},
                    moves_at_once=False,
                ),
                *each_way(
                    loop=adding_a_group,
                    moves_at_once=False,
                    make_model=without_norm,
                    groups=all_but_norm,
                ),
            ]
        ),
        *each_way(loop=accumulating, ddp=SMALL_BUCKETS | {"find_unused_parameters": True}),
        *each_way(optimizer_class=optim.AdamW, options={"fused": True}, zero={"partition": "even"}),
    )


def test_loops_that_users_write() -> None:
    run(what_users_do, 2, timeout=60)


IN_16: list[torch.dtype] = [torch.bfloat16] * 3 + [torch.float16]


def masters_of_16_bits() -> int:
    """With the update after backward and within, gradients everywhere and on owners only."""
    return assert_equals_plain(
        *(
            Job(
                way,
                reduction,
                None,
                make_model=partial(Matrices, *IN_16),
                loss=loss_of_stack,
                ddp={"bucket_cap_mb": 0.0002},
                steps=3,
                zero={
                    "partition": partition,
                    "parameters_as_bucket_view": flat,
                    "master_dtype": torch.float32,
                },
                unsharded_class=partial(OnMasters, optimizer_class=optim.AdamW),
            )
            for partition, flat in (("sorted_greedy", True), ("even", False))
            for way, reduction in itertools.product([None, *BOTH_WAYS], BOTH_REDUCTIONS)
        )
    )


def test_masters_equal_a_loop_that_keeps_them_whole() -> None:
    assert run(masters_of_16_bits, 2, timeout=120) == [2 * 6] * 2


def clipped(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(job.steps):
        optimizer.zero_grad()
        job.loss(ddp, dist.get_rank(), step).backward()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            total = clip_grad_norm_(optimizer, 0.01)
        else:
            total = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        assert total > 0.01
        optimizer.step()
        yield


# ------------------------------------------------------------------------------------------- kinds of models


class Stack(nn.Module):
    """Linear layers that a subclass runs in its own way. Inputs are (4, 8)."""

    def __init__(self, *dtypes: torch.dtype, norm: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes or [torch.float32] * 4)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        for param in self.layers.parameters():
            with torch.no_grad():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.norm(x)


class Matrices(Stack):
    """Weights without biases, which Muon takes, too. Those of each dtype can be cut for 2 and for 4 ranks."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        sizes = itertools.pairwise([8, 24, 24, 16, 8])
        self.layers = nn.ModuleList(
            nn.Linear(*pair, bias=False, dtype=dtype) for pair, dtype in zip(sizes, dtypes, strict=True)
        )
        filled(self)


class Checkpointed(Stack):
    """Forgets what it computed on the way, and computes it again in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for pair in (self.layers[1:3], self.layers[3:]):
            x = checkpoint(nn.Sequential(*pair, nn.Tanh()), x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class UsedTwice(Stack):
    """A layer's gradient is complete, and another still needs the layer's values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        return fourth(third(second(F.linear(first(x), fourth.weight.detach()))))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 3, sparse=True) for _ in range(3))
        for table in self.tables:
            nn.init.constant_(table.weight, 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(tokens) for table in self.tables], dim=-1)


def loss_of_stack(ddp: Any, rank: int, step: int) -> torch.Tensor:
    target = inputs_of(rank, step + 500, 4, 8)
    return (ddp(inputs_of(rank, step, 4, 8)).float() - target).square().mean()


def loss_of_sparse(ddp: Any, rank: int, step: int) -> torch.Tensor:
    tokens = torch.arange(5) if rank == 0 else torch.tensor([[step % 5, 4]])
    return (ddp(tokens) * (1.0 + rank)).square().sum()


MIXED = [torch.bfloat16, torch.float32, torch.float64, torch.float32, torch.bfloat16]


def kinds_of_models() -> int:
    def stack(make_model: Any, **job: Any) -> list[Job]:
        ddp = {"bucket_cap_mb": 0.0002}
        return each_way(make_model=make_model, loss=loss_of_stack, ddp=ddp, **job)

    return assert_equals_plain(
        *stack(lambda: Stack(norm=True)),
        *stack(lambda: Stack(*MIXED), zero={"partition": "even", "parameters_as_bucket_view": True}),
        *stack(lambda: Stack(*MIXED), shard_buckets=True, steps=5),
        *stack(Checkpointed),
        *stack(CheckpointedReentrant),
        *(replace(job, way=STEP) for job in stack(UsedTwice)),
        *(
            Job(
                way,
                make_model=Sparse,
                loss=loss_of_sparse,
                optimizer_class=optimizer_class,
                options={"lr": 0.1},
            )
            for way in BOTH_WAYS
            for optimizer_class in (optim.SGD, optim.SparseAdam)
        ),
    )


def test_models_of_several_dtypes_with_buffers_checkpointed_and_sparse() -> None:
    run(kinds_of_models, 2)


class Wide(nn.Module):
    """torch's compiler wants DDP buckets of at least 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Linear(*pair) for pair in itertools.pairwise([8, 400, 400, 400, 400, 8])
        )
        for param in self.parameters():
            nn.init.normal_(param, std=0.05, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled_model() -> int:
    job = Job(
        INTERLEAVED, OWNERS, make_model=Wide, loss=loss_of_stack, ddp={"bucket_cap_mb": 1}, loop=compiling
    )
    assert_equals_plain(job)
    return torch._dynamo.utils.counters["aot_autograd"]["ok"]


def compiling(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    ddp.module.compile(backend="aot_eager")
    return as_usual(job, ddp, optimizer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about itself
def test_a_compiled_model() -> None:
    assert min(run(compiled_model, 2)) > 1, "buckets are compiled one by one"


# ---------------------------------------------------------------------------------------- kinds of hooks


def own_hook(calls, bucket):  # type: ignore[no-untyped-def]
    """A user's: it has a state, and its future holds a tensor of its own."""
    calls.append(bucket.index())
    world_size = dist.get_world_size()
    future = dist.all_reduce(bucket.buffer().clone(), async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0] / world_size)


def kinds_of_hooks() -> int:
    wrapped = default_hooks.fp16_compress_wrapper(allreduce_hook)
    return assert_equals_plain(
        *(Job(way, default_hooks.fp16_compress_hook) for way in BOTH_WAYS),
        *(Job(way, wrapped) for way in BOTH_WAYS),
        *(Job(way, own_hook, state=list) for way in BOTH_WAYS),
    )


def test_compressing_hooks_and_a_users_own() -> None:
    run(kinds_of_hooks, 2)


def half_precision_to_owners() -> None:
    def halved(way: Any, hook: Any, ddp: Any, zero: Any, _: Any) -> Any:
        return way(default_hooks.fp16_compress_wrapper(hook), ddp, zero)

    for way, mode in itertools.product(BOTH_WAYS, [{}, {"find_unused_parameters": True}]):
        job = Job(way, default_hooks.fp16_compress_wrapper(allreduce_hook), ddp=SMALL_BUCKETS | mode)
        plain, _ = job.run(sharded=False)
        for reduction in (OWNERS, BY_REDUCE):
            ours, optimizer = replace(job, way=partial(halved, way), reduction=reduction).run(sharded=True)
            assert_same(ours, plain, f"{job}, {reduction}")
            assert all(param.grad is None for param in optimizer.built.params)


def test_gradients_in_half_precision_to_their_owners() -> None:
    run(half_precision_to_owners, 2)


# -------------------------------------------------------------------------- kinds of optimizers and groups


class Counting(optim.SGD):
    """Slower with every step, which it counts in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


def steps_counted_in_groups() -> list[int]:
    counts = []
    for job in each_way(optimizer_class=Counting, options={"lr": 0.1}, groups=two_groups):
        (ours, optimizer), (plain, reference) = job.run(sharded=True), job.run(sharded=False)
        assert_same(ours, plain, str(job))
        for group, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            assert (group["steps"], group["lr"]) == (other["steps"], other["lr"])
            counts.append(group["steps"])
    return counts


def test_an_optimizer_that_counts_its_steps_in_its_groups() -> None:
    assert run(steps_counted_in_groups, 2) == [[4] * 8] * 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def loss_of_small(ddp: Any, rank: int, step: int) -> torch.Tensor:
    return ddp(inputs_of(rank, step, 4, 2)).square().mean()


def ranks_that_own_nothing() -> list[int]:
    assert_equals_plain(
        *each_way(make_model=Small, loss=loss_of_small),
        *each_way(make_model=Small, loss=loss_of_small, zero={"partition": "even"}),
        *each_way(make_model=Small, loss=loss_of_small, shard_buckets=True, steps=5),
        *each_way(make_model=Small, loss=loss_of_small, ddp={"find_unused_parameters": True}),
    )
    jobs = each_way(make_model=Small, loss=loss_of_small, optimizer_class=Counting, options={"lr": 0.1})
    return [job.run(sharded=True)[1].param_groups[0]["steps"] for job in jobs]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_single_rank_and_ranks_that_own_nothing(world_size: int) -> None:
    assert run(ranks_that_own_nothing, world_size) == [[4] * 4] * world_size


def on_a_subgroup() -> str:
    odd = dist.new_group([1, 3])
    if dist.get_rank() % 2 == 0:
        return "not a member"
    assert_equals_plain(
        *each_way(group=odd),
        *each_way(group=odd, shard_buckets=True, steps=5, zero={"partition": "even"}),
        *each_way(group=odd, ddp={"find_unused_parameters": True}),
    )
    return "trained"


def test_a_subgroup_whose_ranks_are_not_0_and_1() -> None:
    assert run(on_a_subgroup, 4) == ["not a member", "trained", "not a member", "trained"]


# ---------------------------------------------------------------------------------- calls, and what is kept


def made(
    way: Any = STEP,
    reduction: Any = allreduce_hook,
    model: nn.Module | None = None,
    ddp: dict[str, Any] | None = None,
    group: Any = None,
    **zero: Any,
) -> tuple[Any, Any]:
    """A DDP model and the optimizer that steps it in backward."""
    model = model or Tangle()
    zero = {"optimizer_class": optim.SGD, "lr": 0.1, **zero}
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), process_group=group, overlap_with_ddp=way is not None, **zero
    )
    job = Job(way, reduction, group=group, ddp=SMALL_BUCKETS | (ddp or {}))
    return job.wrap(model, optimizer), optimizer


def backward(ddp: Any, step: int = 0, scale: float = 1.0) -> None:
    (scale * loss_on_own_data(ddp, dist.get_rank(), step)).backward()


def calls_as_planned() -> list[list[Call]]:
    """The calls of a third iteration in each way: as planned for this rank."""
    recorded = []
    for way, reduction, late, (partition, as_view) in itertools.product(
        BOTH_WAYS, [*BOTH_REDUCTIONS, BY_REDUCE], [False, True], PARTITIONS
    ):
        calls: list[Call] = []
        buckets: list[list[int]] = []

        def noting(hook: Any, ddp: Any, zero: Any, _: Any, way: Any = way, buckets: Any = buckets) -> Any:
            return noting_buckets(way(hook, ddp, zero), zero, buckets)

        ddp, zero = made(
            noting,
            recording_all_reduce(calls) if reduction is allreduce_hook else reduction,
            ddp={"find_unused_parameters": late},
            parameters_as_bucket_view=as_view,
            partition=partition,
        )
        zero.collectives.observers.append(calls.append)
        for step in range(3):
            calls.clear()
            zero.zero_grad()
            backward(ddp, step)
            zero.step()
        planned = calls_of_rank(
            zero.partition,
            specs_of(zero.param_groups),
            zero.rank,
            buckets=buckets,
            flat=as_view,
            to_owners=reduction in TO_OWNERS,
            reduced_by="reduce" if reduction == BY_REDUCE else "pairs",
            interleaved=way is INTERLEAVED and not late,
        )
        assert calls == planned, (way, reduction, late, as_view, partition)
        assert len(buckets) == 4 or late
        recorded.append([call for call in calls if call.op not in ("send", "recv")])
    return recorded


def test_all_ranks_make_the_planned_calls_in_the_planned_order() -> None:
    of_rank = run(calls_as_planned, 3)
    assert len(of_rank[0]) == 24
    assert of_rank[0] == of_rank[1] == of_rank[2]


def nothing_is_kept() -> None:
    for way, reduction in WAYS:
        ddp, zero = made(way, reduction)
        for step in range(2):
            backward(ddp, step)
            gradients = [weakref.ref(param.grad) for param in zero.built.params if param.grad is not None]
            assert len(gradients) == (10 if reduction is allreduce_hook else 0)
            ddp.zero_grad()
            gc.collect()
            assert not any(gradient() is not None for gradient in gradients), "gradients outlive zero_grad"
        model, weight = weakref.ref(ddp), weakref.ref(ddp.module.up.weight)
        del ddp, zero
        gc.collect()
        assert model() is weight() is None, f"{way}, {reduction}: the model is kept alive"


def test_neither_gradients_nor_the_model_are_kept_alive() -> None:
    run(nothing_is_kept, 2)


# -------------------------------------------------------------------- what cannot work says so, on all ranks


def refusals_at_construction(way: Any) -> dict[str, str]:
    """Return the refusals' messages, each by a part that it must contain."""
    plain = ZeroRedundancyOptimizer(Tangle().parameters(), optim.SGD, lr=0.1)
    ddp: Any = DDP(Tangle())
    odd = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def zero(model: Any = ddp, group: Any = None) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), optim.SGD, group, overlap_with_ddp=True, lr=0.1)

    alone = virtual.run(lambda comm: zero(group=comm), 1)[0]
    named = ZeroRedundancyOptimizer(Tangle().named_parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1)
    ours = zero(group=odd)
    part: Any = DDP(Tangle(), process_group=odd)
    calls: dict[str, Callable[[], Any]] = {
        "Construct it with overlap_with_ddp=True": lambda: way(allreduce_hook, ddp, plain),
        "takes the DistributedDataParallel model, not Tangle": lambda: way(
            allreduce_hook, ddp.module, zero()
        ),
        "parameter scale of the optimizer is none of": lambda: way(allreduce_hook, ddp, named),
        "reduce_to_owners was made for another": lambda: way(reduce_to_owners(zero()), ddp, zero()),
        "DistributedDataParallel reduces over [0, 1]": lambda: way(reduce_to_owners(ours), ddp, ours),
        "are no torch.distributed process group": lambda: way(allreduce_hook, ddp, alone),
        "Pass the same process_group to both": lambda: way(allreduce_hook, part, zero(part)),
    }
    return {text: caught(call) for text, call in calls.items()}


@pytest.mark.parametrize("way", BOTH_WAYS)
def test_what_does_not_fit_is_refused_when_the_hook_is_made(way: Any) -> None:
    for messages in run(refusals_at_construction, 2, way):
        assert len(messages) == 7
        for text, message in messages.items():
            assert message.startswith("ValueError")
            assert text in message


def clip_by_norm(ddp: Any, zero: Any) -> None:
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)


def clip_by_value(ddp: Any, zero: Any) -> None:
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.0001)


def give_other_gradients(ddp: Any, zero: Any) -> None:
    ddp.module.up.weight.grad = ddp.module.up.weight.grad / 2


def slow_down(ddp: Any, zero: Any) -> None:
    zero.param_groups[0]["lr"] = 0.01


def nothing(ddp: Any, zero: Any) -> None: ...


TOO_LATE: list[tuple[Any, str, dict[str, Any]]] = [
    (clip_by_norm, "RuntimeError: gradients were changed between backward() and step()", {}),
    (clip_by_value, "RuntimeError: gradients were changed between backward() and step()", {}),
    (give_other_gradients, "RuntimeError: gradients were changed between backward() and step()", {}),
    (slow_down, "RuntimeError: lr was changed from 0.1 to 0.01 between backward() and step()", {}),
    (nothing, "ValueError: step() got ['grad_scaler']", {"grad_scaler": None}),
]


def too_late(mode: dict[str, Any]) -> list[str]:
    """Between backward and step, where the update is made already. Later iterations are as ever."""
    messages = []
    for way, (change, _, options) in itertools.product(BOTH_WAYS, TOO_LATE):
        ddp, zero = made(way, ddp=mode, momentum=0.9)
        plain, reference = Tangle(), None
        reference = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        plain_ddp = Job(None, ddp=SMALL_BUCKETS | mode).wrap(plain, reference)
        for step in range(3):
            for model, optimizer in ((ddp, zero), (plain_ddp, reference)):
                optimizer.zero_grad()
                backward(model, step)
            if step == 1:
                change(ddp, zero)
                messages.append(caught(lambda zero=zero, options=options: zero.step(**options)))
                zero.param_groups[0]["lr"] = 0.1
                if not options:
                    zero.zero_grad()
            if options or step != 1:
                zero.step()  # once more where it was refused for its options only: the update counts once
            reference.step()
        assert_same([snapshot(ddp)], [snapshot(plain)], str(change))
    return messages


@pytest.mark.parametrize("mode", [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}])
def test_changes_that_come_too_late_are_refused_on_all_ranks(mode: dict[str, Any]) -> None:
    for messages in run(too_late, 2, mode):
        assert len(messages) == 2 * len(TOO_LATE)
        for (change, text, _), message in zip(TOO_LATE * 2, messages, strict=True):
            assert message.startswith(text), change
            assert "overlap_with_ddp=True" in message


def accumulated_without_no_sync() -> list[str]:
    messages = []
    one_bucket = {"bucket_cap_mb": 25}
    for way, as_views, buckets, before in itertools.product(
        BOTH_WAYS, [False, True], [SMALL_BUCKETS, one_bucket], [1, 3]
    ):
        ddp, zero = made(way, ddp={"gradient_as_bucket_view": as_views} | buckets)
        for step in range(before):
            zero.zero_grad()
            backward(ddp, step)
            if step:
                zero.step()
                backward(ddp, 10 + step)  # adds, as with torch's optimizers, where a step has followed
        messages.append(caught(lambda ddp=ddp: backward(ddp, 3)))
    return messages


def test_a_second_backward_on_top_of_gradients_already_used_is_refused() -> None:
    for messages in run(accumulated_without_no_sync, 2, timeout=120):
        assert len(messages) == 16
        for message in messages:
            assert message.startswith("RuntimeError: a second backward has added to gradients from which")
            assert "ddp.no_sync()" in message


def scaled() -> list[str]:
    messages = []
    for way, reduction in WAYS:
        ddp, zero = made(way, reduction)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        before = snapshot(ddp)
        scaler.scale(loss_on_own_data(ddp, dist.get_rank(), 0)).backward()
        messages.append(caught(lambda scaler=scaler, zero=zero: scaler.step(zero)))
        zero.zero_grad()
        backward(ddp, 1)
        zero.step()  # without the scaler, all is well
        assert not torch.equal(before[0], snapshot(ddp)[0])
    return messages


def not_reduced() -> list[str]:
    """A parameter that DDP was told to leave alone, and one that thawed when DDP was there already."""
    messages = []
    for way, reduction in WAYS:
        model = Tangle()
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["up.weight"])
        ddp, _ = made(way, reduction, model)
        messages.append(caught(lambda ddp=ddp: backward(ddp)))

        model = Tangle()
        model.up.weight.requires_grad_(False)
        ddp, zero = made(way, reduction, model)
        backward(ddp)
        zero.zero_grad()
        model.up.weight.requires_grad_(True)
        messages.append(caught(lambda ddp=ddp: backward(ddp, 1)))
    return messages


def test_a_parameter_that_ddp_does_not_reduce_is_named_on_all_ranks() -> None:
    for rank, messages in enumerate(run(not_reduced, 2)):
        assert len(messages) == 8
        for message in messages:
            assert message.startswith(f"RuntimeError: rank {rank}: parameter 8 is trained, but Distributed")
            assert "Construct it again after unfreezing" in message


def needed_again() -> str:
    job = Job(INTERLEAVED, make_model=UsedTwice, loss=loss_of_stack, ddp={"bucket_cap_mb": 0.0002})
    return caught(lambda: job.run(sharded=True))


@pytest.mark.thorough
@pytest.mark.usefixtures("impatient")  # a rank may wait for the other's half of a bucket when all leave
def test_interleaved_weights_that_are_needed_again_end_in_autograds_error() -> None:
    for message in run(needed_again, 2, timeout=NEVER_S):
        assert "has been modified by an inplace operation" in message


def left_unfinished() -> list[str]:
    """A branch is not used, and DDP was not told that this may happen."""
    messages = []
    for way, reduction in [*WAYS, (None, OWNERS)]:
        ddp, zero = made(way, reduction, Branches(), ddp={"bucket_cap_mb": 0.0001})
        loss_of_branches(ddp, dist.get_rank(), 0).backward()
        zero.step()
        zero.zero_grad()
        ddp(inputs_of(dist.get_rank(), 1, 4, 8), (1, 2)).square().mean().backward()
        messages.append(caught(zero.step))
    return messages


def test_a_step_after_half_a_backward_is_refused() -> None:
    for messages in run(left_unfinished, 2):
        assert len(messages) == 5
        for message in messages:
            assert message.startswith("RuntimeError: the last backward did not come to its end")
            assert "find_unused_parameters=True" in message


# ----------------------------------------------------------------------------------------- errors on the way


def failing_in_forward(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    for step, _ in enumerate(as_usual(job, ddp, optimizer)):
        if step == 1:
            assert "IndexError" in caught(lambda: ddp(torch.full((2, 16), 99)))
        yield


def failing_in_backward(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    """Before any gradient is complete, which DDP forgives, and in the middle: then it must be made anew."""
    model = ddp.module

    def fail(_: Any) -> None:
        raise ZeroDivisionError("no gradient today")

    yield from iterate(job, ddp, optimizer, range(2))
    optimizer.zero_grad()
    loss = job.loss(ddp, dist.get_rank(), 2)
    loss.register_hook(fail)
    assert "no gradient today" in caught(loss.backward)
    yield from iterate(job, ddp, optimizer, range(2, 4))

    optimizer.zero_grad()
    middle = model.norm.register_full_backward_hook(lambda *_: fail(_))
    loss = partial(job.loss, ddp, dist.get_rank(), 4)
    assert "no gradient today" in caught(loss().backward)
    middle.remove()
    optimizer.zero_grad()
    assert "Expected to have finished reduction" in caught(loss)
    del ddp, loss  # else it goes on listening to the parameters
    yield from iterate(job, job.wrap(model, optimizer), optimizer, range(4, 7))


def errors_on_the_way() -> int:
    return assert_equals_plain(
        *each_way(loop=failing_in_forward),
        # Interleaved, the buckets that came before the error are updated by then.
        *(Job(STEP, reduction, loop=failing_in_backward) for reduction in BOTH_REDUCTIONS),
        Job(None, OWNERS, loop=failing_in_backward),
    )


def test_training_goes_on_after_an_error_of_the_users() -> None:
    run(errors_on_the_way, 2)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(where: str, way: Any, reduction: Any) -> None:
    """Rank 1 ends in the third iteration; what the others raise, in their backward."""
    group = dist.new_group(timeout=timedelta(seconds=NEVER_S))
    ddp, zero = made(way, reduction, group=group)
    for step in range(2):
        zero.zero_grad()
        backward(ddp, step)
    zero.zero_grad()
    if dist.get_rank() == 1:
        if where == "reduction":
            ddp.module.norm.weight.register_post_accumulate_grad_hook(die)
        else:
            zero.collectives.observers.append(lambda call: die() if call.op == "broadcast" else None)
    backward(ddp, 2)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
@pytest.mark.usefixtures("all_may_report")
@pytest.mark.parametrize(
    ("where", "way", "reduction", "told"),
    [
        ("reduction", INTERLEAVED, OWNERS, "(receive from|send to) rank 1"),
        (
            "broadcast",
            INTERLEAVED,
            allreduce_hook,
            "(broadcast (from|to) rank|the reduction of DDP's bucket)",
        ),
    ],
)
def test_when_a_rank_is_killed_the_others_say_what_they_waited_for(
    where: str, way: Any, reduction: Any, told: str
) -> None:
    with pytest.raises(RankError) as error:
        run(killed, 2, where, way, reduction, timeout=NEVER_S)
    assert error.value.rank == 1
    assert "SIGKILL" in error.value.summary
    assert re.search(rf"rank 0 raised RuntimeError: rank 0 of 2: {told}", str(error.value))
