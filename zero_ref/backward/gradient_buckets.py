"""Buckets of gradients: each is reduced as a whole, and this rank gets the part that it owns.

`minimal.py` leaves gradients to DDP, which copies them into flat buckets and keeps these. Between pairs of
ranks nothing has to be flat: a large gradient is sent to its owners from where autograd has put it, and only
small ones are copied together. A backend's own reduce-scatter takes one flat tensor, so for that all
gradients of a bucket are copied into one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.optimizer.buckets import flat_like
from zero_ref.optimizer.built import Built
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import Partition, SharedRange, Slice

SMALL_NUMEL = 2**14
"""Up to this size, copying a gradient takes less time than one more message."""

CHUNK_NUMEL = 2**16
"""Elements that are added and divided at a time, so that they stay in the cache between the two."""


class Memory:
    """Flat tensors that buckets use in turn."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of at least so many elements, whatever they are."""
        alike = [one for one in self._free if (one.dtype, one.device) == (dtype, device)]
        if not alike:
            return torch.zeros(numel, dtype=dtype, device=device)
        largest = max(alike, key=torch.Tensor.numel)
        self._free = [one for one in self._free if one is not largest]
        # One that is too small is freed, so that no more are kept than were in use at once.
        return largest if largest.numel() >= numel else torch.zeros(numel, dtype=dtype, device=device)

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are free again."""
        self._free += tensors

    def release(self) -> None:
        """Free all that is not in use."""
        self._free.clear()


class Plan(NamedTuple):
    """Where the gradients of a bucket lie, and who owns them.

    Args:
        starts: by number the place of each parameter's first element.
        numel: elements, gaps between parameters included.
        runs: for each rank what it owns of the bucket.
        own: this rank's slices, each with the place of its first element in this rank's part of the result.
        is_shared: the ranks' runs are equal shares, in the order of ranks.
    """

    starts: dict[int, int]
    numel: int
    runs: list[list[range]]
    own: list[tuple[Slice, int]]
    is_shared: bool = False

    @classmethod
    def of_range(cls, one: SharedRange, built: Built, rank: int) -> Plan:
        """The places of a range's trained parameters are the range's."""
        size, numels = built.partition.world_size, built.partition.numels
        trained = {number for number in one.params if built.params[number].requires_grad}
        starts = {number: start for number, start in zip(one.params, one.starts) if number in trained}
        share = one.numel // size
        runs = [[range(owner * share, (owner + 1) * share)] for owner in range(size)]
        own = [placed for placed in one.slices_of(rank, numels, size) if placed[0].param in trained]
        return cls(starts, one.numel, runs, own, is_shared=True)

    @classmethod
    def of_params(cls, numbers: Sequence[int], partition: Partition, rank: int) -> Plan:
        """These parameters, end to end."""
        ends = list(accumulate(partition.numels[number] for number in numbers))
        starts = dict(zip(numbers, [0, *ends]))
        runs: list[list[range]] = [[] for _ in range(partition.world_size)]
        own: list[tuple[Slice, int]] = []
        end = 0
        for number in numbers:
            for piece, owner in partition.pieces_of_param[number]:
                first, of_owner = starts[number] + piece.start, runs[owner]
                if of_owner and of_owner[-1].stop == first:
                    of_owner[-1] = range(of_owner[-1].start, first + piece.numel)
                else:
                    of_owner.append(range(first, first + piece.numel))
                if owner == rank:
                    own.append((piece, end))
                    end += piece.numel
        return cls(starts, ends[-1], runs, own)


class Cut(NamedTuple):
    """What one owner has of one tensor of a bucket.

    Args:
        tensor: its number.
        start, stop: the elements of the tensor.
        place: where the first of them is in the owner's part of the bucket.
    """

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def within(self) -> slice:
        """The elements in the owner's part."""
        return slice(self.place, self.place + self.stop - self.start)


@dataclass(eq=False)
class GradientBucket:
    """Gradients that are reduced together.

    Args:
        params: the parameters by number, in the order of their places.
        plan: where they lie.
        dtype: in which they are reduced.
        comm: reduces them.
        memory: from which the bucket takes tensors.

    Attributes:
        missing: the numbers of the parameters whose gradients have not come.
        sent: the bucket was reduced in this backward.
        gradient: (own elements,), this rank's part of the averages of this backward and those before it; None
            if there is none yet.
    """

    params: dict[int, torch.Tensor]
    plan: Plan
    dtype: torch.dtype
    comm: Collectives
    memory: Memory
    missing: set[int] = field(default_factory=set)
    sent: bool = False
    gradient: torch.Tensor | None = None
    _work: PendingCall | None = None

    def __post_init__(self) -> None:
        self.is_native = self.plan.is_shared and not self.comm.pairwise
        self._device = next(iter(self.params.values())).device
        self._place: dict[int, tuple[int, int]] = {}  # by parameter the tensor that has it, and where
        self._extents: list[range] = []  # what of the bucket each tensor has
        self._is_joint: list[bool] = []  # gradients are copied into this tensor
        for number, start in self.plan.starts.items():
            numel = self.params[number].numel()
            joint = self.is_native or numel <= SMALL_NUMEL
            if joint and self._is_joint[-1:] == [True]:
                self._extents[-1] = range(self._extents[-1].start, start + numel)
            else:
                self._extents.append(range(0 if self.is_native else start, start + numel))
                self._is_joint.append(joint)
            self._place[number] = len(self._extents) - 1, start - self._extents[-1].start
        if self.is_native:
            self._extents = [range(self.plan.numel)]
        self._cuts = [list(self._cut(runs)) for runs in self.plan.runs]
        self.own_numel = sum(len(run) for run in self.plan.runs[self.comm.rank])
        self.begin()

    def _cut(self, runs: Sequence[range]) -> Iterator[Cut]:
        end = 0
        for run in runs:
            for number, extent in enumerate(self._extents):
                start, stop = max(run.start, extent.start), min(run.stop, extent.stop)
                if start < stop:
                    yield Cut(number, start - extent.start, stop - extent.start, end + start - run.start)
            end += len(run)

    def begin(self) -> None:
        """A backward has begun: no gradient has come."""
        self.missing, self.sent, self._work = set(self.params), False, None
        self._received: dict[int, torch.Tensor] = {}
        self.drop()

    def drop(self) -> None:
        """Free what is not under way: a reduction that is freed before its end would block the network."""
        self.gradient = None
        if self._work is None:
            self._tensors: list[torch.Tensor | None] = [None] * len(self._extents)

    def take(self, number: int, grad: torch.Tensor) -> None:
        """Put a gradient in its place. It must not be changed any more."""
        tensor, start = self._place[number]
        flat = flat_like(grad, self.params[number])
        if self._is_joint[tensor]:
            self._joint(tensor)[start : start + flat.numel()] = flat
        else:
            self._tensors[tensor] = flat.to(self.dtype)
        self.missing.discard(number)

    def _joint(self, tensor: int) -> torch.Tensor:
        joint = self._tensors[tensor]
        if joint is None:
            joint = self.memory.take(len(self._extents[tensor]), self.dtype, self._device)
            self._tensors[tensor] = joint
        return joint

    def reduce(self) -> None:
        """Start to reduce the bucket, with zeros where no gradient has come."""
        for number in list(self.missing):
            self.take(number, torch.zeros_like(self.params[number], requires_grad=False))
        self.sent = True
        comm, wire = self.comm, self.comm.wire_device
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        if self.is_native:
            flat = tensors[0][: self.plan.numel].mul_(
                1 / comm.world_size
            )  # before the sum: float16 could overflow
            self._received = {comm.rank: flat.new_empty(self.own_numel)}
            self._work = comm.reduce_shares(flat, self._received[comm.rank])
            return
        peers = [(comm.rank + distance) % comm.world_size for distance in range(1, comm.world_size)]
        mine = self._cuts[comm.rank]
        self._received = {peer: self._receiver(peer) for peer in sorted(peers) if mine}
        self._work = comm.exchange(
            [
                (peer, tensors[c.tensor][c.start : c.stop].to(wire))
                for peer in peers
                for c in self._cuts[peer]
            ],
            [(peer, part[c.within]) for peer, part in self._received.items() for c in mine],
            told=Call("reduce_scatter", self.plan.numel * self.dtype.itemsize)
            if self.plan.is_shared
            else None,
        )

    def wait(self) -> None:
        """Add this rank's part of the reduced bucket to `gradient`; the bucket's memory is free again."""
        if self._work is None:
            return
        self._work.wait()
        result = self._received.pop(self.comm.rank) if self.is_native else self._averaged()
        if self.gradient is None:
            self.gradient = result.to(next(iter(self.params.values())).dtype)
        else:
            self.gradient.add_(result)
        joint = [one for one, is_joint in zip(self._tensors, self._is_joint) if is_joint and one is not None]
        self.memory.give_back([*joint, *self._received.values()])
        self._received, self._work = {}, None
        self._tensors = [None] * len(self._extents)

    def _receiver(self, peer: int) -> torch.Tensor:
        """Memory for what a peer sends. The average is computed where the first of them has sent its part."""
        rank, wire = self.comm.rank, self.comm.wire_device
        if peer == (1 if rank == 0 else 0):
            return torch.empty(self.own_numel, dtype=self.dtype, device=wire)
        return self.memory.take(self.own_numel, self.dtype, wire)

    def _averaged(self) -> torch.Tensor:
        rank, device = self.comm.rank, self._device
        received = {peer: part[: self.own_numel].to(device) for peer, part in self._received.items()}
        first = min(received, default=rank)
        average = (
            torch.empty(self.own_numel, dtype=self.dtype, device=device) if first == rank else received[first]
        )
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
        self._received.pop(first, None)
        return average

    def parts(self) -> Iterator[tuple[Slice, torch.Tensor]]:
        """This rank's slices, and the window of `gradient` that each has."""
        assert self.gradient is not None
        for piece, start in self.plan.own:
            yield piece, self.gradient[start : start + piece.numel]


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
