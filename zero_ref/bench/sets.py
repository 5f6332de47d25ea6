"""The models that contenders train: one of a language model's shapes, one of very many small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.bench.results import SuiteResult, Taken
from zero_ref.bench.rounds import total_numel
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT, batch, language_reference

GPT_SIZE = GPTConfig(layers=12, heads=8, width=464, context=256)


class Set(NamedTuple):
    """A model and its data.

    Args:
        make: a new model, the same on every rank.
        batches: that many inputs for one rank, different from rank to rank: what the model is called with.
        loss: of what the model returned, a tensor without dimensions.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[int, int], list[tuple[torch.Tensor, ...]]]
    loss: Callable[[torch.Tensor], torch.Tensor]


def chain(widths: Sequence[int]) -> nn.Module:
    """Linear layers one after the other.

    Two tensors a layer, so that their number and their size can be chosen one without the other.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))


def _passages(rank: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    text = language_reference().training
    return [
        tuple(part.to(ranks.device()) for part in batch(text, GPT_SIZE, 1, seed=0, step=step, rank=rank))
        for step in range(count)
    ]


def _noise(rank: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(16, 64, generator=generator).to(ranks.device()),) for _ in range(count)]


SETS: dict[str, Set] = {
    "gpt": Set(lambda: GPT(GPT_SIZE).to(ranks.device()), _passages, lambda loss: loss),
    "tiny": Set(lambda: chain([64] * 1001).to(ranks.device()), _noise, lambda out: out.square().mean()),
}
"""gpt: 148 tensors, 31.3 million parameters, one passage of 256 bytes a rank. tiny: 2,000 and 4.2 million."""


def give_gradients(params: Sequence[torch.Tensor], seed: int = 0) -> None:
    """Set `.grad` of each parameter to noise: the same on all ranks if `seed` is."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


def result(suite: str, set_name: str, taken: dict[str, Taken]) -> SuiteResult:
    """What was taken, and of how much."""
    params = list(SETS[set_name].make().parameters())
    return SuiteResult(suite, set_name, dist.get_world_size(), len(params), total_numel(params), taken)
