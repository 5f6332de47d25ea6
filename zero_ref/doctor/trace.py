"""The record of a trial: the losses, gradients and values after each phase of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Phase = Literal["start", "load", "forward", "backward", "clip", "average", "step"]
"""The phase of a step in which something was noted. "start" is before the first step, "load" after a load."""

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Snapshot:
    """One rank's tensors by name, after a phase of a step.

    Attributes:
        tensors: values after "start", "load" and "step"; gradients after "backward" and "clip"; the losses of
            the micro-batches, under the name "loss", after "forward"; running averages of values after
            "average". What cannot be seen is missing.
        options: after "step", those of each parameter group that are numbers.
    """

    step: int
    phase: Phase
    tensors: Tensors
    options: tuple[dict[str, Any], ...] = ()

    @property
    def of_gradients(self) -> bool:
        """Whether its tensors are gradients."""
        return self.phase in ("backward", "clip")


def noted(tensors: Tensors) -> Tensors:
    """The tensors as a snapshot has them: on the CPU, and complex ones as pairs of real numbers."""
    return {name: None if tensor is None else _real(tensor.cpu()) for name, tensor in tensors.items()}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def options_of(optimizer: Any) -> tuple[dict[str, Any], ...]:
    """The options of each parameter group that are numbers, or pairs of them.

    >>> [group] = options_of(torch.optim.SGD([torch.zeros(1)], lr=0.5))
    >>> group["lr"], group["momentum"]
    (0.5, 0)
    """
    groups = [group for group in getattr(optimizer, "param_groups", ()) if isinstance(group, dict)]
    return tuple({name: value for name, value in group.items() if _is_number(value)} for group in groups)


def _is_number(value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return bool(numbers) and all(type(one) in (int, float) for one in numbers)


Trace = list[Snapshot]
"""One rank's snapshots, in the order in which they were taken."""
