"""When ranks differ, raise or die: an error on every rank, which says what was wrong, within seconds."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import (
    NEVER_S,
    Tangle,
    caught,
    in_a_hurry,
    loss_on_own_data,
    ring_early,
    snapshot,
    train,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.pairwise import PairwiseCollectives
from zero_ref.lab.ranks import RankError, run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks


# ---------------------------------------------------------------------------- ranks that ask different things


def wait_until_rank_1_left(group: Any) -> None:
    """Rank 0 waits for rank 1 to destroy the group, and for its own network to notice."""
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        while True:
            dist.irecv(torch.empty(1), group=group, group_src=1, tag=99)


def construct_and_leave() -> str:
    """Rank 1 leaves the group at once, before rank 0 opens its channel for alarms: what that raises."""
    group = dist.new_group([0, 1])
    open_channel = PairwiseCollectives.open_channel

    def open_late(*args: Any) -> Any:
        wait_until_rank_1_left(group)
        return open_channel(*args)

    def made() -> None:
        ZeroRedundancyOptimizer(Tangle().parameters(), optim.AdamW, group)

    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PairwiseCollectives, "open_channel", open_late)
            return caught(made)
    message = caught(made)
    dist.destroy_process_group(group)
    dist.barrier()
    return message


def test_a_rank_may_leave_as_soon_as_it_has_constructed() -> None:
    assert run(construct_and_leave, 2, timeout=NEVER_S) == ["nothing"] * 2


# ------------------------------------------------------------------------------------- ranks that stop or die


def trained(as_view: bool = False) -> Callable[[Any], ZeroRedundancyOptimizer]:
    """In a group: an optimizer after two steps. The next one compares nothing before it sends."""

    def train_in(group: Any) -> ZeroRedundancyOptimizer:
        model = Tangle()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, group, as_view)
        for _ in train(model, optimizer, range(2)):
            pass
        return optimizer

    return train_in


def meet(happening: Callable[[ZeroRedundancyOptimizer], None], as_view: bool, soon: bool = False) -> str:
    """Rank 1 does something else while the others take a step. What their step raises, and soon enough."""
    patient = timedelta(seconds=NEVER_S)
    optimizer = in_a_hurry(trained(as_view)) if soon else trained(as_view)(dist.new_group(timeout=patient))
    if dist.get_rank() == 1:
        happening(optimizer)
        return "came through"
    for _ in range(2):  # a first broadcast may be on its way before anyone notices
        message = caught(optimizer.step)
        if message != "nothing":
            break
    if soon:
        dist.barrier()
    return message


def go_missing(optimizer: ZeroRedundancyOptimizer) -> None:
    dist.barrier()  # of the default group, which is patient: until the others have given up


def test_a_rank_that_does_not_come_to_a_step_is_waited_for_until_the_groups_timeout() -> None:
    first, second, third = run(meet, 3, go_missing, True, True)
    assert second == "came through"
    for rank, message in ((0, first), (2, third)):
        assert message.startswith(f"RuntimeError: rank {rank} of 3: broadcast ")
        assert "did not complete" in message
        assert "Another rank has stopped, or makes other calls" in message


def raise_something(optimizer: ZeroRedundancyOptimizer) -> None:
    raise ZeroDivisionError("no loss today")


def die(optimizer: ZeroRedundancyOptimizer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle_of_a_step(optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.collectives.observers.append(lambda call: die(optimizer) if call.peer == 1 else None)
    optimizer.step()


def error_of(happening: Callable[[ZeroRedundancyOptimizer], None], as_view: bool) -> RankError:
    with pytest.raises(RankError) as error:
        run(meet, 3, happening, as_view, timeout=NEVER_S)
    assert run(dist.get_rank, 3) == [0, 1, 2], "the next call works"
    return error.value


def test_a_rank_that_raises_ends_the_call_with_its_error_first() -> None:
    error = error_of(raise_something, as_view=True)
    assert error.rank == 1
    assert error.summary == "ZeroDivisionError: no loss today"
    assert "raise ZeroDivisionError" in str(error)
    assert set(error.others) == {0, 2}


def fail_and_recover(failing: list[int]) -> tuple[list[str], bool]:
    """Return the errors of steps in which some ranks fail, and whether training then goes on as plain."""
    plain, model = Tangle(), Tangle()
    reference = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
    messages = []
    for start in range(2):  # what tells of a failure does so again
        steps = range(start, start + 1)
        for _ in zip(train(plain, reference, steps), train(model, optimizer, steps), strict=True):
            pass
        optimizer.consolidate_state_dict("all")
        saved, values = optimizer.state_dict(), snapshot(model)
        if dist.get_rank() in failing:
            hook = optimizer.optim.register_step_pre_hook(lambda *_: raise_something(optimizer))
        messages.append(caught(optimizer.step))
        if dist.get_rank() in failing:
            hook.remove()
        if failing == [1]:
            messages.append(caught(optimizer.step))
            for param, value in zip(model.parameters(), values, strict=True):
                param.data.copy_(value)
            optimizer.load_state_dict(saved)
    return messages, all(map(torch.equal, plain.parameters(), model.parameters()))


def test_an_update_lost_on_one_rank_stops_all_until_a_state_is_loaded() -> None:
    for rank, (messages, same) in enumerate(run(fail_and_recover, 3, [1])):
        told = f"RuntimeError: rank {rank}: in update 2 of optimizer 0 (SGD) the local optimizer of rank 1 "
        assert messages[0].startswith("ZeroDivisionError: no loss today" if rank == 1 else told)
        assert messages[1].startswith(told)
        assert "ZeroDivisionError: no loss today" in messages[1]
        assert all("the local optimizer of rank 1 raised" in message for message in messages[3:])
        assert same


def test_an_alarm_of_a_later_update_is_heard_in_its_turn() -> None:
    assert run(lambda: ring_early(as_collectives(None)), 2) == [[{}, {1: "lost"}, {}], [{}, {}, {}]]


def test_after_an_error_in_every_local_step_ranks_go_on() -> None:
    for messages, same in run(fail_and_recover, 3, [0, 1, 2]):
        assert messages == ["ZeroDivisionError: no loss today"] * 2
        assert same


def step_in_another_order() -> tuple[str, bool]:
    """Two optimizers, of which rank 1 steps the second first: what that raises, and whether nothing came."""

    def trained_twice(group: Any) -> list[tuple[Tangle, ZeroRedundancyOptimizer]]:
        pairs = []
        for seed in range(2):
            model = Tangle(seed)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, group, lr=0.1)
            for _ in train(model, optimizer, range(2)):
                pass
            pairs.append((model, optimizer))
        return pairs

    pairs = in_a_hurry(trained_twice)
    rank = dist.get_rank()
    model, optimizer = pairs[rank]
    before = snapshot(model)
    message = caught(optimizer.step)
    dist.barrier()
    numbers = [piece.param for piece in optimizer.partition.slices_of_rank[1 - rank]]
    return message, all(torch.equal(snapshot(model)[number], before[number]) for number in numbers)


def test_two_optimizers_stepped_in_another_order_never_take_each_others_values() -> None:
    # The third step compares nothing. What the other rank sends for its optimizer has another tag.
    for rank, (message, untouched) in enumerate(run(step_in_another_order, 2)):
        assert f"rank {rank} of 2: broadcast" in message
        assert "makes other calls" in message
        assert untouched


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_rank_that_is_killed_ends_the_call_with_its_end_first() -> None:
    error = error_of(die, as_view=True)
    assert error.rank == 1
    assert "SIGKILL" in error.summary


def outlive() -> str:
    """Rank 1 dies in the middle of a step; what the others find, before the pool ends them."""
    model = Tangle()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    comm = optimizer.collectives
    assert isinstance(comm, PairwiseCollectives)
    if comm.rank == 1:
        die_in_the_middle_of_a_step(optimizer)
    message = caught(optimizer.step)
    raise ValueError(message)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
@pytest.mark.usefixtures("all_may_report")
def test_the_others_are_told_what_they_waited_for_when_a_rank_dies_in_a_step() -> None:
    with pytest.raises(RankError) as error:
        run(outlive, 2, timeout=NEVER_S)
    told = f"{error.value}"
    assert re.search(r"rank 0 of 2: broadcast (from|to) rank \d did not complete", told)


def outlive_in_backward() -> None:
    """Rank 1 dies when it is about to reduce a bucket; what rank 0 finds, before the pool ends it."""
    ddp = DistributedDataParallel(Tangle(), bucket_cap_mb=0.0003)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW)
    ddp.register_comm_hook(None, reduce_to_owners(optimizer, by="reduce"))
    if dist.get_rank() == 1:
        optimizer.collectives.observers.append(lambda call: die(optimizer))
    loss_on_own_data(ddp, dist.get_rank(), 0).backward()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
@pytest.mark.usefixtures("all_may_report")
def test_the_others_are_told_what_they_waited_for_when_a_rank_dies_in_backward() -> None:
    with pytest.raises(RankError) as error:
        run(outlive_in_backward, 2, timeout=NEVER_S)
    assert re.search(r"rank 0 of 2: reduce to rank \d did not complete", f"{error.value}")


def step_after_rank_1_left() -> str:
    group = dist.new_group([0, 1])
    optimizer = trained()(group)
    if dist.get_rank() == 0:
        wait_until_rank_1_left(group)
        return caught(optimizer.step)
    dist.destroy_process_group(group)
    dist.barrier()
    return ""


def test_a_step_after_a_rank_has_left_says_what_it_waited_for() -> None:
    # The alarm cannot be sent either. Its error must not take the place of the first one.
    message, _ = run(step_after_rank_1_left, 2, timeout=NEVER_S)
    assert message.startswith("RuntimeError: rank 0 of 2: broadcast from rank 1 did not complete")


def freeze_on_one() -> str:
    def made(group: Any) -> tuple[Tangle, ZeroRedundancyOptimizer]:
        model = Tangle()
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, group)
        for _ in train(model, optimizer, range(2)):
            pass
        return model, optimizer

    model, optimizer = in_a_hurry(made)
    if dist.get_rank() == 0:
        model.up.weight.requires_grad_(False)
    return caught(optimizer.step)


def test_a_parameter_frozen_on_one_rank_only_ends_in_an_error_at_the_groups_timeout() -> None:
    # Without the check the ranks would broadcast different parameters: Gloo then aborts the process.
    first, second = run(freeze_on_one, 2)
    assert "RanksLostError: rank 0 was to change which parameters are trained with all others: " in first
    assert "RuntimeError: rank 1 of 2: broadcast from rank 0 did not complete" in second


# ------------------------------------------------------------------------- calls that only some ranks make


def new_group(optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


ALONE: dict[str, Callable[[ZeroRedundancyOptimizer], Any]] = {
    "RanksLostError: rank 0 was to add a parameter group with all others": new_group,
    "RanksLostError: rank 0 was to consolidate the optimizer state with": lambda optimizer: (
        optimizer.consolidate_state_dict()
    ),
    "RuntimeError: rank 0 of 3: broadcast to rank 1 did not": lambda optimizer: optimizer.step(),
}


def call_alone(calls: list[Callable[[ZeroRedundancyOptimizer], Any]]) -> list[str]:
    """Rank 0 makes a call, and the others none."""
    messages = []
    for call in calls:
        optimizer = in_a_hurry(trained())
        if dist.get_rank() == 0:
            messages.append(
                caught(lambda call=call, optimizer=optimizer: (call(optimizer), optimizer.step()))
            )
        dist.barrier()  # of the default group, which is patient
    return messages


def test_a_call_that_only_some_ranks_make_ends_in_an_error_that_names_it() -> None:
    first, *_ = run(call_alone, 3, list(ALONE.values()), timeout=40)
    for text, message in zip(ALONE, first, strict=True):
        assert message.startswith(text)
        assert "did not complete" in message
        assert "such as one inside `if rank == 0:`" in message
