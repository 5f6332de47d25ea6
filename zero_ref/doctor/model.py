"""The model that the doctor trains, and its data: gradients whose every element has a size of its own.

The loss is the sum of all elements of all parameters, each multiplied by a number of the batch. So these
numbers are the gradient, whatever values the parameters have. Each element's number has eleven random bits
and a sign that differ by rank and micro-batch, and a power of two that differs by step. Half of the elements
begin far below the eps of the plain optimizer: there Adam's update shows the scale of a gradient, which it
hides elsewhere. They wake at different steps, so that every element is loud in the last one, and counts in a
norm.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random

import torch
from torch import nn

Factors = dict[str, torch.Tensor]
"""By the name of a layer's parameter, what each of its elements is multiplied by."""
Batch = dict[str, Factors]
"""By the name of a layer. A layer that is not in it is not used."""

BITS = 11
"""The significant bits of a factor: more than bfloat16 has, so that rounding to 16 bits shows."""
LOUD = (-3, 3)
"""The binary exponents between which loud elements lie."""
QUIET = (-6, -1)
"""The same for quiet ones, as multiples of the plain optimizer's eps."""
SHORT, SHORT_BITS = ("third", "tiny"), 5
"""The layers that are bfloat16 where dtypes are mixed, and the bits of their factors: sums of these are exact
there, so that none cancels but for its last bits. They are not those that trials freeze or leave unused,
since rounding to 16 bits hides much."""


@dataclass(frozen=True)
class Shape:
    """Which model a trial wants.

    Args:
        matrices_only: no biases, for optimizers that take matrices and nothing else.
        tied: one matrix is the weight of two layers.
        mixed: two layers are bfloat16.
        buffers: a buffer counts what each forward has seen, and the loss depends on it.
        eps: of the plain optimizer; 0 if it has none, and then no element is quiet.
    """

    matrices_only: bool = False
    tied: bool = False
    mixed: bool = False
    buffers: bool = False
    eps: float = 0.0


# Rows and columns of each layer's matrix. Two have one shape, so that their state can be mixed up; one bias
# is smaller than any number of ranks; shares of no number of ranks all end where a matrix does.
LAYERS = {"first": (10, 6), "second": (5, 9), "third": (16, 3), "later": (4, 7)}
LAYERS |= {"tiny": (1, 5), "last": (10, 6)}
TIED = {"embedding": (6, 6), "head": (6, 6)}


class Layer(nn.Module):
    """A matrix and perhaps a vector, whose elements are multiplied by factors and added up."""

    def __init__(self, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, factors: Factors) -> torch.Tensor:
        """The sum of all products; a factor is brought to its parameter's dtype and device."""
        params = {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        products = [
            (param * factors[name].to(param.device, param.dtype)).sum() for name, param in params.items()
        ]
        return torch.stack(products).sum().float()


class Model(nn.Module):
    """Layers side by side. `model(batch)` is the loss.

    >>> model = Model(Shape(), seed=0)
    >>> model(batch_for(Shape(), 0, "plain", step=0, steps=5, rank=1, micro=0)).shape
    torch.Size([])

    Args:
        seed: of the values, multiples of 1/64 between -1 and 1.
    """

    seen: torch.Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        for name, (rows, columns) in layers_of(shape).items():
            self.add_module(name, Layer(rows, columns, bias=not shape.matrices_only))
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
        """The loss of the layers that the batch has factors for; others are not used."""
        parts = [self.get_submodule(name)(factors) for name, factors in batch.items()]
        if self.counts:
            parts.append(self.seen.sum())
            with torch.no_grad():
                # Never 0 in sum, so that counts that were lost show.
                self.seen.add_(batch["first"]["weight"][0, :3].to(self.seen.device).sign() + 2)
        return torch.stack(parts).sum()


def layers_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Rows and columns of each layer's matrix."""
    return LAYERS | TIED if shape.tied else dict(LAYERS)


@torch.no_grad()
def set_values(module: nn.Module, seed: int) -> None:
    """Give all parameters multiples of 1/64 between -1 and 1, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.copy_(torch.randint(-64, 65, param.shape, generator=generator) / 64)


@functools.lru_cache(maxsize=4096)  # the plain loop is played several times
def batch_for(
    shape: Shape,
    seed: int,
    trial: str,
    step: int,
    steps: int,
    rank: int,
    micro: int,
    without: tuple[str, ...] = (),
) -> Batch:
    """The data of one rank in one micro-batch of a step.

    Args:
        trial: its name: in another trial other elements are quiet.
        steps: the number of steps of the trial.
        without: layers that are not used.
    """
    return {
        name: factors_for(
            shape,
            f"{seed}.{trial}.{name}",
            rows_columns,
            step,
            steps,
            rank,
            micro,
            SHORT_BITS if shape.mixed and name in SHORT else BITS,
        )
        for name, rows_columns in layers_of(shape).items()
        if name not in without
    }


def factors_for(
    shape: Shape,
    key: str,
    rows_columns: tuple[int, int],
    step: int,
    steps: int,
    rank: int,
    micro: int,
    bits: int = BITS,
) -> Factors:
    """The factors of one layer."""
    sizes = {"weight": rows_columns} | ({} if shape.matrices_only else {"bias": rows_columns[:1]})
    return {
        name: scale(shape, f"{key}.{name}", size, step, steps)
        * signed(f"{key}.{name}.{step}.{rank}.{micro}", size, bits)
        for name, size in sizes.items()
    }


@functools.lru_cache(maxsize=4096)
def scale(shape: Shape, key: str, size: tuple[int, ...], step: int, steps: int) -> torch.Tensor:
    """The power of two of each element in a step, the same on all ranks and in all micro-batches."""
    wakes = torch.randint(-steps + 1, steps, size, generator=generator_of(key)).clamp(min=0)
    generator = generator_of(f"{key}.{step}")
    loud = 2.0 ** torch.randint(LOUD[0], LOUD[1] + 1, size, generator=generator)
    quiet = shape.eps * 2.0 ** torch.randint(QUIET[0], QUIET[1] + 1, size, generator=generator)
    return torch.where((wakes > step) & (shape.eps > 0), quiet, loud)


def signed(key: str, size: tuple[int, ...], bits: int) -> torch.Tensor:
    """Numbers between 1 and 2 of so many bits, with a random sign."""
    generator = generator_of(key)
    sizes = torch.randint(2 ** (bits - 1), 2**bits, size, generator=generator) / 2.0 ** (bits - 1)
    return sizes * (2 * torch.randint(2, size, generator=generator) - 1)


def generator_of(key: str) -> torch.Generator:
    """A generator that is seeded by a text."""
    return torch.Generator().manual_seed(Random(key).getrandbits(40))
