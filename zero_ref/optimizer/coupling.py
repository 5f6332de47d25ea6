"""Find out by trials whether an optimizer updates each parameter by itself, and each element by itself.

`minimal.py` assumes that it updates each parameter by itself; this module adds the check. A rank's local
optimizer sees only the parameters that the rank owns, so one that scales by a norm of all gradients, or
estimates a learning rate from all parameters, would make different updates, without an error. If it updates
each element by itself too, parameters may be cut.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
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


SHAPES = [(160, 128), (64, 16, 3, 3)]
"""A matrix large enough for Adafactor to factor its state, and weights of a convolution."""

CUTS = [[4160, 12480], [4160]]
"""Where the elements of each shape are cut: at multiples of 64, as `even` cuts, and not of 128.

Optimizers with low-bit state scale blocks of 128 elements or more together, so each cut divides a block. They
keep tensors below 4,096 elements in 32 bits, so no piece is smaller.
"""

UPDATES = 30
"""Some optimizers do something else in every 5th or 10th update, or start to do it in the 26th."""


def updates_elementwise(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> bool:
    """Whether an element's update and state stay the same if its tensor is cut, under these options.

    The trial steps two whole tensors, and each 1-D piece of them by an optimizer of its own, and compares all
    bits. There is no rounding to allow for: pieces begin and end at multiples of 64 elements, where kernels
    compute each element with the same instructions as in the whole tensor.

    >>> updates_elementwise(torch.optim.AdamW, {}, {"lr": 0.1})
    True
    >>> updates_elementwise(torch.optim.Adafactor, {}, {})  # has factors of rows and columns
    False

    Args:
        options, defaults: as for `couples_parameters`.
    Returns:
        Also False if the trial says nothing: the optimizer needs other tensors, or its updates are random.
    Cost: 30 updates of 30,000 elements on the CPU, twice. Answers are kept by class and options.
    """
    case = optimizer_class, tuple(options.items()), tuple(defaults.items())
    with _ONE_AT_A_TIME, _without_compiling(), torch.random.fork_rng(devices=[]):
        try:
            return _cuts_change_nothing(*case)  # type: ignore[arg-type]
        except TypeError:  # options such as lists cannot be keys
            return _cuts_change_nothing.__wrapped__(*case)


@functools.lru_cache(maxsize=64)
def _cuts_change_nothing(
    optimizer_class: type[Optimizer],
    options: tuple[tuple[str, Any], ...],
    defaults: tuple[tuple[str, Any], ...],
) -> bool:
    def stepped(params: list[torch.Tensor], grads: list[torch.Tensor]) -> list[dict[str, Any]]:
        """Step these by one optimizer; return each tensor's values and state."""
        params = [param.requires_grad_() for param in params]
        optimizer = optimizer_class([{**dict(options), "params": params}], **dict(defaults))
        for step in range(UPDATES):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.narrow(0, 64 * step, param.numel()).view(param.shape).clone()
            optimizer.step()
        return [{**optimizer.state[param], "": param.detach()} for param in params]

    # All gradients are windows of one row of random numbers, 64 elements further in each update.
    numels = [math.prod(shape) for shape in SHAPES]
    row = torch.randn(max(numels) + 64 * UPDATES, generator=torch.Generator().manual_seed(0))
    starts = [0.1 * row[:numel] for numel in numels]
    try:
        wholes = stepped([start.clone().view(shape) for start, shape in zip(starts, SHAPES)], [row, row])
        for whole, start, cuts in zip(wholes, starts, CUTS, strict=True):
            bounds = [*pairwise([0, *cuts, start.numel()])]
            pieces = [stepped([start.clone()[a:b]], [row[a:]])[0] for a, b in bounds]
            if not _is_made_of(whole, pieces):
                return False
    except Exception:
        return False
    return True


def _is_made_of(whole: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the values and state of a tensor are those of its pieces, end to end, and numbers are equal."""
    for key, value in whole.items():
        of_pieces = [piece[key] for piece in pieces]
        if isinstance(value, torch.Tensor) and value.shape == whole[""].shape:
            alike = torch.equal(torch.cat(of_pieces), value.flatten())
        else:
            alike = all(bool(torch.as_tensor(other == value).all()) for other in of_pieces)
        if not alike:
            return False
    return all(piece.keys() == whole.keys() for piece in pieces)


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
