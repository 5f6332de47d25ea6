"""Whether an optimizer updates each parameter by itself, found by trying it out on two small tensors.

Sharding rests on it: a rank's local optimizer sees only what the rank owns. One that scales by a norm of all
gradients, or estimates a learning rate from all parameters, makes other updates there, and nothing else would
show it: not every such value is kept where ranks could compare it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

STEPS = 2
"""What an optimizer keeps of the first update may show in the second."""


def couples_parameters(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> bool:
    """Whether a tensor moves otherwise beside another one than by itself, under these options.

    >>> couples_parameters(torch.optim.AdamW, {}, {"lr": 0.1})
    False

    Args:
        options, defaults: of a parameter group and of the constructor.
    Returns:
        False also where it cannot be told: the optimizer wants other tensors, or moves them at random.
    Cost: a few updates of 64 elements on the CPU.
    """

    def tried(tensors: int) -> list[torch.Tensor]:
        return _tried(optimizer_class, options, defaults, tensors)

    try:
        with _ONE_AT_A_TIME, _without_compiling(), torch.random.fork_rng(devices=[]):
            beside = tried(2)
            return not _alike(beside, tried(1)) and _alike(beside, tried(2))
    except Exception:
        return False


_ONE_AT_A_TIME = threading.Lock()  # the stance is that of the process, and virtual ranks are threads


def _without_compiling() -> contextlib.AbstractContextManager[object]:
    """Run functions that torch.compile would compile as they are: for these sizes it would be in vain."""
    if (
        "torch._dynamo" not in sys.modules
    ):  # then nothing has been given to it yet, and importing it takes long
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _tried(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], tensors: int
) -> list[torch.Tensor]:
    """By how much the first of so many tensors is moved, and the numbers that the optimizer keeps for all."""
    # In 64 bits, or the first updates of an optimizer that begins with tiny ones would be lost in rounding.
    places = torch.arange(64, dtype=torch.float64).view(8, 8)
    params = [torch.nn.Parameter(torch.cos(places + number)) for number in range(tensors)]
    optimizer = optimizer_class([{**options, "params": params}], **defaults)
    for step in range(STEPS):
        for number, param in enumerate(params):
            # Of other sizes, so that a norm or a mean over both is another than that of the first.
            param.grad = torch.sin(places * (1 + step + number)) * 0.1 * 300**number
        optimizer.step()
    (group,) = optimizer.param_groups
    kept = [torch.as_tensor(value).double() for value in group.values() if _is_number(value)]
    return [params[0].detach() - torch.cos(places), *kept]


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    # Rounding is allowed for: an optimizer may put its tensors together and sum in another order.
    return all(torch.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True) for a, b in zip(some, others))
