"""Real ranks under DDP, each with its own data: bit for bit as torch's class and as the plain optimizer.

Each test makes one call on a world of ranks and loops there over many configurations. DDP gives all ranks the
same averaged gradients, so what follows is equal to the last bit at any number of ranks.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import (
    MODES,
    Snapshot,
    Tangle,
    assert_moved,
    assert_same,
    describe,
    fill_gradients,
    finished_partition,
    loss_on_own_data,
    snapshot,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import DDPRecorder, held_bytes, recording, state_bytes
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call

pytestmark = pytest.mark.ranks

MakeOptimizer = Callable[[Any], Optimizer]


def train(
    make_optimizer: MakeOptimizer, steps: int = 3, *, channels_last: bool = True, group: Any = None
) -> list[Snapshot]:
    """A user's loop under DDP; the parameters after each step."""
    ddp = DDP(Tangle(channels_last=channels_last), process_group=group)
    before = snapshot(ddp)
    optimizer = make_optimizer(ddp)
    snapshots = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_on_own_data(ddp, dist.get_rank(group), step).backward()
        optimizer.step()
        snapshots.append(snapshot(ddp))
    assert_moved(ddp, before, snapshots[-1])
    return snapshots


def assert_ranks_had_other_gradients(group: Any = None) -> None:
    model = Tangle()
    loss_on_own_data(model, dist.get_rank(group), 0).backward()
    assert model.up.weight.grad is not None
    sums = [torch.empty(()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sums, model.up.weight.grad.sum(), group=group)
    assert len({value.item() for value in sums}) == len(sums)


FIVE: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"momentum": 0.5}),
]
LISTS = "lists"
FINISHED = "finished"
FEW_MODES: list[tuple[Any, bool]] = [("sorted_greedy", True), ("even", False), ("even", True)]


def ours(
    mode: tuple[Any, bool], optimizer_class: Any, options: dict[str, Any], group: Any = None
) -> MakeOptimizer:
    partition, as_view = mode

    def make(ddp: Any) -> Optimizer:
        chosen = partition
        if partition in (LISTS, FINISHED):
            numels = [param.numel() for param in ddp.parameters()]
            world_size = dist.get_world_size(group)
            chosen = [list(range(world_size - 1, len(numels))), *([i] for i in range(world_size - 1))]
            if partition == FINISHED:
                chosen = finished_partition(numels, world_size)
        return ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class, group, as_view, partition=chosen, **options
        )

    return make


def plainly(optimizer_class: Any, options: dict[str, Any]) -> MakeOptimizer:
    return lambda ddp: optimizer_class(ddp.parameters(), **options)


def torchs(as_view: bool, optimizer_class: Any, options: dict[str, Any], group: Any = None) -> MakeOptimizer:
    def make(ddp: Any) -> Optimizer:
        with warnings.catch_warnings(action="ignore"):  # importing it warns
            from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeRO

            return TorchZeRO(
                ddp.parameters(), optimizer_class, group, parameters_as_bucket_view=as_view, **options
            )

    return make


def parity(cases: list[tuple[Any, dict[str, Any]]], modes: list[tuple[Any, bool]]) -> int:
    """On each rank: every case in every mode. Returns how many runs were compared."""
    compared = 0
    for optimizer_class, options in cases:
        name = f"{optimizer_class.__name__} {options}"
        # torch's bucket view gives a channels_last parameter other strides: DDP then sums in another order.
        for channels_last in (True, False):
            plain = train(plainly(optimizer_class, options), channels_last=channels_last)
            for as_view in (False, True):
                if not (channels_last and as_view):
                    theirs = train(torchs(as_view, optimizer_class, options), channels_last=channels_last)
                    assert_same(theirs, plain, f"torch's {name}, bucket view {as_view}")
            for mode in modes if channels_last else modes[:2]:
                label = f"{name}, {describe(mode[0])}, bucket view {mode[1]}"
                assert_same(
                    train(ours(mode, optimizer_class, options), channels_last=channels_last), plain, label
                )
                compared += 1
    assert_ranks_had_other_gradients()
    return compared


def test_five_optimizers_equal_torchs_class_and_the_plain_optimizer() -> None:
    modes = [*FEW_MODES, ("registration_greedy", False), (LISTS, True)]
    assert run(parity, 2, FIVE, modes, timeout=100) == [len(FIVE) * (len(modes) + 2)] * 2


# ------------------------------------------------------------------------------ groups, ranks, kinds of ranks


def on_a_subgroup() -> str:
    """Ranks 1 and 3 of 4 train together; 0 and 2 may not build the optimizer on their group."""
    odd = dist.new_group([1, 3])
    if dist.get_rank() % 2 == 0:
        with pytest.raises(ValueError, match=f"global rank {dist.get_rank()} is not a member"):
            ZeroRedundancyOptimizer(Tangle().parameters(), optim.AdamW, odd)
        return "refused"
    plain = train(lambda ddp: optim.AdamW(ddp.parameters()), group=odd)
    for mode in (*FEW_MODES, (LISTS, False), (FINISHED, True)):
        assert_same(train(ours(mode, optim.AdamW, {}, odd), group=odd), plain, str(mode))
    optimizer = ZeroRedundancyOptimizer(Tangle().parameters(), optim.AdamW, odd)
    assert optimizer.process_group is odd
    assert (optimizer.rank, optimizer.world_size) == (dist.get_rank() // 2, 2)
    assert optimizer.global_rank == dist.get_rank()
    assert_ranks_had_other_gradients(odd)
    optimizer.consolidate_state_dict(to=1)  # a rank of the group: global rank 3
    return f"state here: {optimizer.whole.gathered is not None}"


def test_a_subgroup_whose_ranks_are_not_0_and_1() -> None:
    assert run(on_a_subgroup, 4) == ["refused", "state here: False", "refused", "state here: True"]


def same_on_any_ranks(comm: Collectives, partition: Any, as_view: bool) -> tuple[list[Snapshot], list[Call]]:
    """Gradients of each rank's own data, averaged through `comm`."""
    model = Tangle()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, as_view, partition=partition)
    snapshots = []
    with recording(comm) as calls:
        for step in range(3):
            optimizer.zero_grad()
            loss_on_own_data(model, comm.rank, step).backward()
            for param in model.parameters():
                if param.grad is not None:
                    comm.all_reduce(param.grad).wait()
                    param.grad /= comm.world_size
            optimizer.step()
            snapshots.append(snapshot(model))
    return snapshots, calls


def on_real_ranks(modes: list[tuple[Any, bool]]) -> list[tuple[list[Snapshot], list[Call]]]:
    return [same_on_any_ranks(as_collectives(None), *mode) for mode in modes]


def test_virtual_ranks_equal_real_ranks_and_make_the_same_calls() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on a real rank: kernels share out their sums among threads
    try:
        virtually = [virtual.run(same_on_any_ranks, 2, *mode) for mode in MODES]
    finally:
        torch.set_num_threads(threads)
    for rank, real in enumerate(run(on_real_ranks, 2, MODES)):
        for mode, imagined, (snapshots, calls) in zip(MODES, virtually, real, strict=True):
            assert_same(snapshots, imagined[rank][0], f"{mode}, rank {rank}")
            assert calls == imagined[rank][1]


def several_dtypes() -> None:
    def train_mixed(make: MakeOptimizer) -> list[Snapshot]:
        model = Tangle()
        model.up.to(torch.bfloat16)
        model.conv.to(torch.float64)
        model.norm.to(torch.float16)
        model.down.weight.data = model.down.weight.data.to(torch.complex64)
        optimizer, snapshots = make(model), []
        comm = as_collectives(None)
        for step in range(3):
            fill_gradients(list(model.parameters()), step, comm.world_size, comm)
            optimizer.step()
            snapshots.append(snapshot(model))
        return snapshots

    plain = train_mixed(lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for mode in FEW_MODES:
        assert_same(train_mixed(ours(mode, optim.SGD, {"lr": 0.1, "momentum": 0.9})), plain, str(mode))


def test_several_dtypes_on_the_wire() -> None:
    run(several_dtypes, 2)


# ------------------------------------------------------------------------------------- what else users do


Loop = Callable[[Any, Any], Iterator[None]]


def follow(
    loop: Loop, make: MakeOptimizer, wrap: Callable[[nn.Module], Any] = DDP, model: Any = Tangle
) -> list[Snapshot]:
    ddp = wrap(model())
    before = snapshot(ddp)
    snapshots = [snapshot(ddp) for _ in loop(ddp, make(ddp))]
    assert_moved(ddp, before, snapshots[-1])
    return snapshots


def loop_equals_plain(
    loop: Loop, optimizer_class: Any = optim.AdamW, wrap: Any = DDP, **options: Any
) -> None:
    """On each rank: `loop(ddp, optimizer)` yields after each update, with equal parameters."""
    plain = follow(loop, lambda ddp: optimizer_class(ddp.parameters(), **options), wrap)
    for mode in FEW_MODES:
        assert_same(
            follow(loop, ours(mode, optimizer_class, options), wrap), plain, f"{loop.__name__}, {mode}"
        )


def with_a_gradient_scaler(ddp: Any, optimizer: Any) -> Iterator[None]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_on_own_data(ddp, dist.get_rank(), step)
        if step == 1:  # overflows on one rank: all must skip this step
            loss = loss * (float("inf") if dist.get_rank() == 1 else 1.0)
        before = snapshot(ddp)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert_same([snapshot(ddp)], [before], "skipped")
        yield
    assert scaler.get_scale() == 512.0


def with_accumulation(ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_on_own_data(ddp, dist.get_rank(), 2 * step).backward()
        loss_on_own_data(ddp, dist.get_rank(), 2 * step + 1).backward()
        optimizer.step()
        yield


def with_a_closure(ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_on_own_data(ddp, dist.get_rank(), step)
            loss.backward()
            return loss.detach()

        assert optimizer.step(closure) > 0
        yield


def with_a_scheduler(ddp: Any, optimizer: Any) -> Iterator[None]:
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    for step in range(4):
        optimizer.zero_grad()
        loss_on_own_data(ddp, dist.get_rank(), step).backward()
        optimizer.step()
        scheduler.step()
        yield
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != 0.001


class Checkpointed(nn.Module):
    """Forgets what it computed on the way, and computes it again in backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.model, tokens, use_reentrant=False)


def as_usual(ddp: Any, optimizer: Any) -> Iterator[None]:
    for step in range(3):
        optimizer.zero_grad()
        loss_on_own_data(ddp, dist.get_rank(), step).backward()
        optimizer.step()
        yield


def what_users_do() -> None:
    for loop in (with_a_gradient_scaler, with_accumulation, with_a_closure, with_a_scheduler):
        loop_equals_plain(loop)
    loop_equals_plain(with_a_gradient_scaler, fused=True)
    loop_equals_plain(as_usual, wrap=lambda model: DDP(Checkpointed(model)))
    loop_equals_plain(as_usual, wrap=lambda model: DDP(model, gradient_as_bucket_view=True))
    loop_equals_plain(as_usual, wrap=lambda model: DDP(model, static_graph=True, bucket_cap_mb=0.001))


def test_scalers_accumulation_closures_schedulers_and_activation_checkpointing() -> None:
    run(what_users_do, 2)


# ------------------------------------------------------------------------------ what is sent, held and logged


def measured(partition: Any, as_view: bool, **options: Any) -> tuple[list[Call], int, int, int]:
    """Calls of one step of the optimizer; bytes that DDP all-reduced; state bytes; the share predicted."""
    ddp = DDP(Tangle())
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optim.AdamW, None, as_view, partition=partition, **options
    )
    recorder = DDPRecorder(ddp)
    loss_on_own_data(ddp, dist.get_rank(), 0).backward()
    with recording(optimizer.collectives) as calls:
        optimizer.step()
        optimizer.zero_grad()
    params = list(ddp.parameters())
    mine = [
        piece
        for piece in optimizer.partition.slices_of_rank[dist.get_rank()]
        if params[piece.param].requires_grad
    ]
    held = held_bytes(params, optimizer)
    assert held.optimizer_state == state_bytes(optimizer)
    return (
        calls,
        sum(call.nbytes for call in recorder.calls),
        held.optimizer_state,
        sum(8 * p.numel + 4 for p in mine),
    )


@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
def test_a_step_sends_what_the_plan_says_and_nothing_else(partition: Any) -> None:
    model = Tangle()
    trainable = 4 * sum(param.numel() for param in model.parameters() if param.requires_grad)
    count = sum(param.requires_grad and param.numel() > 0 for param in model.parameters())
    for as_view, buffer_size in ((False, 0), (False, 2**18), (True, 2**18)):
        ranks = run(measured, 4, partition, as_view, broadcast_buffer_size=buffer_size)
        for calls, reduced, state, share in ranks:
            assert calls == ranks[0][0], "all ranks make the same calls"
            assert {call.op for call in calls} == {"broadcast"}
            assert sum(call.nbytes for call in calls) == reduced == trainable
            assert state == share
            if buffer_size:
                assert [call.peer for call in calls] == [0, 1, 2, 3]
            elif partition == "sorted_greedy":
                assert len(calls) == count


def recorded_and_unrecorded() -> None:
    def recorded(ddp: Any) -> Optimizer:
        DDPRecorder(ddp)
        return optim.AdamW(ddp.parameters())

    plain = train(lambda ddp: optim.AdamW(ddp.parameters()))
    assert_same(train(recorded), plain, "with a recorder")


def test_recording_ddp_changes_nothing() -> None:
    run(recorded_and_unrecorded, 3)


def logged() -> list[str]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("zero_ref.optimizer")
    handler = Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = Tangle()  # without DDP, which torch 2.13 crashes on Gloo at DETAIL (a segmentation fault)
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, partition="even")
        fill_gradients(list(model.parameters()), 0, 2, optimizer.collectives)
        optimizer.step()
        for to in (0, 1, "all"):
            optimizer.consolidate_state_dict(to=to)
        assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == dist.get_debug_level().name
    finally:
        logger.removeHandler(handler)
    return messages


def test_it_works_and_logs_at_the_highest_debug_level(monkeypatch: pytest.MonkeyPatch) -> None:
    # At DETAIL torch wraps the process group in one that checks every collective.
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    for rank, messages in enumerate(run(logged, 2)):
        for start in (f"rank {rank} of 2 owns ", f"rank {rank} owns Slice"):
            assert any(message.startswith(start) for message in messages)
