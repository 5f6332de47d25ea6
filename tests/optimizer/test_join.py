"""Uneven inputs on real ranks: as DDP and the plain optimizer under `Join`, bit for bit where sums are equal.

The reference is plain: every rank has the whole optimizer and steps it while it has data. DDP makes the
parameters of a rank that had data to the end everybody's; the optimizer's state of that rank is handed to
the others here, before the next epoch.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import (
    OnMasters,
    Snapshot,
    Tangle,
    assert_same,
    assert_state_dicts_equal,
    loss_on_own_data,
    snapshot,
)
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer, lr_scheduler

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.clip.grad_norm import clip_grad_norm_
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording, recording_distributed
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call

pytestmark = pytest.mark.ranks

Epochs = Sequence[Sequence[int]]
"""For each epoch the number of batches of each rank."""


class Gated(Tangle):
    """Its gate is used by all ranks in iteration 0, 4 and so on, by all but rank 1 in 3, 7 and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((8,), 0.5))
        self.open = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return logits * (self.gate @ self.shift) if self.open else logits


class Sparse(nn.Module):
    """Its embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, sparse=True)
        self.out = nn.Linear(6, 13)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens))[:, :-1]


def all_parameters(model: nn.Module) -> Any:
    return model.parameters()


def two_groups(model: nn.Module) -> Any:
    params = list(model.parameters())
    return [{"params": params[1::2], "lr": 0.03}, {"params": params[::2], "weight_decay": 0.1}]


@dataclass
class Case:
    """A training job; `sharded` says with which optimizer it is to run.

    Args:
        epochs: the batches of each rank, each epoch in a Join of its own.
        schedule: makes a scheduler that steps in every iteration, if there is one.
        hook: makes DDP's communication hook from the model and the optimizer.
        plain_hook: the hook of the reference.
        calls_step: the loop calls step() where an update in backward does not need it.
    """

    epochs: Epochs
    optimizer_class: Any = optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    make_model: Callable[[], nn.Module] = Tangle
    groups: Callable[[Any], Any] = all_parameters
    schedule: Callable[[Optimizer], Any] | None = None
    ddp: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    join: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[DDP, ZeroRedundancyOptimizer], Any] | None = None
    plain_hook: Any = None
    calls_step: bool = True
    zero_grad_first: bool = True
    group: Any = None
    unsharded_class: Any = None  # of the reference, where it is another one


@dataclass
class Outcome:
    """On one rank: the parameters after each own iteration and after each epoch, the optimizer's state."""

    iterations: list[Snapshot]
    epochs: list[Snapshot]
    state: Any
    stayed: bool


def one_iteration(case: Case, ddp: DDP, optimizer: Optimizer, step: int) -> None:
    rank = dist.get_rank(case.group)
    if isinstance(ddp.module, Gated):
        ddp.module.open = step % 4 == 0 or (step % 4 == 3 and rank != 1)
    if case.zero_grad_first:
        optimizer.zero_grad()
    loss_on_own_data(ddp, rank, step).backward()
    if case.calls_step or not isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.step()
    if not case.zero_grad_first:
        optimizer.zero_grad()


def train(case: Case, sharded: bool) -> Outcome:
    """The job on this rank."""
    rank = dist.get_rank(case.group)
    ddp = DDP(case.make_model(), process_group=case.group, **case.ddp)
    options = copy.deepcopy(case.options)  # a scheduler writes into a learning rate that is a tensor
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(
            case.groups(ddp), case.optimizer_class, case.group, **case.zero, **options
        )
        if case.hook is not None:
            ddp.register_comm_hook(None, case.hook(ddp, optimizer))
    else:
        optimizer = (case.unsharded_class or case.optimizer_class)(case.groups(ddp), **options)
        if case.plain_hook is not None:
            ddp.register_comm_hook(None, case.plain_hook)
    scheduler = case.schedule(optimizer) if case.schedule else None
    outcome = Outcome([], [], None, stayed=False)
    for number, batches in enumerate(case.epochs):
        with Join([ddp, optimizer] if sharded else [ddp], **case.join):
            for step in range(batches[rank]):
                one_iteration(case, ddp, optimizer, 100 * number + step)
                if scheduler:
                    scheduler.step()
                outcome.iterations.append(snapshot(ddp))
        outcome.epochs.append(snapshot(ddp))
        stayed_longest = list(batches).index(max(batches))
        outcome.stayed = stayed_longest == rank
        if scheduler:
            scheduler.load_state_dict(from_rank(scheduler.state_dict(), stayed_longest, case.group))
        if not sharded:
            optimizer.load_state_dict(from_rank(optimizer.state_dict(), stayed_longest, case.group))
    if sharded:
        optimizer.consolidate_state_dict(to="all")
    outcome.state = optimizer.state_dict()
    return outcome


def from_rank(value: Any, src: int, group: Any) -> Any:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values[src]


def assert_close(ours: list[Snapshot], plain: list[Snapshot], label: str) -> None:
    assert len(ours) == len(plain)
    for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
        for x, y in zip(a, b, strict=True):
            # Sums over three ranks in another order: they differ in the last bits, and AdamW magnifies that.
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=f"{label}, step {step}")


def compare(cases: dict[str, Case], exactly: bool = True) -> list[str]:
    """Run each case both ways on this rank, and compare. Returns what was compared."""
    compared = []
    for label, case in cases.items():
        ours, plain = train(case, sharded=True), train(case, sharded=False)
        assert_equal = assert_same if exactly else assert_close
        if plain.iterations:
            assert_equal(ours.iterations, plain.iterations, label)
        assert_equal(ours.epochs, plain.epochs, label)
        if exactly:
            assert_state_dicts_equal(ours.state, plain.state)
        else:
            assert ours.state["param_groups"] == plain.state["param_groups"]
        compared.append(label)
    return compared


def assert_as_plain(cases: dict[str, Case], exactly: bool = True, timeout: float = 20) -> None:
    """Compare on as many ranks as the cases have batches for."""
    (world_size,) = {len(batches) for case in cases.values() for batches in case.epochs}
    assert run(compare, world_size, cases, exactly, timeout=timeout) == [list(cases)] * world_size


MODES: list[dict[str, Any]] = [
    {"partition": "sorted_greedy"},
    {"partition": "even", "parameters_as_bucket_view": True},
]
MOMENTUM = {"optimizer_class": optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}}


# --------------------------------------------------------------------------------- as the plain optimizer


def test_parameters_and_state_are_those_of_the_plain_optimizer() -> None:
    epochs = [(5, 2, 2), (0, 2, 4), (2, 2, 2)]
    assert_as_plain(
        {f"{way}, {mode}": Case(epochs, zero=mode, **way) for way in ({}, MOMENTUM) for mode in MODES}
    )


def in_16_bits() -> nn.Module:
    return Tangle().bfloat16()


def test_masters() -> None:
    masters = {"master_dtype": torch.float32}
    unsharded = partial(OnMasters, optimizer_class=optim.AdamW)
    assert_as_plain(
        {
            f"{mode}, {hook}": Case(
                [(1, 3), (4, 2)],
                zero=mode | masters,
                hook=hook,
                make_model=in_16_bits,
                unsharded_class=unsharded,
            )
            for mode in MODES
            for hook in (None, to_owners)
        },
        timeout=60,
    )


def halving(optimizer: Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def cycling(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.1, 0.2], total_steps=20
    )  # moves betas or momentum too


def test_two_groups_and_a_scheduler_that_steps_where_there_are_data() -> None:
    epochs = [(4, 2, 1), (0, 2, 4)]
    ways: dict[str, dict[str, Any]] = {
        "SGD": MOMENTUM,
        "a tensor as the learning rate": {"options": {"lr": torch.tensor(0.01), "foreach": False}},
    }
    assert_as_plain(
        {
            f"{name}, {schedule.__name__}": Case(
                epochs, groups=two_groups, schedule=schedule, zero={"partition": "even"}, **way
            )
            for name, way in ways.items()
            for schedule in (halving, cycling)
        }
    )


# Rank 0 leaves after iteration 1, in which the gate was unused: else DDP takes it for used from then on.
def test_parameters_that_nobody_uses_in_an_iteration_are_left_alone() -> None:
    epochs = [(2, 5, 2), (0, 2, 2)]
    ddp = {"find_unused_parameters": True}
    assert_as_plain(
        {
            f"{way}, {mode}": Case(epochs, make_model=Gated, ddp=ddp, zero=mode, **way)
            for way in ({}, MOMENTUM)
            # Not "even" with buckets: the gate moves the others in memory, and products round otherwise.
            for mode in (MODES[0], {"partition": "even"})
        }
    )


def test_sparse_gradients() -> None:
    # DDP itself cannot shadow a sparse gradient that its buckets, rebuilt after an iteration, never held.
    assert_as_plain(
        {
            optimizer_class.__name__: Case(
                [(2, 4, 3), (3, 1, 1)],
                make_model=Sparse,
                optimizer_class=optimizer_class,
                options={"lr": 0.1},
            )
            for optimizer_class in (optim.SGD, optim.Adagrad)
        }
    )


def test_gradients_divided_by_the_number_of_ranks_that_have_data() -> None:
    divided = {"divide_by_initial_world_size": False}
    cases = {str(mode): Case([(3, 1, 4)], zero=mode, join=divided) for mode in MODES}
    assert_as_plain(cases, timeout=120)
    hooks = [to_owners, stepping_to_owners, interleaved_to_owners]
    cases = {
        hook.__name__: Case(
            [(3, 1), (1, 4)], zero={"overlap_with_ddp": hook in OVERLAPPED}, join=divided, hook=hook
        )
        for hook in hooks
    }
    assert_as_plain(cases, timeout=120)
    # On three ranks two may have data. Their sum is in the order of ranks, an all-reduce's is not.
    assert_as_plain({"three": Case([(3, 1, 4)], join=divided, hook=to_owners)}, exactly=False)


def a_subgroup(case: Case) -> list[str]:
    case.group = dist.new_group([1, 3])
    return compare({"ranks 1 and 3": case}) if dist.get_rank() % 2 else []


def test_a_subgroup() -> None:
    case = Case([(1, 3), (2, 0)], zero={"partition": "even"})
    assert run(a_subgroup, 4, case) == [[], ["ranks 1 and 3"]] * 2


# ---------------------------------------------------------------------------- updates made by DDP's hooks


def to_owners(ddp: DDP, zero: ZeroRedundancyOptimizer) -> Any:
    return reduce_to_owners(zero)


def by_reduce(ddp: DDP, zero: ZeroRedundancyOptimizer) -> Any:
    return reduce_to_owners(zero, by="reduce")


def stepping(ddp: DDP, zero: ZeroRedundancyOptimizer) -> Any:
    return hook_with_zero_step(allreduce_hook, ddp, zero)


def interleaved(ddp: DDP, zero: ZeroRedundancyOptimizer) -> Any:
    return hook_with_zero_step_interleaved(allreduce_hook, ddp, zero)


def stepping_to_owners(ddp: DDP, zero: ZeroRedundancyOptimizer) -> Any:
    return hook_with_zero_step(reduce_to_owners(zero), ddp, zero)


def interleaved_to_owners(ddp: DDP, zero: ZeroRedundancyOptimizer) -> Any:
    return hook_with_zero_step_interleaved(reduce_to_owners(zero), ddp, zero)


OVERLAPPED = [stepping, interleaved, stepping_to_owners, interleaved_to_owners]


def hooked(epochs: Epochs, hook: Any, mode: dict[str, Any]) -> Case:
    """Many buckets, two groups, a scheduler. The reference sums the gradients in the same way at 2 ranks."""
    return Case(
        epochs,
        groups=two_groups,
        schedule=halving,
        ddp={"bucket_cap_mb": 0.001},
        zero={"overlap_with_ddp": hook in OVERLAPPED, **mode},
        hook=hook,
        plain_hook=allreduce_hook,
    )


@pytest.mark.parametrize("hook", [to_owners, by_reduce, stepping, interleaved])
def test_updates_in_backward_and_gradients_at_their_owners(hook: Any) -> None:
    epochs = [(1, 4), (4, 2), (0, 2)]
    mode = MODES[hook in (by_reduce, interleaved)]
    case = hooked(epochs, hook, mode)
    case.zero_grad_first = hook is not to_owners  # else a later backward adds to what a shadow step leaves
    assert_as_plain({str(mode): case})


def test_a_loop_that_leaves_the_update_to_backward() -> None:
    cases = {}
    for first in (True, False):
        case = hooked([(1, 4), (4, 2), (0, 2)], interleaved, {})
        case.calls_step, case.zero_grad_first = False, first
        cases[f"zero_grad first: {first}"] = case
    assert_as_plain(cases)


def test_owner_only_gradients_of_parameters_that_nobody_uses() -> None:
    case = Case([(2, 6), (5, 1)], make_model=Gated, hook=to_owners, ddp={"find_unused_parameters": True})
    assert_as_plain({"momentum": case})


class Interrupted(Exception): ...


def calls_after_a_join(zero_first: bool) -> None:
    """However a Join has ended, steps make the calls they made before it, and gradients can be clipped."""
    ddp = DDP(Tangle())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    ddp.register_comm_hook(None, reduce_to_owners(zero))
    joined = [zero, ddp] if zero_first else [ddp, zero]

    def backward(step: int) -> None:
        zero.zero_grad()
        loss_on_own_data(ddp, dist.get_rank(), step).backward()

    def calls_of_a_step() -> list[Call]:
        backward(0)
        with recording_distributed() as calls:
            clip_grad_norm_(zero, 1.0)
            zero.step()
        return [call for call in calls if call != Call("all_gather", 32)]  # the check of some steps

    def train(iterations: int, interrupted: bool = False) -> None:
        with Join(joined):
            for step in range(iterations):
                backward(step)
                zero.step()
            if interrupted:
                raise Interrupted

    before = calls_of_a_step()
    train(1 if zero_first else 1 + dist.get_rank())  # shadows are made in the order of the list
    assert calls_of_a_step() == before
    with pytest.raises(Interrupted):
        train(1, interrupted=True)
    assert calls_of_a_step() == before


@pytest.mark.parametrize("zero_first", [False, True])
def test_after_a_join_has_ended_all_is_as_before_it(zero_first: bool) -> None:
    run(calls_after_a_join, 2, zero_first, timeout=120)


def refusals() -> list[str]:
    messages = []
    for option in ("find_unused_parameters", "static_graph"):
        ddp = DDP(nn.Linear(2, 2), **{option: True})
        zero = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
        with pytest.raises(ValueError) as error:
            Join([ddp, zero])
        messages.append(str(error.value))
    return messages


def test_overlap_that_depends_on_what_was_used_is_refused() -> None:
    for messages in run(refusals, 2):
        assert len(messages) == 2
        for message in messages:
            assert "find_unused_parameters=True or static_graph=True" in message


# ------------------------------------------------------------------------------- other company in the Join


Make = Callable[[list[nn.Parameter]], list[Any]]
"""Makes from a model's parameters the optimizers that step in turn."""


def in_company(make: Make, counts: Sequence[int]) -> list[Snapshot]:
    ddp = DDP(Tangle())
    optimizers = make(list(ddp.parameters()))
    snapshots = []
    with Join([ddp, *(one for one in optimizers if isinstance(one, Joinable))]):
        for step in range(counts[dist.get_rank()]):
            ddp.zero_grad()
            loss_on_own_data(ddp, dist.get_rank(), step).backward()
            for optimizer in optimizers:
                optimizer.step()
            snapshots.append(snapshot(ddp))
    return [*snapshots, snapshot(ddp)]


def two_plain(params: list[nn.Parameter]) -> list[Any]:
    return [optim.AdamW(params[::2]), optim.SGD(params[1::2], lr=0.1, momentum=0.9)]


def two_sharded(params: list[nn.Parameter]) -> list[Any]:
    return [
        ZeroRedundancyOptimizer(params[::2], optim.AdamW),
        ZeroRedundancyOptimizer(params[1::2], optim.SGD, lr=0.1, momentum=0.9, partition="even"),
    ]


def compare_company(make: Make, counts: Sequence[int]) -> None:
    assert_same(in_company(make, counts), in_company(two_plain, counts), f"{counts}")


def test_two_optimizers_on_one_model() -> None:
    for counts in [(1, 4, 2), (3, 0, 3)]:
        run(compare_company, 3, two_sharded, counts)


def alone() -> list[float]:
    """The optimizer is all that joins; both ranks have the same gradients."""
    param = nn.Parameter(torch.zeros(3))
    zero = ZeroRedundancyOptimizer([param, nn.Parameter(torch.zeros(3))], optim.SGD, lr=1.0)
    with Join([zero]):
        for _ in range(1 + 2 * dist.get_rank()):
            param.grad = torch.ones(3)
            zero.step()
    return param.tolist()


def test_an_optimizer_alone() -> None:
    assert run(alone, 2) == [[-3.0] * 3] * 2


# ------------------------------------------------------------------------ what the loop sees, what it costs


def job(model: nn.Module | None = None, **mode: Any) -> tuple[DDP, ZeroRedundancyOptimizer]:
    ddp = DDP(model or Tangle(), find_unused_parameters=mode.pop("find_unused_parameters", False))
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, **mode)


def iterate(ddp: DDP, zero: ZeroRedundancyOptimizer, steps: int, scheduler: Any = None) -> Iterator[int]:
    for step in range(steps):
        zero.zero_grad()
        loss_on_own_data(ddp, dist.get_rank(), step).backward()
        zero.step()
        if scheduler:
            scheduler.step()
        yield step


def gradients_left() -> tuple[bool, bool]:
    ddp, zero = job(partition="even")
    before: list[Any] = []
    with Join([ddp, zero]):
        for _ in iterate(ddp, zero, 1 + 2 * dist.get_rank()):
            before = [param.grad if param.grad is None else param.grad.clone() for param in ddp.parameters()]
    after = [param.grad for param in ddp.parameters()]
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return all(same) and len(same) == len(list(ddp.parameters())) - 1, any(a is not None for a in after)


def test_shadow_steps_leave_the_gradients_of_the_last_own_backward() -> None:
    assert run(gradients_left, 2) == [(True, True)] * 2


def no_data_then_schedule() -> float:
    ddp, zero = job()
    scheduler = lr_scheduler.StepLR(zero, 1, gamma=0.5)
    with Join([ddp, zero]):
        for _ in iterate(ddp, zero, 2 * dist.get_rank()):
            pass
    with warnings.catch_warnings(action="error"):  # "call optimizer.step() before lr_scheduler.step()"
        scheduler.step()
    return float(zero.param_groups[0]["lr"])


def test_a_scheduler_once_an_epoch_does_not_miss_the_steps_of_a_rank_without_data() -> None:
    assert run(no_data_then_schedule, 2) == [0.0005, 0.0005]


def drifting() -> list[str]:
    """Two epochs, in both of which rank 1's scheduler makes more steps."""
    ddp, zero = job()
    scheduler = lr_scheduler.LambdaLR(zero, lambda step: 1 / (1 + step))
    messages = []
    for _ in range(2):
        try:
            with Join([ddp, zero]):
                for _ in iterate(ddp, zero, 2 + dist.get_rank(), scheduler):
                    pass
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_schedulers_that_have_drifted_apart_are_told_of() -> None:
    for rank, messages in enumerate(run(drifting, 2)):
        (message,) = messages
        assert message.startswith(f"rank {rank}: ranks 0 and 1 have different options; here they are ")
        assert f"lr={0.001 / (4 + rank)!r}," in message
        assert "load into it, on all ranks, the state_dict()" in message


def calls_of(
    counts: Sequence[int], enable: bool | None, partition: Any = "even"
) -> tuple[list[list[Call]], int]:
    """The calls of each step on this rank, and of its way out; the bytes of trained parameters it owns.

    Without Join if `enable` is None.
    """
    ddp, zero = job(partition=partition)
    calls: list[list[Call]] = []
    context: Any = contextlib.nullcontext() if enable is None else Join([ddp, zero], enable=enable)
    with recording(zero.collectives) as recorded:
        with context:
            for _ in iterate(ddp, zero, counts[dist.get_rank()]):
                calls.append(recorded.copy())
                recorded.clear()
        calls.append(recorded.copy())
    return calls, sum(4 * piece.numel for piece, param, *_ in zero.shard.owned if param.requires_grad)


def test_while_all_have_data_a_step_makes_one_call_of_8_bytes_more() -> None:
    question = Call("all_gather", 8)
    ways = [run(calls_of, 2, (3, 3), enable) for enable in (None, True, False)]
    for (usual, _), (joined, _), (disabled, _) in zip(*ways, strict=True):
        assert len(usual) == 4
        assert joined == [*([question, *calls] for calls in usual[:-1]), [question]]
        assert disabled == usual


@pytest.mark.parametrize("partition", ["even", [list(range(11)), [], []]], ids=["even", "all at rank 0"])
def test_a_rank_without_data_is_lent_what_it_owns_by_one_other(partition: Any) -> None:
    (first, own_nbytes), (second, _), (third, _) = run(calls_of, 3, (1, 2, 2), True, partition)
    usual = second[0][1:]
    shadow, lender, other = first[1], second[1], third[1]
    assert [call.op for call in lender[:3]] == ["all_gather", "broadcast", "broadcast"]
    options = lender[:3]
    assert lender[0].nbytes == lender[1].nbytes == 8
    assert lender[2].nbytes < 1000

    sends = [call for call in lender if call.op == "send"]
    assert {call.peer for call in sends} == {0}
    assert all(call.nbytes for call in sends), "nothing is sent of a parameter without elements"
    assert sum(call.nbytes for call in sends) == own_nbytes > 1000
    assert lender == [*options, *sends, *usual]
    assert other == [*options, *usual]
    receipts = [Call("recv", call.nbytes, 1) for call in sends]
    assert shadow == [*options, *receipts, *usual, *shadow[-3:]]
    assert second[2] == third[2] == shadow[-3:], "on the way out the last ones' options, once more"


def no_gradients_to_lend() -> list[str]:
    ddp, zero = job()
    ddp.register_comm_hook(None, reduce_to_owners(zero))
    with Join([ddp, zero]), recording(zero.collectives) as calls:
        for _ in iterate(ddp, zero, 1 + dist.get_rank()):
            ops = [call.op for call in calls]
            calls.clear()
    return ops


def test_owner_only_gradients_are_not_sent_once_more() -> None:
    ops = run(no_gradients_to_lend, 2)[1]
    assert ops[-1] == "broadcast"
    questions = ops[ops.index("all_gather") :]
    assert "send" not in questions
    assert "recv" not in questions


# ------------------------------------------------------------------------- closures, thawing, the same Join


def with_closure() -> tuple[list[Snapshot], list[float]]:
    ddp, zero = job()
    losses, snapshots = [], []
    with Join([ddp, zero]):
        for step in range(1 + 2 * dist.get_rank()):

            def closure(step: int = step) -> torch.Tensor:
                zero.zero_grad()
                loss = loss_on_own_data(ddp, dist.get_rank(), step)
                loss.backward()
                return loss

            losses.append(zero.step(closure).item())
            snapshots.append(snapshot(ddp))
    return snapshots, losses


def without_closure() -> list[Snapshot]:
    ddp, zero = job()
    with Join([ddp, zero]):
        return [snapshot(ddp) for _ in iterate(ddp, zero, 1 + 2 * dist.get_rank())]


def test_a_closure() -> None:
    for (ours, losses), plain in zip(run(with_closure, 2), run(without_closure, 2), strict=True):
        assert_same(ours, plain, "closure")
        assert len(set(losses)) == len(plain)


def freezing(sharded: bool) -> tuple[list[Snapshot], bool]:
    """A layer is frozen, and another one thaws, when rank 0 has left."""
    model = Tangle()
    ddp = DDP(model, find_unused_parameters=True)
    params = list(model.parameters())
    optimizer: Any = optim.AdamW(params)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, partition="even")
    else:  # which would move a frozen parameter: a rank that has left makes DDP believe that it was used
        optimizer.register_step_pre_hook(lambda *_: model.up.zero_grad() if frozen else None)
    frozen: list[bool] = []
    snapshots = []
    with Join([ddp, optimizer] if sharded else [ddp]):
        for step in iterate(ddp, optimizer, 1 + 3 * dist.get_rank()):
            snapshots.append(snapshot(ddp))
            if step == 1:
                model.up.requires_grad_(False)
                frozen.append(True)
    return snapshots, model.up.weight.requires_grad


def test_a_layer_is_frozen_when_a_rank_has_left() -> None:
    for (ours, trained), (plain, _) in zip(run(freezing, 2, True), run(freezing, 2, False), strict=True):
        assert_same(ours, plain, "freezing")
        assert not trained, "also on the rank that has left"


# ------------------------------------------------------------------------------------------- ends and faults


def terminated(hook: Any) -> tuple[int, str, float]:
    """Rank 1 has the fewest batches: steps made, what was raised, and whether the ranks can go on."""
    ddp, zero = job(overlap_with_ddp=hook in OVERLAPPED)
    if hook is not None:
        ddp.register_comm_hook(None, hook(ddp, zero))
    steps, message = 0, "nothing"
    try:
        with Join([ddp, zero], throw_on_early_termination=True):
            for _ in iterate(ddp, zero, (5, 2, 4)[dist.get_rank()]):
                steps += 1
    except RuntimeError as error:
        message = str(error)
    after = in_company(two_sharded, (1, 2, 0))[-1]  # nothing of the old context is left to wait for
    return steps, message, after[0].sum().item()


@pytest.mark.parametrize("hook", [None, interleaved])
def test_ending_when_the_first_rank_runs_out_of_data_raises_on_all(hook: Any) -> None:
    outcomes = run(terminated, 3, hook, timeout=20)
    assert [steps for steps, _, _ in outcomes] == [2, 2, 2]
    assert outcomes[1][1] == "Rank 1 exhausted all inputs."
    assert outcomes[0][1] == outcomes[2][1] != "nothing"
    assert outcomes[0][2] == outcomes[1][2] == outcomes[2][2]


def killed(rank: int, hook: Any) -> None:
    """A rank is killed in an update when rank 0 has left the loop."""
    ddp, zero = job(overlap_with_ddp=hook in OVERLAPPED)
    if hook is not None:
        ddp.register_comm_hook(None, hook(ddp, zero))
    left: list[bool] = []

    def die(call: Call) -> None:
        if dist.get_rank() == rank and left and call.op != "all_gather":
            os.kill(os.getpid(), signal.SIGKILL)

    zero.collectives.observers.append(die)
    with Join([ddp, zero]):
        for step in iterate(ddp, zero, 2 + 3 * dist.get_rank()):
            if step == 1:
                left.append(True)


def failing(comm: virtual.VirtualCollectives) -> list[str]:
    zero = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], optim.SGD, comm, lr=0.1)

    def fail(tensor: torch.Tensor) -> list[torch.Tensor]:
        raise RuntimeError("all_gather did not complete")

    comm.all_gather = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="did not complete") as error:
        zero.join_hook().main_hook()
    return error.value.__notes__


def test_a_shadow_step_that_fails_says_what_the_others_may_have_done() -> None:
    ((note,),) = virtual.run(failing, 1)
    assert "makes one step for each forward of the others" in note
