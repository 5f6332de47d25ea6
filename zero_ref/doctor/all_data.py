"""The loss of one process that has the data of all ranks: by how much each rank's batch counts in it.

The mean of the ranks' means is another number where ranks have batches of different sizes, such as different
numbers of tokens. So the batches are laid together, and the gradient of their loss is solved for the weights
of the gradients of each batch's own loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

SAME = 1e-4
"""Losses and weights are the same if they do not differ by more than this part."""


def shares(
    model: nn.Module, loss: Callable[[Any, Any], torch.Tensor], batches: Sequence[Any]
) -> list[float] | None:
    """The weight of each batch's loss in the loss of all of them; they add up to 1.

    The model is looked at as it evaluates, without dropout and with the statistics that it has.

    >>> mean = lambda model, batch: (model(batch) ** 2).mean()
    >>> [round(one, 3) for one in shares(nn.Linear(2, 1), mean, [torch.randn(2, 2), torch.randn(6, 2)])]
    [0.25, 0.75]

    Returns:
        None: all batches count alike, or their loss is no weighted mean of theirs.
    """
    if len(batches) == 1:
        return None
    probe = copy.deepcopy(model).eval()
    try:
        whole = loss(probe, laid_together(batches))
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError):
        return None  # they cannot be laid together, or the loss takes only batches of one size
    each = [loss(probe, batch) for batch in batches]
    sizes = sum(abs(one.item()) for one in each)
    params = [param for param in probe.parameters() if param.requires_grad]
    columns = torch.stack([_gradient(one, params) for one in each], 1)
    wanted = _gradient(whole, params)
    if len(wanted) <= len(each) or not (columns.isfinite().all() and wanted.isfinite().all()):
        return None
    found = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0]
    left = (columns @ found - wanted).norm() / wanted.norm().clamp(min=1e-300)
    weighted = sum(weight * one.item() for weight, one in zip(found.tolist(), each))
    if left > 10 * SAME or abs(weighted - whole.item()) > 10 * SAME * sizes:
        return None
    shares = found / found.sum()
    alike = bool((shares - 1 / len(each)).abs().max() <= SAME)  # by rounding alone they would differ
    return None if alike else [float(one) for one in shares]


def _gradient(loss: torch.Tensor, params: Sequence[nn.Parameter]) -> torch.Tensor:
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    there = [torch.zeros_like(param) if grad is None else grad for param, grad in zip(params, grads)]
    return torch.cat(
        [(torch.view_as_real(grad) if grad.is_complex() else grad).flatten().double() for grad in there]
    )


def laid_together(batches: Sequence[Any]) -> Any:
    """One batch of several, whose tensors are put one behind the other.

    >>> laid_together([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(5, 3)}])["x"].shape
    torch.Size([7, 3])

    Raises:
        TypeError: something in them is no tensor, and differs.
        RuntimeError: tensors have other sizes in a dimension behind the first.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {name: laid_together([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list | tuple):
        parts = [laid_together(of_place) for of_place in zip(*batches, strict=True)]
        return parts if isinstance(first, list) else tuple(parts)
    if any(batch != first for batch in batches):
        raise TypeError(f"a {type(first).__name__} cannot be laid together")
    return first
