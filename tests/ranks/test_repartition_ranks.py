"""Repartitions between real ranks: training goes on, also in a subgroup, and nobody waits for ever."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import optim
from training import (
    NEVER_S,
    Run,
    Snapshot,
    Tangle,
    assert_same,
    assert_state_dicts_equal,
    caught,
    dealt,
    in_a_hurry,
    of_several_dtypes,
    snapshot,
    train,
)

from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.lab.ranks import RankError, run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks


TURNS: list[Any] = ["even", "sorted_greedy", dealt, "even", "registration_greedy"]


def train_and_repartition(case: Run, as_view: bool, group: Any = None) -> tuple[list[Snapshot], Any]:
    """A repartition before each step; at the end the whole state, on rank 1."""
    model = case.model(None)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), case.optimizer_class, group, as_view, **case.options
    )
    trained = []
    for step, partition in enumerate(TURNS):
        optimizer.repartition(partition)
        trained += [snapshot(model) for _ in train(model, optimizer, range(step, step + 1))]
    optimizer.repartition("even")
    optimizer.consolidate_state_dict(to=1)
    return trained, optimizer.state_dict() if optimizer.rank == 1 else None


def train_all(cases: list[Run], as_view: bool) -> list[tuple[list[Snapshot], Any]]:
    return [train_and_repartition(case, as_view) for case in cases]


# ------------------------------------------------------------------------------------------- it goes on


@pytest.mark.parametrize(("world_size", "as_view"), [(2, True), (4, False)])
def test_training_goes_on_bit_for_bit(world_size: int, as_view: bool) -> None:
    cases = [Run(optim.AdamW, make_model=of_several_dtypes), Run(optim.ASGD, t0=1.0)]
    of_rank = run(train_all, world_size, cases, as_view, timeout=30)
    for case, results in zip(cases, zip(*of_rank, strict=True), strict=True):
        plain, end = case.plain(range(len(TURNS)))
        for rank, (trained, _) in enumerate(results):
            assert_same(trained, plain, f"rank {rank}")
        assert_state_dicts_equal(results[1][1], end)


def in_a_subgroup(case: Run) -> Any:
    odd = dist.new_group([1, 3])
    return train_and_repartition(case, True, odd) if dist.get_rank() % 2 else None


def test_in_a_subgroup_ranks_count_within_it() -> None:
    case = Run(optim.AdamW)
    plain, end = case.plain(range(len(TURNS)))
    _, first, _, second = run(in_a_subgroup, 4, case, timeout=30)
    for trained, _ in (first, second):
        assert_same(trained, plain, "in the subgroup")
    assert_state_dicts_equal(second[1], end)


# ------------------------------------------------------------------------------- ranks that differ, stop, die


def ask_for_another() -> tuple[str, str, list[Snapshot]]:
    """Rank 1 asks for another partition, then cannot ask at all; and training goes on."""
    model = Tangle()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    trained = [snapshot(model) for _ in train(model, optimizer, range(2))]
    first = caught(lambda: optimizer.repartition("even" if optimizer.rank == 1 else dealt))
    second = caught(lambda: optimizer.repartition("by luck" if optimizer.rank == 1 else dealt))
    return first, second, trained + [snapshot(model) for _ in train(model, optimizer, range(2, 4))]


def test_a_rank_that_asks_for_something_else_makes_all_raise() -> None:
    plain, _ = Run(optim.AdamW).plain(range(4))
    for rank, (first, second, trained) in enumerate(run(ask_for_another, 4, timeout=20)):
        assert first.startswith(
            "ValueError: ranks disagree, so none can repartition the optimizer: rank 1 has [part"
        )
        assert "unknown partition 'by luck'" in second
        assert rank == 1 or second.startswith(
            f"RuntimeError: rank {rank}: rank 1 could not repartition the optimizer"
        )
        assert_same(trained, plain, "after both were refused")


def stop() -> None:
    dist.barrier()  # of the default group, which is patient: until the others have given up


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hand_out(happening: Callable[[], None], at_send: int) -> str:
    """Rank 1 owns all, and something happens to it before its n-th send. What the others' calls raise."""

    def trained(group: Any) -> ZeroRedundancyOptimizer:
        model = Tangle()
        everything = [[], list(range(len(list(model.parameters())))), [], []]
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, group, partition=everything)
        for _ in train(model, optimizer, range(1)):
            pass
        return optimizer

    patient = timedelta(seconds=NEVER_S)
    optimizer = in_a_hurry(trained) if happening is stop else trained(dist.new_group(timeout=patient))
    sent = itertools.count()
    send = ProcessGroupCollectives.message_to

    def send_or_stop(*args: Any, **kwargs: Any) -> Any:
        if next(sent) == at_send:
            happening()
        return send(*args, **kwargs)

    before = optimizer.partition
    with mock.patch.object(ProcessGroupCollectives, "message_to", send_or_stop):
        message = caught(lambda: optimizer.repartition("even"))
    if optimizer.rank != 1:
        assert optimizer.partition is before
        assert len(optimizer.state) == 0, "not all has arrived, so nothing counts"
    if happening is die:
        raise ValueError(message)
    if optimizer.rank != 1:
        dist.barrier()
    return message


# Three ranks get a length each, then a table, then the state.
AT_SEND = {"the tables": 4, "the state": 9}


@pytest.mark.parametrize("at_send", AT_SEND.values(), ids=list(AT_SEND))
def test_a_rank_that_stops_in_the_middle_is_waited_for_until_the_groups_timeout(at_send: int) -> None:
    first, _, third, fourth = run(hand_out, 4, stop, at_send)
    for rank, message in ((0, first), (2, third), (3, fourth)):
        assert re.search(rf"rank {rank} of 4: (receive from rank 1|all_gather) did not complete", message)
        assert "Another rank has stopped, or makes other calls" in message


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
@pytest.mark.usefixtures("all_may_report")
def test_a_rank_that_is_killed_in_the_middle_ends_the_others_without_a_timeout() -> None:
    with pytest.raises(RankError) as error:
        run(hand_out, 4, die, AT_SEND["the state"], timeout=NEVER_S)
    assert error.value.rank == 1
    assert "SIGKILL" in error.value.summary
    for rank in (0, 2, 3):
        assert f"rank {rank} of 4: receive from rank 1 did not complete" in str(error.value)
