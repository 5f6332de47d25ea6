"""The operations of `ShardedDataParallel`: gradients go straight into shards, parameters come out of them."""

from __future__ import annotations

from collections.abc import Sequence

from zero_ref.plan.gradients import GradientPlan, gradient_plans
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.simulator.data_parallel import most_flops, new_parameters, shares_of
from zero_ref.simulator.groups import Groups
from zero_ref.simulator.ledger import itemsize_of
from zero_ref.simulator.operations import (
    COMPUTE,
    NETWORK,
    Operation,
    forward_and_backward,
    passes_before,
    shared_out,
)

COUNT_ITEMSIZE = 4
"""Bytes for each parameter in the all-reduce that counts on how many ranks it had a gradient."""


def sharded_data_parallel(
    params: Sequence[ParamSpec],
    world_size: int,
    partition: Partition,
    *,
    flat: bool = True,
    in_forward: bool = False,
    activation_bytes: int = 0,
    muon: bool = False,
    accumulation: int = 1,
    no_sync: bool = False,
    reduced_itemsize: int | None = None,
) -> tuple[Operation, ...]:
    """Buckets of gradients reduced to their owners, the update, and new parameters sent.

    The gradients of a range take one `reduce_shares`, and where the ranks are in groups that each keep all of
    the state, an all-reduce of the share between the groups. An exchange sends the gradients of other
    parameters, and their all-reduce is priced as if each owner had an equal part. An all-reduce counts on how
    many ranks each parameter had a gradient.

    Args:
        partition: who owns what, within a group of as many ranks as it has.
        flat, muon: as in `data_parallel`.
        in_forward: what the step before has sent arrives in forward, so it is listed first: the iteration
            begins behind a step.
        activation_bytes: that forward leaves for backward, on each rank.
        accumulation: backwards before an update. Each reduces its gradients, which add up in the shares.
        no_sync: only the last one does.
        reduced_itemsize: bytes of an element in the reductions; None for those of the gradients.
    Raises:
        ValueError: `world_size` is no multiple of the partition's.
    """
    if world_size % partition.world_size:
        raise ValueError(f"{world_size} ranks cannot be divided into groups of {partition.world_size}.")
    groups = Groups(world_size, partition.world_size)
    building = _Building(params, partition, groups, activation_bytes, reduced_itemsize)
    gathers = [
        groups.within(Operation("broadcast", NETWORK, op=op, nbytes=nbytes, owner=owner))
        for op, nbytes, owner in (new_parameters(partition, params, flat) if groups.ranks > 1 else [])
    ]
    building.passes(gathers if in_forward else [], accumulation, no_sync)
    if in_forward:
        building.step(muon)
    else:
        stepped = building.step(muon)
        building.operations += [one._replace(after=(stepped,)) for one in gathers]
    return tuple(building.operations)


class _Building:
    """The operations so far."""

    def __init__(
        self,
        params: Sequence[ParamSpec],
        partition: Partition,
        groups: Groups,
        activation_bytes: int,
        reduced_itemsize: int | None,
    ) -> None:
        self.params, self.partition, self.groups = params, partition, groups
        self.reduced_itemsize = reduced_itemsize
        self.plans = gradient_plans(partition, params)
        buckets = [list(plan.starts) for plan in self.plans]
        self.forward, self.backwards = forward_and_backward(params, buckets, activation_bytes)
        self.operations: list[Operation] = []
        self.awaited: list[int] = []  # the calls for which the step waits

    def _append(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def passes(self, gathers: Sequence[Operation], accumulation: int, no_sync: bool) -> None:
        """All forwards and backwards; the first forward behind the gathers."""
        if no_sync and accumulation > 1:
            self.forward_behind(gathers)
            before = passes_before(self.forward, self.backwards, accumulation - 1)
            self.operations += before[1:]  # the first forward is there
            self.forward_behind([])
            self.backward(first=True, allocates=False)
            return
        for number in range(accumulation):
            self.forward_behind([] if number else gathers)
            self.backward(first=not number)

    def forward_behind(self, gathers: Sequence[Operation]) -> None:
        """Forward; if parameters are on their way, a part of it behind each gather, in the same order."""
        places = [self._append(one) for one in gathers]
        count = max(len(gathers), 1)
        # The ranges are gathered in the order in which forward needs them, about as its parts lie.
        weights = [one.nbytes for one in gathers] or [1]
        parts = zip(
            *(
                shared_out(amount, weights)
                for amount in (self.forward.numel, self.forward.tensors, self.forward.takes)
            )
        )
        for part, (numel, tensors, takes) in enumerate(parts):
            after = (places[part],) if places else ()
            one = self.forward._replace(numel=numel, tensors=tensors, takes=takes, after=after)
            self._append(one if count == 1 else one._replace(part=part))

    def backward(self, *, first: bool = True, allocates: bool = True) -> None:
        """Backward bucket by bucket, each reduced when it is full; and the count.

        Shares that an earlier backward has left are added to. Backward waits for the reduction before the
        last, so that no more than two buckets are on their way.
        The groups average a bucket when the next one is on its way, and the last one behind the count.
        """
        to_average: list[Operation] = []
        ends: list[int] = []  # the last call of each bucket's reduction
        for plan, backward in zip(self.plans, self.backwards):
            backward = backward._replace(after=tuple(ends[-2:-1]))
            reduce = self._reduction(plan, backward)
            if not first:
                reduce = reduce._replace(gives=reduce.gives + reduce.takes)
            backward = backward if allocates else backward._replace(takes=0)
            place = self._await(reduce._replace(after=(self._append(backward),)))
            for one in to_average:
                self._await(one)
            ends.append(self.awaited[-1])
            own = reduce.nbytes // self.groups.ranks
            to_average = self._between_groups(reduce._replace(nbytes=own, after=(place,))) if own else []
        counted = sum(len(plan.starts) for plan in self.plans)
        if counted and self.groups.world_size > 1:
            count = Operation("agree", NETWORK, op="all_reduce", nbytes=COUNT_ITEMSIZE * counted)
            place = self._await(self.groups.within(count._replace(after=(place,))))
            for one in to_average + self._between_groups(count._replace(after=(place,))):
                self._await(one)

    def _await(self, call: Operation) -> int:
        self.awaited.append(self._append(call))
        return self.awaited[-1]

    def _reduction(self, plan: GradientPlan, backward: Operation) -> Operation:
        own_itemsize = itemsize_of(self.params[next(iter(plan.starts))].dtype)
        itemsize = self.reduced_itemsize or own_itemsize
        nbytes, group = plan.numel * itemsize, self.groups.ranks
        reduce = self.groups.within(Operation("reduce", NETWORK, backward.part, nbytes=nbytes))
        reduce = reduce._replace(gives=backward.takes)
        if plan.is_shared:
            return reduce._replace(op="reduce_shares", takes=plan.numel // group * own_itemsize)
        sent = tuple((owner, numel * itemsize) for owner in range(group) for numel in plan.sent_numels(owner))
        return reduce._replace(op="exchange", shares=sent)

    def _between_groups(self, call: Operation) -> list[Operation]:
        """The all-reduce of as many bytes by the ranks that have the same place in their groups."""
        if self.groups.replicas == 1:
            return []
        between = self.groups.between(call._replace(op="all_reduce"))
        return [between._replace(shares=None, takes=0, gives=0)]

    def step(self, muon: bool) -> int:
        """The update, in which a range is one tensor."""
        trained = [number for plan in self.plans for number in plan.starts]
        is_trained = [int(param.trainable) for param in self.params]
        in_range = {number for one in self.partition.ranges for number in one.params}
        beside = [int(flag and number not in in_range) for number, flag in enumerate(is_trained)]
        tensors = max(self.partition.totals([0] * len(self.params), beside)) + len(self.partition.ranges)
        return self._append(
            Operation(
                "step",
                COMPUTE,
                None,
                tuple(self.awaited),
                numel=sum(self.params[number].numel for number in trained),
                shares=shares_of(self.partition.totals(is_trained) * self.groups.replicas),
                tensors=tensors,
                flops=most_flops(self.params, self.partition, muon),
            )
        )
