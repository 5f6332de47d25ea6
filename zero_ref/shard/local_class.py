"""The class of a local optimizer: whether it is torch's own, and whether all its state belongs to parameters.

`stairs/owners.py` checks neither. torch's own classes keep options and the state of parameters, and no more.
"""

from __future__ import annotations

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
