"""State that is a tensor subclass (torchao's 8-bit moments) or a list (SOAP's), taken apart and put together.

This module adds to `state_dict` of `stairs/owners.py` that such state needs no pickle. A wrapper subclass
holds plain tensors: `__tensor_flatten__` returns their names and a context, and `__tensor_unflatten__` makes
the wrapper from both, as torch.compile requires too. In state that is sent or stored, plain tensors replace a
wrapper or list:

    {"exp_avg": wrapper}      {"exp_avg::codes": tensor, "exp_avg::scale": tensor, "exp_avg::": recipe}
    {"GG": [matrix, None]}    {"GG::0": tensor, "GG::": recipe}

The recipe is JSON. It names the class, which this program must have imported before: no text from another
rank or a file causes an import, and no pickle is read.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_within(key: Any) -> bool:
    """Return whether a key belongs to a part of a wrapper or list."""
    return isinstance(key, str) and PART in key


def has_parts(value: Any) -> bool:
    """Return whether a value is a wrapper, or a list, tuple or dict."""
    return type(value) in _CONTAINERS.values() or is_traceable_wrapper_subclass(value)


def take_apart(of_param: Mapping[Any, Any], param: int, whole: bool) -> dict[Any, Any]:
    """Replace each wrapper or list in the state of a parameter by plain tensors and a recipe.

    Args:
        of_param: the state.
        param: the parameter's number.
        whole: this is the state of all of the parameter, and not of a slice.
    Raises:
        TypeError: the state of a slice has a wrapper or list; a wrapper or list holds a value that JSON
            cannot express; other ranks could not find a wrapper's class by its name.
    """
    plain: dict[Any, Any] = {}
    for key, value in of_param.items():
        # 1. A plain value stays, unless its key looks like that of a part.
        if not has_parts(value):
            if is_within(key):
                raise TypeError(f"the state {key!r} of parameter {param} has {PART!r} in its name, {TAKEN}.")
            plain[key] = value
            continue
        # 2. A wrapper or list becomes its tensors, and a recipe.
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
    """Refuse parts of a wrapper or list in the state of a slice.

    Args:
        plain: the state.
        whole: this is the state of all of the parameter.
        what: words for the state in the error.
    Raises:
        TypeError: there are such parts, and this is the state of a slice.
    """
    if not whole and any(map(is_within, plain)):
        raise TypeError(f"{what} has a tensor subclass or a list, which cannot be cut. {WHOLE}")


PART = "::"
TAKEN = "which stands for a part of a tensor subclass or a list"
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
        # The first part of a value stands for all: the recipe knows the others.
        name, _, _ = key.partition(PART)
        if name not in of_param:
            recipe = json.loads(plain[name + PART])
            of_param[name] = _unflattened(recipe, plain, name + PART)
    return of_param


def cloned(value: Any) -> Any:
    """Copy a value; copy a wrapper, list, tuple or dict with all that it holds."""
    if type(value) in (list, tuple):
        return type(value)(map(cloned, value))
    if type(value) is dict:
        return {key: cloned(part) for key, part in value.items()}
    if not is_traceable_wrapper_subclass(value):
        return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    names, context = value.__tensor_flatten__()
    inner = {name: cloned(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


Recipe = dict[str, Any]


def _flattened(value: Any) -> tuple[Recipe | None, dict[str, torch.Tensor]]:
    """Return the recipe of a value, and its plain tensors by name.

    A plain tensor has the name "" and no recipe.
    """
    kind = type(value)
    # 1. A value without parts: a tensor, or a value for JSON.
    if not has_parts(value):
        is_tensor = isinstance(value, torch.Tensor)
        return (None, {"": value}) if is_tensor else ({"value": _encoded(value)}, {})
    # 2. The parts by name, and the recipe that makes the value from them.
    if kind in _CONTAINERS.values():
        keys = [*value] if kind is dict else [*range(len(value))]
        recipe: Recipe = {"container": kind.__name__, "keys": _encoded(keys)}
        parts = {str(place): value[key] for place, key in enumerate(keys)}
    else:
        names, context = value.__tensor_flatten__()
        recipe = {"class": f"{kind.__module__}:{kind.__qualname__}"}
        if _named(recipe["class"]) is not kind:
            raise TypeError(f"nobody else finds its class, {recipe['class']}, by that name")
        recipe |= {"size": [*value.size()], "stride": [*value.stride()], "context": _encoded(context)}
        parts = {name: getattr(value, name) for name in names}
    # 3. Each part may have parts, too. Their names are joined by dots: "codes", "0.codes".
    recipe["inner"] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        recipe["inner"][name], tensors = _flattened(part)
        plain |= {f"{name}.{within}".removesuffix("."): tensor for within, tensor in tensors.items()}
    return recipe, plain


def _unflattened(recipe: Recipe | None, plain: Mapping[str, Any], prefix: str) -> Any:
    """Make a value from its recipe.

    Args:
        plain: the plain tensors.
        prefix: the beginning of the names of this value's tensors.
    """
    if recipe is None:
        return plain[prefix.removesuffix(".")]
    if "value" in recipe:
        return _decoded(recipe["value"])
    inner = {
        name: _unflattened(within, plain, f"{prefix}{name}.") for name, within in recipe["inner"].items()
    }
    if "container" in recipe:
        container = _CONTAINERS[recipe["container"]]
        parts = inner.values()
        return dict(zip(_decoded(recipe["keys"]), parts)) if container is dict else container(parts)
    kind = _named(recipe["class"])
    if kind is None:
        raise TypeError(
            f"the state is a {recipe['class']}, and this program has no such tensor class. Import its module."
        )
    size, stride = torch.Size(recipe["size"]), tuple(recipe["stride"])
    return kind.__tensor_unflatten__(inner, _decoded(recipe["context"]), size, stride)


def _named(path: str) -> Any:
    """Find the wrapper class of a name, "module:Class"; None if this program has imported no such class."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_class = isinstance(found, type) and issubclass(found, torch.Tensor)
    return found if is_class and hasattr(found, "__tensor_unflatten__") else None


def _encoded(value: Any) -> Any:
    """Write a value for JSON. A value of a type that JSON lacks becomes an object {kind: parts}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encoded(item) for item in value]
    for name, (kind, parts, _) in _KINDS.items():
        if type(value) is kind:
            return {name: _encoded(parts(value))}
    raise TypeError(f"to be made again it needs a {type(value).__name__}, which JSON cannot express")


def _decoded(value: Any) -> Any:
    """Undo `_encoded`."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    return _KINDS[name][2](_decoded(parts))


_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "dict": dict}

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
