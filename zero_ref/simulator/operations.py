"""The operations of an iteration: what is computed, what is sent, and what each operation waits for.

Each subclass of `strategy.Strategy` lists the operations of one strategy; `schedule` chooses among them. A
rank computes in one lane, and the network carries calls in another. Each lane works through its operations in
the order of the list; an operation also waits for those in its `after`. Operations have elements and bytes;
`play` says how long they take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator._checks import check_name
from zero_ref.simulator.ledger import nbytes_of

WAYS: dict[str, str] = {
    "plain": "DDP reduces during backward; then optimizer.step() updates and sends",
    "after_backward": "hook_with_zero_step: updates too may hide behind later reductions; then all is sent",
    "interleaved": "hook_with_zero_step_interleaved: a bucket is updated and sent while backward goes on",
    "in_forward": "ShardedDataParallel(gather_in_forward=True): new parameters arrive in the next forward",
}

WAYS_OF_DDP = ("plain", "after_backward", "interleaved")
WAYS_WITHOUT_DDP = ("plain", "in_forward")

NETWORK = "network"
COMPUTE = "compute"
SIDE_STREAM = "side stream"
HOST = "host"

NEEDS = {"reduce": "backward", "step": "reduce", "broadcast": "step"}
"""The label of the operation on a bucket that has to end before the operation of another label can begin."""

Shares = tuple[tuple[int, int], ...]
"""(rank, amount) for each rank that has any, in the order of the ranks."""


class Operation(NamedTuple):
    """One operation of an iteration, on all ranks.

    Args:
        label: "forward", "backward", "step"; on the network "reduce", "broadcast", "gather", "agree" or
            "average"; "offload" for gradients that go to the CPU.
        lane: COMPUTE or NETWORK; SIDE_STREAM for what a GPU computes beside backward, and HOST for what its
            CPU does meanwhile.
        part: the gradient bucket or block that the operation is about; None for all of them.
        after: the positions of the operations that must end before this one begins.
        numel: elements that each rank computes on, unless `shares` says which rank computes on how many.
        op: the operation that the network is asked for, one of `traffic.OPERATIONS`; "" for computing.
        nbytes: the payload of the call, as `traffic` counts it.
        owner: the source of a broadcast, or the rank that a reduce gives the sum to.
        shares: for a step (rank, elements that it updates); for gradients that are reduced to their owners
            (owner, bytes that it owns), of a reduce its one owner; or (owner, bytes) for each message where
            an owner gets several.
        takes: bytes of memory that a rank allocates when the operation begins.
        gives: bytes of memory that a rank frees when the operation ends. Of gradients with `shares`, an owner
            keeps its own.
        tensors: the number of parameters that are computed on; of a step, on the rank that updates most.
        ranks: the size of the groups of consecutive ranks that make the call at the same time; None for one
            call of all ranks.
        stride: from one rank of such a group to the next, where groups are not of consecutive ranks.
        passed: bytes of the tensor that each rank passes to an all-gather of different tensors; None where
            each rank passes the payload.
        flops: of a step, the floating-point operations beside its reading and writing, on the rank that makes
            most.
    """

    label: str
    lane: str
    part: int | None = None
    after: tuple[int, ...] = ()
    numel: int = 0
    op: str = ""
    nbytes: int = 0
    owner: int | None = None
    shares: Shares | None = None
    takes: int = 0
    gives: int = 0
    tensors: int = 0
    ranks: int | None = None
    stride: int = 1
    passed: int | None = None
    flops: int = 0

    def calls_of(self, rank: int, world_size: int) -> list[Call]:
        """The calls that one rank makes: none for computing, several messages for an exchange.

        >>> gradients = Operation("reduce", NETWORK, op="exchange", nbytes=30, shares=((0, 10), (2, 20)))
        >>> [tuple(call) for call in gradients.calls_of(0, world_size=3)]
        [('send', 20, 2), ('recv', 10, 1), ('recv', 10, 2)]
        >>> every_other = gradients._replace(ranks=3, stride=2)         # peers are places in the group
        >>> every_other.calls_of(1, world_size=6) == gradients.calls_of(0, world_size=3)
        True
        """
        if not self.op:
            return []
        if self.ranks is not None:  # calls name positions in the group
            rank, world_size = rank // self.stride % self.ranks, self.ranks
        if self.op != "exchange":
            return [Call(self.op, self.nbytes if self.passed is None else self.passed, self.owner)]
        shares = self.shares or ()
        own = [nbytes for owner, nbytes in shares if owner == rank]
        peers = [peer for peer in range(world_size) if peer != rank] if own else []
        sends = [Call("send", nbytes, owner) for owner, nbytes in shares if owner != rank]
        return sends + [Call("recv", nbytes, peer) for peer in peers for nbytes in own]


def order(parts: int, way: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The order in which the optimizer's code reaches each label, and for which parts.

    >>> [f"{label} {parts}" for label, parts in order(2, "interleaved")]     # doctest: +NORMALIZE_WHITESPACE
    ['backward (0,)', 'reduce (0,)', 'backward (1,)', 'reduce (1,)',
     'step (0,)', 'broadcast (0,)', 'step (1,)', 'broadcast (1,)']

    Raises:
        ValueError: the way is not one of DDP's.
    Source: `OverlappedStep.on_bucket` in zero_ref/backward/overlap.py, and
        `ZeroRedundancyOptimizer.step`.
    """
    check_name("way", way, WAYS_OF_DDP)
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


def forward_and_backward(
    params: Sequence[ParamSpec], buckets: Sequence[Sequence[int]], activation_bytes: int
) -> tuple[Operation, list[Operation]]:
    """Forward, and backward bucket by bucket, which allocates gradients and frees activations."""
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


def passes_before(forward: Operation, backwards: Sequence[Operation], count: int) -> list[Operation]:
    """Forwards and backwards that reduce nothing: gradients add up, and the first backward allocates them."""
    whole = Operation(
        "backward",
        COMPUTE,
        numel=sum(one.numel for one in backwards),
        tensors=sum(one.tensors for one in backwards),
        gives=sum(one.gives for one in backwards),
    )
    first = whole._replace(takes=sum(one.takes for one in backwards))
    return [one for number in range(count) for one in (forward, whole if number else first)]


def reduction_of(backward: Operation, position: int, *, itemsize: int | None = None) -> Operation:
    """The all-reduce of the gradients of a backward, which is at `position` in the list.

    Args:
        itemsize: bytes of an element on the way; None for those of the gradients.
    """
    nbytes = backward.takes if itemsize is None else backward.numel * itemsize
    return Operation("reduce", NETWORK, backward.part, (position,), op="all_reduce", nbytes=nbytes)


def shared_out(amount: int, weights: Sequence[int]) -> list[int]:
    """A whole number divided in proportion to `weights`, nothing lost to rounding; all 0 if no weight is.

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


def shares_of(amount_of_rank: Sequence[int]) -> Shares:
    """The ranks that have any, with their amounts."""
    return tuple([(rank, amount) for rank, amount in enumerate(amount_of_rank) if amount])
