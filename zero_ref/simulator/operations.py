"""One iteration as ordered operations: what is computed, what is sent, what each waits for.

`schedule` chooses a strategy's builder here, `play` gives the operations a length in time. Both lanes of a
rank, computing and the network, work through their operations in the order of the list; beyond that an
operation waits for those in `after`. Elements and bytes only: no clock, no link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.calls import Call
from zero_ref.plan.layout import lay_out, runs_within
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.simulator.ledger import itemsize_of, nbytes_of

WAYS: dict[str, str] = {
    "plain": "DDP reduces during backward; then optimizer.step() updates and sends",
    "after_backward": "hook_with_zero_step: updates too may hide behind later reductions; then all is sent",
    "interleaved": "hook_with_zero_step_interleaved: a bucket is updated and sent while backward goes on",
}

NETWORK = "network"
COMPUTE = "compute"
SIDE_STREAM = "side stream"

AGREEMENT_BYTES = 32
"""That each rank passes in where ranks agree on what comes next: `zero_ref.comm.agreement.agree`."""


class Operation(NamedTuple):
    """One thing that happens in an iteration, on all ranks.

    Args:
        label: "forward", "backward", "step"; on the network "reduce", "broadcast", "gather", "agree" or
            "average".
        lane: COMPUTE or NETWORK; SIDE_STREAM for what a GPU computes beside backward.
        part: the gradient bucket or block that it is about; None for all.
        after: positions in the list of operations that must be over before this one begins.
        numel: elements that each rank computes on, unless `shares` says who computes on how many.
        tensors: parameters that they are of; of a step, on the rank that updates most.
        op: what is asked of the network, an operation of `cluster.OPERATIONS`; "" for computing.
        nbytes: its payload, as `cluster.traffic` counts it.
        ranks: the call is made in groups of so many consecutive ranks, all at once; None for one of all.
        passed: of an all-gather in which each rank passes in a tensor of its own, the bytes of that one; None
            where what a call says is the payload.
        owner: the source of a broadcast.
        shares: for a step (rank, elements that it updates), for gradients that are reduced to their owners
            (owner, bytes that it owns).
        takes: bytes of memory that a rank needs from its beginning on.
        gives: bytes of memory that a rank gives back at its end; of gradients with `shares`, all but its own.
    """

    label: str
    lane: str
    part: int | None = None
    after: tuple[int, ...] = ()
    numel: int = 0
    op: str = ""
    nbytes: int = 0
    owner: int | None = None
    shares: tuple[tuple[int, int], ...] | None = None
    takes: int = 0
    gives: int = 0
    tensors: int = 0
    ranks: int | None = None
    passed: int | None = None

    def calls_of(self, rank: int, world_size: int) -> list[Call]:
        """What one rank asks of the network: nothing when it computes, several messages of an exchange.

        >>> gradients = Operation("reduce", NETWORK, op="exchange", nbytes=30, shares=((0, 10), (2, 20)))
        >>> [tuple(call) for call in gradients.calls_of(0, world_size=3)]
        [('send', 20, 2), ('recv', 10, 1), ('recv', 10, 2)]
        """
        if not self.op:
            return []
        if self.op != "exchange":
            return [Call(self.op, self.nbytes if self.passed is None else self.passed, self.owner)]
        shares = self.shares or ()
        return [
            *(Call("send", nbytes, owner) for owner, nbytes in shares if owner != rank),
            *(
                Call("recv", nbytes, peer)
                for owner, nbytes in shares
                if owner == rank
                for peer in range(world_size)
                if peer != rank
            ),
        ]


def order(parts: int, way: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """In which order the optimizer's code reaches backward, reduce, step and broadcast, and of which parts.

    >>> [f"{label} {parts}" for label, parts in order(2, "interleaved")]     # doctest: +NORMALIZE_WHITESPACE
    ['backward (0,)', 'reduce (0,)', 'backward (1,)', 'reduce (1,)',
     'step (0,)', 'broadcast (0,)', 'step (1,)', 'broadcast (1,)']

    Raises:
        ValueError: the way is not one of WAYS.
    Source: `OverlappedStep.on_bucket` in zero_ref/backward/overlap.py, and
        `ZeroRedundancyOptimizer.step`.
    """
    if way not in WAYS:
        raise ValueError(f"unknown way {way!r}; choose one of {', '.join(WAYS)}.")
    for part in range(parts):
        yield "backward", (part,)
        yield "reduce", (part,)
        if way == "interleaved" and part:
            yield "step", (part - 1,)
            yield "broadcast", (part - 1,)
    everything = tuple(range(parts))
    if way == "interleaved":
        yield "step", everything[-1:]
        yield "broadcast", everything[-1:]
    else:
        steps = [everything] if way == "plain" else [(part,) for part in everything]
        yield from (("step", parts_of_step) for parts_of_step in steps)
        yield "broadcast", everything


# --------------------------------------------------------------------------- data parallel, ZeRO stage 1, 2


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
) -> tuple[Operation, ...]:
    """DDP's gradient buckets reduced behind backward, the update, and the new parameters sent.

    Args:
        partition: who owns what; None where every rank updates everything and nothing is sent.
        buckets: the parameters of each of DDP's gradient buckets, in the order of their reductions.
        flat: parameters are views of flat tensors, so that what lies together is sent together.
        to_owners: gradients are reduced to the owners only, pairwise, and the rest is released; else they are
            all-reduced.
        way: one of WAYS.
        side_stream: an interleaved update is made beside backward, as on a GPU.
        native: not this package's messages but a GPU library's: gradients by one reduce for each owner, and
            what all ranks send after backward by one all-gather.
        activation_bytes: that forward leaves for backward, on each rank.
    """
    forward, backwards = _passes(params, buckets, activation_bytes)
    updating = SIDE_STREAM if way == "interleaved" and side_stream else COMPUTE

    messages: _Messages | None = None  # made where they are sent one by one
    listed = [forward]
    at: dict[tuple[str, int], int] = {}  # where the last operation of this label and bucket stands
    for label, parts in order(len(buckets), way):
        members = [number for part in parts for number in buckets[part]]
        part = parts[0] if len(parts) == 1 and (way != "plain" or label in ("backward", "reduce")) else None
        needs = {"reduce": "backward", "step": "reduce", "broadcast": "step"}.get(label)
        after = (at[needs, parts[-1]],) if needs and parts else ()
        if label == "backward":
            listed.append(backwards[parts[0]])
        elif label == "reduce":
            reduce = _reduce_of(backwards[parts[0]], at["backward", parts[0]])
            if partition is None or not to_owners:
                listed.append(reduce)
            elif native:
                listed += [
                    Operation(
                        *reduce[:4],
                        op="reduce",
                        nbytes=share[1],
                        owner=share[0],
                        shares=(share,),
                        gives=share[1],
                    )
                    for share in _bytes_of_owners(partition, params, buckets[parts[0]])
                ]
            else:
                owned = _bytes_of_owners(partition, params, buckets[parts[0]])
                listed.append(reduce._replace(op="exchange", shares=owned, gives=reduce.nbytes))
        elif label == "step":
            numel = sum(params[number].numel for number in members)
            shares, tensors = None, len(members)
            if partition is not None:
                shares, tensors = _owned_of(partition, members)
            listed.append(
                Operation(label, updating, part, after, numel=numel, shares=shares, tensors=tensors)
            )
        else:
            if partition is None or world_size == 1:
                calls = []
            elif native and part is None:  # all that is trained, whoever owns it
                nbytes = sum(nbytes_of(params[number]) for number in members if params[number].trainable)
                calls = [Call("all_gather", nbytes)] if nbytes else []
            else:
                messages = _Messages(messages_of(partition, params, flat)) if messages is None else messages
                calls = broadcasts_of(messages.about(members), params, frozenset(members))
            listed += [
                Operation(label, NETWORK, part, after, op=op, nbytes=size, owner=owner)
                for op, size, owner in calls
            ]
        at.update({(label, one): len(listed) - 1 for one in parts})
    return tuple(listed)


def _passes(
    params: Sequence[ParamSpec], buckets: Sequence[Sequence[int]], activation_bytes: int
) -> tuple[Operation, list[Operation]]:
    """Forward, and backward bucket by bucket: each takes its gradients, and gives activations back."""
    numels = [sum(params[number].numel for number in bucket) for bucket in buckets]
    freed = shared_out(activation_bytes, numels)
    elements = sum(param.numel for param in params)
    forward = Operation("forward", COMPUTE, numel=elements, tensors=len(params), takes=sum(freed))
    backwards = [
        Operation(
            "backward",
            COMPUTE,
            part,
            numel=numels[part],
            tensors=len(bucket),
            takes=sum(nbytes_of(params[number]) for number in bucket),
            gives=freed[part],
        )
        for part, bucket in enumerate(buckets)
    ]
    return forward, backwards


def _reduce_of(backward: Operation, place: int, ranks: int | None = None) -> Operation:
    """The all-reduce of the gradients of a backward, which stands at `place`."""
    nbytes = backward.takes
    return Operation("reduce", NETWORK, backward.part, (place,), op="all_reduce", nbytes=nbytes, ranks=ranks)


def messages_of(
    partition: Partition, params: Sequence[ParamSpec], flat: bool
) -> list[tuple[int, tuple[Slice, ...]]]:
    """The owner and the slices of each message of a step: a bucket, or one slice."""
    if flat:
        layout = lay_out(partition, params)
        return [(bucket.owner, bucket.slices) for flat in layout.flats for bucket in flat.buckets]
    return [(owner, (piece,)) for owner, slices in enumerate(partition.slices_of_rank) for piece in slices]


class _Messages:
    """Messages of a step, found by the parameters that they are about: a bucket need not look at all."""

    def __init__(self, messages: Sequence[tuple[int, tuple[Slice, ...]]]) -> None:
        self._messages = messages
        self._numbers_of_param: dict[int, list[int]] = {}
        for number, (_, slices) in enumerate(messages):
            for param, _, _ in slices:
                self._numbers_of_param.setdefault(param, []).append(number)

    def about(self, members: Iterable[int]) -> list[tuple[int, tuple[Slice, ...]]]:
        """Those with a part of one of these parameters, in their order."""
        numbers = {number for param in members for number in self._numbers_of_param.get(param, ())}
        return [self._messages[number] for number in sorted(numbers)]


def broadcasts_of(
    messages: Iterable[tuple[int, tuple[Slice, ...]]], params: Sequence[ParamSpec], members: Container[int]
) -> list[Call]:
    """One broadcast for each run of elements in a message that belongs to trainable `members`."""
    return [
        Call("broadcast", (run.stop - run.start) * itemsize_of(params[run.slices[0].param].dtype), owner)
        for owner, slices in messages
        for run in runs_within(slices, members)
        if params[run.slices[0].param].trainable
    ]


def owned_bytes(partition: Partition, params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Bytes of the trainable parameters that each rank owns, and so of the gradients that it needs."""
    trainable = [number for number, param in enumerate(params) if param.trainable]
    of_rank = dict(_bytes_of_owners(partition, params, trainable))
    return tuple(of_rank.get(rank, 0) for rank in range(partition.world_size))


def _bytes_of_owners(
    partition: Partition, params: Sequence[ParamSpec], bucket: Iterable[int]
) -> tuple[tuple[int, int], ...]:
    nbytes_of_rank: dict[int, int] = {}
    for number in bucket:
        for piece, owner in partition.pieces_of_param[number]:
            nbytes = piece.numel * itemsize_of(params[number].dtype)
            nbytes_of_rank[owner] = nbytes_of_rank.get(owner, 0) + nbytes
    return _sorted_shares(nbytes_of_rank)


def _owned_of(partition: Partition, members: Iterable[int]) -> tuple[tuple[tuple[int, int], ...], int]:
    """The elements that each owner updates, and of how many parameters the one that has most."""
    numel_of_rank: dict[int, int] = {}
    pieces_of_rank: dict[int, int] = {}
    for number in members:
        for piece, owner in partition.pieces_of_param[number]:
            numel_of_rank[owner] = numel_of_rank.get(owner, 0) + piece.numel
            pieces_of_rank[owner] = pieces_of_rank.get(owner, 0) + 1
    return _sorted_shares(numel_of_rank), max(pieces_of_rank.values(), default=0)


def _sorted_shares(of_rank: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((rank, amount) for rank, amount in of_rank.items() if amount))


# ------------------------------------------------------------------------------------------------- stage 3


class Unit(NamedTuple):
    """Parameters that stage 3 gathers together.

    Args:
        numel: their elements, of which a rank computes with all.
        gathered_bytes: of the whole unit, padded so that each rank has as much of it.
        reduced_bytes: of its gradients, padded in the same way; frozen parameters have none.
        kept: not freed between its forward and its backward: the root's parameters, which both ends need.
        tensors: how many parameters.
    """

    numel: int
    gathered_bytes: int
    reduced_bytes: int
    kept: bool = False
    tensors: int = 0


def stage_3(
    units: Sequence[Unit],
    world_size: int,
    shards: Sequence[int],
    *,
    prefetch: int = 1,
    activation_bytes: int = 0,
) -> tuple[Operation, ...]:
    """Parameters gathered before use, in forward and again in backward; gradients reduced to shards.

    Before a unit computes, the units up to `prefetch` places further on are asked for. So in backward the
    next unit's parameters come before this unit's gradients: the network does first what is needed first.

    >>> units = [Unit(8, 16, 16, kept=True), Unit(10, 20, 20), Unit(10, 20, 20)]
    >>> [f"{one.label} {one.part}" for one in stage_3(units, 2, shards=[14, 14]) if one.op]
    ['gather 0', 'gather 1', 'gather 2', 'gather 2', 'gather 1', 'reduce 2', 'reduce 1', 'reduce 0']

    Args:
        units: in the order of forward; backward takes them in the reverse.
        shards: elements that each rank updates.
        prefetch: how many units ahead; 0 gathers a unit when it is needed, and nothing hides the wait.
        activation_bytes: that forward leaves for backward, on each rank.
    Raises:
        ValueError: `prefetch` is negative.
    Source: ZeRO (arXiv:1910.02054), section 5.3. The order is that of torch's `fully_shard`, as recorded in
        tests/ranks/test_stage_3.py.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch counts units, 0 or more; got {prefetch}.")
    freed = shared_out(activation_bytes, [unit.numel for unit in units])
    listed: list[Operation] = []
    at: dict[tuple[str, int], int] = {}  # where the last operation of this label and unit stands
    computed: tuple[int, ...] = ()  # where the last computation stands

    def add(operation: Operation, part: int) -> None:
        at[operation.label, part] = len(listed)
        listed.append(operation)

    for label in ("forward", "backward"):
        sequence = list(range(len(units)) if label == "forward" else reversed(range(len(units))))
        to_gather = deque(
            (position, part)
            for position, part in enumerate(sequence)
            if world_size > 1 and not (label == "backward" and units[part].kept)
        )
        for position, part in enumerate(sequence):
            unit = units[part]
            compute = Operation(label, COMPUTE, part, numel=unit.numel, tensors=unit.tensors)
            while to_gather and to_gather[0][0] <= position + prefetch:
                _, ahead = to_gather.popleft()
                size = units[ahead].gathered_bytes
                add(
                    Operation("gather", NETWORK, ahead, computed, op="all_gather", nbytes=size, takes=size),
                    ahead,
                )
            gathered = (at["gather", part],) if world_size > 1 else ()
            held = unit.gathered_bytes if world_size > 1 else 0
            computed = (len(listed),)
            if label == "forward":
                gives = 0 if unit.kept else held
                add(compute._replace(after=gathered, takes=freed[part], gives=gives), part)
                continue
            gives = held + freed[part]
            add(compute._replace(after=gathered, takes=unit.reduced_bytes, gives=gives), part)
            if world_size > 1 and unit.reduced_bytes:
                size = unit.reduced_bytes
                gives = size - size // world_size
                add(
                    Operation(
                        "reduce", NETWORK, part, computed, op="reduce_scatter", nbytes=size, gives=gives
                    ),
                    part,
                )
    reduced = max((place for (label, _), place in at.items() if label == "reduce"), default=None)
    listed.append(
        Operation(
            "step",
            COMPUTE,
            None,
            () if reduced is None else (reduced,),
            numel=sum(shards),
            shares=tuple(enumerate(shards)),
            tensors=sum(unit.tensors for unit in units if unit.reduced_bytes),
        )
    )
    return tuple(listed)


# ------------------------------------------------------------------------------------------------ local SGD


def local_sgd(
    params: Sequence[ParamSpec],
    buckets: Sequence[Sequence[int]],
    averaging: AveragingSchedule,
    world_size: int,
    steps: range | None = None,
    *,
    averaged_itemsize: int | None = None,
    activation_bytes: int = 0,
) -> tuple[Operation, ...]:
    """Steps of ranks that train by themselves, and the averages that end some of them.

    In the warm-up gradients are reduced as by DDP, then within the gradient group or not at all. Before an
    average the ranks agree on what they are about to do. Then all that is trained lies end to end in one
    tensor, of a dtype that takes it all, and is all-reduced: parameters, not gradients. Frozen ones are equal
    on all ranks anyway. A group of one rank calls nobody, but for DDP in the warm-up, which does.

    >>> averaging = AveragingSchedule.periodic(2, warmup_steps=1)
    >>> def labels(steps=None):
    ...     return " ".join(one.label for one in local_sgd([ParamSpec(4)], [[0]], averaging, 2, steps))
    >>> labels()
    'forward backward step forward backward step agree average'
    >>> labels(range(2))
    'forward backward reduce step forward backward step agree average'

    Args:
        buckets: as `data_parallel`; backward is listed bucket by bucket.
        averaging: which steps reduce gradients, which average, and over whom.
        steps: that are listed, from 0; None for `averaging.steady`, a cycle that begins with all ranks equal.
        averaged_itemsize: bytes of an element as it is averaged: 4 where the optimizer keeps 32-bit copies of
            16-bit parameters, since its next step would undo an average of these; None for the parameters'.
    Raises:
        ValueError: the averaging is none for so many ranks, or steps are none, negative, or leave some out.
    Source: post-local SGD (Lin et al., arXiv:1808.07217), as `zero_ref.local_sgd.optimizer` does it.
        torch's own makes no agreement, and else the same calls: tests/ranks/test_simulated_calls.py.
    """
    averaging.check_fits(world_size)
    steps = averaging.steady if steps is None else steps
    if not steps or steps.start < 0 or steps.step != 1:
        raise ValueError(f"steps follow one another and are counted from 0, as in range(8); got {steps}.")
    forward, backwards = _passes(params, buckets, activation_bytes)
    gradient_bytes = sum(backward.takes for backward in backwards)
    trained = [params[number] for bucket in buckets for number in bucket]
    update = Operation("step", COMPUTE, numel=sum(param.numel for param in trained), tensors=len(trained))
    averaged_bytes = _end_to_end((param for param in params if param.trainable), averaged_itemsize)
    listed: list[Operation] = []
    met: tuple[int, ...] = ()  # where the average stands that the next forward computes with
    for step in steps:
        local = averaging.is_local(step)
        reducing = averaging.gradient_group if local else world_size
        listed.append(forward._replace(after=met))
        reduced: tuple[int, ...] = ()
        for backward in backwards:
            listed.append(backward)
            if reducing > 1 or not local:
                listed.append(_reduce_of(backward, len(listed) - 1, _group(reducing, world_size)))
                reduced = (len(listed) - 1,)
        # The gradients are freed before the next forward; those of the last step are still there.
        gives = gradient_bytes if step != steps[-1] else 0
        listed.append(update._replace(after=reduced, gives=gives))
        level = averaging.level(step)
        averaging_ranks = 1 if level is None else level.group_size or world_size
        met = ()
        if averaging_ranks > 1:
            group, whole = _group(averaging_ranks, world_size), AGREEMENT_BYTES * averaging_ranks
            agree = Operation("agree", NETWORK, None, (len(listed) - 1,), op="all_gather", nbytes=whole)
            listed.append(agree._replace(passed=AGREEMENT_BYTES, ranks=group))
            for nbytes in averaged_bytes:
                before = (len(listed) - 1,)
                average = Operation("average", NETWORK, None, before, op="all_reduce", nbytes=nbytes)
                listed.append(average._replace(ranks=group))
            met = (len(listed) - 1,)
    return tuple(listed)


def _group(ranks: int, world_size: int) -> int | None:
    """As an Operation says it."""
    return None if ranks == world_size else ranks


def _end_to_end(params: Iterable[ParamSpec], itemsize: int | None) -> list[int]:
    """Bytes of the tensors that take all parameters, one for each device."""
    on_device: dict[str, list[ParamSpec]] = {}
    for param in params:
        on_device.setdefault(param.device, []).append(param)
    return [
        sum(param.numel for param in there)
        * (itemsize or _promoted_itemsize({param.dtype for param in there}))
        for there in on_device.values()
    ]


def _promoted_itemsize(dtypes: Collection[str]) -> int:
    """Of the dtype that takes them all, where torch puts tensors of several dtypes into one."""
    widest = max(map(itemsize_of, dtypes), default=0)
    return 4 if widest == 2 and len(dtypes) > 1 else widest  # of float16 and bfloat16 neither takes the other


def shared_out(amount: int, weights: Sequence[int]) -> list[int]:
    """A whole number cut in proportion to `weights`, nothing lost to rounding; all 0 if no weight is.

    >>> shared_out(10, [1, 1, 1])
    [3, 3, 4]
    """
    total, done, given = sum(weights), 0, 0
    parts = []
    for weight in weights:
        done += weight
        parts.append(amount * done // total - given if total else 0)
        given += parts[-1]
    return parts
