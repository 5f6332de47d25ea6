"""Buckets of gradients: each is reduced as a whole, and this rank gets the part that it owns.

`stairs/owners.py` leaves gradients to DDP, which copies them into flat buckets and keeps these. A bucket here
takes this rank's own gradients, and its `OwnedGradient` is this rank's part of the averages. The way between
them depends on the network, so there are two buckets. `NativeBucket` copies all gradients into one flat
tensor, for a backend's own reduce-scatter. `PairwiseBucket` sends messages between pairs of ranks. For those
a large gradient stays where autograd has put it, and only small ones are copied together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import torch

from zero_ref.comm.collectives import Collectives
from zero_ref.plan.calls import Call
from zero_ref.plan.gradients import GradientPlan
from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like

CHUNK_NUMEL = 2**18
"""Elements that are added and divided at a time, so that they stay in the cache between the two."""

Phases = Generator[None, None, None]
"""A reduction, which pauses while messages travel. `next` waits for these and goes on."""


class Memory:
    """Flat tensors that buckets use in turn, during one backward."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of at least `numel` elements, with any values."""
        smallest: torch.Tensor | None = None
        for one in self._free:
            fits = (one.dtype, one.device) == (dtype, device) and numel <= one.numel() <= 2 * numel
            if fits and (smallest is None or one.numel() < smallest.numel()):
                smallest = one
        if smallest is None:
            return torch.zeros(numel, dtype=dtype, device=device)
        self._free = [one for one in self._free if one is not smallest]
        return smallest

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return these tensors to the pool."""
        self._free += tensors

    def release(self) -> None:
        """Free the pool at the end of a backward."""
        self._free.clear()


class OwnedGradient:
    """This rank's part of a bucket's averages, added up over the backwards since `zero_grad`.

    Args:
        plan: the bucket's.
        rank: this one.
        like: a parameter, whose dtype and device the gradient has.
        memory: lends the tensors in which a part is received.

    Attributes:
        pieces: this rank's slices, each with the place of its first element.
        gradient: (numel,), None before the first average.
    """

    def __init__(self, plan: GradientPlan, rank: int, like: torch.Tensor, memory: Memory) -> None:
        self.pieces, self.numel = list(plan.own(rank)), plan.own_numel(rank)
        self.dtype, self.device, self.memory = like.dtype, like.device, memory
        self.gradient: torch.Tensor | None = None

    def take_over(self, left: Mapping[Slice, torch.Tensor]) -> None:
        """Go on from the averages that earlier backwards have left.

        Args:
            left: the averages by slice, (numel,) each.
        """
        if not left:
            return
        # Averages that still lie where such a bucket has put them are added to in place.
        places = dict(self.pieces)
        flat = next(iter(left.values()))._base  # of which they are views
        fits = flat is not None and (flat.shape, flat.dtype) == ((self.numel,), self.dtype)
        stay = fits and all(
            part._base is flat and part.storage_offset() == places[piece] for piece, part in left.items()
        )
        if flat is None or not stay:
            flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        for piece, place in self.pieces:
            window = flat[place : place + piece.numel]
            if piece not in left:
                window.zero_()
            elif not stay:
                window.copy_(left[piece])
        self.gradient = flat

    def receiver(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for this rank's part of one reduction, which becomes `gradient` if there is none yet."""
        if self.gradient is None and dtype == self.dtype:
            return torch.empty(self.numel, dtype=dtype, device=self.device)
        return self.memory.borrow(self.numel, dtype, self.device)[: self.numel]

    def add(self, part: torch.Tensor) -> None:
        """Add the averages of one reduction."""
        if self.gradient is None:
            self.gradient = part.to(self.dtype)  # `part` itself, unless it was sent in another dtype
        else:
            self.gradient.add_(part)
        if part is not self.gradient:
            self.memory.give_back([part])


class GradientBucket:
    """Gradients that are reduced together. Subclasses differ in how gradients get to their owners.

    Args:
        plan: the places of the gradients, and their owners.
        params: the parameters by number, in the order of their places.
        dtype: the dtype in which gradients are reduced.
        comm: reduces them.
        replicas: adds up the shards of the same rank in other groups; None if there is one group.
        memory: from which the bucket takes tensors.

    Attributes:
        layout: the tensor and the place of each gradient.
        missing: the numbers of the parameters whose gradients have not come.
        tensors: this rank's own gradients, as they are sent; None until a gradient has come.
        own: this rank's part of the averages.
    """

    as_one: bool
    """All gradients are sent from one flat tensor."""

    def __init__(
        self,
        plan: GradientPlan,
        params: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
        comm: Collectives,
        replicas: Collectives | None,
        memory: Memory,
    ) -> None:
        self.params, self.dtype, self.comm, self.replicas = params, dtype, comm, replicas
        self.layout, self.memory = plan.tensors(as_one=self.as_one), memory
        self.own = OwnedGradient(plan, comm.rank, next(iter(params.values())), memory)
        self.reset()

    def reset(self) -> None:
        """Expect all gradients, and forget the averages. Messages that are under way keep their tensors."""
        self.missing = set(self.params)
        self.tensors: list[torch.Tensor | None] = [None] * len(self.layout.extents)
        self.own.gradient = None

    def put(self, number: int, grad: torch.Tensor) -> None:
        """Take a parameter's gradient, which must not be changed any more."""
        self.missing.discard(number)
        tensor, start = self.layout.of_param[number]
        if not self.layout.joint[tensor]:
            self.tensors[tensor] = flat_like(grad, self.params[number]).to(self.dtype)
            return
        joint = self.tensors[tensor]
        if joint is None:
            numel = len(self.layout.extents[tensor])
            joint = self.tensors[tensor] = self.memory.borrow(numel, self.dtype, self.own.device)
        param = self.params[number]
        joint.as_strided(param.size(), param.stride(), start).copy_(grad)

    def reduce(self) -> Phases:
        """Average the gradients, which have all come, over all ranks, and add this rank's part to `own`.

        Collective: all ranks reduce their buckets in the same order.
        Cost: each rank sends (N-1)/N of the bucket, with R replicas also 2(R-1)/R of its part.
        """
        # Phase 1: from all ranks of the group to the owners.
        tensors = cast(list[torch.Tensor], self.tensors)
        part = yield from self.average_on_owners(tensors)
        self.memory.give_back(compress(tensors, self.layout.joint))
        self.tensors = []
        del tensors
        # Phase 2: over the replicas of each owner, divided before the sum, as float16 could overflow.
        if self.replicas is not None and part.numel():
            work = self.replicas.all_reduce(part.mul_(1 / self.replicas.world_size))
            yield
            work.wait()
        self.own.add(part)

    def average_on_owners(self, tensors: Sequence[torch.Tensor]) -> Generator[None, None, torch.Tensor]:
        """Start to send the tensors and pause; then return this rank's part of the averages, (own numel,)."""
        raise NotImplementedError


class NativeBucket(GradientBucket):
    """Equal shares by one reduce-scatter, such as NCCL's."""

    as_one = True

    def average_on_owners(self, tensors: Sequence[torch.Tensor]) -> Generator[None, None, torch.Tensor]:
        # Divided before the sum: float16 could overflow. What memory has lent may be longer than the bucket.
        flat = tensors[0][: len(self.layout.extents[0])].mul_(1 / self.comm.world_size)
        part = self.own.receiver(self.dtype)
        work = self.comm.reduce_shares(flat, part)
        yield
        work.wait()
        return part


class PairwiseBucket(GradientBucket):
    """Any slices, by messages between pairs of ranks: an owner receives all parts and averages them.

    Attributes:
        sends: (peer, its part of a tensor) of each message that this rank sends, in order.
        cuts: this rank's own parts of the tensors; `windows` are their ranges in its part of the bucket.
        senders: the ranks that send to this one, in rank order.
        wire: the device of the messages.
        told: the call that observers see; None for each message.
    """

    as_one = False

    def __init__(self, plan: GradientPlan, *args: Any) -> None:
        super().__init__(plan, *args)
        rank, world_size = self.comm.rank, self.comm.world_size
        self.wire = self.comm.wire_of(self.own.device)
        # The next rank first, so that not all send to the same one at once. Observers see equal shares as one
        # call, as a reduce-scatter would be.
        peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self.told: Call | None = None
        if plan.is_shared:
            self.told = Call("reduce_shares", plan.numel * self.dtype.itemsize)
        else:
            peers.sort()
        self.sends = [(peer, cut) for peer in peers for cut in self.layout.cuts(plan.runs(peer))]
        self.cuts = list(self.layout.cuts(plan.runs(rank)))
        self.windows = [cut.within for cut in self.cuts]
        self.senders = sorted(peers) if self.cuts else []

    def average_on_owners(self, tensors: Sequence[torch.Tensor]) -> Generator[None, None, torch.Tensor]:
        own = self.own
        # Phase 1: memory for what peers send. The first part arrives where the average is computed.
        average = own.receiver(self.dtype)
        received: list[torch.Tensor] = []
        for _ in self.senders:
            in_place = not received and self.wire == own.device
            received.append(average if in_place else self.memory.borrow(own.numel, self.dtype, self.wire))
        # Phase 2: the exchange.
        sends, recvs = [], []
        for peer, cut in self.sends:
            sends.append((peer, tensors[cut.tensor][cut.start : cut.stop].to(self.wire)))
        for peer, part in zip(self.senders, received):
            for window in self.windows:
                recvs.append((peer, part[window]))
        work = self.comm.exchange(sends, recvs, self.told)
        yield
        work.wait()
        # Phase 3: the average, in the order of ranks, so that it is the same whoever owns it.
        arrived = []
        for part in received:
            arrived.append(part[: own.numel].to(own.device))
        for cut, window in zip(self.cuts, self.windows):
            parts = []
            for part in arrived:
                parts.append(part[window])
            parts.insert(self.comm.rank, tensors[cut.tensor][cut.start : cut.stop])
            average_into(average[window], parts)
        for part in received:
            if part is not average:
                self.memory.give_back([part])
        return average


def bucket_class(plan: GradientPlan, comm: Collectives, device: torch.device) -> type[GradientBucket]:
    """The kind of bucket that suits the plan and the network.

    Equal shares are reduced by one native call on NCCL, and on Gloo by a ring of more than 8 ranks. On Gloo
    with fewer ranks, and under any other partition, gradients are sent to their owners pair by pair.
    """
    return NativeBucket if plan.is_shared and not comm.goes_pairwise(device) else PairwiseBucket


def average_into(result: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Overwrite `result`, which may be a part, by the average: each part divided, then added in this order.

    >>> average_into(result := torch.empty(2), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    >>> result
    tensor([2., 4.])
    """
    scale = 1 / len(parts)
    # Dividing by a power of two is exact, so sum first and divide once. Not in float16, where the sum could
    # overflow.
    sums_first = len(parts) > 1 and len(parts) & (len(parts) - 1) == 0 and result.dtype != torch.float16
    for start in range(0, result.numel(), CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        average = result[chunk]
        if sums_first:  # `result` may be the first or the second part: `add` reads both before it writes
            torch.add(parts[0][chunk], parts[1][chunk], out=average)
            for part in parts[2:]:
                average.add_(part[chunk])
            average.mul_(scale)
        else:
            divided = [part[chunk] * scale for part in parts]  # `result` may be the memory of a part
            average.copy_(sum(divided[1:], divided[0]))
