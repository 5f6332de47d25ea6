"""The model that the doctor trains, and its data: gradients that are exact, and different on each rank.

The loss is a sum of linear layers, each multiplied by its own targets. So the gradient of each parameter is a
sum of products of small integers, whatever values the parameters have, and the mean over ranks and batches is
an integer too: no order of summation rounds. What differs from the plain loop then differs because it was
computed otherwise.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from random import Random

import torch
from torch import nn

ROWS = 4
BOUND = 2
"""Inputs and targets are integers of at most this absolute value, before targets are multiplied."""
ODD = 513
"""Targets of float32 layers are multiplied by it. It has ten bits, so a gradient rounded to 16 bits shows."""
SHORT = ("second", "later")
"""The layers that are bfloat16 where dtypes are mixed; their sums have to be exact in eight bits."""

Batch = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By the name of a layer its inputs, (ROWS, in), and what its outputs are multiplied by, (ROWS, out)."""


@dataclass(frozen=True)
class Shape:
    """Which model a trial wants.

    Args:
        matrices_only: no biases, for optimizers that take matrices and nothing else.
        tied: one matrix is the weight of two layers.
        mixed: two layers are bfloat16.
        buffers: a buffer counts what each forward has seen, and the loss depends on it.
        quiet: what targets of each layer's first output, and of the whole layer `quiet`, are multiplied by.
            Adam hides the scale of a gradient, but not of one that is smaller than its eps.
    """

    matrices_only: bool = False
    tied: bool = False
    mixed: bool = False
    buffers: bool = False
    quiet: float = 1.0


def quiet_scale(eps: float | None) -> float:
    """A power of two, well below this eps; 1 if there is none.

    >>> quiet_scale(2.0**-20) == 2.0**-35
    True
    """
    return 2.0 ** (round(math.log2(eps)) - 15) if eps else 1.0


# Two have one shape, so that their state can be mixed up. Numbers that 2, 3 and 4 do not divide are among
# them: every rule has to cut or to leave a remainder.
LAYERS = {"first": (6, 10), "second": (9, 5), "third": (3, 16), "later": (7, 4), "quiet": (6, 10)}
TIED = {"embedding": (6, 6), "head": (6, 6)}


class Model(nn.Module):
    """Layers side by side, each with inputs and targets of its own. `model(batch)` is the loss.

    >>> model = Model(Shape(), seed=0)
    >>> model(batch_for(Shape(), seed=0, rank=1, number=0, divisor=2)).shape
    torch.Size([])

    Args:
        seed: of the values, multiples of 1/64 between -1 and 1.
    """

    seen: torch.Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        for name, (columns, rows) in layers_of(shape).items():
            self.add_module(name, nn.Linear(columns, rows, bias=not shape.matrices_only))
        if shape.tied:
            self.get_submodule("head").weight = self.get_submodule("embedding").weight
        if shape.mixed:
            for name in SHORT:
                self.get_submodule(name).bfloat16()
        self.counts = shape.buffers
        if shape.buffers:
            self.register_buffer("seen", torch.zeros(3))
        set_values(self, seed)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of the layers that the batch has data for; others are not used."""
        parts = []
        for name, (inputs, targets) in batch.items():
            layer = self.get_submodule(name)
            param = next(layer.parameters())
            inputs, targets = (one.to(param.device, param.dtype) for one in (inputs, targets))
            parts.append((layer(inputs) * targets).sum().float())
        if self.counts:
            parts.append(self.seen.sum() * ODD)
            with torch.no_grad():
                self.seen.add_(batch["first"][0][0, :3].to(self.seen.device))
        return torch.stack(parts).sum()


def layers_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Columns and rows of each layer's matrix."""
    return LAYERS | TIED if shape.tied else dict(LAYERS)


@torch.no_grad()
def set_values(module: nn.Module, seed: int) -> None:
    """Give all parameters multiples of 1/64 between -1 and 1, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.copy_(torch.randint(-64, 65, param.shape, generator=generator) / 64)


@functools.lru_cache(maxsize=1024)  # the plain loop is played many times
def batch_for(
    shape: Shape, seed: int, rank: int, number: int, divisor: int, without: tuple[str, ...] = ()
) -> Batch:
    """The data of one rank in one batch: integers, and targets that `divisor` divides.

    Args:
        number: of the batch, counted through the whole trial.
        divisor: the number of ranks.
        without: layers that are not used.
    """
    layers = layers_of(shape)
    return {
        name: drawn(
            f"{seed}.{rank}.{number}.{name}",
            (columns, rows),
            divisor if shape.mixed and name in SHORT else divisor * ODD,
            shape.quiet,
        )
        for name, (columns, rows) in layers.items()
        if name not in without
    }


def drawn(key: str, widths: tuple[int, int], factor: int, quiet: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one layer: integers, of which the first target is multiplied by `quiet`."""
    generator = torch.Generator().manual_seed(Random(key).getrandbits(40))
    inputs, targets = (
        torch.randint(-BOUND, BOUND + 1, (ROWS, width), generator=generator).float() for width in widths
    )
    targets[:, slice(None) if key.endswith(".quiet") else 0] *= quiet
    return inputs, targets * factor
