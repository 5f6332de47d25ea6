"""The record of a trial: the losses, gradients and values after each phase of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["start", "load", "forward", "backward", "clip", "step"]
"""The phase of a step in which something was noted. "start" is before the first step, "load" after a load."""

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Snapshot:
    """One rank's tensors by name, after a phase of a step.

    Attributes:
        tensors: values after "start", "load" and "step"; gradients after "backward" and "clip"; the losses of
            the micro-batches, under the name "loss", after "forward". What cannot be seen is missing.
    """

    step: int
    phase: Phase
    tensors: Tensors

    @property
    def of_gradients(self) -> bool:
        """Whether its tensors are gradients."""
        return self.phase in ("backward", "clip")


def noted(tensors: Tensors) -> Tensors:
    """The tensors as a snapshot has them: on the CPU, and complex ones as pairs of real numbers."""
    return {name: None if tensor is None else _real(tensor.cpu()) for name, tensor in tensors.items()}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


Trace = list[Snapshot]
"""One rank's snapshots, in the order in which they were taken."""
