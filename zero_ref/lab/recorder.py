"""A real iteration as a Timeline: measured on a rank, in the lanes and under the labels of the simulator.

    recorder = IterationRecorder(ddp, optimizer)
    for inputs, targets in batches:
        with recorder:
            optimizer.zero_grad()
            loss_function(ddp(inputs), targets).backward()
            optimizer.step()
    recorder.timelines[-1]      # to be laid beside play(schedule(...)).timeline(rank)

What one thread does lies in the compute lane; a call is under way on the network from its start until the
backend reports that it is complete. Several can be at once, which the simulator's network does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero_ref.backward.overlap import OverlappedStep
from zero_ref.backward.reduction import Hook, OwnerReduction
from zero_ref.comm.collectives import Collectives, PendingCall, ToPeer
from zero_ref.lab.meter import recording_all_reduce
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.timeline import Event, Timeline

Overlap = Callable[[Hook, DistributedDataParallel, ZeroRedundancyOptimizer], Hook]
"""`hook_with_zero_step` or `hook_with_zero_step_interleaved`."""


class IterationRecorder:
    """Times what a rank does in an iteration; each `with` adds one to `timelines`.

    It registers DDP's communication hook, which can be done only once for a model. An iteration is one
    forward and one backward through DDP, and one step; entered after forward, it has no forward event. What
    a hook does before it starts its call, such as dividing gradients, counts as part of the call. Leave out
    the first two iterations: DDP has one bucket in the first, and makes its buckets anew before the second.

    >>> recorder = IterationRecorder(ddp, zero, overlap=hook_with_zero_step_interleaved)    # doctest: +SKIP
    >>> recorder = IterationRecorder(ddp, zero, reduce=reduce_to_owners(zero))              # doctest: +SKIP

    Args:
        optimizer: a ZeroRedundancyOptimizer, or any of torch's.
        overlap: registered around the reduction; None if `optimizer.step()` makes the update.
        reduce: reduces a bucket: a hook such as `reduce_to_owners(zero)`; None for DDP's own all-reduce.
    Raises:
        TypeError: `overlap` without a ZeroRedundancyOptimizer.
        ValueError: the model is not on the CPU, where a clock on the wall says little. Use torch.profiler.
        RuntimeError: from DDP, if another hook is registered. (In `with`) it is entered twice.
    Cost: two readings of a clock for each event. Collective calls are those of the loop, and no others.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        *,
        overlap: Overlap | None = None,
        reduce: Hook | None = None,
    ) -> None:
        self.zero = optimizer if isinstance(optimizer, ZeroRedundancyOptimizer) else None
        if overlap is not None and self.zero is None:
            raise TypeError(
                f"overlap= takes a ZeroRedundancyOptimizer, not {type(optimizer).__name__}: the update of "
                "another optimizer is made by its step(). Leave overlap= out."
            )
        devices = {param.device.type for param in ddp.parameters()}
        if devices != {"cpu"}:
            raise ValueError(
                f"the model is on {', '.join(sorted(devices))}; this recorder reads the CPU's clock, which "
                "a GPU does not wait for. Move the model to the CPU, or use torch.profiler."
            )
        self.timelines: list[Timeline] = []
        self._way = "plain"
        self._noted: list[Event] | None = None  # None outside of an iteration
        hook = reduce or recording_all_reduce([])
        # An exchange with owners is seen where it is made. Its hook must stay as it is, to be recognised.
        if not isinstance(getattr(hook, "__self__", None), OwnerReduction):
            hook = self._timed(hook)
        if overlap is not None and self.zero is not None:
            hook = overlap(hook, ddp, self.zero)
            step = getattr(hook, "__self__", None)
            if isinstance(step, OverlappedStep) and not step.late:
                self._way = "interleaved" if step.interleaved else "after_backward"
        ddp.register_comm_hook(ddp.process_group, self._after_backward_of(hook))
        ddp.register_forward_pre_hook(self._mark)
        ddp.register_forward_hook(self._after_forward)
        stepping = optimizer if self.zero is None else self.zero.optim
        stepping.register_step_pre_hook(self._before_step)
        stepping.register_step_post_hook(self._after_step)
        self._begin()

    # ------------------------------------------------------------------------------------ the iteration

    def _begin(self) -> None:
        self._pending: list[torch.futures.Future[None]] = []
        self._bucket = self._steps = 0
        self._began, self._mark_ms = time.perf_counter(), 0.0

    def __enter__(self) -> None:
        if self._noted is not None:
            raise RuntimeError("this recorder is in an iteration already: leave it before the next.")
        self._begin()
        self._noted = []
        if self.zero is not None:
            self.zero.collectives = cast(Collectives, _Timed(self.zero.collectives, self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        noted = self._noted or []
        try:
            if error is None:
                torch.futures.wait_all(self._pending)
                self.timelines.append(Timeline(tuple(sorted(noted, key=lambda event: event.start_ms))))
        finally:
            self._noted, self._pending = None, []
            if self.zero is not None and isinstance(self.zero.collectives, _Timed):
                self.zero.collectives = self.zero.collectives.collectives

    def _now_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._began)

    def _mark(self, *_: object) -> None:
        """Note the time at which the next computation begins."""
        self._mark_ms = self._now_ms()

    def _note(self, lane: str, label: str, bucket: int | None, start_ms: float) -> None:
        """Note an event that ends now. Outside of an iteration nothing is noted."""
        if self._noted is not None:
            self._noted.append(Event(lane, label, bucket, start_ms, self._now_ms()))

    # ---------------------------------------------------------------------------------------- computing

    def _after_forward(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._note(COMPUTE, "forward", None, self._mark_ms)
        self._mark()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._mark)  # what lies between forward and backward is neither

    def _after_backward_of(self, hook: Hook) -> Hook:
        """The hook, after a note that backward has completed a bucket's gradients."""

        # DDP refuses annotations other than its own classes, and typing knows no name for those.
        def on_bucket(state, bucket):  # type: ignore[no-untyped-def]
            self._bucket = bucket.index()
            self._note(COMPUTE, "backward", self._bucket, self._mark_ms)
            future = hook(state, bucket)
            self._mark()
            return future

        return on_bucket

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._step_ms = self._now_ms()
        # A rank that owns nothing of a bucket calls step() too, and computes nothing.
        groups = optimizer.param_groups
        self._steps_something = any(
            param.grad is not None and param.numel() for group in groups for param in group["params"]
        )

    def _after_step(self, *_: Any) -> None:
        if self._steps_something:
            self._note(COMPUTE, "step", None if self._way == "plain" else self._steps, self._step_ms)
        self._steps += 1

    # ------------------------------------------------------------------------------------- the network

    def _timed(self, hook: Hook) -> Hook:
        """The hook, with a note when the reduction that it starts is complete."""

        def reduce(state, bucket):  # type: ignore[no-untyped-def]
            noted = self._starting("reduce", bucket.index())
            future = hook(state, bucket)
            if self._noted is not None:
                self._pending.append(future.then(noted))
            return future

        return reduce

    def _starting(self, label: str, bucket: int | None) -> Callable[[object], None]:
        """Note that a call starts now; return a function to be called when the call is complete."""
        start_ms = self._now_ms()
        return lambda _: self._note(NETWORK, label, bucket, start_ms)

    def _noted_when_done(self, work: PendingCall, noted: Callable[[object], None]) -> PendingCall:
        """Return the same work, whose end is noted when the backend tells it, else when it was waited for."""
        try:
            future = work.work.get_future()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):  # of several calls, of a Gloo send or receive
            return _NotedWork(work, noted)
        self._pending.append(future.then(noted))
        return work


class _Timed:
    """The optimizer's collectives, with a note of each broadcast, each exchange and each reduce."""

    def __init__(self, collectives: Collectives, recorder: IterationRecorder) -> None:
        self.collectives, self.recorder = collectives, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collectives, name)

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> PendingCall:
        recorder = self.recorder
        bucket = recorder._steps - 1 if recorder._way == "interleaved" else None
        noted = recorder._starting("broadcast", bucket)
        return recorder._noted_when_done(self.collectives.broadcast(tensor, src, expected), noted)

    def exchange(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer]) -> PendingCall:
        noted = self.recorder._starting("reduce", self.recorder._bucket)
        return self.recorder._noted_when_done(self.collectives.exchange(sends, recvs), noted)

    def reduce(self, tensor: torch.Tensor, dst: int) -> PendingCall:
        noted = self.recorder._starting("reduce", self.recorder._bucket)
        return self.recorder._noted_when_done(self.collectives.reduce(tensor, dst), noted)


class _NotedWork:
    """A work that cannot be asked for a future: it is complete, at the latest, when someone waited for it."""

    def __init__(self, work: PendingCall, noted: Callable[[object], None]) -> None:
        self.work, self.noted = work, noted

    def wait(self) -> object:
        result = self.work.wait()
        self.noted(None)
        return result
