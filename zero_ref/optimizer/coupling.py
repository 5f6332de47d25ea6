"""Find out whether an optimizer updates each parameter by itself, by a trial on two small tensors.

`minimal.py` assumes that it does; this module adds the check. A rank's local optimizer sees only the
parameters that the rank owns, so one that scales by a norm of all gradients, or estimates a learning rate
from all parameters, would make different updates, without an error.
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
"""Two, since state from the first update may affect only the second."""


def couples_parameters(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> bool:
    """Whether the update of a tensor changes when a second tensor is beside it, under these options.

    >>> couples_parameters(torch.optim.AdamW, {}, {"lr": 0.1})
    False

    Args:
        options: those of a parameter group.
        defaults: those of the optimizer's constructor.
    Returns:
        Also False if the trial says nothing: the optimizer needs other tensors, or its updates are random.
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


_ONE_AT_A_TIME = threading.Lock()  # set_stance is global, and virtual ranks are threads


def _without_compiling() -> contextlib.AbstractContextManager[object]:
    """Run functions under torch.compile eagerly: compiling them for a trial would be slow."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled yet, and importing it is slow
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _tried(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], tensors: int
) -> list[torch.Tensor]:
    """The update of the first of that many tensors, and the numbers in the optimizer's group."""
    # float64: rounding would hide the first updates of an optimizer that begins with tiny ones.
    places = torch.arange(64, dtype=torch.float64).view(8, 8)
    params = [torch.nn.Parameter(torch.cos(places + number)) for number in range(tensors)]
    optimizer = optimizer_class([{**options, "params": params}], **defaults)
    for step in range(STEPS):
        for number, param in enumerate(params):
            # The second gradient is larger, so that a norm or mean of both differs from that of the first.
            param.grad = torch.sin(places * (1 + step + number)) * 0.1 * 300**number
        optimizer.step()
    (group,) = optimizer.param_groups
    kept = [torch.as_tensor(value).double() for value in group.values() if _is_number(value)]
    return [params[0].detach() - torch.cos(places), *kept]


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    # Allow for rounding: an optimizer may concatenate its tensors and sum in another order.
    return all(torch.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True) for a, b in zip(some, others))
