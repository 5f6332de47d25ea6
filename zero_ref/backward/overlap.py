"""The optimizer's update made during DDP's backward, bucket by bucket.

In `stairs/owners.py` the update begins when backward is over. DDP calls a communication hook for each bucket
of gradients while autograd still computes those of earlier layers. The hooks of this module start the
bucket's reduction, and when it is complete let its owners step their parameters and send the new values:

    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))

The partition does not depend on DDP's buckets, so this works from the first iteration on, with any optimizer
class and any parameter groups. The thread that runs backward issues all calls, in the order of the buckets.
From a future's callback their order would differ between ranks, and Gloo would wait for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.reduction import (
    ByHook,
    Hook,
    OwnerReduction,
    ToOwners,
    after_backward,
    gradients_in,
)
from zero_ref.comm import devices
from zero_ref.comm.collectives import PendingCall
from zero_ref.comm.process_group import ProcessGroupCollectives, global_ranks
from zero_ref.optimizer import join
from zero_ref.optimizer.during_backward import in_backward
from zero_ref.optimizer.plans import change_owners
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer, listed
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import bucket_round_robin, bucket_threshold, from_lists
from zero_ref.shard.buckets import Message, Parcel, finish_broadcasts, start_broadcasts
from zero_ref.shard.groups import replace_options
from zero_ref.shard.stepper import GradientSource


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    shard_buckets: bool | None = None,
) -> Hook:
    """A DDP communication hook that runs `hook` on each bucket, and after the last one makes the update.

    The local step of a bucket runs while later buckets are still being reduced; the new parameters are sent
    when all buckets are reduced. When `backward()` returns, every rank has the new parameters; `zero.step()`
    has nothing left to do and may be called or left out. Each backward makes an update, so to accumulate
    gradients run all but the last backward under `ddp.no_sync()`.

    >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))      # doctest: +SKIP

    Args:
        hook: reduces a bucket: torch's `allreduce_hook` or `fp16_compress_hook`, or `reduce_to_owners(zero)`.
        zero: made with `overlap_with_ddp=True`; or a list, if several optimizers have the parameters of the
            model. The local optimizer's `step()` is called once for each bucket, so any count of steps must
            be in its groups or its state.
        shard_buckets: None leaves every parameter with its owner. As torch's hooks do, False gives DDP's
            buckets to the ranks in turn, and True also cuts them where that is more even. Owners then change
            when DDP has used the same buckets in two iterations, since DDP rebuilds its buckets after the
            first. For that, each rank needs CPU memory for the whole state once.
    Returns:
        The hook for `ddp.register_comm_hook`. Its state is passed to `hook`.
    Raises:
        ValueError: `zero` was not made for it, or has a parameter or ranks that DDP has not. (In `zero.step`)
            it is called with options.
        RuntimeError: (in backward) a parameter is trained that DDP does not reduce; gradients of an earlier
            update are still there and would count twice; a reduction or a message did not complete. (In
            `zero.step`) gradients, as by clipping, or a learning rate were changed after the update was made;
            a torch.amp.GradScaler is in use.
    Collective: all ranks, in backward.
    Cost: that of `hook`, and as ZeroRedundancyOptimizer.step.
    """
    return OverlappedStep(hook, ddp, zero, shard_buckets, interleaved=False).on_bucket


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    shard_buckets: bool | None = None,
) -> Hook:
    """As `hook_with_zero_step`, but each bucket is updated and sent as soon as it is reduced.

    A bucket is updated when the next one is ready, while autograd computes gradients of earlier layers. With
    DDP's `static_graph` or `find_unused_parameters` only the end of backward tells which parameters have
    gradients, so the update is made there.

    A parameter gets its new value while backward is still running. A model that needs the parameter again
    after its gradient is complete (through `detach()`, say) gets autograd's error about an in-place change.
    """
    return OverlappedStep(hook, ddp, zero, shard_buckets, interleaved=True).on_bucket


class OverlappedStep:
    """The hook of an overlapped update, and its state from one bucket of a backward to the next."""

    def __init__(
        self,
        hook: Hook,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
        shard_buckets: bool | None,
        interleaved: bool,
    ) -> None:
        zeros = listed(zero, "hook_with_zero_step")
        owner = getattr(hook, "__self__", None)
        self.to_owners = owner if isinstance(owner, OwnerReduction) else None
        if self.to_owners is not None and set(self.to_owners.zeros) != set(zeros):
            raise ValueError(
                "reduce_to_owners was made for another optimizer, whose owners are others. Pass the same "
                "optimizers, and no other, to reduce_to_owners and to the hook that steps them."
            )
        for one in zeros:
            _check_fits(ddp, one, self.to_owners is not None)
        self.hook, self.interleaved = hook, interleaved
        self.updates = [UpdateInBackward(one, interleaved, shard_buckets) for one in zeros]
        # No reference to DDP: it holds this hook where the garbage collector does not look, so neither could
        # ever be freed.
        self.group = ddp.process_group
        self.grads_are_views = ddp.gradient_as_bucket_view
        # A parameter that no rank has used has the gradient None and must not be stepped. DDP finds out which
        # these are at the end of backward.
        self.late = bool(ddp.find_unused_parameters or ddp.static_graph)
        for one in zeros:
            one.backward.late = self.late
        self.under_way: list[ByHook | ToOwners] = []
        self.side_stream: Any = None

    # DDP refuses annotations other than its own classes, and typing knows no name for those.
    @torch.no_grad()
    def on_bucket(self, state, bucket):  # type: ignore[no-untyped-def]
        """Start to reduce a bucket, update those before it, and after the last one complete the update."""
        if bucket.index() == 0:
            self.under_way = []
            for update in self.updates:
                update.begin(bucket.parameters(), self.grads_are_views)
        reduction = self._start(state, bucket)
        self.under_way.append(reduction)
        for update in self.updates:
            update.add_bucket(reduction.params)
        if self.interleaved and not self.late:
            self._finish(leave=1)
        elif self.to_owners is not None:
            for earlier in self.under_way[:-1]:
                earlier.wait()  # frees what it has received, which is as large as the bucket
        if bucket.is_last():
            for update in self.updates:
                update.check_all_reduced()
            if self.late:
                for reduction in self.under_way:
                    reduction.wait()
                self.under_way = []
            else:
                self._finish(leave=0)
                self._complete()
            after_backward(self._settle)
        return reduction.future

    def _start(self, state: Any, bucket: Any) -> ByHook | ToOwners:
        if self.to_owners is not None:
            return self.to_owners.start(bucket)
        if state is None and self.group is not dist.group.WORLD:
            state = self.group  # for torch's hooks None is the default group
        return ByHook(self.updates[0].zero.collectives, self.hook, state, bucket)

    def _finish(self, leave: int) -> None:
        """Wait for all but the last `leave` reductions, step these buckets, and if interleaved send them."""
        done = self.under_way[: len(self.under_way) - leave]
        del self.under_way[: len(done)]
        with self._beside_backward():
            for reduction in done:
                gradients = gradients_in(reduction.wait(), reduction.params)
                reduced = dict(zip(reduction.params, gradients, strict=True))
                for update in self.updates:
                    update.step(reduced)

    def _complete(self) -> None:
        for update in self.updates:
            update.send_the_rest()
        with self._beside_backward():
            for update in self.updates:
                update.receive()
        if self.side_stream is not None:
            devices.current_stream(self.side_stream.device).wait_stream(self.side_stream)
        for update in self.updates:
            update.zero.end_update()

    @torch.no_grad()
    def _settle(self) -> None:
        """Complete the update when backward is over, and change owners if DDP's buckets have settled."""
        if self.late and self.to_owners is not None:
            self.to_owners.release_others()
        for update in self.updates:
            update.settle(self.late, self.to_owners is not None)

    def _beside_backward(self) -> contextlib.AbstractContextManager[object]:
        """On one accelerator, a stream of its own: waiting for the network must not delay backward's."""
        zeros = [update.zero for update in self.updates]
        device, *others = {param.device for zero in zeros for param in zero.built.params}
        # To wait for a reduction orders this stream after backward's. A single rank waits for no reduction.
        beside = self.interleaved and zeros[0].world_size > 1
        if not beside or others or not devices.is_accelerator(device):
            return contextlib.nullcontext()
        if self.side_stream is None:
            self.side_stream = devices.new_stream(device)
        return devices.on_stream(self.side_stream)


class UpdateInBackward:
    """The update of one optimizer, made bucket by bucket.

    Args:
        interleaved: send new parameters as soon as their bucket is updated.
        shard_buckets: as `hook_with_zero_step`.

    Attributes:
        zero: the optimizer.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer, interleaved: bool, shard_buckets: bool | None) -> None:
        self.zero, self.interleaved = zero, interleaved
        self._resharding = None if shard_buckets is None else Resharding(shard_buckets)
        self._numbers: dict[torch.Tensor, int] = {}
        self._buckets: list[list[int]] = []  # the numbers of the optimizer's parameters in each bucket
        self._broadcasts: list[PendingCall] = []

    def begin(self, first_bucket: Sequence[torch.Tensor], are_views: bool) -> None:
        """Begin the update, when backward has completed its first bucket.

        Args:
            first_bucket: the parameters of the bucket.
            are_views: gradients are views of DDP's buckets.
        """
        zero = self.zero
        zero.backward.begin(first_bucket, are_views)
        self._buckets, self._broadcasts = [], []
        if zero.joined:
            join.share_options(zero, active=in_backward())
        zero.begin_update()
        self._numbers = {param: number for number, param in enumerate(zero.built.params)}

    def add_bucket(self, params: Sequence[torch.Tensor]) -> None:
        """Note the parameters of a bucket that is being reduced."""
        self._buckets.append([self._numbers[param] for param in params if param in self._numbers])

    def step(self, reduced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step the parameters of a bucket, and if interleaved start to send them.

        Args:
            reduced: by parameter its averaged gradient; parameters of other optimizers are left out.
        """
        zero = self.zero
        gradients = {self._numbers[param]: grad for param, grad in reduced.items() if param in self._numbers}
        # Each local step starts from the same options. So an optimizer that counts its steps in its groups
        # counts one for each iteration, also on a rank that owns nothing of the bucket.
        replace_options(zero.param_groups, zero.optim.param_groups)
        zero.shard.step(GradientSource(gradients))
        if self.interleaved:
            torch.autograd.graph.increment_version([zero.built.params[number] for number in gradients])
            self._broadcast(zero.built.to_send_of(gradients))

    def send_the_rest(self) -> None:
        """Start to send all new parameters, unless they were sent bucket by bucket."""
        if not self.interleaved:
            self._broadcast(self.zero.built.to_send)

    def _broadcast(self, messages: Sequence[Message | Parcel]) -> None:
        self._broadcasts += start_broadcasts(self.zero.collectives, messages)

    def receive(self) -> None:
        """Wait until all new parameters have arrived."""
        finish_broadcasts(self._broadcasts, self.zero.built.name)
        self._broadcasts = []

    def settle(self, late: bool, to_owners: bool) -> None:
        """Complete the update when backward is over, and change owners if DDP's buckets have settled.

        Args:
            late: nothing was updated in backward, so the whole update is made now.
            to_owners: the hook is one of `reduce_to_owners`.
        """
        zero = self.zero
        # A reduce_to_owners inside another hook is not `to_owners`, but has set `on_owners`.
        owner_only = to_owners or zero.backward.gradients.on_owners
        if late:
            zero.make_update()
        if owner_only:
            for param in zero.built.params:
                param.grad = None  # already used; those of other ranks' parameters were never complete
        zero.backward.end_updated(zero.built.params, zero.param_groups)
        if self._resharding is not None:
            self._resharding.after_backward(zero, self._buckets)

    def check_all_reduced(self) -> None:
        """Refuse a trained parameter that was in none of the buckets.

        Raises:
            RuntimeError: names the parameter.
        """
        reduced = {number for bucket in self._buckets for number in bucket}
        for number, param in enumerate(self.zero.built.params):
            if param.requires_grad and number not in reduced:
                raise RuntimeError(
                    f"rank {self.zero.rank}: parameter {self.zero.built.name(number)} is trained, but "
                    "DistributedDataParallel does not reduce its gradient: it takes the parameters that "
                    "require gradients when it is constructed. Construct it again after unfreezing."
                )


class Resharding:
    """Changes of an optimizer's owners, by DDP's buckets.

    Args:
        cut: as `partition_by_buckets`.
    """

    def __init__(self, cut: bool) -> None:
        self.cut = cut
        self.last: list[list[int]] = []
        self.done_for: list[list[int]] = []

    def after_backward(self, zero: ZeroRedundancyOptimizer, buckets: list[list[int]]) -> None:
        """Change owners once DDP has used the same buckets twice: it rebuilds them after the first iteration.

        Args:
            buckets: the parameters of each bucket of the backward that is over.
        """
        if buckets == self.last != self.done_for:
            change_owners(zero, partition_by_buckets(zero.partition, buckets, cut=self.cut))
            self.done_for = buckets
        self.last = buckets


def partition_by_buckets(partition: Partition, buckets: Sequence[Sequence[int]], cut: bool) -> Partition:
    """The partition by torch's bucket rules. Frozen parameters, which are in no bucket, keep their owners.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> before = sorted_greedy([6, 5, 4, 1], 2)              # parameter 2, which is in no bucket, is rank 1's
    >>> partition_by_buckets(before, [[3, 1], [0]], cut=False).owner_of_param
    (1, 0, 1, 0)

    Args:
        partition: the present one, of all parameters.
        buckets: the parameters of each of DDP's buckets, in the order in which it reduces them.
        cut: `bucket_threshold`, else `bucket_round_robin`.
    """
    members = [number for bucket in buckets for number in bucket]
    place = {number: index for index, number in enumerate(members)}
    rule = bucket_threshold if cut else bucket_round_robin
    of_members = rule(
        [partition.numels[number] for number in members],
        partition.world_size,
        buckets=[[place[number] for number in bucket] for bucket in buckets],
    )
    owned: list[list[Slice]] = []
    for before, now in zip(partition.slices_of_rank, of_members.slices_of_rank, strict=True):
        staying = [piece for piece in before if piece.param not in place]
        owned.append([*staying, *(piece._replace(param=members[piece.param]) for piece in now)])
    return from_lists(partition.numels, owned)


def _check_fits(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, to_owners: bool) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"ddp takes the DistributedDataParallel model, not {type(ddp).__name__}.")
    if not zero.registered.options.overlap_with_ddp:
        raise ValueError(
            "the optimizer was not made for updates during backward. Construct it with overlap_with_ddp=True."
        )
    if not isinstance(zero.collectives, ProcessGroupCollectives):
        raise ValueError(
            "the optimizer's ranks are no torch.distributed process group, so DistributedDataParallel does "
            "not reduce over them. Pass the same process_group to both."
        )
    ours = global_ranks(zero.collectives)
    theirs = dist.get_process_group_ranks(ddp.process_group)
    # Where all of DDP's ranks get every gradient, a part of them may share an optimizer.
    if ours != theirs and (to_owners or not set(ours) <= set(theirs)):
        raise ValueError(
            f"the optimizer shards over the ranks {ours}, and DistributedDataParallel reduces over {theirs}. "
            "Pass the same process_group to both."
        )
    reduced = set(ddp.module.parameters())
    for number, param in enumerate(zero.built.params):
        if param not in reduced:
            raise ValueError(
                f"parameter {zero.built.name(number)} of the optimizer is none of the "
                "DistributedDataParallel model, so nothing would update it during backward."
            )
