"""The one place that talks to other ranks.

It adds to `dist.broadcast` of `minimal.py` that every call can be seen, and that ranks which disagree all get
an error where they would wait for each other for ever.

`Collectives` says what the optimizer needs of a network; `ProcessGroupCollectives` does it on a
torch.distributed process group (NCCL, Gloo), `zero_ref.lab.virtual` on threads of one process. Every call
is told to `observers` before it is made, so that what really happened can be held against the plan.

`agree` keeps ranks from waiting for each other for ever: before the first call whose success depends on
the others, each says what it is about to do, and all raise alike if one differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_ref.plan.calls import Call

Observer = Callable[[Call], None]
ToPeer = tuple[int, torch.Tensor]
"""A tensor on its way, after the rank at its other end."""

PAIRWISE_RANKS = 8
"""On Gloo, up to here a broadcast goes straight from its source to each rank: many broadcasts at once take a
fraction of the time of Gloo's own, large ones no more (bench/NOTES.md). More ranks have not been measured."""

TAG = 2**20
"""Tells our messages between two ranks from a user's own, whose tag is 0 unless they choose."""

ALARM_TAG = TAG + 720_720
"""A group with several network devices takes one by the tag. This is the same one, up to 16 of them."""

ALARM_NBYTES = 512
"""A text, then the update's number in eight bytes, then a 1, which comes last."""


class Work(Protocol):
    """A call under way."""

    def wait(self) -> object:
        """Return when the call's tensors may be used; raise RuntimeError if it failed."""


class Alarm(Protocol):
    """A word to all other ranks that they hear without a call, before what its rank sends them later."""

    def ring(self, text: str, update: int) -> None:
        """Tell the others of this update, counted from 1."""

    def heard(self, update: int) -> dict[int, str]:
        """What came since the last time, one text from a rank, before what has been received from it.

        A rank that is ahead may have rung of a later update than this one: that is heard in its turn.
        """


class Collectives(Protocol):
    """What the optimizer asks of a network of `world_size` ranks, of which this is `rank`.

    Calls return at once; their tensors belong to the call until `wait()` returns. All ranks must make the
    same collective calls in the same order. Ranks are positions in the process group, never global ones.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def wire_device(self) -> torch.device:
        """Where tensors of `send`, `recv` and `all_gather` must lie."""
        ...

    @property
    def observers(self) -> list[Observer]: ...

    def expect(self, tensor: torch.Tensor, src: int) -> Work | None:
        """Let what `src` will broadcast come straight into `tensor` while this rank still computes.

        Returns:
            What to pass to that `broadcast`, which has to follow; None where the network has no such thing.
        """
        ...

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        """Keep messages from now on apart from those of other numbers, where the network can.

        Args:
            number: of the optimizer on the group.
            devices: of what it will broadcast.
        Returns:
            An alarm that is heard when what its rank broadcasts later has arrived; None where there is none.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, src: int, expected: Work | None = None) -> Work:
        """Overwrite `tensor` on all ranks by that of `src`. Cost: each other rank receives it once."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Overwrite `tensor` by its sum over ranks. Cost: each rank sends 2(N-1)/N of it on a ring."""
        ...

    def all_gather(self, tensor: torch.Tensor, told_as: str = "all_gather") -> list[torch.Tensor]:
        """The `tensor` of each rank, in rank order; equal shapes. Cost: each rank receives N-1 of them.

        Args:
            told_as: the `op` that observers hear.
        """
        ...

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Hand `tensor` to `dst`, which must `recv` one of its shape and dtype."""
        ...

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Overwrite `tensor` by what `src` sends next. Messages of a pair of ranks keep their order."""
        ...

    def exchange(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer]) -> Work:
        """Send and receive several tensors, each paired with its other end, as one call.

        Ranks that send to each other need this in place of `send` and `recv`, which on NCCL would each wait
        for the other end. Messages of a pair of ranks keep their order; none may be empty, or to oneself.
        """
        ...


class Observable:
    """The list of observers, and the telling. Both kinds of ranks inherit it."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def tell(self, op: str, tensor: torch.Tensor, peer: int | None = None) -> None:
        if self.observers:
            call = Call(op, tensor.numel() * tensor.element_size(), peer)
            for observer in self.observers:
                observer(call)

    def expect(self, tensor: torch.Tensor, src: int) -> Work | None:
        return None

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        return None


class ProcessGroupCollectives(Observable):
    """Collectives on a torch.distributed process group.

    Args:
        group: the process group; None is the default group of `init_process_group`.
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
        # A group may have a backend for each kind of device, as in "cpu:gloo,cuda:nccl".
        backends = str(dist.get_backend_config(group))
        self.pairwise = "cpu:gloo" in backends and self.world_size <= PAIRWISE_RANKS
        self.tag = TAG
        self.wire_device = torch.device(
            "cpu" if "cpu:" in backends else f"cuda:{torch.cuda.current_device()}"
        )

    def expect(self, tensor: torch.Tensor, src: int) -> Work | None:
        if src == self.rank or not self._goes_pairwise(tensor):
            return None
        return self._from(src, tensor, "broadcast")

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        # If ranks step two optimizers in another order, each waits for the other, until the group's time-out.
        # With one tag, each would take what the other sends for its own.
        self.tag = TAG + number
        straight = self.pairwise and all(device.type == "cpu" for device in devices)
        return _PairwiseAlarm(self, ALARM_TAG + number) if straight else None

    def broadcast(self, tensor: torch.Tensor, src: int, expected: Work | None = None) -> Work:
        self.tell("broadcast", tensor, src)
        if not self._goes_pairwise(tensor):
            what = f"broadcast from rank {src}"
            return self._start(what, dist.broadcast, _raw(tensor), group_src=src, async_op=True)
        if src != self.rank:
            return expected or self._from(src, tensor, "broadcast")
        # Each begins with another, so that not all send to the same rank at once.
        peers = ((src + distance) % self.world_size for distance in range(1, self.world_size))
        return AllOf(self._to(peer, tensor, "broadcast") for peer in peers)

    def _goes_pairwise(self, tensor: torch.Tensor) -> bool:
        return self.pairwise and tensor.device.type == "cpu" and tensor.is_contiguous()

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self.tell("all_reduce", tensor)
        return self._start("all_reduce", dist.all_reduce, tensor, async_op=True)

    def all_gather(self, tensor: torch.Tensor, told_as: str = "all_gather") -> list[torch.Tensor]:
        self.tell(told_as, tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._start("all_gather", dist.all_gather, gathered, tensor, async_op=True).wait()
        return gathered

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        self.tell("send", tensor, dst)
        return self._to(dst, tensor)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        self.tell("recv", tensor, src)
        return self._from(src, tensor)

    def exchange(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer]) -> Work:
        for dst, tensor in sends:
            self.tell("send", tensor, dst)
        for src, tensor in recvs:
            self.tell("recv", tensor, src)
        if self.wire_device.type == "cpu":
            # Receives first, so that Gloo can write what comes straight into its place.
            return AllOf([*(self._from(*recv) for recv in recvs), *(self._to(*send) for send in sends)])
        peers = sorted({peer for peer, _ in (*sends, *recvs)})
        return self._start(f"exchange with ranks {peers}", _batch, sends, recvs)

    def _to(self, dst: int, tensor: torch.Tensor, what: str = "send") -> Work:
        return self._start(f"{what} to rank {dst}", dist.isend, _raw(tensor), group_dst=dst, tag=self.tag)

    def _from(self, src: int, tensor: torch.Tensor, what: str = "receive") -> Work:
        return self._start(f"{what} from rank {src}", dist.irecv, _raw(tensor), group_src=src, tag=self.tag)

    def _start(self, what: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
        work = _GroupWork(f"rank {self.rank} of {self.world_size}: {what}")
        with work:
            work.work = operation(*args, group=self.group, **kwargs)
        return work


class _PairwiseAlarm:
    """On Gloo: a receive from each peer that nobody waits for; an alarm is there when its memory changes.

    Gloo delivers the messages between two ranks in their order, so when a rank has received new values, an
    alarm that their sender rang before them lies in memory, and looking there asks nothing of the network.
    """

    def __init__(self, comm: ProcessGroupCollectives, tag: int) -> None:
        self.comm, self.tag = comm, tag
        self.rooms: dict[int, bytearray] = {}
        self.listening: dict[int, Any] = {}
        self.sent: list[Any] = []
        for peer in range(comm.world_size):
            if peer != comm.rank:
                self._listen(peer)

    def _listen(self, peer: int) -> None:
        self.rooms[peer] = bytearray(ALARM_NBYTES)
        room = torch.frombuffer(self.rooms[peer], dtype=torch.uint8)
        self.listening[peer] = dist.irecv(room, group=self.comm.group, group_src=peer, tag=self.tag)

    def ring(self, text: str, update: int) -> None:
        room = ALARM_NBYTES - 9
        word = bytearray(text.encode()[:room].ljust(room) + update.to_bytes(8, "big") + b"\1")
        sent = torch.frombuffer(word, dtype=torch.uint8)
        self.sent = [
            dist.isend(sent, group=self.comm.group, group_dst=peer, tag=self.tag) for peer in self.rooms
        ]

    def heard(self, update: int) -> dict[int, str]:
        texts = {}
        for peer, word in list(self.rooms.items()):
            if word[-1] and int.from_bytes(word[-9:-1], "big") <= update:
                texts[peer] = word[:-9].decode(errors="replace").rstrip()
                self._listen(peer)
        return texts


class AllOf:
    """Several calls under way, waited for as one."""

    def __init__(self, works: Iterable[Work]) -> None:
        self.works = list(works)

    def wait(self) -> object:
        for work in self.works:
            work.wait()
        return None


def as_collectives(process_group: dist.ProcessGroup | Collectives | None) -> Collectives:
    """What a user may pass as `process_group`: a torch group, None for the default one, or Collectives."""
    # An int is what new_group() gives to ranks outside the group; the constructor refuses it.
    if process_group is None or isinstance(process_group, (dist.ProcessGroup, int)):
        return ProcessGroupCollectives(process_group)
    if not hasattr(process_group, "broadcast"):
        raise TypeError(
            f"process_group takes a process group, Collectives or None, not {process_group!r}. "
            "Options of the optimizer are passed by name, such as lr=0.001."
        )
    return process_group


class RanksLostError(RuntimeError):
    """The network failed while ranks compared what they do, so this one cannot know who went on."""


class Fact(str):
    """A line that must be the same on all ranks, with what to do about it where it is not."""

    remedy: str

    def __new__(cls, line: str, remedy: str) -> Fact:
        fact = super().__new__(cls, line)
        fact.remedy = remedy
        return fact


REMEDY = "Pass the same parameters and options on every rank."


def agree(
    comm: Collectives, action: str, facts: Sequence[str] | Exception, told_as: str = "all_gather"
) -> None:
    """Compare what every rank is about to do; return if they agree, raise on all of them if not.

    An error found by one rank alone would leave the others waiting in their next collective. So each
    rank first checks by itself, then passes here what it found: the facts that must be equal, or its error.

    Args:
        action: what comes next, in words: "construct the optimizer".
        facts: one line each, in an order that all ranks share, or the exception that this rank met. A `Fact`
            brings its own advice for the case that it differs.
        told_as: the `op` that observers hear.
    Raises:
        Exception: the one passed as `facts`, on the rank that passed it.
        RuntimeError: another rank failed, or does something else.
        RanksLostError: the network failed.
        ValueError: the facts differ; names the rank and the first fact.
    Collective: all ranks of the group, outside of any other call.
    Cost: one all-gather of 32 bytes; where ranks differ, one more of all the facts.
    """
    failed = isinstance(facts, Exception)
    lines = [f"{type(facts).__name__}: {facts}"] if isinstance(facts, Exception) else list(facts)
    text = json.dumps([action, failed, lines]).encode()
    digest = hashlib.sha256(text).digest()[:24] + len(text).to_bytes(8, "big")
    try:
        digests = [_text(other) for other in comm.all_gather(_as_bytes(digest, comm), told_as)]
    except RuntimeError as error:
        raise RanksLostError(f"rank {comm.rank} was to {action} with all others: {error}") from error
    if all(other == digest for other in digests) and not failed:
        return

    longest = max(int.from_bytes(other[24:], "big") for other in digests)
    texts = comm.all_gather(_as_bytes(text.ljust(longest), comm), told_as)
    if isinstance(facts, Exception):
        raise facts
    said = [json.loads(_text(other)) for other in texts]
    for rank, (their_action, their_failure, their_lines) in enumerate(said):
        if their_failure:
            raise RuntimeError(f"rank {comm.rank}: rank {rank} could not {their_action}: {their_lines[0]}")
    for rank, (their_action, _, _) in enumerate(said):
        if their_action != action:
            raise RuntimeError(
                f"rank {comm.rank} is to {action} while rank {rank} is to {their_action}. "
                "All ranks must make the same calls in the same order."
            )
    raise ValueError(_disagreement(action, [lines for _, _, lines in said], facts))


@contextlib.contextmanager
def agreement(comm: Collectives, action: str) -> Iterator[list[str]]:
    """Prepare an action, and at the end compare it with what other ranks have prepared.

    >>> with agreement(comm, "construct the optimizer") as facts:                          # doctest: +SKIP
    ...     facts += [f"{len(params)} parameters"]

    Yields:
        A list for the facts. An exception that leaves the block is what this rank met.
    Raises, Collective, Cost: as `agree`, at the end.
    """
    facts: list[str] = []
    try:
        yield facts
    except Exception as error:
        agree(comm, action, error)
    else:
        agree(comm, action, facts)


def gather_texts(comm: Collectives, text: str) -> list[str]:
    """What each rank has to say, in rank order.

    Collective: all ranks of the group.
    Cost: one all-gather of 8 bytes; where a rank says something, one more of the texts.
    """
    mine = text.encode()
    length = torch.tensor([len(mine)], device=comm.wire_device)
    lengths = [int(other.item()) for other in comm.all_gather(length)]
    if not any(lengths):
        return [""] * comm.world_size
    texts = comm.all_gather(_as_bytes(mine.ljust(max(lengths)), comm))
    return [_text(other)[:numel].decode() for other, numel in zip(texts, lengths, strict=True)]


def broadcast_json(comm: Collectives, value: Any, src: int) -> Any:
    """The `value` of rank `src`, which JSON can express; tensors without dimensions become numbers.

    Collective: all ranks of the group.
    Cost: two broadcasts, of 8 bytes and of the text.
    """
    text = torch.zeros(0, dtype=torch.uint8)
    if comm.rank == src:
        text = _as_bytes(json.dumps(value, default=torch.Tensor.item).encode(), comm)
    length = torch.tensor([text.numel()], device=comm.wire_device)
    comm.broadcast(length, src).wait()
    if comm.rank != src:
        text = _room(length)
    comm.broadcast(text, src).wait()
    return json.loads(_text(text))


def exchange_json(comm: Collectives, values: Mapping[int, Any], sources: Iterable[int]) -> list[Any]:
    """Hand a value, which JSON can express, to each of some ranks, and give what comes from each source.

    Collective: this rank is among the sources of the ranks that it hands something, and the other way round.
    Cost: between two ranks two messages, of 8 bytes and of the text.
    """
    texts = [(peer, _as_bytes(json.dumps(value).encode(), comm)) for peer, value in values.items()]
    lengths = [(peer, torch.tensor([text.numel()], device=comm.wire_device)) for peer, text in texts]
    coming = [(peer, torch.empty(1, dtype=torch.int64, device=comm.wire_device)) for peer in sources]
    comm.exchange(lengths, coming).wait()
    room = [(peer, _room(length)) for peer, length in coming]
    comm.exchange(texts, room).wait()
    return [json.loads(_text(text)) for _, text in room]


def _disagreement(action: str, lines_of_rank: list[list[str]], facts: Sequence[str]) -> str:
    """Name the rank that differs from most, and the first line in which it does."""
    usual = list(Counter(map(tuple, lines_of_rank)).most_common(1)[0][0])
    odd = next(rank for rank, lines in enumerate(lines_of_rank) if lines != usual)
    typical = lines_of_rank.index(usual)
    for number, (mine, theirs) in enumerate(zip(lines_of_rank[odd], usual, strict=False)):
        if mine != theirs:
            remedy = getattr(facts[number], "remedy", REMEDY) if number < len(facts) else REMEDY
            return (
                f"ranks disagree, so none can {action}: rank {odd} has [{mine}] where rank {typical} has "
                f"[{theirs}]. {remedy}"
            )
    return (
        f"ranks disagree, so none can {action}: rank {odd} lists {len(lines_of_rank[odd])} facts and rank "
        f"{typical} lists {len(usual)}. {REMEDY}"
    )


def _as_bytes(text: bytes, comm: Collectives) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(comm.wire_device)


def _room(length: torch.Tensor) -> torch.Tensor:
    return torch.empty(int(length.item()), dtype=torch.uint8, device=length.device)


def _text(received: torch.Tensor) -> bytearray:
    text = bytearray(received.numel())
    torch.frombuffer(text, dtype=torch.uint8).copy_(received)
    return text


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # Copying needs no dtype, and Gloo does not broadcast every one: not int16, bool or float8.
    return tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor


def _batch(sends: Sequence[ToPeer], recvs: Sequence[ToPeer], *, group: Any) -> Work:
    # One launch for all: NCCL would finish a send that stands before a receive only when that peer receives.
    ops = [
        *(dist.P2POp(dist.isend, _raw(tensor), group=group, group_peer=dst) for dst, tensor in sends),
        *(dist.P2POp(dist.irecv, _raw(tensor), group=group, group_peer=src) for src, tensor in recvs),
    ]
    return AllOf(dist.batch_isend_irecv(ops) if ops else [])


class _GroupWork:
    """A torch Work that says, when it cannot be started or fails, which rank was to do what."""

    # A context by itself and not by @contextmanager: this runs for every message of every step.
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
