"""The calls between ranks: `Collectives` lists what the optimizer needs of a network.

`ProcessGroupCollectives` makes the calls on a torch.distributed process group (NCCL, Gloo), and
`zero_ref.lab.virtual` between threads of one process. Both pass every call to `observers` before they make
it, so that the calls that were made can be compared with the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_ref.plan.calls import Call

Observer = Callable[[Call], None]
ToPeer = tuple[int, torch.Tensor]
"""(peer rank, tensor): a tensor to send to that rank, or one to overwrite with the tensor that it sends."""


class ToBroadcast(Protocol):
    """A contiguous tensor that a broadcast is to send."""

    @property
    def owner(self) -> int:
        """The rank that sends it."""

    @property
    def tensor(self) -> torch.Tensor: ...


class PendingCall(Protocol):
    """A call that was started."""

    def wait(self) -> object:
        """Return when the call's tensors may be used; raise RuntimeError if the call failed."""


class Alarm(Protocol):
    """Short messages to all other ranks, for which the receivers do not wait."""

    def ring(self, text: str, update: int) -> None:
        """Send all other ranks `text` about an update; updates are counted from 1."""

    def heard(self, update: int) -> dict[int, str]:
        """Give the texts that have arrived since the last call, by the rank that sent them.

        A text arrives before all tensors that its rank sends later. A text about an update after `update`,
        from a rank that is ahead, is kept for a later call.
        """


class Collectives(Protocol):
    """The calls that the optimizer makes to a network of `world_size` ranks, of which this is `rank`.

    Calls return immediately; their tensors belong to the call until `wait()` returns. All ranks must make the
    same collective calls in the same order. Ranks are positions in the process group, never global ones.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def control_device(self) -> torch.device:
        """The device of short messages between ranks, such as facts, counts and norms."""

    @property
    def observers(self) -> list[Observer]:
        """The functions that get every call before it is made."""

    def wire_of(self, device: torch.device) -> torch.device:
        """The device to which a tensor on `device` must be copied for `send`, `recv` and `exchange`."""

    def goes_pairwise(self, device: torch.device) -> bool:
        """Whether messages between pairs of ranks take less time than a collective, for tensors there."""

    def prefers_reduce(self, device: torch.device) -> bool:
        """Whether gradients should go to their owners by `reduce`, and not by messages between pairs."""

    def expect(self, messages: Iterable[ToBroadcast]) -> Sequence[PendingCall | None]:
        """Receive the next broadcasts early, while this rank still computes.

        Returns:
            For each message the started receive, to pass to its `broadcast`, which has to follow; None for a
            message that cannot be received early. Nothing at all where the network never can.
        """

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        """Keep this optimizer's later messages apart from those of other optimizers, where the network can.

        Args:
            number: the number of the optimizer on the group.
            devices: the devices of the tensors that it will broadcast.
        Returns:
            An alarm whose messages arrive before later broadcasts of their sender; None where the network has
            no such alarm.
        """

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> PendingCall:
        """Overwrite `tensor` on all ranks with the tensor of rank `src`.

        Args:
            expected: the receive that `expect` has started for this call.
        Cost: each rank other than `src` receives it once.
        """

    def all_reduce(self, tensor: torch.Tensor) -> PendingCall:
        """Overwrite `tensor` with its sum over ranks. Cost: each rank sends 2(N-1)/N of it on a ring."""

    def reduce(self, tensor: torch.Tensor, dst: int) -> PendingCall:
        """Overwrite `tensor` on rank `dst` with its sum over ranks; on other ranks its values are undefined.

        Cost: on NCCL each rank passes it on once, along a chain. Gloo sends up to twice as much.
        """

    def all_gather(self, tensor: torch.Tensor, op: str = "all_gather") -> list[torch.Tensor]:
        """Wait for the `tensor` of each rank, and return them in rank order.

        Args:
            tensor: of the same shape and dtype on all ranks.
            op: the call's name for observers.
        Cost: each rank receives N-1 of them.
        """

    def gather_shares(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        """Overwrite each of the N equal shares of `flat` with the values of its rank, in rank order.

        Args:
            flat: (N * share,), contiguous; rank r has the values of its r-th share.
            expected: for each rank the receive that `expect` has started for its share.
        Cost: each rank receives (N-1)/N of it.
        """

    def reduce_shares(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        """Overwrite `share` with the sum over ranks of this rank's share of `flat`.

        Args:
            flat: (N * share,), contiguous. It may be overwritten, and must not be used before `wait` returns.
            share: (share,), of the dtype and device of `flat`.
        Cost: each rank sends (N-1)/N of `flat`; in pairwise messages it receives N-1 shares at once.
        """

    def send(self, tensor: torch.Tensor, dst: int) -> PendingCall:
        """Send `tensor` to `dst`, which must `recv` one of its shape and dtype."""

    def recv(self, tensor: torch.Tensor, src: int) -> PendingCall:
        """Overwrite `tensor` with the next one that `src` sends. Messages of two ranks keep their order."""

    def exchange(
        self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer], told: Call | None = None
    ) -> PendingCall:
        """Send and receive several tensors as one call.

        Ranks that send to each other need this in place of `send` and `recv`, which on NCCL would each wait
        for the other rank. Messages of two ranks keep their order. No tensor may be empty, and no peer may be
        this rank itself.

        Args:
            told: the call that observers see in place of the messages.
        """


class Observable:
    """A base of implementations of `Collectives`: it calls observers, and has no early receives or alarms."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def tell(self, op: str, tensor: torch.Tensor, peer: int | None = None) -> None:
        """Pass a call that is about to be made to all observers."""
        if self.observers:  # without observers a step makes no `Call`
            self.tell_of(Call(op, tensor.numel() * tensor.element_size(), peer))

    def tell_of(self, call: Call) -> None:
        """Pass a call that is described already to all observers."""
        for observer in self.observers:
            observer(call)

    def tell_exchange(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer], told: Call | None) -> None:
        """Pass an exchange to all observers: `told`, or each message."""
        if told is not None:
            self.tell_of(told)
            return
        for dst, tensor in sends:
            self.tell("send", tensor, dst)
        for src, tensor in recvs:
            self.tell("recv", tensor, src)

    def expect(self, messages: Iterable[ToBroadcast]) -> Sequence[PendingCall | None]:
        return ()

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        return None


@dataclass(eq=False)
class AllOf:
    """Several calls that were started, to wait for together."""

    calls: Sequence[PendingCall]

    def wait(self) -> None:
        for call in self.calls:
            call.wait()


@dataclass(eq=False)
class Then:
    """A call that was started, and an action that `wait` takes once the call is complete."""

    call: PendingCall
    action: Callable[[], object]

    @torch.no_grad()
    def wait(self) -> None:
        self.call.wait()
        self.action()
