"""An awkward model for the wrapper's tests, its data, and the average of all ranks' gradients, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from library.training import filled
from torch import nn

from zero_ref.plan.rules import equal_shares

Values = list[torch.Tensor]
SHARES = partial(equal_shares, range_numel=300)
RULES: list[Any] = ["sorted_greedy", "registration_greedy", "even", "balanced", SHARES]


class Tied(nn.Module):
    """A tied weight, a norm with buffers, a convolution in channels_last, and a layer that data may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.skipped, self.never = nn.Linear(16, 16), nn.Parameter(torch.ones(5))
        self.last = nn.Linear(16, 8)
        self.last.weight = nn.Parameter(self.last.weight.detach().clone())
        self.tied = self.first.weight
        filled(self)  # from a generator of its own, since virtual ranks are threads

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        y = self.norm(self.first(x))
        y = y if skip else torch.tanh(self.skipped(y))
        y = y + self.conv(y.view(-1, 1, 4, 4)).mean()
        return (self.last(y) @ self.tied.T).square().mean()


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def values_of(model: nn.Module) -> Values:
    return [value.detach().clone() for value in model.parameters()]


def averaged(gradients: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """The mean over ranks, each divided first, in the order of ranks; None where no rank has one."""
    mean: list[torch.Tensor | None] = []
    for of_ranks in zip(*gradients, strict=True):
        if all(grad is None for grad in of_ranks):
            mean.append(None)
            continue
        like = next(grad for grad in of_ranks if grad is not None)
        parts = [
            (torch.zeros_like(like) if grad is None else grad) * (1 / len(gradients)) for grad in of_ranks
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        mean.append(total)
    return mean


def gradients_of(model: nn.Module, losses: Callable[[nn.Module], Sequence[torch.Tensor]]) -> Any:
    for param in model.parameters():
        param.grad = None
    for loss in losses(model):
        loss.backward()
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]
