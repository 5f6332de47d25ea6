"""Collectives on Gloo as messages between pairs of ranks, which are faster on CPUs.

With NCCL no code of this module runs. On few ranks, sending each peer a message of its own takes less time
than Gloo's broadcast or all-gather, and a rank can start to receive early, while it still computes
(`expect`). On more ranks, a reduce-scatter passes sums around a ring. Since the messages of two ranks keep
their order, a rank also learns of an error on another rank without waiting for a message (`Alarm`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.comm.collectives import Alarm, AllOf, PendingCall, Then, ToBroadcast, ToPeer
from zero_ref.comm.devices import CPU
from zero_ref.comm.process_group import TAG, ProcessGroupCollectives

ALARM_TAG = TAG + 720_720
"""Gloo sends a message over network device number (tag mod devices). The offset is a multiple of 1 to 16, so
with up to 16 devices alarms and parameters travel over the same one, and keep their order."""

ALARM_NBYTES = 512
"""An alarm is a text, then the update's number in 8 bytes, then one byte that is 1 and arrives last."""


class GlooCollectives(ProcessGroupCollectives):
    """Collectives on a process group that has Gloo for some kind of device.

    Tensors of a kind of device with another backend take the calls of the base class. Gloo's collectives take
    tensors of GPUs, but its messages between two ranks do not: such tensors are sent by way of the CPU.
    """

    def wire_of(self, device: torch.device) -> torch.device:
        return CPU if self.is_gloos(device) else super().wire_of(device)

    def prefers_reduce(self, device: torch.device) -> bool:
        # Gloo's reduce adds the elements of a tensor in an order that depends on the tensor's size, so sums
        # would depend on who owns what. Messages are added in the order of ranks, whoever owns an element.
        return not self.is_gloos(self.wire_of(device))

    def is_gloos(self, device: torch.device) -> bool:
        """Return whether Gloo is the group's backend for this kind of device."""
        return self.backends.get(device.type) == "gloo"

    def reduce_on_wire(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        # Gloo implements reduce-scatter by an all-reduce, which sends twice as much as a ring.
        if self.world_size == 1 or not self.is_gloos(flat.device):
            return super().reduce_on_wire(flat, share)
        return _RingReduction(self, flat.detach().chunk(self.world_size), share)

    def exchange_on_wire(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer]) -> PendingCall:
        calls: list[PendingCall] = []
        other_sends, other_recvs = [], []  # for the group's other backends
        # Start receives before sends: then Gloo writes an arriving message into its tensor without a copy.
        for src, tensor in recvs:
            if self.is_gloos(tensor.device):
                calls.append(self.message_from(src, tensor))
            else:
                other_recvs.append((src, tensor))
        for dst, tensor in sends:
            if self.is_gloos(tensor.device):
                calls.append(self.message_to(dst, tensor))
            else:
                other_sends.append((dst, tensor))
        if other_sends or other_recvs:
            calls.append(super().exchange_on_wire(other_sends, other_recvs))
        return AllOf(calls)


class PairwiseCollectives(GlooCollectives):
    """Collectives on a group of few ranks with Gloo for the CPU: every rank sends directly to every other.

    Attributes:
        others: the other ranks, beginning with the next one, so that not all ranks send to the same rank
            first.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def goes_pairwise(self, device: torch.device) -> bool:
        return self.is_gloos(self.wire_of(device))

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        super().open_channel(number, devices)
        # An alarm arrives before the broadcasts that follow it only if these are messages of the same pair.
        if any(device.type != "cpu" for device in devices):
            return None
        return _PairwiseAlarm(self, ALARM_TAG + number)

    def expect(self, messages: Iterable[ToBroadcast]) -> Sequence[PendingCall | None]:
        # Here and in `broadcast`, no views as bytes are needed, as `message_from` makes them: between two
        # ranks Gloo sends a contiguous tensor of any dtype.
        expected: list[PendingCall | None] = []
        for message in messages:
            src, tensor, receiving = message.owner, message.tensor, None
            if src != self.rank and tensor.device.type == "cpu":
                what = f"broadcast from rank {src}"
                receiving = self.start(what, dist.irecv, tensor, group_src=src, tag=self.tag)
            expected.append(receiving)
        return expected

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> PendingCall:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return super().broadcast(tensor, src)
        self.tell("broadcast", tensor, src)
        if src != self.rank:  # `expected` is this receive, if it was started early
            return expected or self.message_from(src, tensor, "broadcast")
        sends = []
        for peer in self.others:
            what = f"broadcast to rank {peer}"
            sends.append(self.start(what, dist.isend, tensor, group_dst=peer, tag=self.tag))
        return AllOf(sends)

    def gather_on_wire(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        if not self.is_gloos(flat.device):
            return super().gather_on_wire(flat)
        # Start receives before sends: then Gloo writes an arriving share into `flat` without a copy.
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
        # Each rank sends every peer the peer's share, and receives N-1 parts of its own share.
        shares = flat.detach().chunk(self.world_size)
        parts = {peer: torch.empty_like(share) for peer in self.others} | {self.rank: shares[self.rank]}
        calls = [self.message_from(peer, parts[peer], "reduce_scatter") for peer in self.others]
        calls += [self.message_to(peer, shares[peer], "reduce_scatter") for peer in self.others]

        def add_up() -> None:
            # Add in rank order, so that the rounded sum does not depend on which rank owns the share.
            share.copy_(parts[0])
            for rank in range(1, self.world_size):
                share.add_(parts[rank])

        return Then(AllOf(calls), add_up)


class _PairwiseAlarm:
    """An `Alarm` on Gloo: a receive from each peer is always pending, and no rank waits for it.

    Gloo delivers the messages between two ranks in order. So when a rank has received new values, an alarm
    that their sender rang before is already in memory, and reading it costs no communication. The last byte
    of a message tells whether it has arrived.

    Attributes:
        received: for each peer the memory that its next alarm is written into, zeros until then.
        receives, sends: the calls that were started, kept so that they are not freed.
    """

    def __init__(self, comm: PairwiseCollectives, tag: int) -> None:
        self.comm, self.tag = comm, tag
        self.received: dict[int, bytearray] = {}
        self.receives: dict[int, Any] = {}
        self.sends: list[Any] = []
        for peer in range(comm.world_size):
            if peer != comm.rank:
                self._start_receive(peer)

    def _start_receive(self, peer: int) -> None:
        self.received[peer] = bytearray(ALARM_NBYTES)
        tensor = torch.frombuffer(self.received[peer], dtype=torch.uint8)
        # A peer whose process has ended (a short program may only construct an optimizer) rings no alarm. The
        # next call to this peer raises.
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
        # The flag and the number are bytes in memory: reading them waits for nothing.
        for peer, message in list(self.received.items()):
            if message[-1] and int.from_bytes(message[-9:-1], "big") <= update:
                texts[peer] = message[:-9].decode(errors="replace").rstrip()
                self._start_receive(peer)
        return texts


class _RingReduction:
    """A reduce-scatter around a ring: N-1 times each rank adds its part to a sum and sends that to the next.

    On many ranks, messages between all pairs would be too many at once; in a ring a rank has two neighbours.
    Only the first message is sent before `wait`, which all ranks must call in the same order.

    Args:
        shares: the N equal parts of this rank's tensor; sums overwrite them.
        result: receives the sum of all ranks' parts of this rank's share.
    Source: the first half of a ring all-reduce (Patarasuk and Yuan, 2009).
    """

    def __init__(
        self, comm: ProcessGroupCollectives, shares: Sequence[torch.Tensor], result: torch.Tensor
    ) -> None:
        self.comm, self.shares, self.result = comm, shares, result
        self.received = torch.empty_like(result)
        self.under_way = self._start_round(1)

    def _start_round(self, distance: int) -> AllOf:
        """Send the next rank the sum of the share `distance` places back; receive from the previous rank."""
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
            # The previous rank has sent its sum of one share: add this rank's part of the same share.
            self.shares[(rank - distance - 1) % size].add_(self.received)
            if distance < size - 1:
                self.under_way = self._start_round(distance + 1)
        self.result.copy_(self.shares[rank])
