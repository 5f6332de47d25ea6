"""The operations of DDP and of ZeRO's stages 1 and 2: who owns what is said parameter by parameter."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

from zero_ref.plan.calls import Call
from zero_ref.plan.layout import lay_out, runs_within
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import newton_schulz_operations
from zero_ref.simulator.ledger import itemsize_of, nbytes_of
from zero_ref.simulator.operations import (
    COMPUTE,
    NEEDS,
    NETWORK,
    SIDE_STREAM,
    Operation,
    forward_and_backward,
    order,
    reduction_of,
)


class Message(NamedTuple):
    """A message of a step.

    Args:
        owner: the rank that sends it.
        slices: of a bucket, or a single one.
        starts: the place of each slice's first element in the message.
        whole: number and bytes of the flat tensor of which this is an equal share, if it is one.
    """

    owner: int
    slices: tuple[Slice, ...]
    starts: tuple[int, ...] = (0,)
    whole: tuple[int, int] | None = None


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
    native: bool = False,
    activation_bytes: int = 0,
    muon: bool = False,
) -> tuple[Operation, ...]:
    """DDP's gradient buckets reduced during backward, the update, and the new parameters sent.

    Args:
        partition: who owns what; None where every rank updates everything and nothing is sent.
        buckets: the parameters of each of DDP's gradient buckets, in the order of their reductions.
        flat: parameters are views of flat tensors, so that one message carries neighbours.
        to_owners: gradients are reduced to the owners only, pairwise, and the rest is released; else they are
            all-reduced.
        way: one of WAYS.
        side_stream: an interleaved update runs beside backward, as on a GPU.
        native: the calls are those of a GPU library: one reduce of gradients for each owner, and one
            all-gather for all that is sent after backward.
        activation_bytes: that forward leaves for backward, on each rank.
        muon: the step of parameters that are `whole` orthogonalizes them.
    """
    forward, backwards = forward_and_backward(params, buckets, activation_bytes)
    updating = SIDE_STREAM if way == "interleaved" and side_stream else COMPUTE

    @cache  # a library's all-gather needs no messages, and laying them out takes long
    def messages() -> _Messages:
        return _Messages(messages_of(partition, params, flat) if partition else [])

    listed = [forward]
    position_of: dict[tuple[str, int], int] = {}  # the last operation of a label and bucket
    for label, parts in order(len(buckets), way):
        members = [number for part in parts for number in buckets[part]]
        part = parts[0] if len(parts) == 1 and (way != "plain" or label in ("backward", "reduce")) else None
        after = (position_of[NEEDS[label], parts[-1]],) if label in NEEDS and parts else ()
        if label == "backward":
            listed.append(backwards[parts[0]])
        elif label == "reduce":
            owned = _owned_bytes(partition, params, members) if partition and to_owners else None
            listed += _reductions(reduction_of(backwards[parts[0]], *after), owned, native)
        elif label == "step":
            step = Operation(label, updating, part, after)
            listed.append(_step(step, params, partition, members, muon))
        elif partition and world_size > 1:
            if native and part is None:
                calls = _all_gather(params, members)
            else:
                about = messages().about(members)
                calls = (
                    sent_at_once(about, params)
                    if part is None
                    else broadcasts_of(about, params, frozenset(members))
                )
            listed += [
                Operation(label, NETWORK, part, after, op=op, nbytes=nbytes, owner=owner)
                for op, nbytes, owner in calls
            ]
        position_of.update({(label, one): len(listed) - 1 for one in parts})
    return tuple(listed)


def _reductions(reduce: Operation, owned: Shares | None, native: bool) -> list[Operation]:
    """An all-reduce; or, with the bytes that each owner owns, an exchange or a reduce for each owner."""
    if owned is None:
        return [reduce]
    if not native:
        return [reduce._replace(op="exchange", shares=owned, gives=reduce.nbytes)]
    return [
        reduce._replace(op="reduce", nbytes=nbytes, owner=owner, shares=((owner, nbytes),), gives=nbytes)
        for owner, nbytes in owned
    ]


def _step(
    step: Operation,
    params: Sequence[ParamSpec],
    partition: Partition | None,
    members: Sequence[int],
    muon: bool,
) -> Operation:
    """The update of some parameters: of all of them on each rank, or of what each rank owns."""
    whole = [number for number in members if muon and params[number].whole and params[number].trainable]
    flops = {number: newton_schulz_operations(params[number]) for number in whole}
    step = step._replace(numel=sum(params[number].numel for number in members), tensors=len(members))
    if partition is None:
        return step._replace(flops=sum(flops.values()))
    flops_of_rank = _sums((partition.pieces_of_param[number][0][1], flops[number]) for number in whole)
    owned = [one for number in members for one in partition.pieces_of_param[number]]
    numel_of_rank = _sums((owner, piece.numel) for piece, owner in owned)
    tensors_of_rank = _sums((owner, 1) for _, owner in owned)
    return step._replace(
        shares=_shares(numel_of_rank),
        tensors=max(tensors_of_rank.values(), default=0),
        flops=max(flops_of_rank.values(), default=0),
    )


def _all_gather(params: Sequence[ParamSpec], members: Iterable[int]) -> list[Call]:
    """One all-gather of all that is trained."""
    nbytes = sum(nbytes_of(params[number]) for number in members if params[number].trainable)
    return [Call("all_gather", nbytes)] if nbytes else []


# ------------------------------------------------------------------------------------- messages, and shares


def messages_of(partition: Partition, params: Sequence[ParamSpec], flat: bool) -> list[Message]:
    """The messages of a step: of flat tensors one for each bucket, else one for each slice."""
    if flat:
        layout = lay_out(partition, params)
        return [
            Message(b.owner, b.slices, b.starts, (number, one.numel * one.itemsize) if one.shared else None)
            for number, one in enumerate(layout.flats)
            for b in one.buckets
        ]
    return [
        Message(owner, (piece,)) for owner, slices in enumerate(partition.slices_of_rank) for piece in slices
    ]


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
        for owner, slices, starts, _ in messages
        for run in runs_within(slices, starts, members)
        if params[run.slices[0].param].trainable
    ]


def sent_at_once(messages: Iterable[Message], params: Sequence[ParamSpec]) -> list[Call]:
    """The calls that send these messages after backward: of equal shares one all-gather, else broadcasts."""
    calls: list[Call] = []
    for whole, together in groupby(messages, key=lambda message: message.whole):
        if whole is None:
            calls += broadcasts_of(together, params, range(len(params)))
        else:
            calls.append(Call("all_gather", whole[1]))
    return calls


def owned_bytes(partition: Partition, params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Bytes of the trainable parameters that each rank owns, and so of the gradients that it needs."""
    trainable = [number for number, param in enumerate(params) if param.trainable]
    nbytes_of_rank = dict(_owned_bytes(partition, params, trainable))
    return tuple(nbytes_of_rank.get(rank, 0) for rank in range(partition.world_size))


def _owned_bytes(partition: Partition, params: Sequence[ParamSpec], members: Iterable[int]) -> Shares:
    """The bytes of these parameters that each owner owns."""
    return _shares(
        _sums(
            (owner, piece.numel * itemsize_of(params[number].dtype))
            for number in members
            for piece, owner in partition.pieces_of_param[number]
        )
    )


def _sums(amounts: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The sum of the amounts of each rank."""
    sum_of_rank: dict[int, int] = {}
    for rank, amount in amounts:
        sum_of_rank[rank] = sum_of_rank.get(rank, 0) + amount
    return sum_of_rank


def _shares(amount_of_rank: Mapping[int, int]) -> Shares:
    return tuple(sorted((rank, amount) for rank, amount in amount_of_rank.items() if amount))
