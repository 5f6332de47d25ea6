"""A step by a gradient scaler that adds up over ranks what it finds, as FairScale's `ShardedGradScaler` does.

`stairs/owners.py` has whole gradients on all ranks, with which any scaler works. If only owners have them, a
scaler that looks on each rank by itself is refused. FairScale's hands itself to `step`, and may look.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from zero_ref.shard.built import Built
from zero_ref.shard.gradients import Backward


class Zero(Protocol):
    """The part of a `ZeroRedundancyOptimizer` that this module uses."""

    backward: Backward
    built: Built
    scaler: Any


def step_by_scaler(zero: Zero, scaler: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the scaler unscale what this rank has, and call `step` again if no rank has infinite gradients.

    Args:
        scaler: passes itself to `step` as `grad_scaler`.
        *args, **kwargs: passed to `step`.
    Returns:
        The result of `step`; None if it is left out.
    Raises:
        RuntimeError: parameters are cut, whose gradients are not where the scaler looks. All ranks raise.
    Collective: all ranks of the group, by the scaler.
    """
    gradients = zero.backward.gradients
    if zero.built.cut and gradients.why_no_scaler is not None:
        raise RuntimeError(gradients.why_no_scaler)
    zero.scaler = scaler
    try:
        if scaler._per_optimizer_states[id(zero)]["stage"].name == "READY":
            _unscale(zero, scaler)
        return scaler.step(zero, *args, **kwargs)
    finally:
        zero.scaler = None


def _unscale(zero: Zero, scaler: Any) -> None:
    """Unscale this rank's gradients. A rank without any gets one of zero, to take part in the sums."""
    lent = None
    if all(param.grad is None for param in zero.built.params) and zero.built.trained:
        lent = zero.built.trained[0]
        lent.grad = torch.zeros_like(lent)
    try:
        scaler.unscale_(zero)
    finally:
        if lent is not None:
            lent.grad = None
