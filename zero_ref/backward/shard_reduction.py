"""The gradients of one optimizer, from their arrival in a backward to their owners.

`stairs/owners.py` leaves gradients to DDP, which averages them on every rank. A `ShardReduction` has the
buckets of one optimizer. It puts each gradient into its bucket as it comes, reduces the full buckets, and
when backward is over gives this rank the averages of what it owns, and nothing else.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch

from zero_ref.backward.arguments import WrapperOptions
from zero_ref.backward.gradient_buckets import GradientBucket, Memory, Phases, bucket_class
from zero_ref.backward.reduction import gradients_of, keep_one_to_watch, share_infinities
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.comm.process_group import BACKWARD_TAG, ProcessGroupCollectives
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.gradients import gradient_plans
from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like
from zero_ref.shard.built import Built
from zero_ref.shard.owned import OwnedSlice
from zero_ref.shard.stepper import GradientSource


@dataclass(eq=False)
class RunningBackward:
    """A backward that has begun, and its reductions.

    Attributes:
        before: this rank's slices to whose gradients the backward adds.
        unused: the numbers of the parameters that had no gradient on this rank.
        under_way: the reductions that were started, the latest first.
    """

    before: set[Slice] = field(default_factory=set)
    unused: set[int] = field(default_factory=set)
    under_way: list[Phases] = field(default_factory=list)

    def go_on(self) -> None:
        """Complete the phase that each reduction is in."""
        left = []
        # The latest comes first: it starts messages then, while the earlier ones only wait for theirs.
        for reduction in self.under_way:
            if next(reduction, "complete") is None:  # it pauses again
                left.append(reduction)
        self.under_way = left

    def wait(self) -> None:
        """Complete all reductions."""
        while self.under_way:
            self.go_on()


class ShardReduction:
    """The buckets of one optimizer's parameters, from one backward to the next.

    Args:
        zero: the optimizer.
        options: those of the wrapper.
        replicas: as `ShardedDataParallel`.
    """

    def __init__(
        self, zero: ZeroRedundancyOptimizer, options: WrapperOptions, replicas: Collectives | None
    ) -> None:
        self.zero, self.options, self.replicas = zero, options, replicas
        self.comm = _apart_from(zero.collectives)
        # Are gradients of parameters that are cut in the slices' own `.grad`, or in the parameters', with
        # zeros where other ranks own the rest?
        self._in_slices = not (options.scaled or options.may_change)
        self.buckets: list[GradientBucket] = []
        self.bucket_of: dict[int, GradientBucket] = {}
        self._own: dict[Slice, OwnedSlice] = {}
        self._memory = Memory()
        self._planned_for: Built | None = None
        self._running: RunningBackward | None = None
        self._counting: tuple[torch.Tensor, PendingCall] | None = None

    def _plan(self, built: Built) -> None:
        """Make the buckets for the owners and for the parameters that are trained now."""
        options = self.options
        buckets: list[GradientBucket] = []
        for plan in gradient_plans(built.partition, built.specs, max(options.reduce_buffer_size, 1)):
            params = {number: built.params[number] for number in plan.starts}
            first = next(iter(params.values()))
            kind, dtype = bucket_class(plan, self.comm, first.device), options.dtype or first.dtype
            buckets.append(kind(plan, params, dtype, self.comm, self.replicas, self._memory))
        self._planned_for, self.buckets = built, buckets
        self.bucket_of = {number: bucket for bucket in buckets for number in bucket.params}
        self._own = {own.piece: own for own in self.zero.shard.owned}

    # ------------------------------------------------------------------------------------------- a backward

    def begin(self) -> None:
        """Begin a backward: put the gradients of earlier ones aside, to which this one will add.

        Raises:
            RuntimeError: the earlier gradients are no longer on their owners, or were lost with a backward
                that raised; another rank is to do something else, such as a step that this rank has left out.
            ValueError, RuntimeError: as `ZeroRedundancyOptimizer.current`; ranks differ.
        """
        # 1. Refuse gradients to which none can be added.
        zero = self.zero
        cut_off, self._running = self._running, None
        if cut_off is not None and cut_off.before:
            raise RuntimeError(
                f"rank {zero.rank}: the last backward did not come to its end, and the gradients to which it "
                "was to add are lost. Call zero_grad() and begin the accumulation again."
            )
        gradients = zero.backward.gradients
        if gradients.why_no_clipping and any(param.grad is not None for param in zero.built.params):
            raise RuntimeError(f"rank {zero.rank}: {gradients.why_no_clipping}")
        # 2. Follow what the user has changed.
        zero.accord.compare("run a backward for", lambda: zero.current().facts)
        built = zero.current()
        if built is not self._planned_for:
            self._plan(built)
        # 3. Expect gradients in all buckets.
        running = self._running = RunningBackward()
        zero.backward.begin(adds=True)  # waits for what a backward that raised has left
        zero.backward.under_way.append(running)
        for bucket in self.buckets:
            bucket.reset()
        if gradients.versions is not None:  # else no rank has averages, only gradients of its own
            running.before = self._put_aside(GradientSource(in_slices=gradients.in_slices))

    def _put_aside(self, source: GradientSource) -> set[Slice]:
        """Take the averages that earlier backwards have left, so that `.grad` gets only new gradients.

        Args:
            source: the places of the averages.
        Returns:
            The slices of which there are averages.
        """
        before: set[Slice] = set()
        for bucket in self.buckets:
            left: dict[Slice, torch.Tensor] = {}
            for piece, _ in bucket.own.pieces:
                own = self._own[piece]
                if (part := source.of_slice(own)) is not None:
                    left[piece] = flat_like(part, own.leaf)
                own.leaf.grad = None
            for param in bucket.params.values():
                param.grad = None
            bucket.own.take_over(left)
            before |= left.keys()
        return before

    def take(self, number: int, param: torch.Tensor) -> None:
        """Move a complete gradient to its bucket."""
        bucket, grad = self.bucket_of[number], param.grad
        assert grad is not None
        if number not in bucket.missing:
            raise RuntimeError(
                f"{self._title(number)} got a second gradient in one backward. Reentrant activation "
                "checkpointing does this: pass use_reentrant=False."
            )
        if grad.layout != torch.strided:
            raise ValueError(
                f"{self._title(number)} has a sparse gradient, which has no place in a flat bucket. "
                "Construct its layer with sparse=False, or use DistributedDataParallel."
            )
        if grad.requires_grad:
            raise has_graph()
        bucket.put(number, grad)
        param.grad = None

    def _title(self, number: int) -> str:
        return f"rank {self.zero.rank}: parameter {self.zero.built.name(number)}"

    @torch.no_grad()
    def reduce(self, bucket: GradientBucket) -> None:
        """Start to reduce a bucket, and complete the one before it, which has had time to arrive."""
        running = self._running
        assert running is not None
        for number in sorted(bucket.missing):
            param = bucket.params[number]
            if param.grad is not None:  # of earlier backwards under no_sync, and not used in this one
                bucket.put(number, param.grad)
                param.grad = None
            else:  # other ranks may have one
                bucket.put(number, torch.zeros_like(param, requires_grad=False))
                running.unused.add(number)
        reduction = bucket.reduce()
        next(reduction)
        running.go_on()
        running.under_way.insert(0, reduction)

    def count(self) -> None:
        """Start to count on how many ranks each parameter had a gradient: all buckets are on their way."""
        comm, running = self.comm, self._running
        assert running is not None
        if comm.world_size > 1 or self.replicas is not None:
            had = torch.ones(len(self.bucket_of), dtype=torch.int32, device=comm.control_device)
            if running.unused:
                for place, number in enumerate(self.bucket_of):
                    if number in running.unused:
                        had[place] = 0  # by a kernel: to copy a list to an accelerator would wait for it
            self._counting = had, comm.all_reduce(had)

    def _used_nowhere(self, unused: set[int]) -> set[int]:
        """The numbers of the parameters that had a gradient on no rank."""
        if self._counting is None:
            return unused
        had, work = self._counting
        work.wait()
        if self.replicas is not None:
            had = had.to(self.replicas.control_device)
            self.replicas.all_reduce(had).wait()
        if not unused:
            return unused
        return {number for number, count in zip(self.bucket_of, had.tolist()) if not count}

    @torch.no_grad()
    def end(self) -> None:
        """Wait for all buckets, and give this rank the gradients of what it owns."""
        # 1. Wait for the averages, and for the number of ranks that had a gradient.
        zero, running = self.zero, self._running
        assert running is not None
        running.wait()
        nowhere = self._used_nowhere(running.unused)
        # 2. Give each slice its average.
        watched: dict[torch.Tensor, None] = {}
        for bucket in self.buckets:
            flat = bucket.own.gradient
            if flat is None:
                continue
            for piece, place in bucket.own.pieces:
                if piece.param in nowhere and piece not in running.before:
                    continue
                param, leaf = bucket.params[piece.param], self._own[piece].leaf
                window = flat.as_strided(leaf.size(), leaf.stride(), place)
                if leaf is param or self._in_slices:
                    leaf.grad = window
                else:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param, requires_grad=False)
                    flat_like(param.grad, param)[piece.start : piece.stop] = window
                if param.grad is not None:
                    watched[param] = None
        # 3. Let the step see what is changed later.
        keep_one_to_watch(zero, watched, cut_in_slices=self._in_slices)
        options = self.options
        if options.scaled:
            share_infinities(self.comm, gradients_of(watched))
        self.drop()
        zero.backward.end_on_owners(
            watched,
            scaled=options.scaled,
            may_change=options.may_change,
            cut_in_slices=self._in_slices,
        )

    def drop(self) -> None:
        """Free what a backward holds; one that did not come to its end is forgotten."""
        self._running = self._counting = None
        self._memory.release()
        for bucket in self.buckets:
            bucket.reset()


def has_graph() -> RuntimeError:
    """The error for a gradient of which autograd keeps a graph, since a bucket has none."""
    return RuntimeError(
        "a gradient requires a gradient itself, as backward(create_graph=True) makes it, and its average "
        "could not. Use torch.autograd.grad for gradients of gradients, and call zero_grad() here."
    )


def _apart_from(comm: Collectives) -> Collectives:
    """The same calls, and the same observers, by messages that never meet those of a step."""
    other = copy.copy(comm)
    if isinstance(other, ProcessGroupCollectives):
        other.tag += BACKWARD_TAG
    return other
