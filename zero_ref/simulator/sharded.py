"""The strategy of `ShardedDataParallel`: gradients go straight into shards, parameters come out of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from zero_ref.plan.gradients import GradientPlan, gradient_plans
from zero_ref.simulator.ledger import itemsize_of, nbytes_of
from zero_ref.simulator.messages import new_parameters
from zero_ref.simulator.operations import (
    COMPUTE,
    NETWORK,
    Operation,
    forward_and_backward,
    passes_before,
    shared_out,
    shares_of,
)
from zero_ref.simulator.strategy import Strategy

COUNT_ITEMSIZE = 4
"""Bytes for each parameter in the all-reduce that counts on how many ranks it had a gradient."""


class ZeroWithoutDDP(Strategy):
    """Stage 2: buckets of gradients are reduced to their owners, who update and send new parameters.

    The gradients of a range take one `reduce_shares`, and where the ranks are in groups that each keep all of
    the state, an all-reduce of the share between the groups. An exchange sends the gradients of other
    parameters, and their all-reduce is priced as if each owner had an equal part. An all-reduce counts on how
    many ranks each parameter had a gradient. If new parameters arrive in forward, their calls are listed
    first: the iteration begins behind a step.
    """

    def _list_operations(self) -> None:
        buckets = [list(plan.starts) for plan in self._plans]
        self._forward, self._backwards = forward_and_backward(self.params, buckets, self.activation_bytes)
        self._awaited: list[int] = []  # the calls for which the step waits
        calls = []
        if self.groups.ranks > 1:
            calls = new_parameters(self.partition, self.params, self.how.flat, self.how.buffer_size)
        gathers = [
            self.groups.within(Operation("broadcast", NETWORK, op=op, nbytes=nbytes, owner=owner))
            for op, nbytes, owner in calls
        ]
        if self.how.way == "in_forward":
            self._passes(gathers)
            self._step()
        else:
            self._passes([])
            stepped = self._step()
            self._listed += [one._replace(after=(stepped,)) for one in gathers]

    @cached_property
    def _plans(self) -> Sequence[GradientPlan]:
        return gradient_plans(self.partition, self.params)

    def _passes(self, gathers: Sequence[Operation]) -> None:
        """List all forwards and backwards; the first forward behind the gathers."""
        count = self.how.accumulation
        if self.how.no_sync and count > 1:
            self._forward_behind(gathers)
            self._listed += passes_before(self._forward, self._backwards, count - 1)[1:]  # without a forward
            self._forward_behind([])
            self._backward(first=True, allocates=False)
            return
        for number in range(count):
            self._forward_behind([] if number else gathers)
            self._backward(first=not number)

    def _forward_behind(self, gathers: Sequence[Operation]) -> None:
        """List forward, or a part of it behind each gather, in the same order."""
        places = [self._append(one) for one in gathers]
        count = max(len(gathers), 1)
        # The ranges are gathered in the order in which forward needs them, about as its parts lie.
        weights = [one.nbytes for one in gathers] or [1]
        parts = zip(
            *(
                shared_out(amount, weights)
                for amount in (self._forward.numel, self._forward.tensors, self._forward.takes)
            )
        )
        for part, (numel, tensors, takes) in enumerate(parts):
            after = (places[part],) if places else ()
            one = self._forward._replace(numel=numel, tensors=tensors, takes=takes, after=after)
            self._append(one if count == 1 else one._replace(part=part))

    def _backward(self, *, first: bool, allocates: bool = True) -> None:
        """List backward bucket by bucket, each reduced when it is full; and the count.

        Shares that an earlier backward has left are added to. Backward waits for the reduction before the
        last, so that no more than two buckets are on their way.
        The groups average a bucket when the next one is on its way, and the last one behind the count.
        """
        to_average: list[Operation] = []
        ends: list[int] = []  # the last call of each bucket's reduction
        for plan, backward in zip(self._plans, self._backwards):
            backward = backward._replace(after=tuple(ends[-2:-1]))
            reduce = self._reduction(plan, backward)
            if not first:
                reduce = reduce._replace(gives=reduce.gives + reduce.takes)
            backward = backward if allocates else backward._replace(takes=0)
            place = self._await(reduce._replace(after=(self._append(backward),)))
            for one in to_average:
                self._await(one)
            ends.append(self._awaited[-1])
            own = reduce.nbytes // self.groups.ranks
            to_average = self._between_groups(reduce._replace(nbytes=own, after=(place,))) if own else []
        counted = sum(len(plan.starts) for plan in self._plans)
        if counted and self.groups.world_size > 1:
            count = Operation("agree", NETWORK, op="all_reduce", nbytes=COUNT_ITEMSIZE * counted)
            place = self._await(self.groups.within(count._replace(after=(place,))))
            for one in to_average + self._between_groups(count._replace(after=(place,))):
                self._await(one)

    def _await(self, call: Operation) -> int:
        """List a call for which the step waits; return its position."""
        self._awaited.append(self._append(call))
        return self._awaited[-1]

    def _reduction(self, plan: GradientPlan, backward: Operation) -> Operation:
        own_itemsize = itemsize_of(self.params[next(iter(plan.starts))].dtype)
        itemsize = self._reduced_itemsize or own_itemsize
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

    def _step(self) -> int:
        """List the update, in which a range is one tensor; return its position."""
        trained = [number for plan in self._plans for number in plan.starts]
        is_trained, nothing = [int(param.trainable) for param in self.params], [0] * len(self.params)
        in_range = {number for one in self.partition.ranges for number in one.params}
        beside = [int(flag and number not in in_range) for number, flag in enumerate(is_trained)]
        return self._append(
            Operation(
                "step",
                COMPUTE,
                None,
                tuple(self._awaited),
                numel=sum(self.params[number].numel for number in trained),
                shares=shares_of(self.partition.totals(is_trained) * self.groups.replicas),
                tensors=max(self.partition.totals(nothing, beside)) + len(self.partition.ranges),
                flops=max(self.partition.totals(nothing, self._step_flops)),
            )
        )

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        return self._owned_bytes()

    @property
    def left_to_owners(self) -> tuple[int, ...]:
        """A rank's part of each bucket, and a smallest gradient of zeros where it has no gradient whole."""
        owned, params = self.partition, self.params
        of_rank = [0] * owned.world_size
        for plan in self._plans:
            itemsize = itemsize_of(params[next(iter(plan.starts))].dtype)
            if plan.is_shared:  # a rank whose share is only padding keeps none
                share = plan.numel // owned.world_size
                end = max(start + params[number].numel for number, start in plan.starts.items())
                of_rank = [
                    held + share * itemsize * (rank * share < end) for rank, held in enumerate(of_rank)
                ]
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
        left = tuple(held + (0 if rank in has_whole else least) for rank, held in enumerate(of_rank))
        return left * self.groups.replicas
