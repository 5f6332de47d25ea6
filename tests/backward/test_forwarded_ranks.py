"""`train` and `eval` of a schedule-free optimizer on real ranks: with DDP, its hooks, and each partition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from library.schedule_free import Free
from library.training import Tangle, in_a_hurry, loss_on_own_data
from test_overlap import BOTH_WAYS, OWNERS, Job, assert_equals_plain, caught
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks

FEW_MODES = [("sorted_greedy", True), ("even", False), ("equal_shares", True)]


def evaluating(job: Job, ddp: Any, optimizer: Any) -> Iterator[None]:
    """As the Trainer: into train mode before each backward, and an evaluation after every other update."""
    for step in range(job.steps):
        optimizer.zero_grad()
        optimizer.train()
        job.loss(ddp, dist.get_rank(job.group), step).backward()
        optimizer.step()
        yield
        if step % 2:
            optimizer.eval()
            yield


def each_partition(way: Any, optimizers: list[tuple[Any, dict[str, Any]]]) -> int:
    return assert_equals_plain(
        *(
            Job(
                way, reduction, optimizer_class=optimizer_class, options=options, loop=evaluating,
                zero={"partition": partition, "parameters_as_bucket_view": as_view, "elementwise": True},
                moves_at_once=False,
            )
            for optimizer_class, options in optimizers
            for reduction in (allreduce_hook, OWNERS)
            for partition, as_view in FEW_MODES
        )
    )  # fmt: skip


@pytest.mark.parametrize("way", [None, *BOTH_WAYS])
def test_each_rank_holds_the_plain_values_in_both_modes(way: Any) -> None:
    assert run(each_partition, 2, way, [(Free, {"lr": 0.05})], timeout=60) == [6, 6]


OFFICIAL: list[Any] = [
    (schedulefree.AdamWScheduleFree, {"lr": 0.01, "warmup_steps": 2, "weight_decay": 0.1}),
    (schedulefree.SGDScheduleFree, {"lr": 0.05, "weight_decay": 0.1}),
    (schedulefree.RAdamScheduleFree, {"lr": 0.01, "silent_sgd_phase": False}),
]


def test_so_it_is_with_the_official_package() -> None:
    assert run(each_partition, 2, None, OFFICIAL, timeout=120) == [18] * 2


def overwrite_what_autograd_saved() -> list[str]:
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizer: Any = ZeroRedundancyOptimizer(params, schedulefree.SGDScheduleFree)
    optimizer.train()
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    losses = [param.square().sum() for param in params]
    optimizer.eval()
    return [caught(loss.backward) for loss in losses]


def test_autograd_notices_on_every_rank_that_a_switch_overwrote_what_it_saved() -> None:
    for messages in run(overwrite_what_autograd_saved, 2, timeout=60):
        assert all("modified by an inplace operation" in message for message in messages)


def inside_a_join() -> tuple[str, str]:
    model = Tangle()
    ddp = DistributedDataParallel(model)
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), Free)
    optimizer.train()
    message = "nothing"
    with Join([ddp, optimizer]):
        for step in range(2):
            message = caught(optimizer.train)
            loss_on_own_data(ddp, dist.get_rank(), step).backward()
            optimizer.step()
    return message, caught(optimizer.eval)


def test_a_call_inside_a_join_is_refused_and_works_after_it() -> None:
    for inside, after in run(inside_a_join, 2, timeout=60):
        assert "train() was called inside a Join, where a rank that has run out of data" in inside
        assert after == "nothing"


def trained(group: Any) -> Any:
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(3)]
    optimizer: Any = ZeroRedundancyOptimizer(params, Free, group)
    optimizer.train()
    for step in range(2):
        for param in params:
            param.grad = torch.full_like(param, float(step))
        optimizer.step()
    return optimizer


def evaluate_alone(others_step: bool) -> str:
    """Rank 0 evaluates by itself, as if only its own model were concerned."""
    optimizer = in_a_hurry(trained)
    message = "nothing"
    if dist.get_rank() == 0:
        message = caught(optimizer.eval)
    elif others_step:
        message = caught(optimizer.step)
    dist.barrier()  # of the default group, which is patient
    return message


@pytest.mark.parametrize("others_step", [False, True])
def test_an_evaluation_on_one_rank_ends_in_an_error_that_names_it(others_step: bool) -> None:
    first, *others = run(evaluate_alone, 3, others_step, timeout=60)
    assert first.startswith("RanksLostError: rank 0 was to call eval() of optimizer 0 (Free) with all others")
    assert all(message.startswith("RuntimeError") == others_step for message in others)
