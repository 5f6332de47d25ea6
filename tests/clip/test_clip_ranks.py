"""Clipping on real ranks: DDP, clip, step, held against plain DDP with torch's clipping."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from library.training import Snapshot, Tangle, caught, loss_on_own_data, snapshot
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.clip.grad_norm import clip_grad_norm_, get_total_norm
from zero_ref.lab.meter import recording
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks

STEPS = 4
LIMIT = 0.1


class Trained(NamedTuple):
    """The results of a run: the total norm and the parameters after each step, the scaler's last scale."""

    totals: list[float]
    snapshots: list[Snapshot]
    scale: float = 1.0


class Mode(NamedTuple):
    """The options of a sharded run, and whether it equals the plain one bit for bit."""

    partition: Any
    as_view: bool
    owner_only: bool
    exact: bool

    @staticmethod
    def all_for(world_size: int) -> list[Mode]:
        # Owners add gradients up in the order of ranks, an all-reduce as it likes: of two it is the same.
        two = world_size == 2
        return [
            Mode("sorted_greedy", False, False, True),
            Mode("registration_greedy", True, False, True),
            Mode("even", True, False, False),
            Mode("sorted_greedy", False, True, two),
            Mode("even", False, True, False),
        ]


def plain(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.5, momentum=0.9)


def sharded(params: Any, mode: Mode, group: Any = None) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        params, optim.SGD, group, mode.as_view, partition=mode.partition, lr=0.5, momentum=0.9
    )


def clip(optimizer: Any, ddp: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        with recording(optimizer.collectives) as calls:
            total = clip_grad_norm_(optimizer, LIMIT, norm_type)
        slices = sum(map(len, optimizer.partition.slices_of_rank))
        assert [(call.op, call.nbytes) for call in calls] == [
            ("all_reduce", 8 * (slices + optimizer.world_size))
        ]
        return total
    return nn.utils.clip_grad_norm_(ddp.parameters(), LIMIT, norm_type)


def train(mode: Mode | None, group: Any = None, norm_type: float = 2.0) -> Trained:
    """A user's loop under DDP, clipped."""
    ddp = DDP(Tangle(), process_group=group)
    optimizer = plain(ddp.parameters()) if mode is None else sharded(ddp.parameters(), mode, group)
    if mode is not None and mode.owner_only:
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        ddp.register_comm_hook(None, reduce_to_owners(optimizer))
    trained = Trained([], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_on_own_data(ddp, dist.get_rank(group), step).backward()
        if mode is not None and mode.owner_only:
            assert [param for param in ddp.parameters() if param.requires_grad and param.grad is None]
        total = clip(optimizer, ddp, norm_type)
        assert total > LIMIT, "nothing was clipped"
        optimizer.step()
        trained.totals.append(total.item())
        trained.snapshots.append(snapshot(ddp))
    return trained


def assert_same(ours: Trained, theirs: Trained, mode: Mode) -> None:
    for step, (a, b) in enumerate(zip(ours.totals, theirs.totals, strict=True)):
        assert a == b if mode.exact else a == pytest.approx(b, rel=1e-5), f"{mode}, step {step}: {a}, not {b}"
    tolerance = {"rtol": 0.0, "atol": 0.0} if mode.exact else {"rtol": 1e-4, "atol": 1e-6}
    for after, expected in zip(ours.snapshots, theirs.snapshots, strict=True):
        for x, y in zip(after, expected, strict=True):
            torch.testing.assert_close(x, y, **tolerance, msg=lambda text: f"{mode}: {text}")
    assert ours.scale == theirs.scale


def all_the_same(values: list[float], group: Any = None) -> bool:
    mine = torch.tensor(values, dtype=torch.float64)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, mine, group=group)
    return all(torch.equal(other, mine) for other in others)


def compare(group: Any = None) -> int:
    modes = Mode.all_for(dist.get_world_size(group))
    for norm_type in (2.0, 1.0):
        expected = train(None, group, norm_type)
        for mode in modes:
            trained = train(mode, group, norm_type)
            assert_same(trained, expected, mode)
            assert all_the_same(trained.totals, group), mode
    return len(modes)


def compare_in_a_subgroup() -> str:
    odd = dist.new_group([1, 3])
    if dist.get_rank() % 2 == 0:
        return "not asked"  # and not waited for
    return f"compared {compare(odd)}"


def test_training_equals_ddp_with_torchs_clipping_and_only_the_optimizers_group_takes_part() -> None:
    assert run(compare_in_a_subgroup, 4, timeout=60) == ["not asked", "compared 5"] * 2


# -------------------------------------------------------------------------------------------- mixed precision


def train_scaled(mode: Mode | None) -> Trained:
    """With torch.amp.GradScaler; in the second of three steps rank 1 has an infinite gradient."""
    ddp = DDP(Tangle())
    optimizer = plain(ddp.parameters()) if mode is None else sharded(ddp.parameters(), mode)
    if mode is not None and mode.owner_only:
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        ddp.register_comm_hook(None, reduce_to_owners(optimizer, scaled=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    trained = Trained([], [snapshot(ddp)])
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_on_own_data(ddp, dist.get_rank(), step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss + ddp.module.scale * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        total = clip(optimizer, ddp)
        assert total.isfinite() == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        trained.snapshots.append(snapshot(ddp))
        skipped = all(torch.equal(x, y) for x, y in zip(*trained.snapshots[-2:], strict=True))
        assert skipped == (step == 1)
        if step != 1:
            trained.totals.append(total.item())
    return trained._replace(scale=scaler.get_scale())


def compare_scaled() -> float:
    expected = train_scaled(None)
    for mode in Mode.all_for(dist.get_world_size()):
        trained = train_scaled(mode)
        assert_same(trained, expected, mode)
        assert all_the_same([*trained.totals, trained.scale])
    return expected.scale


def test_a_grad_scaler_skips_the_step_on_all_ranks_and_clips_unscaled_gradients() -> None:
    assert run(compare_scaled, 2, timeout=60) == [128.0] * 2  # doubled, halved, doubled


# ---------------------------------------------------------------------------------------------- uneven inputs


def train_uneven(mode: Mode | None) -> Trained:
    """Rank r has 2 + r batches."""
    ddp = DDP(Tangle())
    optimizer = plain(ddp.parameters()) if mode is None else sharded(ddp.parameters(), mode)
    trained = Trained([], [])
    joinables: list[Any] = [ddp] if mode is None else [ddp, optimizer]
    with Join(joinables):
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            loss_on_own_data(ddp, dist.get_rank(), step).backward()
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                with recording(optimizer.collectives) as calls:
                    total = clip_grad_norm_(optimizer, LIMIT)
                assert not calls
            else:
                total = clip(optimizer, ddp)
            assert total > LIMIT
            optimizer.step()
            trained.totals.append(total.item())
    trained.snapshots.append(snapshot(ddp))
    return trained


def compare_uneven() -> int:
    expected = train_uneven(None)  # in the end DDP hands the last rank's parameters to the others
    for mode in Mode.all_for(dist.get_world_size()):
        if not mode.owner_only:
            assert_same(train_uneven(mode), expected, mode)
    return len(expected.totals)


def test_ranks_that_run_out_of_data_do_not_hold_up_the_clipping_of_the_others() -> None:
    assert run(compare_uneven, 3, timeout=60) == [2, 3, 4]


def clip_own_gradients_in_join() -> str:
    ddp = DDP(Tangle())
    zero = sharded(ddp.parameters(), Mode("sorted_greedy", False, True, True))
    ddp.register_comm_hook(None, reduce_to_owners(zero))
    with Join([ddp, zero]):
        loss_on_own_data(ddp, dist.get_rank(), 0).backward()
        message = caught(lambda: clip_grad_norm_(zero, LIMIT))
        zero.step()
    return message


def test_owner_only_gradients_cannot_be_clipped_inside_join() -> None:
    for rank, message in enumerate(run(clip_own_gradients_in_join, 2, timeout=30)):
        assert message.startswith(
            f"RuntimeError: rank {rank}: inside Join a rank that has run out of data takes"
        )


# --------------------------------------------------------------------------------------------------- refusals


def clip_after_an_overlapped_update() -> list[str]:
    messages = []
    for make_hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for reduces_to_owners in (False, True):
            ddp = DDP(Tangle())
            zero = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1)
            hook = reduce_to_owners(zero) if reduces_to_owners else allreduce_hook
            ddp.register_comm_hook(None, make_hook(hook, ddp, zero))
            for step in range(2):
                loss_on_own_data(ddp, dist.get_rank(), step).backward()
                messages.append(caught(lambda zero=zero: clip_grad_norm_(zero, LIMIT)))  # type: ignore[misc]
                messages.append(caught(lambda zero=zero: get_total_norm(zero)))  # type: ignore[misc]
                zero.step()
                zero.zero_grad()
    return messages


def test_clipping_after_an_overlapped_update_is_refused_on_all_ranks() -> None:
    for rank, messages in enumerate(run(clip_after_an_overlapped_update, 2, timeout=40)):
        assert len(messages) == 16
        for message in messages:
            assert message.startswith(
                f"RuntimeError: rank {rank}: clipping by global norm needs all gradients"
            )
