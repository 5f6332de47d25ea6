"""The calls between ranks: `Collectives` lists what the optimizer asks of a network.

`ProcessGroupCollectives` makes the calls on a torch.distributed process group (NCCL, Gloo), and
`zero_ref.lab.virtual` on threads of one process. In both, every call is passed to `observers` before it is
made, so that what really happened can be compared with the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_ref.plan.calls import Call

Observer = Callable[[Call], None]
ToPeer = tuple[int, torch.Tensor]
"""(peer rank, tensor): what to send to that rank, or where to put what it sends."""


class PendingCall(Protocol):
    """A call that was started."""

    def wait(self) -> object:
        """Return when the call's tensors may be used; raise RuntimeError if the call failed."""


class Alarm(Protocol):
    """Short messages to all other ranks, which need not wait for them."""

    def ring(self, text: str, update: int) -> None:
        """Send `text` about this update, counted from 1, to all other ranks."""

    def heard(self, update: int) -> dict[int, str]:
        """Give by rank the text about an update up to this one that has arrived since the last call.

        A text arrives before all tensors that its rank sends later. A text about a later update, from a rank
        that is ahead, is kept for a later call.
        """


class Collectives(Protocol):
    """What the optimizer asks of a network of `world_size` ranks, of which this is `rank`.

    Calls return immediately; their tensors belong to the call until `wait()` returns. All ranks must make the
    same collective calls in the same order. Ranks are positions in the process group, never global ones.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def control_device(self) -> torch.device:
        """The device on which short messages between ranks are made: facts, counts, norms."""

    @property
    def observers(self) -> list[Observer]: ...

    def wire_of(self, device: torch.device) -> torch.device:
        """The device on which a tensor of this device must lie for `send`, `recv` and `exchange`."""

    def goes_pairwise(self, device: torch.device) -> bool:
        """Whether messages between pairs of ranks take less time than one call, for such tensors."""

    def expect(self, tensor: torch.Tensor, src: int) -> PendingCall | None:
        """Receive the next broadcast of `src` into `tensor` early, while this rank still computes.

        Returns:
            What to pass to that `broadcast`, which has to follow; None where the network cannot do this.
        """

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        """Keep later messages apart from those of other optimizers, where the network can.

        Args:
            number: of the optimizer on the group.
            devices: of what it will broadcast.
        Returns:
            An alarm whose messages arrive before later broadcasts of their sender; None where there is none.
        """

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> PendingCall:
        """Overwrite `tensor` on all ranks by that of `src`. Cost: each other rank receives it once.

        Args:
            expected: what `expect` returned for this call.
        """

    def all_reduce(self, tensor: torch.Tensor) -> PendingCall:
        """Overwrite `tensor` by its sum over ranks. Cost: each rank sends 2(N-1)/N of it on a ring."""

    def all_gather(self, tensor: torch.Tensor, op: str = "all_gather") -> list[torch.Tensor]:
        """Give the `tensor` of each rank, in rank order; equal shapes. Cost: each rank receives N-1 of them.

        Args:
            op: the call's name for observers.
        """

    def gather_shares(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        """Overwrite each of the N equal shares of `flat` by that of its rank, in rank order.

        Args:
            flat: (N * share,), contiguous.
            expected: for each rank what `expect` returned for its share.
        Cost: each rank receives (N-1)/N of it.
        """

    def reduce_shares(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        """Overwrite `share` by the sum over ranks of this rank's share of `flat`.

        Args:
            flat: (N * share,), contiguous. It may be overwritten, and must not be used before `wait` returns.
            share: (share,), of its dtype and device.
        Cost: each rank sends (N-1)/N of `flat`; in pairwise messages it receives N-1 shares at once.
        """

    def send(self, tensor: torch.Tensor, dst: int) -> PendingCall:
        """Send `tensor` to `dst`, which must `recv` one of its shape and dtype."""

    def recv(self, tensor: torch.Tensor, src: int) -> PendingCall:
        """Overwrite `tensor` by what `src` sends next. Messages of a pair of ranks keep their order."""

    def exchange(
        self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer], told: Call | None = None
    ) -> PendingCall:
        """Send and receive several tensors as one call.

        Ranks that send to each other need this in place of `send` and `recv`, which on NCCL would each wait
        for the other rank. Messages of a pair of ranks keep their order; none may be empty, or to oneself.

        Args:
            told: what observers see in place of the messages.
        """


class Observable:
    """What implementations of `Collectives` inherit: observers; early receives and alarms that do nothing."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def tell(self, op: str, tensor: torch.Tensor, peer: int | None = None) -> None:
        """Pass a call that is about to be made to all observers."""
        if self.observers:
            self.tell_of(Call(op, tensor.numel() * tensor.element_size(), peer))

    def tell_of(self, call: Call) -> None:
        """Pass this call to all observers."""
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

    def expect(self, tensor: torch.Tensor, src: int) -> PendingCall | None:
        return None

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        return None


@dataclass(eq=False)
class AllOf:
    """Several calls that were started, as one."""

    calls: Sequence[PendingCall]

    def wait(self) -> None:
        for call in self.calls:
            call.wait()


@dataclass(eq=False)
class Then:
    """A call that was started, and what to do once it is complete."""

    call: PendingCall
    action: Callable[[], object]

    @torch.no_grad()
    def wait(self) -> None:
        self.call.wait()
        self.action()
