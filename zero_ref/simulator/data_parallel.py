"""Strategies on top of DDP, which reduces gradients bucket by bucket: DDP alone, and ZeRO with owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from zero_ref.simulator.ledger import itemsize_of, nbytes_of
from zero_ref.simulator.messages import MessagesByParam, broadcasts_of, messages_of, new_parameters
from zero_ref.simulator.operations import (
    COMPUTE,
    NEEDS,
    NETWORK,
    SIDE_STREAM,
    Operation,
    Shares,
    forward_and_backward,
    order,
    passes_before,
    reduction_of,
    shares_of,
)
from zero_ref.simulator.strategy import Strategy


class DDP(Strategy):
    """Gradients are all-reduced, bucket by bucket during backward, and every rank updates everything."""

    def _list_operations(self) -> None:
        forward, backwards = forward_and_backward(self.params, self.buckets, self.activation_bytes)
        self._backwards = backwards
        self._listed += [*passes_before(forward, backwards, self.how.accumulation - 1), forward]
        operations_of = {
            "backward": self._backward,
            "reduce": self._reduce,
            "step": self._step,
            "broadcast": self._broadcast,
        }
        position_of: dict[tuple[str, int], int] = {}  # the last operation of a label and bucket
        for label, parts in order(len(self.buckets), self.how.way):
            after = (position_of[NEEDS[label], parts[-1]],) if label in NEEDS and parts else ()
            self._listed += operations_of[label](parts, after)
            position_of.update({(label, one): len(self._listed) - 1 for one in parts})

    def _backward(self, parts: Sequence[int], _: tuple[int, ...]) -> list[Operation]:
        backward = self._backwards[parts[0]]
        return [backward if self.how.accumulation == 1 else backward._replace(takes=0)]

    def _reduce(self, parts: Sequence[int], after: tuple[int, ...]) -> list[Operation]:
        return [reduction_of(self._backwards[parts[0]], *after, itemsize=self._reduced_itemsize)]

    def _step(self, parts: Sequence[int], after: tuple[int, ...]) -> list[Operation]:
        lane = SIDE_STREAM if self.how.way == "interleaved" and self.side_stream else COMPUTE
        members = self._members(parts)
        step = Operation(
            "step",
            lane,
            self._single(parts),
            after,
            numel=sum(self.params[number].numel for number in members),
            tensors=len(members),
            flops=sum(self._step_flops[number] for number in members),
        )
        return [step]

    def _broadcast(self, parts: Sequence[int], after: tuple[int, ...]) -> list[Operation]:
        """The calls that send what the step of these buckets has updated."""
        return []

    def _members(self, parts: Sequence[int]) -> list[int]:
        """The parameters of some buckets."""
        return [number for part in parts for number in self.buckets[part]]

    def _single(self, parts: Sequence[int]) -> int | None:
        """The bucket that an update is about; None if it is about all of them."""
        return parts[0] if len(parts) == 1 and self.how.way != "plain" else None


class ZeroWithDDP(DDP):
    """Stage 1: each rank updates the elements that it owns, and broadcasts them."""

    def _step(self, parts: Sequence[int], after: tuple[int, ...]) -> list[Operation]:
        (step,) = super()._step(parts, after)
        members, owners = self._members(parts), self.partition
        inside, nothing = frozenset(members), [0] * len(self.params)
        if len(inside) < self._trained:
            owned = [one for number in members for one in owners.pieces_of_param[number]]
            numel_of_rank = self._of_ranks((owner, piece.numel) for piece, owner in owned)
            tensors_of_rank = self._of_ranks((owner, 1) for _, owner in owned)
        else:  # of all parameters at once, which takes no time on thousands of ranks
            is_member = [int(number in inside) for number in range(len(self.params))]
            numel_of_rank = owners.totals(is_member)
            tensors_of_rank = owners.totals(nothing, is_member)
        flops = [flop if number in inside else 0 for number, flop in enumerate(self._step_flops)]
        return [
            step._replace(
                shares=shares_of(numel_of_rank),
                tensors=max(tensors_of_rank),
                flops=max(owners.totals(nothing, flops)),
            )
        ]

    def _broadcast(self, parts: Sequence[int], after: tuple[int, ...]) -> list[Operation]:
        if self.world_size == 1:
            return []
        part, members = self._single(parts), self._members(parts)
        if part is None and len(members) == self._trained:
            calls = new_parameters(self.partition, self.params, self.how.flat, self.how.buffer_size)
        else:
            messages = self._messages.about(members)
            calls = broadcasts_of(messages, self.params, frozenset(members), self.how.buffer_size)
        return [
            Operation("broadcast", NETWORK, part, after, op=op, nbytes=nbytes, owner=owner)
            for op, nbytes, owner in calls
        ]

    @property
    def _trained(self) -> int:
        return sum(param.trainable for param in self.params)

    @cached_property
    def _messages(self) -> MessagesByParam:
        return MessagesByParam(messages_of(self.partition, self.params, self.how.flat))

    def _of_ranks(self, amounts: Iterable[tuple[int, int]]) -> Sequence[int]:
        """The sum of the amounts of each rank."""
        sums = [0] * self.partition.world_size
        for rank, amount in amounts:
            sums[rank] += amount
        return sums


class ZeroToOwners(ZeroWithDDP):
    """The same, with gradients that are reduced to their owners only, and released elsewhere."""

    def _reduce(self, parts: Sequence[int], after: tuple[int, ...]) -> list[Operation]:
        (reduce,) = super()._reduce(parts, after)
        shares = self._shares_of_bucket(parts)
        if self.how.reduced_by == "pairs":
            return [reduce._replace(op="exchange", shares=shares, gives=reduce.nbytes)]
        return [
            reduce._replace(op="reduce", nbytes=its, owner=owner, shares=((owner, its),), gives=its)
            for owner, its in shares
        ]

    def _shares_of_bucket(self, parts: Sequence[int]) -> Shares:
        """The bytes of a bucket's gradients that each owner owns."""
        amounts = (
            (owner, piece.numel * itemsize_of(self.params[number].dtype))
            for number in self._members(parts)
            for piece, owner in self.partition.pieces_of_param[number]
        )
        return shares_of(self._of_ranks(amounts))

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        return self._owned_bytes()

    @property
    def left_to_owners(self) -> tuple[int, ...]:
        """Bytes of the whole gradients of all parameters that a rank owns or shares, or of a smallest one.

        After updates in backward none is left. `reduce_to_owners` says why.
        """
        if self.how.way != "plain":
            return (0,) * self.world_size
        nbytes = [nbytes_of(param) if param.trainable else 0 for param in self.params]
        least = min((nbytes_of(param) for param in self.params if param.trainable and param.numel), default=0)
        touched = ({piece.param for piece in slices} for slices in self.partition.slices_of_rank)
        return tuple(sum(nbytes[number] for number in of_rank) or least for of_rank in touched)
