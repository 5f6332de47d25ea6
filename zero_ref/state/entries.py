"""The state of a slice in the form in which it is sent and stored: entries, as JSON, and 1-D tensors.

Nothing is pickled. An entry describes a value and says where its elements go. The elements are sent, or
written to a file, separately from the entries, so those of a large tensor need no copy on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.groups import dtype_name
from zero_ref.shard.owned import OwnedSlice

State = dict[int, dict[str, Any]]
"""The state of parameters, or of slices, by number."""

Entry = dict[str, Any]
"""A description of one value of a slice's state: "param", "key", and either its "value" or the "dtype",
"numel" and place of its elements. The place is "start" and "stop" in the parameter; or a "shape" of its own,
with "strides" if the tensor is not contiguous."""

Packed = tuple[Entry, torch.Tensor | None]
"""An entry, and the elements of its value as a 1-D tensor; None instead if the entry has a "value"."""


def pack(owned: Sequence[OwnedSlice], state: Mapping[Any, Mapping[Any, Any]]) -> list[Packed]:
    """This rank's state as entries and 1-D tensors, which are views of the state if its strides allow.

    Raises:
        TypeError: a value is not a tensor, a number, a text or None (nor, in the state of a whole parameter,
            a list, tuple or dict of these).
    """
    return [packed for own in owned for packed in pack_slice(own, plain_state(own, state))]


def plain_state(own: OwnedSlice, state: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, Any]:
    """The state of one slice, with its tensor subclasses and lists taken apart; raises as `pack`."""
    return subclasses.take_apart(state.get(own.local, {}), own.piece.param, whole=own.is_whole)


def pack_slice(own: OwnedSlice, plain: Mapping[Any, Any]) -> list[Packed]:
    """The `plain_state` of one slice as entries and tensors; raises as `pack`."""
    piece, local = own.piece, own.local
    packed: list[Packed] = []
    for key, value in plain.items():
        entry: Entry = {"param": piece.param, "key": key}
        tensor = None
        # A number, text or None.
        if not isinstance(value, torch.Tensor):
            if not isinstance(key, str) or not isinstance(value, (int, float, str, bool, type(None))):
                raise TypeError(
                    f"the state {key!r} of parameter {piece.param} is a {type(value).__name__}; only "
                    "tensors, numbers, texts and None, and lists, tuples and dicts of these, can be "
                    "checkpointed or moved."
                )
            entry["value"] = value
        # A 0-dimensional tensor, such as Adam's step. JSON has no complex numbers.
        elif value.ndim == 0 and not value.is_complex():
            entry |= {"value": value.item(), "dtype": dtype_name(value.dtype)}
        # A tensor. A part of a subclass may have the slice's shape by chance: its elements are not the
        # slice's.
        else:
            follows_param = value.shape == local.shape and not subclasses.is_within(key)
            if follows_param:
                tensor = flat_like(value, local)
                entry |= {"start": piece.start, "stop": piece.stop}
            else:
                dense = torch.ops.aten.is_non_overlapping_and_dense(value)
                value = value if dense else value.contiguous()
                tensor = flat_view(value)
                entry |= {"shape": [*value.shape]}
                if (
                    not value.is_contiguous()
                ):  # keep the strides: a matrix product may round otherwise with others
                    entry["strides"] = [*value.stride()]
            entry |= {"dtype": dtype_name(value.dtype), "numel": tensor.numel()}
        packed.append((entry, tensor))
    return packed


def allocate(of_param: dict[str, Any], entry: Entry, like: torch.Tensor) -> torch.Tensor | None:
    """Add an entry's key to a state, with memory for its elements, and return the 1-D view to copy them into.

    Args:
        of_param: the state of a parameter so far. If the entry has a value, it is added, and the
            result is None.
        entry: its "device" is a name, or missing for the CPU.
        like: the parameter; a state with a place in the parameter gets its shape and strides.
    """
    key = entry["key"]
    dtype = dtype_of(entry["dtype"]) if "dtype" in entry else None
    device = entry.get("device", "cpu")
    if "value" in entry:
        # All slices of a parameter are stepped together, so they have equal values: keep the first one.
        of_param.setdefault(
            key, entry["value"] if dtype is None else torch.tensor(entry["value"], dtype=dtype, device=device)
        )
        return None
    if "shape" in entry:
        of_param[key] = torch.empty(entry["shape"], dtype=dtype, device=device)
        if "strides" in entry:
            of_param[key] = of_param[key].as_strided(entry["shape"], entry["strides"])
        return flat_view(of_param[key])
    # Slices of several owners may fill parts of the same tensor; the first one allocates it.
    if key not in of_param:
        of_param[key] = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
    flat = flat_view(of_param[key])
    # Most entries fill the whole tensor; slicing it would take as long as the rest of this function.
    return flat if flat.numel() == entry["numel"] else flat[entry["start"] : entry["stop"]]


@cache
def dtype_of(name: str) -> torch.dtype:
    """Give the dtype of a name, such as "float32"; ValueError if no dtype has the name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype
