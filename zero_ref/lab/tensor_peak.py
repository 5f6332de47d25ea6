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
    there before. Memory that is resized under its tensor counts anew when an operation next takes the tensor.
    Not seen are tensors that `torch.tensor` and `torch.load` make, what an operation allocates and frees
    inside, and buffers that are no tensors.

    >>> with TensorPeak() as made:
    ...     total = torch.ones(1000) + 1                        # 4,000 bytes each, both at one time
    ...     _ = torch.zeros(10)
    >>> made.peak_bytes, made.bytes
    (8000, 4040)
    >>> with TensorPeak() as made:
    ...     freed = torch.ones(1000)
    ...     _ = freed.untyped_storage().resize_(0)
    ...     _ = freed[:0]                                       # takes the tensor
    >>> made.peak_bytes, made.bytes
    (4000, 0)

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
        given = {id(memory): memory for memory in _memories((args, kwargs or {}))}
        for memory in given.values():
            if memory in self._known:
                self._count(memory)
        made = func(*args, **(kwargs or {}))
        for memory in _memories(made):
            if memory not in self._known and id(memory) not in given:
                self._known[memory] = [0]  # the bytes that are counted for it
                weakref.finalize(memory, self._free, self._known[memory])
                self._count(memory)
        return made

    def _count(self, memory: torch.UntypedStorage) -> None:
        counted = self._known[memory]
        self.bytes += memory.nbytes() - counted[0]
        counted[0] = memory.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _free(self, counted: list[int]) -> None:
        self.bytes -= counted[0]


def _memories(values: Any) -> list[torch.UntypedStorage]:
    tensors = (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))
    return [one.untyped_storage() for one in tensors if one.device.type != "meta"]
