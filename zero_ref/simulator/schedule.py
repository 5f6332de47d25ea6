"""The calls of a strategy in one training iteration, and the bytes that it keeps on each rank.

A prediction to be held against a measurement: `lab.meter` records the calls of a real run, and the two lists
must be equal, the same operations in the same order with the same bytes. `play` says how long it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_ref.plan.calls import Call
from zero_ref.plan.parcels import BROADCAST_NUMEL
from zero_ref.plan.partition import ParamSpec, Partition, check_world_size
from zero_ref.simulator.data_parallel import DDP, ZeroToOwners, ZeroWithDDP
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.local_sgd import LocalSGD
from zero_ref.simulator.operations import NETWORK, Operation
from zero_ref.simulator.recipe import LOCAL_SGD, Recipe, recipe
from zero_ref.simulator.sharded import ZeroWithoutDDP
from zero_ref.simulator.stage_3 import ZeroStage3, ZeroStage3Flat
from zero_ref.simulator.strategy import Strategy
from zero_ref.simulator.traffic import traffic

MIB = 2**20


class Stretch(NamedTuple):
    """A computation, or calls on the network of which each begins when the one before it ends.

    Args:
        operation: the first of them. The others may have another owner and other bytes.
        nbytes_of_calls: payloads, one for each operation.
    """

    operation: Operation
    nbytes_of_calls: list[int]


@dataclass(frozen=True)
class Schedule:
    """One iteration or several: what happens, in order, and what each rank holds.

    Args:
        operations: computing and calls, in the order of the program, which is the same on all ranks.
        world_size: ranks.
        parameter_bytes, gradient_bytes, state_bytes: one entry for each rank, held between iterations.
            Padding of flat tensors counts as parameters; state is the optimizer's, from its first step on.
            Of gradients that are reduced to their owners, what a rank owns.
        iterations: that `operations` are: 1, of local SGD as many as there are steps.
        left_to_owners: of gradients that are reduced to their owners, what this package leaves on each rank.
    """

    operations: tuple[Operation, ...]
    world_size: int
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    iterations: int = 1
    left_to_owners: tuple[int, ...] | None = None

    @cached_property
    def stretches(self) -> Sequence[Stretch]:
        """The operations in their order; calls of one kind that wait for the same operations are together."""
        found: list[Stretch] = []
        open_kind: tuple[object, ...] | None = None  # of the last stretch, if another call may join it
        for one in self.operations:
            joins = one.op not in ("", "exchange")
            kind = (one.op, one.after, one.ranks, one.stride) if joins else None
            if kind is None or kind != open_kind:
                found.append(Stretch(one, []))
            found[-1].nbytes_of_calls.append(one.nbytes)
            open_kind = kind
        return found

    @cached_property
    def computing_shares(self) -> Mapping[int, Mapping[int, int]]:
        """Elements of each rank in computations that ranks divide: {position: {rank: elements}}."""
        return {
            place: dict(one.shares)
            for place, one in enumerate(self.operations)
            if one.lane != NETWORK and one.shares is not None
        }

    @cached_property
    def kind_of_rank(self) -> Sequence[int]:
        """Numbers that are equal for ranks with equal shares of every computation.

        >>> schedule("zero", [ParamSpec(n) for n in (6, 5, 6)], world_size=4).kind_of_rank
        [1, 1, 2, 0]
        """
        kinds = [0] * self.world_size
        number_of: dict[tuple[int, int, int], int] = {}
        for place, numel_of_rank in self.computing_shares.items():
            for rank, numel in numel_of_rank.items():
                kinds[rank] = number_of.setdefault((kinds[rank], place, numel), len(number_of) + 1)
        return kinds

    def calls_of(self, rank: int) -> tuple[Call, ...]:
        """The calls of one rank, in order."""
        return tuple(call for one in self.operations for call in one.calls_of(rank, self.world_size))

    def count_of_calls(self, rank: int) -> int:
        """Return the number of calls that one rank makes."""
        return sum(
            len(one.calls_of(rank, self.world_size)) if one.op == "exchange" else 1
            for one in self.operations
            if one.op
        )

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of rank 0. All ranks make the same, but for messages to single ranks ("send", "recv")."""
        return self.calls_of(0)

    @property
    def collectives(self) -> int:
        """Number of calls that rank 0 makes."""
        return self.count_of_calls(0)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors that rank 0 passes to its calls; wire bytes depend on the operation."""
        return sum(call.nbytes for call in self.calls)

    def wire_bytes(self, backend: str = "nccl") -> int:
        """Bytes that all ranks send, together, as `traffic` counts them for a backend.

        >>> params = [ParamSpec(1024)]
        >>> [schedule(name, params, world_size=4).wire_bytes() for name in ("ddp", "zero-even", "zero-2")]
        [24576, 36864, 24600]
        """
        # A million ranks make a million calls, most of them with as many bytes as others.
        count_of_calls = Counter((one.op, one.nbytes, one.ranks) for one in self.operations if one.op)
        return sum(
            count * self._wire_bytes_of(op, nbytes, ranks or self.world_size, backend)
            for (op, nbytes, ranks), count in count_of_calls.items()
        )

    def _wire_bytes_of(self, op: str, nbytes: int, ranks: int, backend: str) -> int:
        of_group = traffic(op, nbytes, ranks, backend=backend).total_bytes
        return round(of_group * (self.world_size // ranks))

    @property
    def parameter_bytes_max(self) -> int:
        return max(self.parameter_bytes)

    @property
    def left_gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of every `.grad` between iterations.

        Beside what a rank owns this package keeps the rest of a parameter that is cut, and on a rank that
        owns nothing one gradient of zeros; after an update in backward it keeps none.
        """
        return self.gradient_bytes if self.left_to_owners is None else self.left_to_owners

    @property
    def gradient_bytes_max(self) -> int:
        return max(self.left_gradient_bytes)

    @property
    def state_bytes_max(self) -> int:
        return max(self.state_bytes)


def schedule(
    strategy: str | Recipe,
    params: Sequence[ParamSpec],
    world_size: int,
    *,
    ddp_buckets: Sequence[Sequence[int]] | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
    activation_bytes: int = 0,
    steps: range | None = None,
    side_stream: bool = False,
) -> Schedule:
    """Predict one steady-state iteration of a model under DDP and a strategy; of local SGD its steps.

    First DDP's all-reduces of the gradients, one for each of its buckets; then the optimizer's broadcasts of
    the new parameters, in its order. Frozen parameters have no gradient and are not sent. A single rank sends
    no parameters, though DDP still issues its all-reduces.

    >>> params = [ParamSpec(n) for n in (600, 500, 400, 100)]
    >>> plan = schedule("zero", params, world_size=2)
    >>> [(call.op, call.nbytes, call.peer) for call in plan.calls]
    [('all_reduce', 6400, None), ('broadcast', 2800, 0), ('broadcast', 3600, 1)]
    >>> plan.collectives, plan.payload_bytes, plan.state_bytes
    (3, 12800, (5608, 7208))
    >>> one_by_one = schedule(recipe("zero", broadcast_buffer_size=0), params, world_size=2)
    >>> [(call.nbytes, call.peer) for call in one_by_one.calls[1:]]
    [(2400, 0), (400, 0), (2000, 1), (1600, 1)]
    >>> schedule("ddp", params, world_size=2).state_bytes
    (12816, 12816)

    Args:
        strategy: a recipe, or the name of one in `recipe.TRAINED`. Change one by `recipe(name, ...)`.
        params: of the model, in registration order. Stage 3 cuts each along the first dimension of its shape.
        ddp_buckets: the parameters of each of DDP's gradient buckets, in the order of their all-reduces;
            None for the function `ddp_buckets` with its defaults.
        blocks: at stage 3 the parameters of each unit that is gathered together, the root's first
            (`models.blocks`); None for one unit of all.
        activation_bytes: that forward leaves for backward on each rank; only `play` looks at them.
        steps: of local SGD, which ones, from 0; None for a cycle of the averaging after its warm-up.
        side_stream: an interleaved update is made beside backward, as on a GPU.
    Raises:
        ValueError: there is no such strategy; its partition or averaging does not fit; steps are asked of one
            that has none. Facts of the model that a strategy has no use for are ignored.
    Cost: the payload is Ψ elements of gradients, and under ZeRO another Ψ of parameters. On the wire the
        all-reduce moves its payload twice and a broadcast once. So stage 1 on top of DDP, as in PyTorch and
        by this package's default, sends 1.5 times what DDP does. Reduced to their owners (`to_owners=True`),
        gradients move once, and stage 1 sends no more than DDP: so the ZeRO paper counts it, and so
        Megatron-LM's distributed optimizer does it. Stage 3 gathers parameters twice, which is again 1.5
        times DDP. Local SGD all-reduces parameters once in a period, and 32 bytes of each rank before.
    """
    how = recipe(strategy)
    check_world_size(world_size)
    if how.averaging is None and steps is not None:
        raise ValueError(f"steps= is for {LOCAL_SGD!r}; strategy {how.name!r} meets in every step.")
    planned = _class_of(how)(
        how,
        params,
        world_size,
        _default_buckets(params) if ddp_buckets is None else ddp_buckets,
        blocks,
        activation_bytes,
        steps,
        side_stream,
    )
    return Schedule(
        planned.operations,
        world_size,
        planned.parameter_bytes,
        planned.gradient_bytes,
        planned.state_bytes,
        planned.iterations,
        planned.left_to_owners,
    )


def _class_of(how: Recipe) -> type[Strategy]:
    """The class that lists the operations of a recipe."""
    if how.averaging is not None:
        return LocalSGD
    if how.stage == 3:
        return ZeroStage3Flat if how.is_stair else ZeroStage3
    if how.without_ddp:
        return ZeroWithoutDDP
    if how.to_owners:
        return ZeroToOwners
    return DDP if how.partition is None else ZeroWithDDP


def _default_buckets(params: Sequence[ParamSpec]) -> list[list[int]]:
    return ddp_buckets(params)  # by another name, since an argument of `schedule` has this one


def calls_of_rank(
    partition: Partition,
    params: Sequence[ParamSpec],
    rank: int,
    *,
    buckets: Sequence[Sequence[int]] | None = None,
    flat: bool = False,
    to_owners: bool = False,
    reduced_by: str = "pairs",
    interleaved: bool = False,
    broadcast_buffer_size: int = BROADCAST_NUMEL,
) -> list[Call]:
    """The calls of one rank in one iteration, gradients reduced and parameters sent, in order.

    Interleaved, a bucket's new parameters follow the reduction of the bucket after it: they are stepped and
    sent while autograd computes the gradients in between.

    >>> params = [ParamSpec(n) for n in (600, 500, 400, 100)]
    >>> from zero_ref.plan.rules import sorted_greedy
    >>> plan, buckets = sorted_greedy([600, 500, 400, 100], 2), [[3, 2], [1, 0]]
    >>> how = {"buckets": buckets, "interleaved": True, "broadcast_buffer_size": 0}
    >>> [call[:2] for call in calls_of_rank(plan, params, 0, **how)]
    [('all_reduce', 2000), ('all_reduce', 4400), ('broadcast', 400), ('broadcast', 1600),
     ('broadcast', 2400), ('broadcast', 2000)]
    >>> [call[:2] for call in calls_of_rank(plan, params, 0, buckets=buckets, to_owners=True)][:4]
    [('send', 1600), ('recv', 400), ('send', 2000), ('recv', 2400)]
    >>> calls = calls_of_rank(plan, params, 0, buckets=buckets, to_owners=True, reduced_by="reduce")
    >>> [(call.op, call.nbytes, call.peer) for call in calls][:3]
    [('reduce', 400, 0), ('reduce', 1600, 1), ('reduce', 2400, 0)]

    Args:
        buckets: the parameters of each of DDP's gradient buckets; None for `ddp_buckets` with its defaults.
        flat: parameters are views of flat tensors, so that what lies together is sent together.
        to_owners: gradients are reduced to the owners only; else all-reduced.
        reduced_by: how they are, one of REDUCED_BY.
        broadcast_buffer_size: as `Recipe`.
    """
    to_whom = {"to_owners": True, "reduced_by": reduced_by} if to_owners else {}
    way = "interleaved" if interleaved else "plain"
    how = recipe(
        "zero",
        partition=partition,
        flat=flat,
        way=way,
        broadcast_buffer_size=broadcast_buffer_size,
        **to_whom,
    )
    return list(schedule(how, params, partition.world_size, ddp_buckets=buckets).calls_of(rank))


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
        in tests/backward/test_ddp_buckets.py. Not for `find_unused_parameters=True`, which never rebuilds.
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
