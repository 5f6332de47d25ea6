"""The messages that carry new parameters from their owners to all ranks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from zero_ref.plan.calls import Call
from zero_ref.plan.layout import BucketLayout, Flat, lay_out, runs_within
from zero_ref.plan.parcels import PACKED_NUMEL, parcels
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.simulator.ledger import itemsize_of


class Message(NamedTuple):
    """A message of a step.

    Args:
        owner: the rank that sends it.
        slices: of a bucket, or a single one.
        starts: the place of each slice's first element in the message.
    """

    owner: int
    slices: tuple[Slice, ...]
    starts: tuple[int, ...] = (0,)


def messages_of(partition: Partition, params: Sequence[ParamSpec], flat: bool) -> list[Message]:
    """The messages of a step: of flat tensors one for each bucket, else one for each slice."""
    if flat:
        flats = lay_out(partition, params).flats
        return [
            Message(bucket.owner, bucket.slices, bucket.starts) for one in flats for bucket in one.buckets
        ]
    return [
        Message(owner, (piece,)) for owner, slices in enumerate(partition.slices_of_rank) for piece in slices
    ]


class MessagesByParam:
    """The messages of a step by parameter, so that a gradient bucket does not search all of them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._numbers_of_param: dict[int, list[int]] = {}
        for number, message in enumerate(messages):
            for param, _, _ in message.slices:
                self._numbers_of_param.setdefault(param, []).append(number)

    def about(self, members: Iterable[int]) -> list[Message]:
        """The messages with a part of one of these parameters, in their order."""
        numbers = {number for param in members for number in self._numbers_of_param.get(param, ())}
        return [self._messages[number] for number in sorted(numbers)]


def new_parameters(
    partition: Partition, params: Sequence[ParamSpec], flat: bool, buffer_size: int = 0
) -> list[Call]:
    """The calls that send all new parameters at once: of equal shares an all-gather, else broadcasts.

    Args:
        flat: parameters lie in flat tensors.
        buffer_size: without these, elements of a buffer in which small parameters travel; 0 for none.
    """
    if not flat:
        return broadcasts_of_slices(partition, params, buffer_size)
    calls: list[Call] = []
    for one in lay_out(partition, params).flats:
        if one.shared:
            calls.append(Call("all_gather", one.numel * one.itemsize))
        else:
            calls += _broadcasts_of_flat(one)
    return calls


def broadcasts_of(
    messages: Iterable[Message],
    params: Sequence[ParamSpec],
    members: Container[int],
    buffer_size: int = 0,
) -> list[Call]:
    """One broadcast for each run of elements in a message that belongs to trainable `members`.

    Args:
        buffer_size: small runs of one owner, dtype and device travel together in buffers of at most so many
            elements, before all others; 0 for none.
    """
    runs = [
        (owner, params[run.slices[0].param], run.stop - run.start)
        for owner, slices, starts in messages
        for run in runs_within(slices, starts, members)
        if params[run.slices[0].param].trainable
    ]
    sizes = [((owner, param.dtype, param.device), numel) for owner, param, numel in runs]
    together = parcels(sizes, buffer_size, PACKED_NUMEL) if buffer_size else [[n] for n in range(len(runs))]
    return [
        Call("broadcast", sum(sizes[n][1] for n in numbers) * itemsize_of(runs[numbers[0]][1].dtype), owner)
        for numbers in together
        for owner in [runs[numbers[0]][0]]
    ]


def broadcasts_of_slices(
    partition: Partition, params: Sequence[ParamSpec], buffer_size: int = 0
) -> list[Call]:
    """One broadcast for each trainable slice, owner by owner; or small slices together.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> broadcasts_of_slices(sorted_greedy([6, 5], 2), [ParamSpec(6), ParamSpec(5, trainable=False)])
    [Call(op='broadcast', nbytes=24, peer=0)]
    >>> params = [ParamSpec(20_000), ParamSpec(5), ParamSpec(4)]
    >>> [call.nbytes for call in broadcasts_of_slices(sorted_greedy([20_000, 5, 4], 1), params, 2**18)]
    [36, 80000]

    Args:
        buffer_size: as `broadcasts_of`.
    """
    messages = messages_of(partition, params, flat=False)
    return broadcasts_of(messages, params, range(len(params)), buffer_size)


def broadcasts_of_buckets(layout: BucketLayout) -> list[Call]:
    """One broadcast for each bucket, in the order in which the buckets lie.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> params = [ParamSpec(6), ParamSpec(5), ParamSpec(4)]
    >>> from zero_ref.plan.layout import lay_out
    >>> broadcasts_of_buckets(lay_out(sorted_greedy([6, 5, 4], 2), params))
    [Call(op='broadcast', nbytes=24, peer=0), Call(op='broadcast', nbytes=36, peer=1)]
    """
    return [call for flat in layout.flats for call in _broadcasts_of_flat(flat)]


def _broadcasts_of_flat(flat: Flat) -> list[Call]:
    return [Call("broadcast", bucket.numel * flat.itemsize, bucket.owner) for bucket in flat.buckets]
