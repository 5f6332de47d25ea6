"""The most bytes of tensors that are there at one time, counted tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class TensorPeak(TorchDispatchMode):
    """Counts the memory of tensors that operations make while it lasts, until it is freed.

    Views have the memory of what they are views of, so they count nothing, and neither do tensors that were
    there before. Not seen are tensors that `torch.tensor` and `torch.load` make, what an operation allocates
    and frees inside, and buffers that are no tensors.

    >>> with TensorPeak() as made:
    ...     total = torch.ones(1000) + 1                        # 4,000 bytes each, both at one time
    ...     _ = torch.zeros(10)
    >>> made.peak_bytes, made.bytes
    (8000, 4040)

    Attributes:
        bytes: of what was made and is there now.
        peak_bytes: the most that it ever was.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak_bytes = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {id(one.untyped_storage()) for one in _tensors((args, kwargs or {}))}
        made = func(*args, **(kwargs or {}))
        for one in _tensors(made):
            memory = one.untyped_storage()
            if memory not in self._known and id(memory) not in given:
                self._known[memory] = True
                self.bytes += memory.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.bytes)
                weakref.finalize(memory, self._free, memory.nbytes())
        return made

    def _free(self, nbytes: int) -> None:
        self.bytes -= nbytes


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.device.type != "meta"]
