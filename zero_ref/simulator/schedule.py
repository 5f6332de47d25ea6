"""What a strategy sends in one training iteration, call by call, and what it keeps on each rank.

A prediction to be held against a measurement: `lab.meter` records the calls of a real run, and the two lists
must be equal, the same operations in the same order with the same bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from zero_ref.calls import Call
from zero_ref.layout import BucketLayout, lay_out, runs_within
from zero_ref.partition import ParamSpec, Partition, Slice, Strategy, plan_partition
from zero_ref.simulator.ledger import StateRule, itemsize_of, nbytes_of, state_bytes_of_rank

MIB = 2**20


@dataclass(frozen=True)
class StrategyPlan:
    """How a strategy shards the optimizer, and how it sends the new parameters.

    Args:
        partition: the name of its partition; None where every rank keeps the whole optimizer.
        buckets: send one message for each bucket of a BucketLayout, not one for each owned slice.
        summary: in words.
    """

    partition: str | None
    buckets: bool
    summary: str


STRATEGIES: dict[str, StrategyPlan] = {
    "ddp": StrategyPlan(None, False, "every rank keeps the whole optimizer and sends no parameters"),
    "zero": StrategyPlan("sorted_greedy", False, "whole parameters to owners, one broadcast each"),
    "zero-bucket": StrategyPlan("sorted_greedy", True, "whole parameters to owners, one broadcast an owner"),
    "zero-even": StrategyPlan("even", True, "1/N of the elements each, to within 64, one broadcast an owner"),
}


@dataclass(frozen=True)
class Schedule:
    """One iteration in the steady state: the calls, in order, and what each rank holds.

    Args:
        calls: as every rank issues them; all ranks make the same calls.
        parameter_bytes, gradient_bytes, state_bytes: one entry for each rank. Padding of flat tensors counts
            as parameters; state is the optimizer's, from its first step on.
    """

    calls: tuple[Call, ...]
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]

    @property
    def collectives(self) -> int:
        """How many calls a rank makes."""
        return len(self.calls)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors that a rank passes to its calls; wire bytes depend on the operation."""
        return sum(call.nbytes for call in self.calls)

    @property
    def parameter_bytes_max(self) -> int:
        return max(self.parameter_bytes)

    @property
    def gradient_bytes_max(self) -> int:
        return max(self.gradient_bytes)

    @property
    def state_bytes_max(self) -> int:
        return max(self.state_bytes)


def schedule(
    strategy: str,
    params: Sequence[ParamSpec],
    world_size: int,
    optimizer: str | StateRule = "AdamW",
    *,
    ddp_buckets: Sequence[Sequence[int]] | None = None,
    partition: Strategy | None = None,
) -> Schedule:
    """Predict one steady-state iteration of a model under DDP and a strategy.

    First DDP's all-reduces of the gradients, one for each of its buckets; then the optimizer's broadcasts of
    the new parameters, in its order. Frozen parameters have no gradient and are not sent. A single rank sends
    no parameters, though DDP still issues its all-reduces.

    >>> params = [ParamSpec(n) for n in (600, 500, 400, 100)]
    >>> plan = schedule("zero", params, world_size=2)
    >>> [(call.op, call.nbytes, call.peer) for call in plan.calls]       # doctest: +NORMALIZE_WHITESPACE
    [('all_reduce', 6400, None), ('broadcast', 2400, 0), ('broadcast', 400, 0),
     ('broadcast', 2000, 1), ('broadcast', 1600, 1)]
    >>> plan.collectives, plan.payload_bytes, plan.state_bytes
    (5, 12800, (5608, 7208))
    >>> schedule("ddp", params, world_size=2).state_bytes
    (12816, 12816)

    Args:
        strategy: a name in STRATEGIES.
        params: in registration order.
        optimizer: a name in `ledger.STATE_RULES`, or a rule.
        ddp_buckets: the parameters of each of DDP's gradient buckets, in the order of their all-reduces;
            None for the function `ddp_buckets` with its defaults.
        partition: who owns what, in place of the strategy's own rule: anything that the optimizer's
            `partition=` takes.
    Raises:
        ValueError: the strategy or optimizer is unknown, the partition does not fit, or a partition is given
            for a strategy that has none.
    Cost: the payload is Ψ elements of gradients, and under ZeRO another Ψ of parameters. On the wire the
        all-reduce moves its payload twice and a broadcast once, so ZeRO as here sends 1.5 times what DDP
        does; reducing to the owners instead would send no more than DDP.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}.")
    plan = STRATEGIES[strategy]
    reductions = _all_reduces(params, ddp_buckets)
    parameter_bytes = sum(nbytes_of(param) for param in params)
    gradient_bytes = sum(nbytes_of(param) for param in params if param.trainable)

    if plan.partition is None:
        if partition is not None:
            raise ValueError(f"strategy {strategy!r} shards nothing, so it takes no partition=.")
        all_on_one = plan_partition("sorted_greedy", params, world_size=1)
        broadcasts: list[Call] = []
        state_bytes = state_bytes_of_rank(all_on_one, params, optimizer) * world_size
    else:
        owned = plan_partition(plan.partition if partition is None else partition, params, world_size)
        state_bytes = state_bytes_of_rank(owned, params, optimizer)
        if plan.buckets:
            layout = lay_out(owned, params)
            broadcasts = broadcasts_of_buckets(layout)
            parameter_bytes += sum(flat.padding * flat.itemsize for flat in layout.flats)
        else:
            broadcasts = broadcasts_of_slices(owned, params)

    return Schedule(
        calls=(*reductions, *(broadcasts if world_size > 1 else ())),
        parameter_bytes=(parameter_bytes,) * world_size,
        gradient_bytes=(gradient_bytes,) * world_size,
        state_bytes=state_bytes,
    )


def calls_of_rank(
    partition: Partition,
    params: Sequence[ParamSpec],
    rank: int,
    *,
    buckets: Sequence[Sequence[int]] | None = None,
    flat: bool = False,
    to_owners: bool = False,
    interleaved: bool = False,
) -> list[Call]:
    """The calls of one rank in one iteration, gradients reduced and parameters sent, in order.

    Interleaved, a bucket's new parameters follow the reduction of the bucket after it: they are stepped and
    sent while autograd computes the gradients in between.

    >>> params = [ParamSpec(n) for n in (600, 500, 400, 100)]
    >>> from zero_ref.partition import sorted_greedy
    >>> plan, buckets = sorted_greedy([600, 500, 400, 100], 2), [[3, 2], [1, 0]]
    >>> [call[:2] for call in calls_of_rank(plan, params, 0, buckets=buckets, interleaved=True)]
    [('all_reduce', 2000), ('all_reduce', 4400), ('broadcast', 400), ('broadcast', 1600),
     ('broadcast', 2400), ('broadcast', 2000)]
    >>> [call[:2] for call in calls_of_rank(plan, params, 0, buckets=buckets, to_owners=True)][:4]
    [('send', 1600), ('recv', 400), ('send', 2000), ('recv', 2400)]

    Args:
        buckets: the parameters of each of DDP's gradient buckets; None for `ddp_buckets` with its defaults.
        flat: parameters are views of flat tensors, so that what lies together is sent together.
        to_owners: gradients are reduced to the owners only, pairwise; else all-reduced.
    """
    if buckets is None:
        buckets = ddp_buckets(params)
    messages = _messages(partition, params, flat)
    calls: list[Call] = []
    for index, bucket in enumerate(buckets):
        calls += (
            reductions_to_owners(partition, params, rank, bucket)
            if to_owners
            else _all_reduces(params, [bucket])
        )
        if interleaved and index:
            calls += _broadcasts(messages, params, set(buckets[index - 1]))
    left = buckets[-1:] if interleaved else buckets
    calls += _broadcasts(messages, params, {number for bucket in left for number in bucket})
    return [call for call in calls if partition.world_size > 1 or call.op == "all_reduce"]


def reductions_to_owners(
    partition: Partition, params: Sequence[ParamSpec], rank: int, bucket: Iterable[int]
) -> list[Call]:
    """What `rank` sends and receives so that each owner gets all ranks' gradients of a DDP bucket.

    One message to each rank that owns some of it; if `rank` owns some itself, one from each other rank.
    """
    nbytes_of_rank = [0] * partition.world_size
    for number in bucket:
        for piece, owner in partition.pieces_of_param[number]:
            nbytes_of_rank[owner] += piece.numel * itemsize_of(params[number].dtype)
    peers = [peer for peer in range(partition.world_size) if peer != rank]
    return [
        *(Call("send", nbytes_of_rank[peer], peer) for peer in peers if nbytes_of_rank[peer]),
        *(Call("recv", nbytes_of_rank[rank], peer) for peer in peers if nbytes_of_rank[rank]),
    ]


def _messages(
    partition: Partition, params: Sequence[ParamSpec], flat: bool
) -> list[tuple[int, tuple[Slice, ...]]]:
    """The owner and the slices of each message of a step."""
    if flat:
        layout = lay_out(partition, params)
        return [(bucket.owner, bucket.slices) for flat in layout.flats for bucket in flat.buckets]
    return [(owner, (piece,)) for owner, slices in enumerate(partition.slices_of_rank) for piece in slices]


def _broadcasts(
    messages: Sequence[tuple[int, tuple[Slice, ...]]], params: Sequence[ParamSpec], members: Container[int]
) -> list[Call]:
    return [
        Call("broadcast", (run.stop - run.start) * itemsize_of(params[run.slices[0].param].dtype), owner)
        for owner, slices in messages
        for run in runs_within(slices, members)
        if params[run.slices[0].param].trainable
    ]


def broadcasts_of_slices(partition: Partition, params: Sequence[ParamSpec]) -> list[Call]:
    """One broadcast for each trainable slice, owner by owner.

    >>> from zero_ref.partition import sorted_greedy
    >>> broadcasts_of_slices(sorted_greedy([6, 5], 2), [ParamSpec(6), ParamSpec(5, trainable=False)])
    [Call(op='broadcast', nbytes=24, peer=0)]
    """
    return [
        Call("broadcast", piece.numel * itemsize_of(params[piece.param].dtype), owner)
        for owner, slices in enumerate(partition.slices_of_rank)
        for piece in slices
        if piece.numel and params[piece.param].trainable
    ]


def broadcasts_of_buckets(layout: BucketLayout) -> list[Call]:
    """One broadcast for each bucket, in the order in which the buckets lie.

    >>> from zero_ref.partition import sorted_greedy
    >>> params = [ParamSpec(6), ParamSpec(5), ParamSpec(4)]
    >>> broadcasts_of_buckets(lay_out(sorted_greedy([6, 5, 4], 2), params))
    [Call(op='broadcast', nbytes=24, peer=0), Call(op='broadcast', nbytes=36, peer=1)]
    """
    return [
        Call("broadcast", bucket.numel * flat.itemsize, bucket.owner)
        for flat in layout.flats
        for bucket in flat.buckets
    ]


def ddp_buckets(
    params: Sequence[ParamSpec],
    order: Sequence[int] | None = None,
    cap_bytes: int | None = None,
    first_cap_bytes: int | None = None,
) -> list[list[int]]:
    """The gradient buckets of DistributedDataParallel, from its second iteration on.

    DDP's first iteration puts all gradients of one dtype and device in one bucket. Before the second it
    rebuilds: it takes the parameters in the order in which their gradients became ready, and closes a bucket
    as soon as it holds at least its cap, so a bucket may exceed the cap by almost one parameter. The first
    bucket has a smaller cap, so that sending starts early.

    >>> params = [ParamSpec(n) for n in (6, 5, 4, 1)]                    # 24, 20, 16 and 4 bytes
    >>> ddp_buckets(params, cap_bytes=20)
    [[3, 2], [1], [0]]

    Args:
        params: in registration order. Frozen ones are in no bucket.
        order: the trainable parameters in the order in which backward completes their gradients; None for
            the reverse of registration, which is close. `models.ready_order` measures it.
        cap_bytes: DDP's `bucket_cap_mb` in bytes. None for its default, 25 MiB with a first bucket of 1 MiB.
        first_cap_bytes: of the first bucket of each dtype and device; None for what DDP makes of `cap_bytes`:
            1 MiB by default, else the same cap.
    Returns:
        The parameters of each bucket, in the order of the all-reduces.
    Raises:
        ValueError: `order` does not list every trainable parameter once.
    Source:
        torch/nn/parallel/distributed.py (`bucket_cap_mb`) and the Reducer's `rebuild_buckets`; equal to them
        in tests/ranks/test_ddp_buckets.py. Not for `find_unused_parameters=True`, which never rebuilds.
    """
    trainable = [index for index, param in enumerate(params) if param.trainable]
    order = trainable[::-1] if order is None else order
    if sorted(order) != trainable:
        raise ValueError(
            f"order must list each of the {len(trainable)} trainable parameters once; it lists {len(order)}, "
            f"{len(set(order) & set(trainable))} of them trainable and different."
        )
    later_cap = 25 * MIB if cap_bytes is None else cap_bytes
    if first_cap_bytes is None:
        first_cap_bytes = MIB if cap_bytes is None else cap_bytes

    closed: list[list[int]] = []
    open_of_kind: dict[tuple[str, str], list[int]] = {}
    room_of_kind: dict[tuple[str, str], int] = {}
    for index in order:
        kind = params[index].dtype, params[index].device
        open_of_kind.setdefault(kind, []).append(index)
        room_of_kind[kind] = room_of_kind.get(kind, first_cap_bytes) - nbytes_of(params[index])
        if room_of_kind[kind] <= 0:
            closed.append(open_of_kind[kind])
            open_of_kind[kind] = []
            room_of_kind[kind] = later_cap
    # What is left comes last. Of several kinds the one met last is first: the order of DDP's hash map in C++.
    return closed + [bucket for bucket in reversed(open_of_kind.values()) if bucket]


def _all_reduces(params: Sequence[ParamSpec], buckets: Sequence[Sequence[int]] | None) -> list[Call]:
    return [
        Call("all_reduce", sum(nbytes_of(params[index]) for index in bucket))
        for bucket in (ddp_buckets(params) if buckets is None else buckets)
    ]
