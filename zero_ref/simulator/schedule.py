"""What a strategy sends in one training iteration, call by call, and what it keeps on each rank.

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
from zero_ref.plan.choice import plan_partition
from zero_ref.plan.gradients import gradient_plans
from zero_ref.plan.layout import BucketLayout, lay_out
from zero_ref.plan.partition import ParamSpec, Partition, check_world_size
from zero_ref.simulator.cuts import CutParams
from zero_ref.simulator.data_parallel import broadcasts_of, data_parallel, messages_of, owned_bytes
from zero_ref.simulator.groups import Groups
from zero_ref.simulator.ledger import itemsize_of, nbytes_of, state_bytes_of_rank, state_rule
from zero_ref.simulator.local_sgd import local_sgd
from zero_ref.simulator.operations import NETWORK, Operation
from zero_ref.simulator.recipe import LOCAL_SGD, Recipe, recipe
from zero_ref.simulator.sharded import sharded_data_parallel
from zero_ref.simulator.stage_3 import stage_3
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
        """Of the computations that ranks divide: {place in `operations`: {rank: elements}}."""
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
        """How many calls one rank makes."""
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
        """How many calls rank 0 makes."""
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
    >>> [(call.op, call.nbytes, call.peer) for call in plan.calls]       # doctest: +NORMALIZE_WHITESPACE
    [('all_reduce', 6400, None), ('broadcast', 2400, 0), ('broadcast', 400, 0),
     ('broadcast', 2000, 1), ('broadcast', 1600, 1)]
    >>> plan.collectives, plan.payload_bytes, plan.state_bytes
    (5, 12800, (5608, 7208))
    >>> schedule("ddp", params, world_size=2).state_bytes
    (12816, 12816)

    Args:
        strategy: a recipe, or the name of one in `recipe.RECIPES`. Change one by `recipe(name, ...)`.
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
    averaging = how.averaging
    if averaging is None and steps is not None:
        raise ValueError(f"steps= is for {LOCAL_SGD!r}; strategy {how.name!r} meets in every step.")
    if how.stage == 3:
        return _stage_3(params, world_size, how, blocks, activation_bytes)
    reduced_itemsize = None if how.reduce_dtype is None else itemsize_of(how.reduce_dtype)
    buckets = _default_buckets(params) if ddp_buckets is None else ddp_buckets
    muon = state_rule(how.optimizer).of_whole is not None
    parameter_bytes = sum(nbytes_of(param) for param in params)
    gradient_bytes = (sum(nbytes_of(param) for param in params if param.trainable),) * world_size

    # A rank that shares nothing is a group of its own, and owns everything.
    shares = how.partition is not None
    group = how.group_of(world_size) if shares else 1
    owned = plan_partition("sorted_greedy" if how.partition is None else how.partition, params, group)
    replicas = world_size // owned.world_size
    if how.flat:
        parameter_bytes += sum(flat.padding * flat.itemsize for flat in lay_out(owned, params).flats)
    if averaging is not None:
        steps = averaging.steady if steps is None else steps
        operations = local_sgd(
            params,
            buckets,
            averaging,
            world_size,
            steps,
            averaged_itemsize=how.averaged_itemsize,
            activation_bytes=activation_bytes,
            accumulation=how.accumulation,
        )
    elif how.without_ddp:
        operations = sharded_data_parallel(
            params,
            world_size,
            owned,
            flat=how.flat,
            in_forward=how.way == "in_forward",
            activation_bytes=activation_bytes,
            muon=muon,
            accumulation=how.accumulation,
            no_sync=how.no_sync,
            reduced_itemsize=reduced_itemsize,
        )
    else:
        operations = data_parallel(
            params,
            world_size,
            owned if shares else None,
            buckets,
            flat=how.flat,
            to_owners=how.to_owners,
            reduced_by=how.reduced_by,
            way=how.way,
            side_stream=side_stream,
            activation_bytes=activation_bytes,
            muon=muon,
            accumulation=how.accumulation,
            reduced_itemsize=reduced_itemsize,
        )
    return Schedule(
        operations,
        world_size,
        (parameter_bytes,) * world_size,
        owned_bytes(owned, params) * replicas if how.to_owners else gradient_bytes,
        state_bytes_of_rank(owned, params, how.optimizer) * replicas,
        iterations=len(steps) if steps else 1,
        left_to_owners=_left_to_owners(owned, params, how) * replicas if how.to_owners else None,
    )


def _left_to_owners(owned: Partition, params: Sequence[ParamSpec], how: Recipe) -> tuple[int, ...]:
    """What `reduce_to_owners` leaves on each rank, see there."""
    if how.without_ddp:
        return _left_without_ddp(owned, params)
    if how.way != "plain":
        return (0,) * owned.world_size
    nbytes = [nbytes_of(param) if param.trainable else 0 for param in params]
    least = min((nbytes_of(param) for param in params if param.trainable and param.numel), default=0)
    touched = ({piece.param for piece in slices} for slices in owned.slices_of_rank)
    return tuple(sum(nbytes[number] for number in of_rank) or least for of_rank in touched)


def _left_without_ddp(owned: Partition, params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """A rank's part of each bucket; and one gradient of zeros, the smallest, where a rank has none whole."""
    of_rank = [0] * owned.world_size
    for plan in gradient_plans(owned, params):
        itemsize = itemsize_of(params[next(iter(plan.starts))].dtype)
        if plan.is_shared:
            of_rank = [held + plan.numel // owned.world_size * itemsize for held in of_rank]
        else:
            of_rank = [held + plan.own_numel(rank) * itemsize for rank, held in enumerate(of_rank)]
    amounts = [
        (piece.param, range(rank, rank + 1), piece.numel)
        for rank, slices in enumerate(owned.slices_outside_ranges)
        for piece in slices
    ]
    for one in owned.ranges:  # not rank by rank, which takes long on thousands
        amounts += one.amounts_of(owned.numels, owned.world_size)
    trained = [param for param in params if param.trainable and param.numel]
    has_whole = {
        ranks.start
        for number, ranks, numel in amounts
        if params[number].trainable and 0 < numel == params[number].numel
    }
    least = nbytes_of(min(trained, key=lambda param: param.numel)) if trained else 0
    return tuple(held + (0 if rank in has_whole else least) for rank, held in enumerate(of_rank))


def _stage_3(
    params: Sequence[ParamSpec],
    world_size: int,
    how: Recipe,
    blocks: Sequence[Sequence[int]] | None,
    activation_bytes: int,
) -> Schedule:
    """Each parameter cut along its first dimension into as many parts as a group has ranks.

    As torch's `fully_shard` does, of several groups on a mesh of two dimensions.
    """
    blocks = [range(len(params))] if blocks is None else blocks
    if sorted(number for block in blocks for number in block) != list(range(len(params))):
        raise ValueError(f"blocks must list each of the {len(params)} parameters once.")
    reduced = None if how.reduce_dtype is None else itemsize_of(how.reduce_dtype)
    groups = Groups(world_size, how.group_of(world_size))
    cut = CutParams(params, groups.ranks)
    shards, state = cut.held(state_rule(how.optimizer))
    operations = stage_3(
        [cut.unit(block, not place, reduced) for place, block in enumerate(blocks) if block],
        world_size,
        shards * groups.replicas,
        group=groups.ranks,
        prefetch=how.prefetch,
        activation_bytes=activation_bytes,
        accumulation=how.accumulation,
        no_sync=how.no_sync and how.accumulation > 1,
    )
    return Schedule(
        operations,
        world_size,
        (cut.parameter_bytes,) * world_size,
        (cut.gradient_bytes,) * world_size,
        tuple(state) * groups.replicas,
    )


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
) -> list[Call]:
    """The calls of one rank in one iteration, gradients reduced and parameters sent, in order.

    Interleaved, a bucket's new parameters follow the reduction of the bucket after it: they are stepped and
    sent while autograd computes the gradients in between.

    >>> params = [ParamSpec(n) for n in (600, 500, 400, 100)]
    >>> from zero_ref.plan.rules import sorted_greedy
    >>> plan, buckets = sorted_greedy([600, 500, 400, 100], 2), [[3, 2], [1, 0]]
    >>> [call[:2] for call in calls_of_rank(plan, params, 0, buckets=buckets, interleaved=True)]
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
    """
    operations = data_parallel(
        params,
        partition.world_size,
        partition,
        ddp_buckets(params) if buckets is None else buckets,
        flat=flat,
        to_owners=to_owners,
        reduced_by=reduced_by,
        way="interleaved" if interleaved else "plain",
    )
    return [call for one in operations for call in one.calls_of(rank, partition.world_size)]


def broadcasts_of_slices(partition: Partition, params: Sequence[ParamSpec]) -> list[Call]:
    """One broadcast for each trainable slice, owner by owner.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> broadcasts_of_slices(sorted_greedy([6, 5], 2), [ParamSpec(6), ParamSpec(5, trainable=False)])
    [Call(op='broadcast', nbytes=24, peer=0)]
    """
    return broadcasts_of(messages_of(partition, params, flat=False), params, range(len(params)))


def broadcasts_of_buckets(layout: BucketLayout) -> list[Call]:
    """One broadcast for each bucket, in the order in which the buckets lie.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> params = [ParamSpec(6), ParamSpec(5), ParamSpec(4)]
    >>> from zero_ref.plan.layout import lay_out
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
