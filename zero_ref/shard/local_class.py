"""The class of a local optimizer: whether it is torch's own, and what it keeps for all parameters.

`stairs/owners.py` checks neither. torch's own classes keep options and the state of parameters, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zero_ref.shard.groups import ParamGroup, ids_in


def is_known(optim: Optimizer | type[Optimizer]) -> bool:
    """Return whether the class is torch's: it updates tensors one by one and draws no random numbers."""
    optimizer_class = optim if isinstance(optim, type) else type(optim)
    return optimizer_class.__module__.startswith("torch.optim.")


def check_keeps_groups(
    make: Callable[[list[list[torch.Tensor]]], Optimizer], param_groups: Sequence[ParamGroup]
) -> None:
    """Refuse a class that makes parameter groups of its own, such as matrices and vectors apart.

    A rank would give it the parameters that the rank owns, and get other groups than other ranks have. So all
    ranks ask it for the groups of all parameters, on tensors without memory.

    Args:
        make: constructs the class on the parameters of each group.
        param_groups: the groups with the parameters themselves.
    Raises:
        ValueError: the class makes other groups.
    """
    given = [
        [
            torch.empty_like(param, device="meta", requires_grad=param.requires_grad)
            for param in group["params"]
        ]
        for group in param_groups
    ]
    try:
        optim = make(given)
    except Exception:  # a class may refuse such tensors
        return
    made, ours = ids_in(optim.param_groups), [[*map(id, params)] for params in given]
    if made != ours:
        raise ValueError(
            f"{type(optim).__name__} makes parameter groups of its own: from groups of {[*map(len, ours)]} "
            f"parameters it makes groups of {[*map(len, made)]}. On each rank it would make others, of what "
            "the rank owns. Make these groups in your program, and pass them, with their options, to a class "
            "that keeps them, such as torch.optim.AdamW."
        )


def keys_beside_state(optim: Optimizer) -> list[str]:
    """List the keys of a class's `state_dict` beside "state" and "param_groups"."""
    if type(optim).state_dict is Optimizer.state_dict:
        return []
    return sorted(optim.state_dict().keys() - {"state", "param_groups"})


def check_belongs_to_parameters(optim: Optimizer) -> None:
    """Refuse a class that keeps more than options and the state of parameters: nobody would own the rest.

    Raises:
        TypeError: the class keeps more in its `state_dict`, or its state has a key that is no parameter.
    """
    if more := keys_beside_state(optim):
        raise TypeError(
            f"{type(optim).__name__} keeps {more} in its state_dict, beside the state of parameters and the "
            "options of groups. It belongs to no parameter, so it cannot be gathered, saved or moved to "
            "other owners. Use an optimizer whose state_dict has only 'state' and 'param_groups'."
        )
    for stranger in (key for key in optim.state if not isinstance(key, torch.Tensor)):
        raise TypeError(
            f"the optimizer keeps the state {stranger!r} for no parameter in particular, so no rank owns it; "
            "it can be neither checkpointed nor moved."
        )


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, a text, or a tensor of one element."""
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float, str))


def numbers_in_state(optim: Optimizer) -> dict[str, Any]:
    """The numbers in an optimizer's state that belong to no parameter, by description."""
    return {f"state {key!r}": value for key, value in optim.state.items() if _is_number(value)}


def numbers_in_attributes(optim: Optimizer) -> dict[str, Any]:
    """The numbers in the attributes of an optimizer, and in their lists, by description.

    torch's own classes have none that matters.
    """
    found: dict[str, Any] = {}
    for name, value in vars(optim).items() if not is_known(optim) else ():
        if _is_number(value):
            found[f"attribute {name}"] = value
        elif isinstance(value, (list, tuple, deque)) and all(map(_is_number, value)):
            found[f"len(attribute {name})"] = len(value)
            found |= {f"attribute {name}[{place}]": number for place, number in enumerate(value)}
    return found
