"""A whole optimizer's state dict: checked, brought into this optimizer's order, and cut into shards.

This module adds to `minimal.py` that a state dict can be loaded. It may be of the plain torch optimizer, of
this one at any world size and partition, or of FSDP; `shard_of` takes one rank's part out of it. `gather.py`
goes the other way.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero_ref.optimizer.entries import State
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like
from zero_ref.shard.checks import is_elementwise
from zero_ref.shard.groups import (
    OPTIMIZER_CLASS,
    describe_options,
    options_of,
    params_of,
    specs_of,
)
from zero_ref.shard.owned import OwnedSlice
from zero_ref.shard.several import class_of

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""The state that torch's elementwise optimizers keep once for a parameter."""

SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg"}
    | {"grad_avg", "acc_delta", "ax", "prev", "step_size"}
)
"""The state that they keep for each element, in the parameter's shape."""


def packed_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as in a torch state dict: options, and parameters as running numbers.

    A class is given by its name, since a state dict without other objects loads with `weights_only=True`.
    """
    running = itertools.count()

    def packed(group: dict[str, Any]) -> dict[str, Any]:
        kept = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        named = {OPTIMIZER_CLASS: group[OPTIMIZER_CLASS].__name__} if OPTIMIZER_CLASS in group else {}
        return {**kept, **named, "params": [next(running) for _ in group["params"]]}

    return list(map(packed, param_groups))


def arranged(state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state dict with its groups, and the parameters in them, in the order of `param_groups`.

    Parameters are found by name where both sides have names: a saved group has "param_names", or names for
    ids, as FSDP and torch.distributed.checkpoint write them. What wrappers add to a name does not count.

    Raises:
        ValueError: the dict is not of torch's form, or a group's names are not those of any of our groups.
    """
    _check_form(state_dict)
    saved_groups = state_dict["param_groups"]
    theirs = [_names_in(group["params"], group.get("param_names")) for group in saved_groups]
    ours = [_names_in((), g.get("param_names", None if g["params"] else ())) for g in param_groups]
    sizes = [sorted(len(group["params"]) for group in groups) for groups in (saved_groups, param_groups)]
    if sizes[0] != sizes[1] or None in theirs or None in ours:
        return dict(state_dict)

    place: dict[str, tuple[int, Any]] = {}  # of each name its group, and the id under which it was saved
    for index, (names, group) in enumerate(zip(theirs, saved_groups, strict=True)):
        place |= {name: (index, id_) for name, id_ in zip(names or (), group["params"], strict=True)}
    without = iter([group for group in saved_groups if not group["params"]])
    groups: list[Any] = []
    for index, names in enumerate(ours):
        if not names:
            groups.append(next(without))
            continue
        source = next((place[name][0] for name in names if name in place), index)
        if odd := sorted({*names} ^ {*(theirs[source] or ())}):
            raise ValueError(
                f"the checkpoint's group {source} has other parameters than this optimizer's: {odd[0]!r} is "
                f"in one of them only ({len(odd)} such names). Build the same model, then load again."
            )
        groups.append({**saved_groups[source], "params": [place[name][1] for name in names]})
    return {**state_dict, "param_groups": groups}


WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""What DDP, torch.compile, activation checkpointing and FSDP put into the names of parameters."""


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it.

    >>> plain_name("module._orig_mod.up.weight")
    'up.weight'
    """
    return WRAPPERS.sub("", name)


def _names_in(ids: Sequence[Any], names: Sequence[str] | None) -> list[str] | None:
    """The names of a group's parameters without those of wrappers: its ids, if these are names; else None."""
    found = ids if ids and all(isinstance(id_, str) for id_ in ids) else names
    if found is None:
        return None
    plain = [*map(plain_name, found)]
    return plain if len({*plain}) == len(plain) else list(found)


def saved_ids(state_dict: Mapping[str, Any]) -> list[Any]:
    """The id under which the state of each parameter was saved, in the order of the dict's groups.

    Raises:
        ValueError: an id stands for two parameters.
    """
    ids = [id_ for group in state_dict["param_groups"] for id_ in group["params"]]
    if len(set(ids)) != len(ids):
        raise ValueError("the checkpoint's parameter groups name the same parameter twice; it is damaged.")
    return ids


def check_fits(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    optim: torch.optim.Optimizer,
) -> list[str]:
    """Refuse a checkpoint of another model; return the facts that ranks compare before loading.

    Args:
        state_dict: as from `arranged`.
        optim: the local optimizer. If the class of a group is elementwise, its state's shapes are checked.
    Raises:
        ValueError: missing keys, other groups or classes, options that a class refuses, or a state that it
            cannot have made; names the parameter.
    """
    saved_groups = state_dict["param_groups"]
    _check_sizes(saved_groups, param_groups)
    classes = [class_of(group, optim) for group in param_groups]
    _check_options(saved_groups, param_groups, classes)
    elementwise = [is_elementwise(of_class) for of_class in classes]
    specs = specs_of(param_groups)
    kinds: list[tuple[Any, ...]] = []
    ids = saved_ids(state_dict)
    for number, (id_, param) in enumerate(zip(ids, params_of(param_groups), strict=True)):
        for key, value in state_dict["state"].get(id_, {}).items():
            if elementwise[specs[number].group] and not _fits(key, value, param):
                raise ValueError(_misfit_error(specs[number].name or str(number), key, value, param))
            is_tensor = isinstance(value, torch.Tensor)
            kinds.append((number, key, *((tuple(value.shape), value.dtype) if is_tensor else (None, value))))
    described = enumerate(map(describe_options, saved_groups))
    options = [f"group {index}: {option}" for index, of_group in described for option in of_group]
    return [*options, f"state of shapes and kinds {hashlib.sha256(repr(kinds).encode()).hexdigest()[:12]}"]


def _misfit_error(name: str, key: Any, value: Any, param: torch.Tensor) -> str:
    has_shape = isinstance(value, torch.Tensor) and key not in SCALARS
    what = f"has shape {tuple(value.shape)}" if has_shape else f"is {value!r}"
    return (
        f"the checkpoint's {key!r} for parameter {name} {what}; the parameter has {tuple(param.shape)}. The "
        "checkpoint is of another model, or of the same parameters in another order."
    )


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Refuse what lacks groups or state in torch's forms."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"an optimizer's state dict has the keys 'state' and 'param_groups'; this has {found}. "
            "Pass what optimizer.state_dict() returned, not the whole checkpoint."
        )
    saved_groups = state_dict["param_groups"]
    if (
        not isinstance(saved_groups, Sequence)
        or not all(isinstance(group, Mapping) and "params" in group for group in saved_groups)
        or not isinstance(state_dict["state"], Mapping)
        or not all(isinstance(of_param, Mapping) for of_param in state_dict["state"].values())
    ):
        raise ValueError(
            "the state dict's 'param_groups' must be a list of dicts with 'params', its 'state' a dict of "
            "dicts; this one is damaged, or of another program."
        )


def _check_sizes(saved_groups: Sequence[Any], param_groups: Sequence[dict[str, Any]]) -> None:
    saved, ours = [len(g["params"]) for g in saved_groups], [len(g["params"]) for g in param_groups]
    if saved != ours:
        raise ValueError(
            f"the checkpoint has parameter groups of {saved} parameters and this optimizer has {ours}. "
            "Build the optimizer from the same parameter groups, in the same order, then load again."
        )


def _check_options(
    saved_groups: Sequence[Mapping[str, Any]],
    param_groups: Sequence[dict[str, Any]],
    classes: Sequence[type[torch.optim.Optimizer]],
) -> None:
    for index, (saved, ours, of_class) in enumerate(zip(saved_groups, param_groups, classes, strict=True)):
        if saved.get(OPTIMIZER_CLASS, of_class.__name__) != of_class.__name__:
            raise ValueError(
                f"the checkpoint's group {index} is of {saved[OPTIMIZER_CLASS]}, this optimizer's is of "
                f"{of_class.__name__}. Give the group the same optimizer_class, then load again."
            )
        for option, value in options_of(ours).items():
            if not _alike(saved.get(option), value):
                raise ValueError(
                    f"the checkpoint's {option!r} of group {index} is {saved[option]!r}, this optimizer's is "
                    f"{value!r}. The checkpoint is damaged, or of another optimizer."
                )
        # torch checks options in its constructors. A class that refuses our own options says nothing by it.
        refusal = _refusal(of_class, {**ours, **saved})
        if refusal and not _refusal(of_class, ours):
            raise ValueError(
                f"{of_class.__name__} refuses the checkpoint's options of group {index}: {refusal}"
            )


def _alike(theirs: Any, ours: Any) -> bool:
    """Two values of an option are of one kind: numbers, texts or sequences. None may stand for any kind."""
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        as_long = isinstance(ours, list) or len(theirs) == len(ours)
        return as_long and all(map(_alike, theirs, ours))
    kinds = [(numbers.Number, torch.Tensor), (str,), (list, tuple)]
    found = [[isinstance(value, kind) for kind in kinds] for value in (theirs, ours)]
    return found[0] == found[1] or not any(found[0]) or not any(found[1])


def _refusal(optimizer_class: type[torch.optim.Optimizer], group: dict[str, Any]) -> str:
    """The error of the class's constructor for a group's options, without parameters; "" if it has none."""
    accepted = inspect.signature(optimizer_class.__init__).parameters
    options = {key: value for key, value in options_of(group).items() if key in accepted}
    try:
        optimizer_class([{"params": []}], **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fits(key: Any, value: Any, param: torch.Tensor) -> bool:
    shape = value.shape if isinstance(value, torch.Tensor) else None
    if key in SCALARS:
        if shape not in ((), (1,)) and not isinstance(value, (int, float)):
            return False
        number = float(value)
        return math.isfinite(number) and (key != "step" or (number >= 0 and number.is_integer()))
    # SGD without momentum saves a momentum_buffer of None.
    return key not in SHAPED or value is None or (shape == param.shape and value.layout == torch.strided)


@torch.no_grad()
def shard_of(
    state: Mapping[Any, Mapping[str, Any]], saved_ids: Sequence[Any], owned: Sequence[OwnedSlice]
) -> State:
    """The part of a whole optimizer's state that belongs to the owned slices.

    Everything is copied: a local step must not write into the caller's checkpoint.

    Args:
        state: by saved id, as in a torch state dict.
        saved_ids: the id of each parameter, in registration order.
        owned: this rank's slices.
    Returns:
        By position in `owned`; slices without saved state are left out.
    """

    def part(key: str, value: Any, own: OwnedSlice) -> Any:
        if not own.is_whole:
            subclasses.take_apart({key: value}, own.piece.param, whole=False)  # raises for what cannot be cut
            if isinstance(value, torch.Tensor) and value.shape == own.param.shape and value.ndim:
                return flat_like(value, own.param)[own.piece.start : own.piece.stop].clone()
        return subclasses.cloned(value)

    return {
        number: {key: part(key, value, own) for key, value in state[saved_ids[own.piece.param]].items()}
        for number, own in enumerate(owned)
        if saved_ids[own.piece.param] in state
    }
