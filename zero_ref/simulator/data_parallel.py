"""The operations of DDP and of ZeRO's stages 1 and 2: who owns what is said parameter by parameter."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from zero_ref.plan.calls import Call
from zero_ref.plan.layout import lay_out, runs_within
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import newton_schulz_operations
from zero_ref.simulator.ledger import itemsize_of
from zero_ref.simulator.operations import (
    COMPUTE,
    NEEDS,
    NETWORK,
    SIDE_STREAM,
    Operation,
    forward_and_backward,
    order,
    passes_before,
    reduction_of,
)


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


Shares = tuple[tuple[int, int], ...]
"""(rank, amount) for each rank that has any, in the order of the ranks."""


def data_parallel(
    params: Sequence[ParamSpec],
    world_size: int,
    partition: Partition | None,
    buckets: Sequence[Sequence[int]],
    *,
    flat: bool = False,
    to_owners: bool = False,
    way: str = "plain",
    side_stream: bool = False,
    activation_bytes: int = 0,
    muon: bool = False,
    accumulation: int = 1,
    reduced_itemsize: int | None = None,
    reduced_by: str = "pairs",
) -> tuple[Operation, ...]:
    """DDP's gradient buckets reduced during backward, the update, and the new parameters sent.

    Args:
        partition: who owns what; None where every rank updates everything and nothing is sent.
        buckets: the parameters of each of DDP's gradient buckets, in the order of their reductions.
        flat: parameters are views of flat tensors, so that one message carries neighbours.
        to_owners: gradients are reduced to the owners only, and the rest is released; else they are
            all-reduced.
        way: one of WAYS_OF_DDP.
        side_stream: an interleaved update runs beside backward, as on a GPU.
        activation_bytes: that forward leaves for backward, on each rank.
        muon: the step of parameters that are `whole` orthogonalizes them.
        accumulation: backwards before an update, of which the last one reduces.
        reduced_itemsize: bytes of an element in the reductions; None for those of the gradients.
        reduced_by: one of REDUCED_BY: how gradients travel to their owners.
    """
    forward, backwards = forward_and_backward(params, buckets, activation_bytes)
    updating = SIDE_STREAM if way == "interleaved" and side_stream else COMPUTE

    @cache  # laying them out takes long, and shares need none
    def messages() -> _Messages:
        return _Messages(messages_of(partition, params, flat) if partition else [])

    trained = sum(param.trainable for param in params)
    listed = [*passes_before(forward, backwards, accumulation - 1), forward]
    position_of: dict[tuple[str, int], int] = {}  # the last operation of a label and bucket
    for label, parts in order(len(buckets), way):
        members = [number for part in parts for number in buckets[part]]
        part = parts[0] if len(parts) == 1 and (way != "plain" or label in ("backward", "reduce")) else None
        after = (position_of[NEEDS[label], parts[-1]],) if label in NEEDS and parts else ()
        if label == "backward":
            backward = backwards[parts[0]]
            listed.append(backward if accumulation == 1 else backward._replace(takes=0))
        elif label == "reduce":
            owned = _owned_bytes(partition, params, members) if partition and to_owners else None
            reduce = reduction_of(backwards[parts[0]], *after, itemsize=reduced_itemsize)
            if owned is None:
                listed.append(reduce)
            elif reduced_by == "pairs":
                listed.append(reduce._replace(op="exchange", shares=owned, gives=reduce.nbytes))
            else:
                listed += [
                    reduce._replace(op="reduce", nbytes=its, owner=owner, shares=((owner, its),), gives=its)
                    for owner, its in owned
                ]
        elif label == "step":
            step = Operation(label, updating, part, after)
            listed.append(step_of(step, params, partition, members, muon))
        elif partition and world_size > 1:
            if part is None and len(members) == trained:
                calls = new_parameters(partition, params, flat)
            else:
                calls = broadcasts_of(messages().about(members), params, frozenset(members))
            listed += [
                Operation(label, NETWORK, part, after, op=op, nbytes=nbytes, owner=owner)
                for op, nbytes, owner in calls
            ]
        position_of.update({(label, one): len(listed) - 1 for one in parts})
    return tuple(listed)


def step_of(
    step: Operation,
    params: Sequence[ParamSpec],
    owners: Partition | None,
    members: Sequence[int],
    muon: bool,
) -> Operation:
    """The update of some parameters: of all of them on each rank, or of what each rank owns.

    Args:
        step: the operation so far.
        owners: who owns what; None where every rank updates everything.
        members: the numbers of the parameters.
    """
    step = step._replace(numel=sum(params[number].numel for number in members), tensors=len(members))
    inside = frozenset(members)
    flops = [flop if number in inside else 0 for number, flop in enumerate(_newton_schulz(params, muon))]
    if owners is None:
        return step._replace(flops=sum(flops))
    if len(inside) < sum(param.trainable for param in params):
        owned = [one for number in members for one in owners.pieces_of_param[number]]
        numel_of_rank: Sequence[int] = _of_ranks(
            ((owner, piece.numel) for piece, owner in owned), owners.world_size
        )
        tensors_of_rank: Sequence[int] = _of_ranks(((owner, 1) for _, owner in owned), owners.world_size)
    else:
        is_member = [int(number in inside) for number in range(len(params))]
        numel_of_rank = owners.totals(is_member)
        tensors_of_rank = owners.totals([0] * len(params), is_member)
    return step._replace(
        shares=shares_of(numel_of_rank),
        tensors=max(tensors_of_rank),
        flops=max(owners.totals([0] * len(params), flops)),
    )


def _newton_schulz(params: Sequence[ParamSpec], muon: bool) -> list[int]:
    """The operations of Muon's step of each parameter that it sees whole."""
    return [
        newton_schulz_operations(param) if muon and param.whole and param.trainable else 0 for param in params
    ]


def most_flops(params: Sequence[ParamSpec], owners: Partition, muon: bool) -> int:
    """The operations of Muon's step on the rank that makes most."""
    return max(owners.totals([0] * len(params), _newton_schulz(params, muon)))


# ------------------------------------------------------------------------------------- messages, and shares


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


def new_parameters(partition: Partition, params: Sequence[ParamSpec], flat: bool) -> list[Call]:
    """The calls that send all new parameters at once: of equal shares an all-gather, else broadcasts."""
    if not flat:
        return broadcasts_of(messages_of(partition, params, flat=False), params, range(len(params)))
    calls: list[Call] = []
    for one in lay_out(partition, params).flats:
        if one.shared:
            calls.append(Call("all_gather", one.numel * one.itemsize))
        else:
            calls += [Call("broadcast", bucket.numel * one.itemsize, bucket.owner) for bucket in one.buckets]
    return calls


class _Messages:
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


def broadcasts_of(
    messages: Iterable[Message], params: Sequence[ParamSpec], members: Container[int]
) -> list[Call]:
    """One broadcast for each run of elements in a message that belongs to trainable `members`."""
    return [
        Call("broadcast", (run.stop - run.start) * itemsize_of(params[run.slices[0].param].dtype), owner)
        for owner, slices, starts in messages
        for run in runs_within(slices, starts, members)
        if params[run.slices[0].param].trainable
    ]


def owned_bytes(owners: Partition, params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Bytes of the trainable parameters that each rank owns, and so of the gradients that it needs."""
    return owners.totals([itemsize_of(param.dtype) if param.trainable else 0 for param in params])


def _owned_bytes(partition: Partition, params: Sequence[ParamSpec], members: Iterable[int]) -> Shares:
    """The bytes of these parameters that each owner owns."""
    amounts = (
        (owner, piece.numel * itemsize_of(params[number].dtype))
        for number in members
        for piece, owner in partition.pieces_of_param[number]
    )
    return shares_of(_of_ranks(amounts, partition.world_size))


def _of_ranks(amounts: Iterable[tuple[int, int]], world_size: int) -> list[int]:
    """The sum of the amounts of each rank."""
    sums = [0] * world_size
    for rank, amount in amounts:
        sums[rank] += amount
    return sums


def shares_of(amount_of_rank: Sequence[int]) -> Shares:
    """The ranks that have any."""
    return tuple([(rank, amount) for rank, amount in enumerate(amount_of_rank) if amount])
