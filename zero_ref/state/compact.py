"""State dicts whose tensors lie in memory of their own, so that a file of them holds nothing else.

`torch.save` writes all the memory in which a tensor lies. In `minimal.py` each parameter has memory of its
own. With `parameters_as_bucket_view=True` it is a view of a flat tensor, which has all parameters of its
owner, so that a file of a part of the model is about as large as one of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

State = TypeVar("State", bound="dict[Any, Any] | list[Any] | tuple[Any, ...] | torch.Tensor")


@torch.no_grad()
def compact(state_dict: State) -> State:
    """The same state dict, whose tensors have memory of their own, and no more than they need.

    >>> torch.save(compact(model.head.state_dict()), "head.pt")                            # doctest: +SKIP

    Tensors that fill their memory stay as they are, others are copied. Those that overlap, as tied weights
    do, overlap in the result too. (`copy.deepcopy` of a module copies its parameters in the same way.)

    >>> flat = torch.arange(1000.0)
    >>> weight = compact({"weight": flat[4:6]})["weight"]
    >>> weight, weight.untyped_storage().nbytes()
    (tensor([4., 5.]), 8)

    Args:
        state_dict: that of a module or optimizer, or dicts, lists and tuples of tensors.
    Returns:
        Containers of the same types, with the metadata of a module's state dict. What they hold beside dense
        tensors (sparse ones, tensor subclasses, numbers) is what `state_dict` holds.
    Raises:
        TypeError: `state_dict` is something else, such as a module.
    """
    if not isinstance(state_dict, (dict, list, tuple, torch.Tensor)):
        raise TypeError(
            f"compact takes a state dict, not {type(state_dict).__name__}: pass what state_dict() returns."
        )
    of_memory: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in _tensors_in(state_dict):
        of_memory.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append(tensor)
    moved: dict[int, torch.Tensor] = {}
    for tensors in of_memory.values():
        for overlapping in _runs(tensors):
            moved |= {id(tensor): new for tensor, new in zip(overlapping, _own_memory(overlapping))}
    return _with_tensors(state_dict, moved)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The dense tensors of no special class in a structure."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _extent(tensor: torch.Tensor) -> range:
    """The places of a tensor's memory from its first element to its last."""
    start = tensor.storage_offset()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return range(start, start + length if tensor.numel() else start)


def _runs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one memory, those that overlap together."""
    runs: list[list[torch.Tensor]] = []
    stop = 0
    for tensor in sorted(tensors, key=lambda one: _extent(one).start):
        extent = _extent(tensor)
        if runs and extent.start < stop:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        stop = max(stop, extent.stop)
    return runs


def _own_memory(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that overlap, in memory that has nothing but them."""
    first, storage = tensors[0], tensors[0].untyped_storage()
    places = {(one.storage_offset(), one.size(), one.stride()) for one in tensors}
    start, stop = first.storage_offset(), max(_extent(one).stop for one in tensors)
    if (stop - start) * first.itemsize == storage.nbytes():
        return tensors
    if len(places) == 1:
        copied = first.detach().clone()  # without gaps that the tensor may have in memory
        views = [copied.detach() for _ in tensors]
    else:
        memory = first.detach().as_strided((stop - start,), (1,)).clone()
        views = [memory.as_strided(one.size(), one.stride(), one.storage_offset() - start) for one in tensors]
    return [
        torch.nn.Parameter(view, one.requires_grad) if isinstance(one, torch.nn.Parameter) else view
        for one, view in zip(tensors, views)
    ]


def _with_tensors(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    """A structure with other tensors in place of those of these ids."""
    if isinstance(value, dict):
        new = copy.copy(value)  # a module's has its metadata as an attribute
        new.update({key: _with_tensors(item, moved) for key, item in value.items()})
        return new
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, moved) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return moved.get(id(value), value)
