"""Loading of a whole optimizer's state dict: check it, bring it into this optimizer's order, and cut it.

`stairs/owners.py` cannot load. Here a state dict may come from the plain torch optimizer, from this one at
any world size and partition, or from FSDP. `shard_of` takes one rank's part out of it. `gather.py` does the
reverse.
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

from zero_ref.comm.agreement import Fact
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.checks import is_elementwise
from zero_ref.shard.groups import (
    describe_options,
    dtype_name,
    name_of,
    options_of,
    plain,
    specs_of,
)
from zero_ref.shard.owned import OwnedSlice
from zero_ref.state.entries import State

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""The keys of the state that torch's elementwise optimizers keep once for each parameter."""

SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg"}
    | {"grad_avg", "acc_delta", "ax", "prev", "step_size"}
)
"""The keys of the state that torch's elementwise optimizers keep in the parameter's shape."""


def packed_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as in a torch state dict: their options, and their parameters numbered from 0."""
    running = itertools.count()
    groups = []
    for group in param_groups:
        packed = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        groups.append({**packed, "params": [next(running) for _ in group["params"]]})
    return groups


def check_form(state_dict: Mapping[str, Any]) -> None:
    """Refuse a dict without groups and state in the form of torch's state dicts.

    Raises:
        ValueError: the dict is in another form.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"an optimizer's state dict has the keys 'state' and 'param_groups'; this has {found}. "
            "Pass the dict that optimizer.state_dict() returned, not the whole checkpoint."
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
            "dicts; this one is damaged, or was written by another program."
        )


def arranged(state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state dict with its groups, and the parameters in them, in the order of `param_groups`.

    If both sides have names, parameters are found by name. A saved group has names under "param_names", or as
    ids, as FSDP and torch.distributed.checkpoint write them. Prefixes that wrappers add do not count.

    Raises:
        ValueError: a group's names are not those of any of our groups.
    """
    # 1. Look for names. Without them on both sides, the order of the dict counts.
    saved_groups = state_dict["param_groups"]
    theirs = [_names_in(group["params"], group.get("param_names")) for group in saved_groups]
    ours = [_names_in((), g.get("param_names", None if g["params"] else ())) for g in param_groups]
    sizes = [sorted(len(group["params"]) for group in groups) for groups in (saved_groups, param_groups)]
    if sizes[0] != sizes[1] or None in theirs or None in ours:
        return dict(state_dict)

    # 2. Bring the saved groups into our order.
    named = [names or [] for names in theirs]
    groups = _groups_in_order([names or [] for names in ours], named, saved_groups)
    return {**state_dict, "param_groups": groups}


def _groups_in_order(
    ours: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]], saved_groups: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """The saved groups in the order of ours, each with the ids of its parameters in our order.

    Args:
        ours, theirs: for each of our groups, and for each saved one, the names of its parameters.
    """
    # 1. For each name the number of its saved group, and the id under which its state was saved.
    place: dict[str, tuple[int, Any]] = {}
    for index, (names, group) in enumerate(zip(theirs, saved_groups, strict=True)):
        place |= {name: (index, id_) for name, id_ in zip(names, group["params"], strict=True)}

    # 2. Find the saved group of each of our groups by its first known name. Groups without parameters have no
    # names, so they keep their order.
    without = iter([group for group in saved_groups if not group["params"]])
    groups: list[Any] = []
    for index, names in enumerate(ours):
        if not names:
            groups.append(next(without))
            continue
        source = next((place[name][0] for name in names if name in place), index)
        _check_names(source, names, theirs[source])
        groups.append({**saved_groups[source], "params": [place[name][1] for name in names]})
    return groups


def _check_names(source: int, ours: Sequence[str], theirs: Sequence[str]) -> None:
    """Refuse a saved group, number `source`, that has other parameters than our group."""
    if odd := sorted({*ours} ^ {*theirs}):
        raise ValueError(
            f"the checkpoint's group {source} has other parameters than this optimizer's: {odd[0]!r} is "
            f"in one of them only ({len(odd)} such names). Build the same model, then load again."
        )


WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""The parts that DDP, torch.compile, activation checkpointing and FSDP add to the names of parameters."""


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add.

    >>> plain_name("module._orig_mod.up.weight")
    'up.weight'
    """
    return WRAPPERS.sub("", name)


def _names_in(ids: Sequence[Any], names: Sequence[str] | None) -> list[str] | None:
    """The plain names of a group's parameters: its ids, if these are names, or else `names`."""
    found = ids if ids and all(isinstance(id_, str) for id_ in ids) else names
    if found is None:
        return None
    # Two names that differ only in a wrapper's part have to stay apart.
    plain = [*map(plain_name, found)]
    return plain if len({*plain}) == len(plain) else list(found)


def check_fits(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    optim: torch.optim.Optimizer,
) -> list[Any]:
    """Refuse a checkpoint of another model; return the ids under which the parameters' states were saved.

    Args:
        state_dict: from `arranged`.
        optim: the local optimizer. The state of parameters whose class is elementwise must have their shapes.
    Raises:
        ValueError: the dict has other groups or classes, options that a class refuses, or a state that the
            class cannot have made; names the parameter. Or two parameters have the same id.
    """
    # 1. The groups have the parameters that ours have, each once.
    saved_groups = state_dict["param_groups"]
    theirs, here = ([len(group["params"]) for group in groups] for groups in (saved_groups, param_groups))
    if theirs != here:
        raise ValueError(
            f"the checkpoint has parameter groups of {theirs} parameters and this optimizer has {here}. "
            "Build the optimizer from the same parameter groups, in the same order, then load again."
        )
    ids = [id_ for group in saved_groups for id_ in group["params"]]
    if len(set(ids)) != len(ids):
        raise ValueError("the checkpoint's parameter groups name the same parameter twice; it is damaged.")

    # 2. The options of each group, and the state of its parameters.
    for index, (saved, ours) in enumerate(zip(saved_groups, param_groups, strict=True)):
        _check_options(index, saved, ours, type(optim))
        if not is_elementwise(type(optim)):
            continue
        for id_, param in zip(saved["params"], ours["params"], strict=True):
            for key, value in state_dict["state"].get(id_, {}).items():
                if not _fits(key, value, param):
                    name = name_of(specs_of(param_groups), ids.index(id_))
                    raise ValueError(_misfit_error(name, key, value, param))
    return ids


def facts_of(state_dict: Mapping[str, Any], ids: Sequence[Any]) -> list[str]:
    """The facts that ranks compare before they load, since a rank may have opened the file of another step.

    To compare all elements would take too long, so a few stand for a tensor.

    Args:
        ids: from `check_fits`.
    """
    lines = [
        f"group {index}: {option}"
        for index, group in enumerate(state_dict["param_groups"])
        for option in describe_options(group)
    ]
    lines += [
        f"state {key!r} of parameter {number}: {_described(value)}"
        for number, id_ in enumerate(ids)
        for key, value in state_dict["state"].get(id_, {}).items()
    ]
    return [Fact(line, "Load the same state dict, of one step, on every rank.") for line in lines]


SAMPLE = 16
"""The number of elements that stand for a tensor."""


def _described(value: Any) -> str:
    """Describe a value of the state by a short text that is another one, most likely, for another value."""
    if isinstance(value, (list, tuple)):
        return str([*map(_described, value)])
    if isinstance(value, dict):
        return str({key: _described(part) for key, part in value.items()})
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"{tuple(value.shape)} {dtype_name(value.dtype)}"
    # A description in place of a tensor has no elements; those of a tensor subclass are in other tensors.
    if value.is_meta or type(value) is not torch.Tensor or value.layout != torch.strided:
        return text
    if value.numel() == 1:
        return f"{text}, {plain(value)}"
    try:
        elements = flat_view(value.detach())
    except ValueError:  # gaps: all elements would have to be copied
        return text
    sample = elements[:: len(elements) // SAMPLE + 1].cpu().contiguous()
    return f"{text}, elements {hashlib.sha256(bytes(sample.view(torch.uint8).tolist())).hexdigest()[:12]}"


def _misfit_error(name: str, key: Any, value: Any, param: torch.Tensor) -> str:
    has_shape = isinstance(value, torch.Tensor) and key not in SCALARS
    what = f"has shape {tuple(value.shape)}" if has_shape else f"is {value!r}"
    return (
        f"the checkpoint's {key!r} for parameter {name} {what}; the parameter has {tuple(param.shape)}. The "
        "checkpoint is of another model, or of the same parameters in another order."
    )


def _check_options(
    index: int, saved: Mapping[str, Any], ours: dict[str, Any], of_class: type[torch.optim.Optimizer]
) -> None:
    """Refuse the options of saved group number `index` if the class of our group cannot have them."""
    for option, value in options_of(ours).items():
        if not _alike(saved.get(option), value):
            raise ValueError(
                f"the checkpoint's {option!r} of group {index} is {saved[option]!r}, this optimizer's is "
                f"{value!r}. The checkpoint is damaged, or of another optimizer."
            )
    # torch checks options in its constructors. Ignore a class that refuses even our own options.
    refusal = _refusal(of_class, {**ours, **saved})
    if refusal and not _refusal(of_class, ours):
        raise ValueError(f"{of_class.__name__} refuses the checkpoint's options of group {index}: {refusal}")


def _alike(theirs: Any, ours: Any) -> bool:
    """Return whether two values of an option are of one kind: numbers, texts or sequences. Others fit all."""
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        as_long = isinstance(ours, list) or len(theirs) == len(ours)
        return as_long and all(map(_alike, theirs, ours))
    kinds = [(numbers.Number, torch.Tensor), (str,), (list, tuple)]
    found = [[isinstance(value, kind) for kind in kinds] for value in (theirs, ours)]
    return found[0] == found[1] or not any(found[0]) or not any(found[1])


def _refusal(optimizer_class: type[torch.optim.Optimizer], group: dict[str, Any]) -> str:
    """The error with which the class's constructor refuses a group's options; "" if it accepts them."""
    accepted = inspect.signature(optimizer_class.__init__).parameters
    options = {key: value for key, value in options_of(group).items() if key in accepted}
    try:
        optimizer_class([{"params": []}], **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fits(key: Any, value: Any, param: torch.Tensor) -> bool:
    """Return whether one of torch's elementwise optimizers can have made this state of the parameter."""
    shape = value.shape if isinstance(value, torch.Tensor) else None
    if key in SCALARS:
        if shape not in ((), (1,)) and not isinstance(value, (int, float)):
            return False
        number = float(value)
        return math.isfinite(number) and (key != "step" or (number >= 0 and number.is_integer()))
    # SGD without momentum saves None as momentum_buffer. A key that torch does not use may hold anything.
    return key not in SHAPED or value is None or (shape == param.shape and value.layout == torch.strided)


@torch.no_grad()
def shard_of(
    state: Mapping[Any, Mapping[str, Any]],
    saved_ids: Sequence[Any],
    owned: Sequence[OwnedSlice],
    copy: bool = True,
) -> State:
    """Copy the part of a whole optimizer's state that belongs to the owned slices.

    The copies keep a local step from writing into the caller's checkpoint. Without them, a part of a tensor
    is copied all the same: it would keep all of the tensor's memory.

    Args:
        state: by saved id, as in a torch state dict.
        saved_ids: the id of each parameter, in registration order.
        owned: this rank's slices.
        copy: copy also what the slices can have as it is: the tensors of whole parameters.
    Returns:
        The state by position in `owned`; slices without saved state are left out.
    """

    def part(key: str, value: Any, own: OwnedSlice) -> Any:
        if not own.is_whole:
            subclasses.take_apart({key: value}, own.piece.param, whole=False)  # raises if it cannot be cut
            # State in the parameter's shape is cut like the parameter; other state belongs to all slices.
            if isinstance(value, torch.Tensor) and value.shape == own.param.shape and value.ndim:
                return flat_like(value, own.param)[own.piece.start : own.piece.stop].clone()
        elif not copy and type(value) is torch.Tensor and value.ndim:
            return value
        return subclasses.cloned(value)

    return {
        number: {key: part(key, value, own) for key, value in state[saved_ids[own.piece.param]].items()}
        for number, own in enumerate(owned)
        if saved_ids[own.piece.param] in state
    }
