"""The class of a local optimizer: whether it is torch's own, and what it keeps for all parameters.

`stairs/owners.py` checks neither. torch's own classes keep options and the state of parameters, and no more.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.optim import Optimizer


def is_known(optim: Optimizer) -> bool:
    """Return whether the class is torch's: it updates tensors one by one and draws no random numbers."""
    return type(optim).__module__.startswith("torch.optim.")


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
