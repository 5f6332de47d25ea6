"""Virtual ranks: the optimizer's own code on W ranks of one process, every rank's state in sight.

A rank is a thread, and a collective is an exchange through shared memory, so 64 ranks start in
milliseconds on a laptop and a notebook cell can compare what each of them holds. What is learned here
holds on real ranks, because the optimizer is the same and sees the same `Collectives` protocol.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from zero_ref.comm.collectives import Observable, PendingCall, ToPeer
from zero_ref.lab.patience import patience
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import check_world_size

T = TypeVar("T")


def run(
    function: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[T]:
    """Call `function(collectives, *args, **kwargs)` on each of `world_size` virtual ranks.

    Pass `collectives` to the optimizer as its `process_group`. Seed with a `torch.Generator` of each
    rank's own: the global generator is shared by all threads.

    >>> run(lambda comm: int(comm.all_gather(torch.tensor([comm.rank]))[-1]), world_size=3)
    [2, 2, 2]

    Args:
        timeout: seconds for which a rank waits for the others in one call, times `patience()`.
    Returns:
        What each rank returned, in rank order.
    Raises:
        ValueError: `world_size` is below 1.
        RuntimeError: a rank raised; names the first that did, with its error as the cause.
    """
    check_world_size(world_size)
    world = World(world_size, timeout)
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []  # in order of time: list.append is atomic

    def one_rank(rank: int) -> None:
        try:
            results[rank] = function(world.collectives(rank), *args, **kwargs)
        except BaseException as error:
            failures.append((rank, error))
            world.barrier.abort()  # the others wait for a rank that will not come

    threads = [threading.Thread(target=one_rank, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = failures[0]
        raise RuntimeError(f"virtual rank {rank} failed first: {type(error).__name__}: {error}") from error
    return results


class World:
    """The common objects of a group's ranks: a board to lay tensors on, a barrier, a mailbox for each pair.

    `run` makes one of all its ranks. Others are for groups of these ranks, such as those of a node.

    >>> nodes = [World(2), World(2)]
    >>> def in_node(comm):
    ...     node, place = divmod(comm.rank, 2)
    ...     within = nodes[node].collectives(place)
    ...     return [int(one) for one in within.all_gather(torch.tensor([comm.rank]))]
    >>> run(in_node, world_size=4)
    [[0, 1], [0, 1], [2, 3], [2, 3]]

    Args:
        size: the number of ranks.
        timeout: seconds for which a rank waits for the others in one call, times `patience()`.
    """

    def __init__(self, size: int, timeout: float = 3.0) -> None:
        self.size, self.timeout = size, timeout * patience()
        self.barrier = threading.Barrier(size, timeout=self.timeout)
        self.board: list[Any] = [None] * size
        self.mailboxes: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (src, dst): queue.SimpleQueue() for src in range(size) for dst in range(size)
        }
        # By number, the rank that rings and the one that listens.
        self.alarms: dict[tuple[int, int, int], deque[tuple[int, str]]] = {}

    def collectives(self, rank: int) -> VirtualCollectives:
        """Return the collectives of one rank of the group."""
        return VirtualCollectives(self, rank)


class VirtualCollectives(Observable):
    """The `Collectives` of one virtual rank. Calls are complete when they return."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__()
        self.world, self.rank, self.world_size = world, rank, world.size
        self.control_device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"virtual rank {self.rank} of {self.world_size}"

    def wire_of(self, device: torch.device) -> torch.device:
        return device

    def goes_pairwise(self, device: torch.device) -> bool:
        return True

    def prefers_reduce(self, device: torch.device) -> bool:
        return False

    def open_channel(self, number: int, devices: Collection[torch.device]) -> _VirtualAlarm:
        return _VirtualAlarm(self, number)

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> _Done:
        self.tell("broadcast", tensor, src)
        return self._exchange(f"broadcast from rank {src}", tensor, lambda board: tensor.copy_(board[src]))

    def all_reduce(self, tensor: torch.Tensor) -> _Done:
        self.tell("all_reduce", tensor)
        return self._exchange("all_reduce", tensor, lambda board: tensor.copy_(sum(board[1:], board[0])))

    def reduce(self, tensor: torch.Tensor, dst: int) -> _Done:
        self.tell("reduce", tensor, dst)

        def add_up(board: list[torch.Tensor]) -> None:
            if self.rank == dst:
                tensor.copy_(sum(board[1:], board[0]))

        return self._exchange(f"reduce to rank {dst}", tensor, add_up)

    def all_gather(self, tensor: torch.Tensor, op: str = "all_gather") -> list[torch.Tensor]:
        self.tell(op, tensor)
        gathered: list[torch.Tensor] = []
        # Copies: what lies on the board is the same tensor for all ranks.
        self._exchange("all_gather", tensor, lambda board: gathered.extend(laid.clone() for laid in board))
        return gathered

    def gather_shares(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> _Done:
        self.tell("all_gather", flat)
        mine = flat.chunk(self.world_size)[self.rank]
        return self._exchange("all_gather", mine, lambda board: flat.copy_(torch.cat(board)))

    def reduce_shares(self, flat: torch.Tensor, share: torch.Tensor) -> _Done:
        self.tell("reduce_shares", flat)

        def add_up(board: list[torch.Tensor]) -> None:
            parts = [laid.chunk(self.world_size)[self.rank] for laid in board]
            share.copy_(sum(parts[1:], parts[0]))

        return self._exchange("reduce_scatter", flat, add_up)

    def send(self, tensor: torch.Tensor, dst: int) -> _Done:
        self.tell("send", tensor, dst)
        self._put(tensor, dst)
        return _Done()

    def recv(self, tensor: torch.Tensor, src: int) -> _Done:
        self.tell("recv", tensor, src)
        self._receive(tensor, src)
        return _Done()

    def _put(self, tensor: torch.Tensor, dst: int) -> None:
        self.world.mailboxes[self.rank, dst].put(tensor.detach().clone())

    @torch.no_grad()
    def _receive(self, tensor: torch.Tensor, src: int) -> None:
        received = self._take(src)
        if _kind(received) != _kind(tensor):
            raise RuntimeError(
                f"virtual rank {self.rank} wants {_kind(tensor)} and rank {src} sent {_kind(received)}."
            )
        tensor.copy_(received)

    def exchange(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer], told: Call | None = None) -> _Done:
        self.tell_exchange(sends, recvs, told)
        for dst, tensor in sends:
            self._put(tensor, dst)
        for src, tensor in recvs:
            self._receive(tensor, src)
        return _Done()

    def _take(self, src: int) -> torch.Tensor:
        """The next message from `src`, unless a rank stops before it comes."""
        deadline = time.monotonic() + self.world.timeout
        while time.monotonic() < deadline and not self.world.barrier.broken:
            with contextlib.suppress(queue.Empty):
                return self.world.mailboxes[src, self.rank].get(timeout=0.05)
        raise RuntimeError(
            f"virtual rank {self.rank}: receive from rank {src} did not complete: another rank stopped, or "
            f"nothing came in {self.world.timeout} s."
        )

    @torch.no_grad()
    def _exchange(self, op: str, tensor: torch.Tensor, take: Callable[[list[torch.Tensor]], Any]) -> _Done:
        """Lay a copy on the board, wait for all, take what is needed, wait till all have taken."""
        call = f"{op} of {_kind(tensor)}"
        self.world.board[self.rank] = (call, tensor.detach().clone())
        try:
            self.world.barrier.wait()
            calls = [laid for laid, _ in self.world.board]
            if calls != [call] * self.world_size:
                raise RuntimeError(f"virtual rank {self.rank} calls {call}, but the ranks call {calls}.")
            take([laid for _, laid in self.world.board])
            self.world.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(
                f"virtual rank {self.rank}: {op} did not complete: another rank stopped, or did not come in "
                f"{self.world.timeout} s."
            ) from None
        return _Done()


class _VirtualAlarm:
    """Texts laid down for each other rank, which takes them up when it looks."""

    def __init__(self, comm: VirtualCollectives, number: int) -> None:
        peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
        alarms = comm.world.alarms
        # Whichever end comes first makes the deque: setdefault is atomic.
        self.to = [alarms.setdefault((number, comm.rank, peer), deque()) for peer in peers]
        self.of = {peer: alarms.setdefault((number, peer, comm.rank), deque()) for peer in peers}

    def ring(self, text: str, update: int) -> None:
        for rung in self.to:
            rung.append((update, text))

    def heard(self, update: int) -> dict[int, str]:
        return {peer: rung.popleft()[1] for peer, rung in self.of.items() if rung and rung[0][0] <= update}


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


class _Done:
    def wait(self) -> None: ...
