"""Buckets of gradients: each is reduced as a whole, and this rank gets the part that it owns.

`minimal.py` leaves gradients to DDP, which copies them into flat buckets and keeps these. Between pairs of
ranks nothing has to be flat: a large gradient is sent to its owners from where autograd has put it, and only
small ones are copied together. A backend's own reduce-scatter takes one flat tensor, so for that all
gradients of a bucket are copied into one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.plan.calls import Call
from zero_ref.plan.gradients import GradientPlan
from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like

CHUNK_NUMEL = 2**18
"""Elements that are added and divided at a time, so that they stay in the cache between the two."""


class Memory:
    """Flat tensors that buckets use in turn.

    Args:
        keeps: they stay when a backward is over, and so do the gradients that buckets have made.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of at least so many elements, whatever they are."""
        fits = [
            one
            for one in self._free
            if (one.dtype, one.device) == (dtype, device) and numel <= one.numel() <= 2 * numel
        ]
        if not fits:
            return torch.zeros(numel, dtype=dtype, device=device)
        smallest = min(fits, key=torch.Tensor.numel)
        self._free = [one for one in self._free if one is not smallest]
        return smallest

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are free again."""
        self._free += tensors

    def release(self) -> None:
        """A backward is over: free all that is not in use."""
        if not self.keeps:
            self._free.clear()


@dataclass(eq=False)
class GradientBucket:
    """Gradients that are reduced together.

    Args:
        params: the parameters by number, in the order of their places.
        plan: where they lie.
        dtype: in which they are reduced.
        comm: reduces them.
        replicas: adds up what the same rank of other groups has; None if there is one group.
        memory: from which the bucket takes tensors.

    Attributes:
        missing: the numbers of the parameters whose gradients have not come.
        sent: the bucket was reduced in this backward.
        gradient: (own elements,), this rank's part of the averages of this backward and those before it; None
            if there is none yet.
    """

    params: dict[int, torch.Tensor]
    plan: GradientPlan
    dtype: torch.dtype
    comm: Collectives
    replicas: Collectives | None
    memory: Memory
    missing: set[int] = field(default_factory=set)
    sent: bool = False
    gradient: torch.Tensor | None = None
    _kept: torch.Tensor | None = None
    _work: PendingCall | None = None
    _part: torch.Tensor | None = None

    def __post_init__(self) -> None:
        like = next(iter(self.params.values()))
        self._dtype, self._device = like.dtype, like.device
        self._wire = self.comm.wire_of(self._device)
        self._averages_in_place = self._wire == self._device
        self.is_native = self.plan.is_shared and not self.comm.goes_pairwise(self._device)
        self._in = self.plan.tensors(as_one=self.is_native)
        self._cuts = [list(self._in.cuts(self.plan.runs(owner))) for owner in range(self.comm.world_size)]
        self.own = list(self.plan.own(self.comm.rank))
        self.own_numel = self.plan.own_numel(self.comm.rank)
        self.begin()

    def begin(self) -> None:
        """A backward has begun: no gradient has come."""
        self.missing, self.sent = set(self.params), False
        self._work = self._part = None
        self._received: dict[int, torch.Tensor] = {}
        self.drop()

    def drop(self) -> None:
        """Free what is not under way: a reduction that is freed before its end would block the network."""
        self.gradient = None
        if self._work is None:
            self._tensors: list[torch.Tensor | None] = [None] * len(self._in.extents)

    def take(self, number: int, grad: torch.Tensor) -> None:
        """Put a gradient in its place. It must not be changed any more."""
        tensor, start = self._in.of_param[number]
        flat = flat_like(grad, self.params[number])
        if self._in.joint[tensor]:
            self._joint(tensor)[start : start + flat.numel()] = flat
        else:
            # A gradient that was set to zero, and not to None, lies where peers are about to send theirs.
            self._tensors[tensor] = flat.to(
                self.dtype, copy=self._kept is not None and _share(flat, self._kept)
            )
        self.missing.discard(number)

    def _joint(self, tensor: int) -> torch.Tensor:
        joint = self._tensors[tensor]
        if joint is None:
            joint = self.memory.take(len(self._in.extents[tensor]), self.dtype, self._device)
            self._tensors[tensor] = joint
        return joint

    def reduce(self) -> None:
        """Start to reduce the bucket, with zeros where no gradient has come."""
        for number in list(self.missing):
            self.take(number, torch.zeros_like(self.params[number], requires_grad=False))
        self.sent = True
        comm = self.comm
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        if self.is_native:
            # Divided before the sum: float16 could overflow.
            flat = tensors[0][: self.plan.numel].mul_(1 / comm.world_size)
            self._received = {comm.rank: self._result()}
            self._work = comm.reduce_shares(flat, self._received[comm.rank])
            return
        peers = [peer for peer in range(comm.world_size) if peer != comm.rank]
        mine = self._cuts[comm.rank]
        self._received = {peer: self._receiver(peer) for peer in peers if mine}
        told = Call("reduce_shares", self.plan.numel * self.dtype.itemsize) if self.plan.is_shared else None
        if self.plan.is_shared:  # the next rank first, so that not all send to the same one at once
            peers.sort(key=lambda peer: (peer - comm.rank) % comm.world_size)
        sends = [
            (peer, tensors[cut.tensor][cut.start : cut.stop].to(self._wire))
            for peer in peers
            for cut in self._cuts[peer]
        ]
        recvs = [(peer, part[cut.within]) for peer, part in self._received.items() for cut in mine]
        self._work = comm.exchange(sends, recvs, told)

    def average(self) -> None:
        """Wait for this rank's part, whose bucket is free again, and start to average it over replicas."""
        if self._work is None:
            return
        self._work.wait()
        part = self._received.pop(self.comm.rank) if self.is_native else self._averaged()
        joint = [one for one, is_joint in zip(self._tensors, self._in.joint) if is_joint and one is not None]
        self.memory.give_back([*joint, *self._received.values()])
        self._received, self._work, self._part = {}, None, part
        self._tensors = [None] * len(self._in.extents)
        if self.replicas is not None and part.numel():
            part.mul_(1 / self.replicas.world_size)  # before the sum: float16 could overflow
            self._work = self.replicas.all_reduce(part)

    def add_up(self) -> None:
        """Wait for the average over replicas, and add it to `gradient`."""
        part, work = self._part, self._work
        self._part = self._work = None
        if work is not None:
            work.wait()
        if part is None:
            return
        if self.gradient is not None:
            self.gradient.add_(part)
        elif part.dtype == self._dtype:
            self.gradient = part
            return
        else:
            self.gradient = self.new_gradient().copy_(part)
        self.memory.give_back([part])

    def wait(self) -> None:
        """Complete the reduction."""
        self.average()
        self.add_up()

    def _receiver(self, peer: int) -> torch.Tensor:
        """Memory for what a peer sends. The average is computed where the first of them has sent its part."""
        if self._averages_in_place and peer == (1 if self.comm.rank == 0 else 0):
            return self._result()
        return self.memory.take(self.own_numel, self.dtype, self._wire)

    def _result(self) -> torch.Tensor:
        """Memory for this rank's part, which becomes the gradient if there is none yet."""
        if self.gradient is None and self.dtype == self._dtype:
            return self.new_gradient()
        return self.memory.take(self.own_numel, self.dtype, self._device)[: self.own_numel]

    def new_gradient(self) -> torch.Tensor:
        """Memory for `gradient`, whatever is in it: the same one each time, if memory is kept."""
        if self._kept is not None:
            return self._kept
        memory = torch.empty(self.own_numel, dtype=self._dtype, device=self._device)
        self._kept = memory if self.memory.keeps else None
        return memory

    def _averaged(self) -> torch.Tensor:
        rank, device = self.comm.rank, self._device
        received = {peer: part[: self.own_numel].to(device) for peer, part in self._received.items()}
        first = min(received, default=rank)
        in_place = first != rank and self._averages_in_place
        average = received[first] if in_place else self._result()
        for cut in self._cuts[rank]:
            mine = self._tensors[cut.tensor]
            assert mine is not None
            received[rank] = mine
            for start in range(0, cut.stop - cut.start, CHUNK_NUMEL):
                stop = min(start + CHUNK_NUMEL, cut.stop - cut.start)
                inside = slice(cut.place + start, cut.place + stop)
                parts = {peer: part[inside] for peer, part in received.items()}
                parts[rank] = mine[cut.start + start : cut.start + stop]
                average_into(average[inside], [parts[peer] for peer in sorted(parts)])
        if in_place:
            del self._received[first]
        return average

    def parts(self) -> Iterator[tuple[Slice, torch.Tensor]]:
        """This rank's slices, and the window of `gradient` that each has."""
        assert self.gradient is not None
        for piece, start in self.own:
            yield piece, self.gradient[start : start + piece.numel]


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tensors have the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def average_into(result: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Overwrite `result`, which may be a part, by the average: each part divided, then added in this order.

    >>> average_into(result := torch.empty(2), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    >>> result
    tensor([2., 4.])
    """
    scale = 1 / len(parts)
    # A power of two changes exponents only, so the division may follow the sum; float16 could overflow in it.
    # Two parts may be added in either order, and so `result` may be the first or the second part.
    if len(parts) > 1 and len(parts) & (len(parts) - 1) == 0 and result.dtype != torch.float16:
        torch.add(parts[0], parts[1], out=result)
        for part in parts[2:]:
            result.add_(part)
        result.mul_(scale)
        return
    divided = [part * scale for part in parts]  # `result` may be the memory of a part
    result.copy_(sum(divided[1:], divided[0]))
