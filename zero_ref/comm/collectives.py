"""The calls between ranks: what the optimizer asks of a network, and torch.distributed as that network.

To the `dist.broadcast` of `minimal.py` this module adds three things. Every call is passed to `observers`
before it is made, so that what really happened can be compared with the plan. A failed call says which rank
was to do what. And `Collectives` lists the methods that a network must have: `ProcessGroupCollectives` has
them on a torch.distributed process group (NCCL, Gloo), `zero_ref.lab.virtual` on threads of one process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_ref.comm.devices import CPU, current_device
from zero_ref.plan.calls import PAIRWISE_RANKS, Call

Observer = Callable[[Call], None]
ToPeer = tuple[int, torch.Tensor]
"""(peer rank, tensor): what to send to that rank, or where to put what it sends."""

TAG = 2**20
"""Tells our messages between two ranks from a user's own, whose tag is 0 unless they choose another."""

ALARM_TAG = TAG + 720_720
"""Gloo takes network device number (tag mod devices): with up to 16 devices the same one as for `TAG`."""

BACKWARD_TAG = 360_360
"""What the messages of a backward have in addition, so that none is taken for one of a step."""

ALARM_NBYTES = 512
"""A text, then the update's number in eight bytes, then a 1, which arrives last."""


class PendingCall(Protocol):
    """A call that was started."""

    def wait(self) -> object:
        """Return when the call's tensors may be used; raise RuntimeError if the call failed."""


class Alarm(Protocol):
    """Short messages to all other ranks, which need not wait for them."""

    def ring(self, text: str, update: int) -> None:
        """Send `text` about this update, counted from 1, to all other ranks."""

    def heard(self, update: int) -> dict[int, str]:
        """By rank, the text about an update up to this one that has arrived since the last call.

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
        """Where short messages about the ranks' work are made: facts, counts, norms."""

    @property
    def observers(self) -> list[Observer]: ...

    def wire_of(self, device: torch.device) -> torch.device:
        """Where tensors that belong on the device must lie for `send`, `recv` and `exchange`."""

    def goes_pairwise(self, device: torch.device) -> bool:
        """Whether, for such tensors, many messages between pairs of ranks take less time than one call."""

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

    def all_gather(self, tensor: torch.Tensor, told_as: str = "all_gather") -> list[torch.Tensor]:
        """The `tensor` of each rank, in rank order; equal shapes. Cost: each rank receives N-1 of them.

        Args:
            told_as: the `op` that observers see.
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


class ProcessGroupCollectives(Observable):
    """Collectives on a torch.distributed process group.

    A group may have a backend for each kind of device: Gloo for the CPU, NCCL for GPUs. Gloo alone takes
    tensors of GPUs too, but not in messages between pairs of ranks; these then go by way of the CPU.

    Args:
        group: the process group; None is the default group of `init_process_group`.
    Attributes:
        pairwise: Gloo sends broadcasts and shares in messages between pairs of ranks.
        native: Gloo reduces shares by its own reduce-scatter, which is an all-reduce inside.
    Raises:
        RuntimeError: torch.distributed has not been initialised.
        ValueError: this process is not a member of `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised in this process. Start it with torchrun and call "
                "torch.distributed.init_process_group(), or use zero_ref.lab.ranks.run()."
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not a member of the process group that it passed in. "
                "Build the optimizer only on the group's ranks."
            )
        self.backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
        self.control_device = CPU if "cpu" in self.backends else current_device()
        self.pairwise, self.native = self.world_size <= PAIRWISE_RANKS, False
        self.tag = TAG

    def wire_of(self, device: torch.device) -> torch.device:
        if device.type not in self.backends:
            return self.control_device
        return CPU if self._is_gloos(device) else device

    def goes_pairwise(self, device: torch.device) -> bool:
        return self.pairwise and self._is_gloos(self.wire_of(device))

    def _is_gloos(self, device: torch.device) -> bool:
        return self.backends.get(device.type) == "gloo"

    def expect(self, tensor: torch.Tensor, src: int) -> PendingCall | None:
        if src == self.rank or not self._is_sent_pairwise(tensor):
            return None
        return self._from(src, tensor, "broadcast")

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        # With one tag for all, ranks that step two optimizers in another order would each take the other's
        # parameters for their own. With a tag for each optimizer they wait, until the group's time-out.
        self.tag = TAG + number
        all_pairwise = self.goes_pairwise(CPU) and all(device.type == "cpu" for device in devices)
        return _PairwiseAlarm(self, ALARM_TAG + number) if all_pairwise else None

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> PendingCall:
        self.tell("broadcast", tensor, src)
        if not self._is_sent_pairwise(tensor):
            what = f"broadcast from rank {src}"
            return self._start(what, dist.broadcast, _raw(tensor), group_src=src, async_op=True)
        if src != self.rank:
            return expected or self._from(src, tensor, "broadcast")
        # Each source begins with another peer, so that not all send to the same rank at once.
        peers = ((src + distance) % self.world_size for distance in range(1, self.world_size))
        return AllOf(self._to(peer, tensor, "broadcast") for peer in peers)

    def _is_sent_pairwise(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and self.goes_pairwise(tensor.device) and tensor.is_contiguous()

    def all_reduce(self, tensor: torch.Tensor) -> PendingCall:
        self.tell("all_reduce", tensor)
        return self._start("all_reduce", dist.all_reduce, tensor, async_op=True)

    def all_gather(self, tensor: torch.Tensor, told_as: str = "all_gather") -> list[torch.Tensor]:
        self.tell(told_as, tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._start("all_gather", dist.all_gather, gathered, tensor, async_op=True).wait()
        return gathered

    def gather_shares(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        self.tell("all_gather", flat)
        wire = self.wire_of(flat.device)
        if flat.device.type != wire.type:
            staged = flat.to(wire)
            return Then(self._gather_shares(staged), lambda: flat.copy_(staged))
        return self._gather_shares(flat, expected)

    def _gather_shares(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        shares = flat.detach().chunk(self.world_size)
        if not self.goes_pairwise(flat.device):
            return self._start("all_gather", _all_gather, _raw(flat), _raw(shares[self.rank]), async_op=True)
        early = dict(enumerate(expected))
        # The next rank first, so that not all send to the same rank at once.
        after = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        receives = [early.get(peer) or self._from(peer, shares[peer], "all_gather") for peer in after]
        return AllOf([*receives, *(self._to(peer, shares[self.rank], "all_gather") for peer in after)])

    def reduce_shares(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        self.tell("reduce_shares", flat)
        wire = self.wire_of(flat.device)
        if flat.device.type != wire.type:
            staged, sent = share.to(wire), flat.to(wire)
            return Then(self._reduce_shares(sent, staged), lambda: share.copy_(staged))
        return self._reduce_shares(flat, share)

    def _reduce_shares(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        shares = [*flat.detach().chunk(self.world_size)]
        if self.native or not self._is_gloos(flat.device):
            return self._start("reduce_scatter", _reduce_scatter, share, flat, async_op=True)
        if not self.pairwise and self.world_size > 1:
            return _RingReduction(self, shares, share)
        after = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        parts = {peer: torch.empty_like(share) for peer in after} | {self.rank: shares[self.rank]}
        calls = [self._from(peer, parts[peer], "reduce_scatter") for peer in after]
        calls += [self._to(peer, shares[peer], "reduce_scatter") for peer in after]

        def add_up() -> None:
            # In the order of ranks, so that the result does not depend on who owns it.
            share.copy_(parts[0])
            for rank in range(1, self.world_size):
                share.add_(parts[rank])

        return Then(AllOf(calls), add_up)

    def send(self, tensor: torch.Tensor, dst: int) -> PendingCall:
        self.tell("send", tensor, dst)
        return self._to(dst, tensor)

    def recv(self, tensor: torch.Tensor, src: int) -> PendingCall:
        self.tell("recv", tensor, src)
        return self._from(src, tensor)

    def exchange(
        self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer], told: Call | None = None
    ) -> PendingCall:
        self.tell_exchange(sends, recvs, told)
        # Receives first, so that Gloo can write what arrives into its place without a copy.
        calls = [self._from(*recv) for recv in recvs if self._is_gloos(recv[1].device)]
        calls += [self._to(*send) for send in sends if self._is_gloos(send[1].device)]
        sends, recvs = ([one for one in each if not self._is_gloos(one[1].device)] for each in (sends, recvs))
        if sends or recvs:
            peers = sorted({peer for peer, _ in (*sends, *recvs)})
            calls.append(self._start(f"exchange with ranks {peers}", _batch, sends, recvs, tag=self.tag))
        return AllOf(calls)

    def _to(self, dst: int, tensor: torch.Tensor, what: str = "send") -> PendingCall:
        return self._start(f"{what} to rank {dst}", dist.isend, _raw(tensor), group_dst=dst, tag=self.tag)

    def _from(self, src: int, tensor: torch.Tensor, what: str = "receive") -> PendingCall:
        return self._start(f"{what} from rank {src}", dist.irecv, _raw(tensor), group_src=src, tag=self.tag)

    def _start(self, what: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> PendingCall:
        call = _NamedCall(f"rank {self.rank} of {self.world_size}: {what}")
        with call:
            call.work = operation(*args, group=self.group, **kwargs)
        return call


class _PairwiseAlarm:
    """An `Alarm` on Gloo: from each peer a receive for which nobody waits. Its last byte says if it came.

    Gloo delivers the messages between two ranks in their order. So when a rank has received new values, an
    alarm that their sender rang before is already in memory, and reading it there costs no communication.
    """

    def __init__(self, comm: ProcessGroupCollectives, tag: int) -> None:
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


class AllOf:
    """Several calls that were started, as one."""

    def __init__(self, calls: Iterable[PendingCall]) -> None:
        self.calls = list(calls)

    def wait(self) -> None:
        for call in self.calls:
            call.wait()


class Then:
    """A call that was started, and what to do once it is complete."""

    def __init__(self, call: PendingCall, action: Callable[[], object]) -> None:
        self.call, self.action = call, action

    @torch.no_grad()
    def wait(self) -> None:
        self.call.wait()
        self.action()


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
                self.comm._from((rank - 1) % size, self.received, what),
                self.comm._to((rank + 1) % size, self.shares[(rank - distance) % size], what),
            ]
        )

    @torch.no_grad()
    def wait(self) -> None:
        rank, size = self.comm.rank, self.comm.world_size
        for distance in range(1, size):
            self.under_way.wait()
            self.shares[(rank - distance - 1) % size].add_(self.received)
            if distance < size - 1:
                self.under_way = self._pass_on(distance + 1)
        self.result.copy_(self.shares[rank])


def as_collectives(process_group: dist.ProcessGroup | DeviceMesh | Collectives | None) -> Collectives:
    """The `Collectives` of a `process_group`.

    Args:
        process_group: a torch group, None for the default one, a DeviceMesh of one dimension, or Collectives.
    """
    if isinstance(process_group, DeviceMesh):
        process_group = process_group.get_group()  # of several dimensions torch asks for one of them
    # new_group() returns an int to ranks outside the group; the constructor refuses it.
    if process_group is None or isinstance(process_group, (dist.ProcessGroup, int)):
        return ProcessGroupCollectives(process_group)
    if not hasattr(process_group, "broadcast"):
        raise TypeError(
            f"process_group takes a process group, Collectives or None, not {process_group!r}. "
            "Options of the optimizer are passed by name, such as lr=0.001."
        )
    return process_group


def global_ranks(comm: Collectives) -> list[int]:
    """The global rank of each of its ranks; where there is no process group, the ranks themselves."""
    if isinstance(comm, ProcessGroupCollectives):
        return dist.get_process_group_ranks(comm.group)
    return list(range(comm.world_size))


def gather_bytes(comm: Collectives, content: bytes, told_as: str = "all_gather") -> list[bytearray]:
    """The `content` of each rank, in rank order; equally many bytes on all ranks.

    Collective: all ranks of the group.
    Cost: one all-gather of the content.
    """
    return [_content_of(other) for other in comm.all_gather(_tensor_of(content, comm), told_as)]


def gather_texts(comm: Collectives, text: str) -> list[str]:
    """The `text` of each rank, in rank order.

    Collective: all ranks of the group.
    Cost: one all-gather of 8 bytes; where a rank has a text, one more of the texts.
    """
    mine = text.encode()
    lengths = [int.from_bytes(other, "big") for other in gather_bytes(comm, len(mine).to_bytes(8, "big"))]
    if not any(lengths):
        return [""] * comm.world_size
    texts = gather_bytes(comm, mine.ljust(max(lengths)))
    return [other[:length].decode() for other, length in zip(texts, lengths, strict=True)]


def broadcast_json(comm: Collectives, value: Any, src: int) -> Any:
    """The `value` of rank `src`, which JSON can express; tensors without dimensions become numbers.

    Collective: all ranks of the group.
    Cost: two broadcasts, of 8 bytes and of the text.
    """
    text = json.dumps(value, default=torch.Tensor.item).encode() if comm.rank == src else b""
    length = torch.tensor([len(text)], device=comm.control_device)
    comm.broadcast(length, src).wait()
    tensor = _tensor_of(text.ljust(int(length.item())), comm)
    comm.broadcast(tensor, src).wait()
    return json.loads(_content_of(tensor))


def exchange_json(comm: Collectives, values: Mapping[int, Any], sources: Iterable[int]) -> list[Any]:
    """Send a value, which JSON can express, to each rank in `values`; return what each source sends.

    Collective: each destination has this rank among its sources, and each source has a value for this rank.
    Cost: between two ranks two messages, of 8 bytes and of the text.
    """
    texts = [(peer, _tensor_of(json.dumps(value).encode(), comm)) for peer, value in values.items()]
    lengths = [(peer, torch.tensor([text.numel()], device=comm.control_device)) for peer, text in texts]
    their_lengths = [(peer, torch.tensor([0], device=comm.control_device)) for peer in sources]
    comm.exchange(lengths, their_lengths).wait()
    theirs = [(peer, _tensor_of(bytes(int(length.item())), comm)) for peer, length in their_lengths]
    comm.exchange(texts, theirs).wait()
    return [json.loads(_content_of(text)) for _, text in theirs]


def _tensor_of(content: bytes, comm: Collectives) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(comm.control_device)


def _content_of(tensor: torch.Tensor) -> bytearray:
    content = bytearray(tensor.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(tensor)
    return content


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, because Gloo does not broadcast every dtype: not int16, bool or float8.
    return tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor


# Newer versions of torch give the older names a warning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _batch(sends: Sequence[ToPeer], recvs: Sequence[ToPeer], *, group: Any, tag: int) -> PendingCall:
    # One launch for all: by itself a send on NCCL would complete only when its peer receives.
    ops = [
        *(dist.P2POp(dist.isend, _raw(tensor), None, group, tag, dst) for dst, tensor in sends),
        *(dist.P2POp(dist.irecv, _raw(tensor), None, group, tag, src) for src, tensor in recvs),
    ]
    return AllOf(dist.batch_isend_irecv(ops))


class _NamedCall:
    """A torch `Work` that says, when it cannot be started or fails, which rank was to do what."""

    # A context of its own and not by @contextmanager, which is slower: every message of every step enters it.
    def __init__(self, what: str) -> None:
        self.what = what
        self.work: Any = None

    def wait(self) -> object:
        with self:
            return self.work.wait()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"{self.what} did not complete: {error}\nAnother rank has stopped, or makes other calls. "
                "Look for the first error among the ranks; if there is none, for a call that only some of "
                "them make, such as one inside `if rank == 0:`."
            ) from error
