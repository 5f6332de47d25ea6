"""State that is a tensor subclass, such as torchao's 8-bit moments, taken apart and put together again.

Such a tensor is a wrapper around plain ones. It says itself which these are and what else it needs
(`__tensor_flatten__`), and its class makes it again from both (`__tensor_unflatten__`): torch.compile wants
that of it too. While state travels or lies in files, the plain tensors stand in place of the wrapper:

    {"exp_avg": wrapper}      {"exp_avg::codes": tensor, "exp_avg::scale": tensor, "exp_avg::": recipe}

The recipe is JSON. It names the class, and that must be one that this program has imported by itself: nothing
is imported, and no pickle is read, because another rank or a file says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_within(key: Any) -> bool:
    """Under this key stands a part of a wrapper."""
    return isinstance(key, str) and PART in key


def take_apart(of_param: Mapping[Any, Any], param: int, whole: bool) -> dict[Any, Any]:
    """The state of a parameter without wrappers.

    Args:
        param: its number.
        whole: this is all of it, and not a slice.
    Raises:
        TypeError: a wrapper is one of a slice, has something that JSON cannot express, or a class that others
            could not find.
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
    """Refuse a wrapper, taken apart, where only a slice of the state belongs.

    Raises:
        TypeError: `what`, in words, has one.
    """
    if not whole and any(map(is_within, plain)):
        raise TypeError(f"{what} has a tensor subclass, which cannot be cut. {WHOLE}")


PART = "::"
TAKEN = "which stands for a part of a tensor subclass"
WHOLE = 'Use a partition of whole parameters, such as "sorted_greedy".'


def put_together(plain: Mapping[Any, Any]) -> dict[Any, Any]:
    """What `take_apart` was given. The plain tensors may still wait for their values.

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


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """What `function` makes of a tensor; of a wrapper, the wrapper around what it makes of each in it."""
    if not is_traceable_wrapper_subclass(value):
        return function(value)
    names, context = value.__tensor_flatten__()
    inner = {name: mapped(function, getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def _flattened(value: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The recipe of a wrapper, and the plain tensors in it by name."""
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
    """The wrapper class of that name, if this program has imported one."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_class = isinstance(found, type) and issubclass(found, torch.Tensor)
    return found if is_class and hasattr(found, "__tensor_unflatten__") else None


def _encoded(value: Any) -> Any:
    """As JSON. What JSON does not know is an object that says its kind."""
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
"""What else a context may hold: its type, what of it JSON takes, and how it is made again."""
