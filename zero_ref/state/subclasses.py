"""State that is a tensor subclass, such as torchao's 8-bit moments, taken apart and put together again.

This module adds to `state_dict` of `minimal.py` that such state needs no pickle. A wrapper holds plain
tensors: `__tensor_flatten__` names them and what else the wrapper needs, and `__tensor_unflatten__` makes the
wrapper from both, as torch.compile requires too. While state is sent or stored, plain tensors replace it:

    {"exp_avg": wrapper}      {"exp_avg::codes": tensor, "exp_avg::scale": tensor, "exp_avg::": recipe}

The recipe is JSON. It names the class, which this program must have imported by itself: nothing that another
rank or a file says causes an import, and no pickle is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_within(key: Any) -> bool:
    """The key is that of a part of a wrapper."""
    return isinstance(key, str) and PART in key


def take_apart(of_param: Mapping[Any, Any], param: int, whole: bool) -> dict[Any, Any]:
    """The state of a parameter, with plain tensors and a recipe in place of each wrapper.

    Args:
        param: the parameter's number.
        whole: this is the state of all of the parameter, and not of a slice.
    Raises:
        TypeError: a wrapper in the state of a slice, or one that holds what JSON cannot express, or whose
            class other ranks could not find by its name.
    """
    plain: dict[Any, Any] = {}
    for key, value in of_param.items():
        if not is_traceable_wrapper_subclass(value):
            if is_within(key):
                raise TypeError(f"the state {key!r} of parameter {param} has {PART!r} in its name, {TAKEN}.")
            plain[key] = value
            continue
        what = f"the state {key!r} of parameter {param} is a {type(value).__name__}"
        if not whole:
            raise TypeError(f"{what}, which cannot be cut. {WHOLE}")
        try:
            recipe, tensors = _flattened(value)
        except TypeError as error:
            raise TypeError(f"{what} and can be neither checkpointed nor moved: {error}.") from error
        plain |= {f"{key}{PART}{name}": tensor for name, tensor in tensors.items()}
        plain[f"{key}{PART}"] = json.dumps(recipe)
    return plain


def check_is_whole(plain: Mapping[Any, Any], whole: bool, what: str) -> None:
    """Refuse parts of a wrapper in the state of a slice.

    Args:
        what: the state, in words.
    Raises:
        TypeError: there are such parts, and not `whole`.
    """
    if not whole and any(map(is_within, plain)):
        raise TypeError(f"{what} has a tensor subclass, which cannot be cut. {WHOLE}")


PART = "::"
TAKEN = "which stands for a part of a tensor subclass"
WHOLE = 'Use a partition of whole parameters, such as "sorted_greedy".'


def put_together(plain: Mapping[Any, Any]) -> dict[Any, Any]:
    """Undo `take_apart`. The plain tensors may be filled later: the wrappers share their memory.

    Raises:
        TypeError: this program has no such class.
    """
    of_param: dict[Any, Any] = {}
    for key, value in plain.items():
        if not is_within(key):
            of_param[key] = value
            continue
        name, _, _ = key.partition(PART)
        if name not in of_param:
            recipe = json.loads(plain[name + PART])
            of_param[name] = _unflattened(recipe, plain, name + PART)
    return of_param


def cloned(value: Any) -> Any:
    """A copy of a tensor; of a wrapper, one made from copies of its plain tensors."""
    if not is_traceable_wrapper_subclass(value):
        return value.clone()
    names, context = value.__tensor_flatten__()
    inner = {name: cloned(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def _flattened(value: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The recipe of a wrapper, and its plain tensors by name."""
    names, context = value.__tensor_flatten__()
    kind = type(value)
    recipe: dict[str, Any] = {"class": f"{kind.__module__}:{kind.__qualname__}", "inner": {}}
    if _named(recipe["class"]) is not kind:
        raise TypeError(f"nobody else finds its class, {recipe['class']}, by that name")
    recipe |= {"size": [*value.size()], "stride": [*value.stride()], "context": _encoded(context)}
    plain: dict[str, torch.Tensor] = {}
    for name in names:
        inner = getattr(value, name)
        recipe["inner"][name] = None
        if is_traceable_wrapper_subclass(inner):
            recipe["inner"][name], parts = _flattened(inner)
            plain |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        else:
            plain[name] = inner
    return recipe, plain


def _unflattened(recipe: Mapping[str, Any], plain: Mapping[str, Any], prefix: str) -> Any:
    kind = _named(recipe["class"])
    if kind is None:
        raise TypeError(
            f"the state is a {recipe['class']}, and this program has no such tensor class. Import its module."
        )
    inner = {
        name: _unflattened(within, plain, f"{prefix}{name}.") if within else plain[prefix + name]
        for name, within in recipe["inner"].items()
    }
    size, stride = torch.Size(recipe["size"]), tuple(recipe["stride"])
    return kind.__tensor_unflatten__(inner, _decoded(recipe["context"]), size, stride)


def _named(path: str) -> Any:
    """The wrapper class of that name, or None if this program has imported none."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_class = isinstance(found, type) and issubclass(found, torch.Tensor)
    return found if is_class and hasattr(found, "__tensor_unflatten__") else None


def _encoded(value: Any) -> Any:
    """The value for JSON. A type that JSON lacks becomes an object {kind: parts}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encoded(item) for item in value]
    for name, (kind, parts, _) in _KINDS.items():
        if type(value) is kind:
            return {name: _encoded(parts(value))}
    raise TypeError(f"to be made again it needs a {type(value).__name__}, which JSON cannot express")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    return _KINDS[name][2](_decoded(parts))


_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "size": (torch.Size, list, torch.Size),
    "dict": (dict, lambda value: [list(item) for item in value.items()], dict),
    "dtype": (
        torch.dtype,
        lambda value: str(value).removeprefix("torch."),
        lambda name: getattr(torch, name),
    ),
    "device": (torch.device, str, torch.device),
}
"""The types in a context that JSON lacks: (type, function to parts, function from parts)."""
