"""The step of an optimizer class that is not torch's own, and may give a tensor other memory.

torch's classes update each tensor in its memory. Another class may replace that memory (`p.data = ...`),
while messages and parameters share the old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class ForeignStep:
    """Steps a local optimizer whose class is not torch's, and keeps the tensors in their memory.

    Args:
        optim: the local optimizer.
        tensors: the tensors that it steps.
    """

    def __init__(self, optim: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
        self.optim = optim
        # (a tensor, a view of the memory in which it has to stay)
        self._memory = [(tensor, tensor.detach()) for tensor in tensors]

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, and return what it returns."""
        try:
            return self.optim.step(**options)
        finally:
            self.restore_memory()

    @torch.no_grad()
    def restore_memory(self) -> None:
        """Copy the values of each tensor that the class has moved back to the tensor's own memory."""
        for tensor, memory in self._memory:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory.copy_(tensor)
