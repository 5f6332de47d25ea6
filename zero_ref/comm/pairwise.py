"""Collectives on Gloo as messages between pairs of ranks: all that makes CPUs fast, and nothing else.

A process group of NCCL passes no line of this module. On few ranks, a message of its own to each peer takes
less time than Gloo's broadcast or all-gather, and a rank can post the receive early, while it still computes
(`expect`). On more ranks, shares are added up around a ring. Since the messages of two ranks keep their
order, a rank also learns of another's error without waiting for it (`Alarm`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.comm.collectives import Alarm, AllOf, PendingCall, Then, ToPeer
from zero_ref.comm.devices import CPU
from zero_ref.comm.process_group import TAG, ProcessGroupCollectives

ALARM_TAG = TAG + 720_720
"""Gloo takes network device number (tag mod devices): with up to 16 devices the same one as for `TAG`."""

ALARM_NBYTES = 512
"""An alarm is a text, then the update's number in eight bytes, then a 1, which arrives last."""


class GlooCollectives(ProcessGroupCollectives):
    """Collectives on a process group that has Gloo for some kind of device; tensors of the others pass by.

    Gloo takes tensors of GPUs too, but not in messages between pairs of ranks; these go by way of the CPU.
    """

    def wire_of(self, device: torch.device) -> torch.device:
        return CPU if self.is_gloos(device) else super().wire_of(device)

    def is_gloos(self, device: torch.device) -> bool:
        """Whether Gloo is the group's backend for this kind of device."""
        return self.backends.get(device.type) == "gloo"

    def reduce_on_wire(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        # Gloo's own reduce-scatter is an all-reduce inside, and sends twice as much.
        if self.world_size == 1 or not self.is_gloos(flat.device):
            return super().reduce_on_wire(flat, share)
        return _RingReduction(self, flat.detach().chunk(self.world_size), share)

    def exchange_on_wire(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer]) -> PendingCall:
        # Receives first, so that Gloo can write what arrives into its place without a copy.
        calls = [self.message_from(*recv) for recv in recvs if self.is_gloos(recv[1].device)]
        calls += [self.message_to(*send) for send in sends if self.is_gloos(send[1].device)]
        sends, recvs = ([one for one in each if not self.is_gloos(one[1].device)] for each in (sends, recvs))
        return AllOf([*calls, super().exchange_on_wire(sends, recvs)])


class PairwiseCollectives(GlooCollectives):
    """Collectives on a process group that has Gloo for the CPU, of few ranks: each sends to each other.

    Attributes:
        others: the other ranks, the next one first, so that not all send to the same rank at once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def goes_pairwise(self, device: torch.device) -> bool:
        return self.is_gloos(self.wire_of(device))

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        super().open_channel(number, devices)
        # An alarm comes before the broadcasts that follow it only if these are messages as well.
        if any(device.type != "cpu" for device in devices):
            return None
        return _PairwiseAlarm(self, ALARM_TAG + number)

    def expect(self, tensor: torch.Tensor, src: int) -> PendingCall | None:
        if src == self.rank or not _fits_messages(tensor):
            return None
        return self.message_from(src, tensor, "broadcast")

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> PendingCall:
        if not _fits_messages(tensor):
            return super().broadcast(tensor, src)
        self.tell("broadcast", tensor, src)
        if src != self.rank:  # `expected` is the same receive, started early
            return expected or self.message_from(src, tensor, "broadcast")
        return AllOf([self.message_to(peer, tensor, "broadcast") for peer in self.others])

    def gather_on_wire(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        if not self.is_gloos(flat.device):
            return super().gather_on_wire(flat)
        # Receives before sends: what arrives is then written into its place without a copy.
        shares = flat.detach().chunk(self.world_size)
        early = dict(enumerate(expected))
        calls = [
            early.get(peer) or self.message_from(peer, shares[peer], "all_gather") for peer in self.others
        ]
        calls += [self.message_to(peer, shares[self.rank], "all_gather") for peer in self.others]
        return AllOf(calls)

    def reduce_on_wire(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        if not self.is_gloos(flat.device):
            return super().reduce_on_wire(flat, share)
        shares = flat.detach().chunk(self.world_size)
        parts = {peer: torch.empty_like(share) for peer in self.others} | {self.rank: shares[self.rank]}
        calls = [self.message_from(peer, parts[peer], "reduce_scatter") for peer in self.others]
        calls += [self.message_to(peer, shares[peer], "reduce_scatter") for peer in self.others]

        def add_up() -> None:
            # In the order of ranks, so that the result does not depend on who owns it.
            share.copy_(parts[0])
            for rank in range(1, self.world_size):
                share.add_(parts[rank])

        return Then(AllOf(calls), add_up)


def _fits_messages(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


class _PairwiseAlarm:
    """An `Alarm` on Gloo: from each peer a receive for which nobody waits. Its last byte says if it came.

    Gloo delivers the messages between two ranks in their order. So when a rank has received new values, an
    alarm that their sender rang before is already in memory, and reading it there costs no communication.
    """

    def __init__(self, comm: PairwiseCollectives, tag: int) -> None:
        self.comm, self.tag = comm, tag
        self.received: dict[int, bytearray] = {}
        self.receives: dict[int, Any] = {}
        self.sends: list[Any] = []
        for peer in range(comm.world_size):
            if peer != comm.rank:
                self._listen(peer)

    def _listen(self, peer: int) -> None:
        self.received[peer] = bytearray(ALARM_NBYTES)
        tensor = torch.frombuffer(self.received[peer], dtype=torch.uint8)
        # A peer whose process has ended, as a short program does that only constructs, rings no alarm.
        # The next call to it raises.
        with contextlib.suppress(RuntimeError):
            self.receives[peer] = dist.irecv(tensor, group=self.comm.group, group_src=peer, tag=self.tag)

    def ring(self, text: str, update: int) -> None:
        limit = ALARM_NBYTES - 9
        message = bytearray(text.encode()[:limit].ljust(limit) + update.to_bytes(8, "big") + b"\1")
        tensor = torch.frombuffer(message, dtype=torch.uint8)
        self.sends = [
            dist.isend(tensor, group=self.comm.group, group_dst=peer, tag=self.tag) for peer in self.received
        ]

    def heard(self, update: int) -> dict[int, str]:
        texts = {}
        for peer, message in list(self.received.items()):
            if message[-1] and int.from_bytes(message[-9:-1], "big") <= update:
                texts[peer] = message[:-9].decode(errors="replace").rstrip()
                self._listen(peer)
        return texts


class _RingReduction:
    """A reduce-scatter around a ring: N-1 times a rank adds its part to a sum and passes that on.

    Many small tensors at once between all pairs of ranks would flood them; here a rank has two neighbours.
    Only the first message is sent before `wait`, which all ranks must call in the same order.

    Args:
        shares: of this rank's tensor, which are overwritten by sums.
        result: receives the sum of all ranks' parts of this rank's share.
    Source: the first half of a ring all-reduce (Patarasuk and Yuan, 2009).
    """

    def __init__(
        self, comm: ProcessGroupCollectives, shares: Sequence[torch.Tensor], result: torch.Tensor
    ) -> None:
        self.comm, self.shares, self.result = comm, shares, result
        self.received = torch.empty_like(result)
        self.under_way = self._pass_on(1)

    def _pass_on(self, distance: int) -> AllOf:
        rank, size = self.comm.rank, self.comm.world_size
        what = "reduce_scatter"
        return AllOf(
            [
                self.comm.message_from((rank - 1) % size, self.received, what),
                self.comm.message_to((rank + 1) % size, self.shares[(rank - distance) % size], what),
            ]
        )

    @torch.no_grad()
    def wait(self) -> None:
        rank, size = self.comm.rank, self.comm.world_size
        for distance in range(1, size):
            self.under_way.wait()
            # What came is the sum that the previous rank passed on: add this rank's part of the same share.
            self.shares[(rank - distance - 1) % size].add_(self.received)
            if distance < size - 1:
                self.under_way = self._pass_on(distance + 1)
        self.result.copy_(self.shares[rank])
