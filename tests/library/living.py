"""Counts what operations of torch make, and what they read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Living(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and (storage := one.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.nbytes())
        return result

    def nbytes(self) -> int:
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())


class Touching(Living):
    """Counts also the bytes that operations read and write, of tensors with several elements."""

    touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        storages = {one.untyped_storage()._cdata for one in read.values()}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [
            one
            for one in tree_leaves(result)
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in storages
        ]
        changed = [
            one
            for argument, given in zip(func._schema.arguments, args)
            if argument.alias_info and argument.alias_info.is_write
            for one in tree_leaves(given)
        ]
        if "view" not in func.name():  # which only looks at the same memory in another way
            self.touched += sum(one.nbytes for one in (*read.values(), *made, *changed) if one.numel() > 1)
        return result
