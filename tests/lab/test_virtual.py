"""Virtual ranks: what each collective does to its tensors, and that none waits for one that has stopped."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from library.training import NEVER_S
from torch import nn

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording
from zero_ref.plan.calls import Call


def numbered(comm: Collectives) -> torch.Tensor:
    """(2, 2): ten times the rank, then ones up."""
    return torch.arange(4.0).view(2, 2) + 10 * comm.rank


def test_values_come_back_in_rank_order() -> None:
    assert virtual.run(lambda comm, x, y: (comm.rank, comm.world_size, x + y), 3, 1, y=2) == [
        (rank, 3, 3) for rank in range(3)
    ]


def test_broadcast_overwrites_by_the_sources_values() -> None:
    def on_rank(comm: Collectives) -> torch.Tensor:
        tensor = numbered(comm)
        comm.broadcast(tensor, src=1).wait()
        return tensor

    assert all(torch.equal(tensor, torch.arange(4.0).view(2, 2) + 10) for tensor in virtual.run(on_rank, 3))


def test_all_reduce_sums() -> None:
    def on_rank(comm: Collectives) -> torch.Tensor:
        tensor = numbered(comm)
        comm.all_reduce(tensor).wait()
        return tensor

    assert all(torch.equal(t, 3 * torch.arange(4.0).view(2, 2) + 30) for t in virtual.run(on_rank, 3))


def test_all_gather_gives_each_rank_copies_of_its_own() -> None:
    def on_rank(comm: Collectives) -> torch.Tensor:
        tensor = numbered(comm)
        gathered = comm.all_gather(tensor)
        comm.all_gather(tensor)  # all ranks have theirs
        for other in gathered:
            other += 100 * comm.rank
        comm.all_gather(tensor)
        assert torch.equal(tensor, numbered(comm))
        return torch.stack(gathered)

    expected = torch.stack([torch.arange(4.0).view(2, 2) + 10 * rank for rank in range(2)])
    for rank, gathered in enumerate(virtual.run(on_rank, 2)):
        assert torch.equal(gathered, expected + 100 * rank)


def test_a_reduce_gives_the_sum_to_one_rank() -> None:
    def on_rank(comm: Collectives) -> list[float]:
        tensor = torch.tensor([1.0, 2.0]) * 10**comm.rank
        comm.reduce(tensor, dst=1).wait()
        return tensor.tolist()

    assert virtual.run(on_rank, 3) == [[1, 2], [111, 222], [100, 200]]


def test_equal_shares_are_gathered_and_added_up() -> None:
    def on_rank(comm: Collectives) -> tuple[list[float], list[float]]:
        flat, share = torch.arange(6.0) + 10 * comm.rank, torch.empty(2)
        comm.reduce_shares(flat.clone(), share).wait()
        comm.gather_shares(flat).wait()
        return flat.tolist(), share.tolist()

    gathered = [0, 1, 12, 13, 24, 25]
    assert virtual.run(on_rank, 3) == [
        (gathered, [30, 33]),
        (gathered, [36, 39]),
        (gathered, [42, 45]),
    ]


def test_messages_of_a_pair_keep_their_order_and_the_sender_keeps_its_tensor() -> None:
    def on_rank(comm: Collectives) -> list[float]:
        if comm.rank == 0:
            tensor = torch.zeros(1)
            for value in (1.0, 2.0, 3.0):
                tensor.fill_(value)
                comm.send(tensor, dst=2).wait()
            return []
        if comm.rank == 1:
            comm.send(torch.tensor([9.0]), dst=2)
            return []
        received = [torch.empty(1) for _ in range(4)]
        for tensor, src in zip(received, [0, 1, 0, 0]):
            comm.recv(tensor, src).wait()
        return [tensor.item() for tensor in received]

    assert virtual.run(on_rank, 3)[2] == [1.0, 9.0, 2.0, 3.0]


def test_parameters_may_be_sent_and_received() -> None:
    def on_rank(comm: Collectives) -> None:
        weight = nn.Parameter(torch.full((3,), float(comm.rank)))
        comm.broadcast(weight, src=1)
        if comm.rank == 0:
            comm.send(weight, dst=1)
        else:
            comm.recv(weight, src=0)
        assert weight.tolist() == [1.0] * 3
        assert weight.grad_fn is None

    virtual.run(on_rank, 2)


def test_calls_are_recorded_on_the_rank_that_makes_them() -> None:
    def on_rank(comm: Collectives) -> list[Call]:
        with recording(comm) as calls:
            comm.broadcast(torch.zeros(3), src=1)
            comm.all_reduce(torch.zeros(2, dtype=torch.bfloat16))
            comm.all_gather(torch.zeros(5, dtype=torch.uint8))
            if comm.rank == 0:
                comm.send(torch.zeros(1), dst=1)
            else:
                comm.recv(torch.zeros(1), src=0)
        comm.all_reduce(torch.zeros(1))
        return calls

    both = [Call("broadcast", 12, 1), Call("all_reduce", 4), Call("all_gather", 5)]
    assert virtual.run(on_rank, 2) == [[*both, Call("send", 4, 1)], [*both, Call("recv", 4, 0)]]


# ------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("world_size", [0, -1])
def test_there_is_at_least_one_rank(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 rank, got {world_size}"):
        virtual.run(lambda comm: None, world_size)


def stop_while_others(wait: Any) -> None:
    """A run in which rank 1 raises and the others call `wait`."""

    def on_rank(comm: Collectives) -> None:
        if comm.rank == 1:
            time.sleep(0.1)
            raise ZeroDivisionError("one by nothing")
        wait(comm)

    with pytest.raises(
        RuntimeError, match="virtual rank 1 failed first: ZeroDivisionError: one by nothing"
    ) as caught:
        virtual.run(on_rank, 3, timeout=NEVER_S)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "wait",
    [
        lambda comm: comm.all_reduce(torch.zeros(1)),
        lambda comm: comm.all_gather(torch.zeros(1)),
        lambda comm: comm.recv(torch.zeros(1), src=1),
    ],
    ids=["all_reduce", "all_gather", "recv"],
)
def test_a_rank_that_raises_ends_the_run_whatever_the_others_wait_for(wait: Any) -> None:
    stop_while_others(wait)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Thread-")]


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_never_comes_ends_the_run_at_the_timeout() -> None:
    with pytest.raises(RuntimeError, match=r"all_reduce did not complete.*0\.2 s"):
        virtual.run(lambda comm: comm.rank or comm.all_reduce(torch.zeros(1)), 2, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"rank 0: receive from rank 1 did not complete.*0\.2 s"):
        virtual.run(lambda comm: comm.rank or comm.recv(torch.zeros(1), src=1), 2, timeout=0.2)


def test_ranks_that_make_different_calls_are_told() -> None:
    def different_operations(comm: Collectives) -> None:
        comm.all_reduce(torch.zeros(1)) if comm.rank else comm.all_gather(torch.zeros(1))

    def different_shapes(comm: Collectives) -> None:
        comm.broadcast(torch.zeros(1 + comm.rank), src=0)

    def different_sources(comm: Collectives) -> None:
        comm.broadcast(torch.zeros(1), src=comm.rank)

    def different_dtypes(comm: Collectives) -> None:
        comm.all_reduce(torch.zeros(1, dtype=torch.float32 if comm.rank else torch.float64))

    for function in (different_operations, different_shapes, different_sources, different_dtypes):
        with pytest.raises(RuntimeError, match="but the ranks call"):
            virtual.run(function, 2, timeout=5)


def test_a_message_of_another_shape_is_told() -> None:
    def on_rank(comm: Collectives) -> None:
        if comm.rank:
            comm.send(torch.zeros(1), dst=0)
        else:
            comm.recv(torch.zeros(4), src=1)

    with pytest.raises(RuntimeError, match=r"rank 0 wants \(4,\) torch.float32 and rank 1 sent \(1,\)"):
        virtual.run(on_rank, 2, timeout=5)


def test_sixty_four_ranks_gather() -> None:
    totals = virtual.run(lambda comm: sum(int(t) for t in comm.all_gather(torch.tensor([comm.rank]))), 64)
    assert totals == [64 * 63 // 2] * 64
