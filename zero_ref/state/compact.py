"""State dicts whose tensors have memory of their own, so that a file of them contains nothing else.

`torch.save` writes the whole storage of which a tensor is a view. In `stairs/owners.py` each parameter has
memory of its own. With `parameters_as_bucket_view=True` a parameter is a view of a flat tensor that has all
parameters of its owner, so a file of a part of the model is about as large as a file of the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

StateDict = TypeVar("StateDict", bound="dict[Any, Any] | list[Any] | tuple[Any, ...] | torch.Tensor")


@torch.no_grad()
def compact(state_dict: StateDict) -> StateDict:
    """Copy a state dict so that its tensors have memory of their own, and no more than they need.

    >>> torch.save(compact(model.head.state_dict()), "head.pt")                            # doctest: +SKIP

    Tensors that fill their memory stay as they are, and others are copied. Tensors that overlap, as tied
    weights do, overlap in the result too. (`copy.deepcopy` copies a module's parameters in the same way.)

    >>> flat = torch.arange(1000.0)
    >>> weight = compact({"weight": flat[4:6]})["weight"]
    >>> weight, weight.untyped_storage().nbytes()
    (tensor([4., 5.]), 8)

    Args:
        state_dict: the state dict of a module or optimizer, or dicts, lists and tuples of tensors.
    Returns:
        Containers of the same types, with the metadata of a module's state dict. All else than dense tensors
        (sparse tensors, tensor subclasses, numbers) is shared with `state_dict`.
    Raises:
        TypeError: `state_dict` is something else, such as a module.
    """
    if not isinstance(state_dict, (dict, list, tuple, torch.Tensor)):
        raise TypeError(
            f"compact takes a state dict, not {type(state_dict).__name__}: pass what state_dict() returns."
        )
    # 1. Collect the tensors of each storage. Views of one storage with different dtypes are kept apart.
    tensors_of_storage: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in _tensors_in(state_dict):
        tensors_of_storage.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append(tensor)
    # 2. Move tensors that overlap together: id of a tensor -> the tensor that replaces it.
    moved: dict[int, torch.Tensor] = {}
    for tensors in tensors_of_storage.values():
        for overlapping in _overlapping(tensors):
            moved |= {id(tensor): new for tensor, new in zip(overlapping, _with_own_memory(overlapping))}
    # 3. Make the same containers with the moved tensors.
    return _with_tensors(state_dict, moved)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Find the dense tensors in a structure, without tensor subclasses."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _extent(tensor: torch.Tensor) -> range:
    """The range in the storage, in elements, from a tensor's first element to its last."""
    start = tensor.storage_offset()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return range(start, start + length if tensor.numel() else start)


def _overlapping(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide the tensors of one storage into groups, so that tensors of different groups do not overlap."""
    groups: list[list[torch.Tensor]] = []
    stop = 0  # the end of the last group
    for tensor in sorted(tensors, key=lambda one: _extent(one).start):
        extent = _extent(tensor)
        if groups and extent.start < stop:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
        stop = max(stop, extent.stop)
    return groups


def _with_own_memory(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors that overlap into memory that contains nothing else."""
    first, storage = tensors[0], tensors[0].untyped_storage()
    places = {(one.storage_offset(), one.size(), one.stride()) for one in tensors}
    start, stop = first.storage_offset(), max(_extent(one).stop for one in tensors)
    # The storage contains nothing else already.
    if (stop - start) * first.itemsize == storage.nbytes():
        return tensors
    if len(places) == 1:
        # All are the same tensor, as tied weights are. A clone leaves out gaps between its elements.
        copied = first.detach().clone()
        views = [copied.detach() for _ in tensors]
    else:
        # They overlap in part, so copy the range that they cover, with any gaps.
        memory = first.detach().as_strided((stop - start,), (1,)).clone()
        views = [memory.as_strided(one.size(), one.stride(), one.storage_offset() - start) for one in tensors]
    return [
        torch.nn.Parameter(view, one.requires_grad) if isinstance(one, torch.nn.Parameter) else view
        for one, view in zip(tensors, views)
    ]


def _with_tensors(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    """Copy a structure, with the tensors `moved` in place of the tensors with these ids."""
    if isinstance(value, dict):
        # The state dict of a module has its metadata as an attribute, which a new dict would lose.
        new = copy.copy(value)
        new.update({key: _with_tensors(item, moved) for key, item in value.items()})
        return new
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, moved) for item in value]
        # A NamedTuple takes its items as arguments.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return moved.get(id(value), value)
