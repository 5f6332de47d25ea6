"""The gradients of one optimizer, from their arrival in a backward to their owners.

`stairs/owners.py` leaves gradients to DDP, which averages them on every rank. A `ShardReduction` has the
buckets of one optimizer. It puts each gradient into its bucket as it comes, reduces the full buckets, and
when backward is over gives this rank the averages of what it owns, and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
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


@dataclass(eq=False)
class RunningBackward:
    """A backward that has begun, and its reductions.

    Attributes:
        before: this rank's slices to whose gradients the backward adds.
        of_frozen: gradients of slices that are not trained now, which stay as they are.
        unused: the numbers of the parameters that had no gradient on this rank.
        under_way: the reductions that were started, the latest first.
    """

    before: set[Slice] = field(default_factory=set)
    of_frozen: dict[Slice, torch.Tensor] = field(default_factory=dict)
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
        # Are parts of a parameter's gradient in `.grad`, with zeros where other ranks own the rest, or apart?
        self._in_grad = options.scaled or options.may_change
        self.buckets: list[GradientBucket] = []
        self.bucket_of: dict[int, GradientBucket] = {}
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
            running.of_frozen, running.before = self._put_aside(gradients.parts, gradients.flats)

    def _put_aside(
        self, parts: Mapping[Slice, torch.Tensor] | None, flats: Mapping[GradientBucket, torch.Tensor]
    ) -> tuple[dict[Slice, torch.Tensor], set[Slice]]:
        """Take the averages that earlier backwards have left, so that `.grad` gets only new gradients.

        Args:
            parts: averages of slices of parameters that are cut; None where `.grad` has them.
            flats: the memory of averages, by the bucket that made them.
        Returns:
            The averages that belong to no bucket, and the slices of which there are averages.
        """
        before: set[Slice] = set()
        for bucket in self.buckets:
            left: dict[Slice, torch.Tensor] = {}
            for piece, _ in bucket.own.pieces:
                param = bucket.params[piece.param]
                if parts is not None and piece.numel != param.numel():
                    if piece in parts:
                        left[piece] = parts[piece]
                elif param.grad is not None:
                    left[piece] = flat_like(param.grad, param)[piece.start : piece.stop]
            for param in bucket.params.values():
                param.grad = None
            bucket.own.take_over(left, flats.get(bucket))
            before |= left.keys()
        of_frozen = {
            piece: part for piece, part in (parts or {}).items() if piece.param not in self.bucket_of
        }
        return of_frozen, before

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
        # 2. Give each slice its average: in `.grad`, or beside it for a part of a parameter.
        parts = running.of_frozen  # by slice, what is not in `.grad`
        flats: dict[GradientBucket, torch.Tensor] = {}
        watched: dict[torch.Tensor, None] = {}
        used: set[int] = set()
        for bucket in self.buckets:
            flat = bucket.own.gradient
            if flat is None:
                continue
            flats[bucket] = flat
            for (piece, _), window in zip(bucket.own.pieces, bucket.own.windows(bucket.params)):
                number, start, stop = piece
                if number in nowhere and piece not in running.before:
                    continue
                param = bucket.params[number]
                used.add(number)
                if stop - start == param.numel():
                    param.grad = window
                elif not self._in_grad:
                    parts[piece] = window
                    continue
                else:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param, requires_grad=False)
                    flat_like(param.grad, param)[start:stop] = window
                watched[param] = None
        # 3. Let the step see what is changed later.
        keep_one_to_watch(zero, watched, parts_apart=not self._in_grad)
        scaled, may_change = self.options.scaled, self.options.may_change
        if scaled:
            share_infinities(self.comm, gradients_of(watched))
        self.drop()
        apart = None if self._in_grad else parts
        zero.backward.end_on_owners(watched, frozenset(used), scaled, may_change, apart, flats)

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
