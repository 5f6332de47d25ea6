"""A wrapper around `step` for special cases, so that `step` itself stays short.

This module adds to `step` of `minimal.py`: ranks with uneven inputs (`optimizer/join.py`), a gradient scaler
that calls the step, an update that backward has made already (`backward/overlap.py`), and a rank whose local
optimizer raises. In an ordinary loop the wrapper only calls the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.optimizer import join
from zero_ref.shard.gradients import WHOLE, check_no_scaler

Closure = Callable[[], Any]
Step = TypeVar("Step", bound=Callable[..., Any])


def in_its_circumstances(step: Step) -> Step:
    """Wrap `step`: skip an update that backward has made, and do what a `Join` or a closure needs.

    Raises:
        RuntimeError: a gradient scaler cannot work on these gradients; or gradients were changed after
            backward by each rank separately, or after the update that used them.
    """

    @functools.wraps(step)
    def stepping(zero: Any, closure: Closure | None = None, **kwargs: Any) -> Any:
        gradients = zero.backward.gradients
        if gradients is WHOLE and closure is None and not zero.joined:
            return step(zero, **kwargs)
        if zero.joined:
            Join.notify_join_context(zero)
        check_no_scaler(zero, gradients)
        if closure is None:
            gradients.check_as_left(zero.rank, zero.built)
        else:
            closure = _followed_by(
                closure, lambda: zero.backward.gradients.check_as_left(zero.rank, zero.built)
            )
        if closure is not None and (zero.overlap_with_ddp or zero.joined):
            # The closure's backward makes the update, or ranks without data repeat its collectives.
            closure = _evaluated(closure)
        if zero.backward.take_update(kwargs):
            return closure and closure()
        if zero.joined:
            join.send_to_joined(zero, active=True)
        return step(zero, closure, **kwargs)

    return stepping  # type: ignore[return-value]


class TakesPartInJoin(Joinable):
    """The methods that torch.distributed.algorithms.join.Join requires of an optimizer."""

    collectives: Collectives
    process_group: Any
    _shadow: weakref.ref[join.ShadowStep] | None = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook by which a rank without data continues to update its shard."""
        shadow = join.ShadowStep(self, **kwargs)  # type: ignore[arg-type]
        self._shadow = weakref.ref(shadow)
        return shadow

    @property
    def joined(self) -> join.ShadowStep | None:
        """The hook that `Join` runs once this rank has no more data; None outside of a `Join`.

        torch never resets `_join_config`, so a weak reference tells whether the `Join` still exists: its hook
        is freed when the `Join` ends, also by an error.
        """
        return self._shadow() if self._join_config.enable and self._shadow is not None else None

    @property
    def join_device(self) -> torch.device:
        """The device on which Join counts the ranks that have data."""
        return self.collectives.control_device

    @property
    def join_process_group(self) -> Any:
        """The process group whose ranks join."""
        return self.process_group


@contextmanager
def failure_told(zero: Any, expected: Sequence[PendingCall | None]) -> Iterator[list[Exception]]:
    """If the local optimizer raises, send the old values to the other ranks, and report the error to them.

    The other ranks wait for values. Without this exchange they would receive those of the next step.

    Args:
        expected: the receives that this rank has already started.
    Yields:
        A list for errors that the closure raises, which are not reported to other ranks.
    """
    by_closure: list[Exception] = []
    try:
        yield by_closure
    except Exception as error:
        if error not in by_closure:
            with suppress(RuntimeError):
                if any(message.owner == zero.rank for message in zero.built.messages):
                    zero.accord.ring(error)
                zero.exchange(expected)
        raise


def noting_errors(closure: Closure, errors: list[Exception]) -> Closure:
    """The closure, which also appends the error that it raises to `errors`."""

    def noting() -> Any:
        try:
            return closure()
        except Exception as error:
            errors.append(error)
            raise

    return noting


def _followed_by(closure: Closure, check: Callable[[], None]) -> Closure:
    """The closure followed by `check`, which checks the gradients that the closure computed."""

    def closure_then_check() -> Any:
        loss = closure()
        check()
        return loss

    return closure_then_check


def _evaluated(closure: Closure) -> Closure:
    """Call the closure now, once; return a closure that returns its loss."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss
