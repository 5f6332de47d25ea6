"""The meters: each measures one thing at its source."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from zero_ref.comm.collectives import Collectives
from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import (
    DDPRecorder,
    HeldBytes,
    bytes_sent_by,
    gather_from_ranks,
    held_bytes,
    recording,
    recording_distributed,
    sent_bytes,
    state_bytes,
    wire_bytes,
)
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call

# -------------------------------------------------------------------------------------------------- recording


def test_recording_sees_the_calls_made_while_it_lasts() -> None:
    def on_rank(comm: Collectives) -> tuple[list[Call], list[Call]]:
        with recording(comm) as outer:
            with recording(comm) as inner:
                pass  # two lists that are equal: each must remove its own
            comm.all_reduce(torch.zeros(2))
            with recording(comm) as inner:
                comm.all_reduce(torch.zeros(3))
        comm.all_reduce(torch.zeros(4))
        assert comm.observers == []
        return outer, inner

    outer, inner = virtual.run(on_rank, 2)[0]
    assert outer == [Call("all_reduce", 8), Call("all_reduce", 12)]
    assert inner == [Call("all_reduce", 12)]


def test_recording_stops_where_an_error_leaves_it() -> None:
    def on_rank(comm: Collectives) -> None:
        with pytest.raises(ZeroDivisionError), recording(comm):
            raise ZeroDivisionError
        assert comm.observers == []

    virtual.run(on_rank, 1)


@pytest.mark.usefixtures("group_of_one")
def test_what_anyone_asks_of_torch_distributed_is_seen() -> None:
    comm = ProcessGroupCollectives()
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    ddp.register_comm_hook(None, allreduce_hook)
    with recording_distributed() as calls:
        comm.all_gather(torch.zeros(32, dtype=torch.uint8))
        comm.all_reduce(torch.zeros(3)).wait()
        ddp(torch.ones(1, 2)).sum().backward()
        dist.all_gather(tensor=torch.zeros(5), tensor_list=[torch.zeros(5)])
    comm.all_reduce(torch.zeros(3)).wait()  # unseen: the context is over
    gather, reduce = "all_gather", "all_reduce"
    assert calls == [Call(gather, 32), Call(reduce, 12), Call(reduce, 12), Call(gather, 20)]


def test_torch_is_left_as_it_was_also_by_an_error() -> None:
    before = dist.all_reduce, dist.all_gather
    with pytest.raises(KeyError), recording_distributed():
        raise KeyError(dist.all_reduce)
    assert before == (dist.all_reduce, dist.all_gather)


@pytest.mark.usefixtures("group_of_one")
def test_the_ddp_recorder_sees_each_gradient_bucket() -> None:
    ddp = DistributedDataParallel(nn.Linear(10, 3))
    recorder = DDPRecorder(ddp)
    for step in (1, 2):
        ddp(torch.ones(2, 10)).sum().backward()
        assert sum(call.nbytes for call in recorder.calls) == step * 33 * 4
        assert {call.op for call in recorder.calls} == {"all_reduce"}


# ------------------------------------------------------------------------------------------------ held bytes


def test_held_bytes_of_a_plain_optimizer_by_hand() -> None:
    params = [nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = optim.Adam(params)
    assert held_bytes(params, optimizer) == HeldBytes(parameters=64, gradients=0, optimizer_state=0)
    params[0].grad = torch.ones(10)
    optimizer.step()
    # two moments of 40 bytes and a step counter of 4
    assert held_bytes(params, optimizer) == HeldBytes(parameters=64, gradients=40, optimizer_state=84)


def test_memory_that_several_share_counts_once_and_padding_counts() -> None:
    flat = torch.zeros(16)
    params = [nn.Parameter(flat[:5]), nn.Parameter(flat[5:9])]
    params[0].grad, params[1].grad = torch.zeros(16).split([5, 11])[0], None
    assert held_bytes([*params, params[0]], optim.SGD(params, lr=0.1)) == HeldBytes(64, 64, 0)


def test_sparse_gradients_count_their_indices_and_values() -> None:
    table = nn.Parameter(torch.ones(100, 4))
    table.grad = torch.sparse_coo_tensor([[3, 5]], torch.ones(2, 4), (100, 4), check_invariants=True)
    assert held_bytes([table], optim.SparseAdam([table])).gradients == 2 * 8 + 2 * 4 * 4


def test_a_shards_state_is_that_of_its_rank() -> None:
    def on_rank(comm: Collectives) -> tuple[HeldBytes, int]:
        params = [nn.Parameter(torch.ones(n)) for n in (60, 40, 20)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = ZeroRedundancyOptimizer(params, optim.Adam, comm)
        optimizer.step()
        return held_bytes(params, optimizer), state_bytes(optimizer)

    held = virtual.run(on_rank, 2)
    assert held[0] == (HeldBytes(480, 480, 8 * 60 + 4), 8 * 60 + 4)
    assert held[1] == (HeldBytes(480, 480, 8 * 60 + 8), 8 * 60 + 8)


def test_state_that_is_no_tensor_has_no_bytes() -> None:
    params = [nn.Parameter(torch.ones(4))]
    optimizer = optim.SGD(params, lr=0.1)
    optimizer.state[params[0]] = {"momentum_buffer": None, "count": 3, "sum": torch.ones(4)}
    assert state_bytes(optimizer) == 16


# ------------------------------------------------------------------------------------------ wire, other ranks


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")


@contextlib.contextmanager
def connection(address: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as here,
    ):
        there, _ = server.accept()
        with there:
            yield here, there


def send(here: socket.socket, there: socket.socket, nbytes: int) -> None:
    here.sendall(bytes(nbytes))
    received = 0
    while received < nbytes:
        received += len(there.recv(nbytes))


@on_linux
def test_wire_bytes_reads_the_kernels_counter_of_what_was_sent() -> None:
    before = wire_bytes()
    assert before is not None
    with connection() as (here, there):
        send(here, there, 200_000)
    after = wire_bytes()
    assert after is not None
    assert after - before >= 200_000


def test_wire_bytes_is_none_without_counters() -> None:
    assert wire_bytes("no-such-interface") is None


@on_linux
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_sent_bytes_counts_what_this_process_wrote_and_nothing_else(address: str) -> None:
    if address == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    with connection(address) as (here, there):
        before = sent_bytes()
        assert before is not None
        send(here, there, 200_000)
        assert sent_bytes() == before + 200_000  # to the byte: no headers
        send(there, here, 1)
        assert sent_bytes() == before + 200_001


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@on_linux
def test_sent_bytes_counts_a_connection_once_and_leaves_it_open() -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    with connection() as (here, there), here.dup():
        before = sent_bytes()
        assert before is not None
        send(here, there, 5_000)
        assert sent_bytes() == before + 5_000
        send(here, there, 1)
    assert len(os.listdir("/proc/self/fd")) == open_before


@on_linux
def test_sockets_that_are_not_tcp_and_connections_that_are_closed_do_not_count() -> None:
    before = sent_bytes()
    one, other = socket.socketpair()
    with one, other, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        one.sendall(b"12345")
        datagrams.sendto(b"12345", ("127.0.0.1", 9))
        assert sent_bytes() == before
    with connection() as (here, there):
        send(here, there, 5_000)
    assert sent_bytes() == before


def test_without_the_kernels_counters_there_is_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sent_bytes() is None


@on_linux
def test_a_kernel_that_tells_too_little_gives_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_ref.lab.meter._TCP_INFO_BYTES", 1000)
    with connection():
        assert sent_bytes() is None


@on_linux
def test_what_was_sent_a_second_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = bytes(200) + (5_000).to_bytes(8, sys.byteorder) + (1_400).to_bytes(8, sys.byteorder)
    with connection() as (here, there):
        monkeypatch.setattr(os, "listdir", lambda _: [str(here.fileno()), str(there.fileno())])
        monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: counters)
        assert sent_bytes() == 2 * (5_000 - 1_400)


@pytest.mark.usefixtures("group_of_one")
def test_a_call_is_made_once_to_connect_and_once_to_count() -> None:
    calls: list[int] = []
    sent = bytes_sent_by(lambda: calls.append(1))
    assert len(calls) == 2
    assert sent == (0 if sys.platform == "linux" else None)  # a rank that is alone has no connection


@pytest.mark.usefixtures("group_of_one")
def test_gathering_from_one_rank() -> None:
    value: Any = {"a": 1}
    assert gather_from_ranks(value) == [value]
