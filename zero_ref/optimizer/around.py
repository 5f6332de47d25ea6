"""What may stand between a training loop and the step, kept out of the step.

An ordinary loop passes straight through. This module sees to ranks that have uneven inputs (`join.py` beside
this folder), to a gradient scaler that calls the step, to an update that backward has made already
(`backward/overlap.py`), and to a rank whose local optimizer fails.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from zero_ref import join
from zero_ref.backward.gradients import WHOLE, check_no_scaler
from zero_ref.comm.collectives import Collectives, PendingCall

Closure = Callable[[], Any]
Step = TypeVar("Step", bound=Callable[..., Any])


def in_its_circumstances(step: Step) -> Step:
    """The step of an optimizer, made only where it is due, and with what a `Join` or a closure asks for.

    Raises:
        RuntimeError: a gradient scaler cannot work on these gradients; they were changed after backward as
            each rank sees fit, or after the update was made from them.
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
            # Its backward makes the update, or ranks without data shadow it.
            closure = _evaluated(closure)
        if zero.backward.take_update(kwargs):
            return closure and closure()
        if zero.joined:
            join.send_to_joined(zero, active=True)
        return step(zero, closure, **kwargs)

    return stepping  # type: ignore[return-value]


class TakesPartInJoin(Joinable):
    """What torch.distributed.algorithms.join.Join asks of an optimizer."""

    collectives: Collectives
    process_group: Any
    _shadow: weakref.ref[join.ShadowStep] | None = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """A rank without data goes on updating its shard."""
        shadow = join.ShadowStep(self, **kwargs)  # type: ignore[arg-type]
        self._shadow = weakref.ref(shadow)
        return shadow

    @property
    def joined(self) -> join.ShadowStep | None:
        """What `Join` runs in place of this rank's steps when its data end; None outside of a `Join`.

        torch never takes back what a `Join` has set in `_join_config`. But a `Join` that has ended, be it by
        an error, is gone, and with it what it runs.
        """
        return self._shadow() if self._join_config.enable and self._shadow is not None else None

    @property
    def join_device(self) -> torch.device:
        """Where Join counts the ranks that have data."""
        return self.collectives.wire_device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks join."""
        return self.process_group


@contextmanager
def failure_told(zero: Any, expected: Sequence[PendingCall | None]) -> Iterator[list[Exception]]:
    """If the local optimizer raises, give the other ranks the old values, and tell them.

    They wait for values, and would take those of the next step for them.

    Args:
        expected: what the others send and this rank has begun to receive.
    Yields:
        A list for what the closure raises, which is the caller's affair.
    """
    by_closure: list[Exception] = []
    try:
        yield by_closure
    except Exception as error:
        if error not in by_closure:
            if any(message.owner == zero.rank for message in zero.built.messages):
                zero.accord.ring(error)
            with suppress(RuntimeError):
                zero.exchange(expected)
        raise


def noting_errors(closure: Closure, errors: list[Exception]) -> Closure:
    """The closure, which puts what it raises into the list."""

    def noting() -> Any:
        try:
            return closure()
        except Exception as error:
            errors.append(error)
            raise

    return noting


def _followed_by(closure: Closure, check: Callable[[], None]) -> Closure:
    """The closure, which computes the gradients, followed by a check of them."""

    def closure_then_check() -> Any:
        loss = closure()
        check()
        return loss

    return closure_then_check


def _evaluated(closure: Closure) -> Closure:
    """The closure's loss, computed now and once, in the form of a closure."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss
