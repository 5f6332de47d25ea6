"""The first page of the package computes what all of it computes."""

from __future__ import annotations

import inspect
import random
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from library.training import assert_state_dicts_equal, fill_gradients
from torch import optim

from zero_ref.lab.ranks import run
from zero_ref.minimal import MinimalZero
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.ranks

MODELS = 6
OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, float]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.AdamW, {"lr": 1e-2}),
    (optim.Adafactor, {"lr": 1e-2}),
]


def random_parameters(seed: int) -> list[torch.nn.Parameter]:
    """One to eight parameters of up to two dimensions, sometimes fewer than there are ranks."""
    rng = random.Random(seed)
    shapes = [[rng.randint(1, 40) for _ in range(rng.randint(0, 2))] for _ in range(rng.randint(1, 8))]
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train_both(seed: int, optimizer_class: type[optim.Optimizer], options: dict[str, float]) -> None:
    """Three steps of each, on the same averaged gradients: equal parameters, which moved, and equal state."""
    params, complete_params = random_parameters(seed), random_parameters(seed)
    minimal = MinimalZero(params, optimizer_class, **options)
    complete = ZeroRedundancyOptimizer(complete_params, optimizer_class, **options)
    assert tuple(minimal.owners) == complete.partition.owner_of_param
    for step in range(3):
        for of_one, optimizer in ((params, minimal), (complete_params, complete)):
            fill_gradients(of_one, step, world_size=2)
            optimizer.step()
        for number, (ours, theirs) in enumerate(zip(params, complete_params, strict=True)):
            label = f"seed {seed}, {optimizer_class.__name__}, step {step}, parameter {number}"
            assert torch.equal(ours, theirs), label
    start = random_parameters(seed)
    assert not any(torch.equal(before, after) for before, after in zip(start, params, strict=True))
    complete.consolidate_state_dict(to="all")
    assert_state_dicts_equal(complete.state_dict(), minimal.state_dict())


def train_all() -> int:
    for seed in range(MODELS):
        for optimizer_class, options in OPTIMIZERS:
            train_both(seed, optimizer_class, options)
    return dist.get_world_size()


def test_the_minimal_optimizer_equals_the_complete_one() -> None:
    assert run(train_all, 3, timeout=500) == [3, 3, 3]


def test_the_readme_shows_its_step() -> None:
    """Without the docstring: the README says in its own words what the step does."""
    source = re.sub(r' *""".*?"""\n', "", inspect.getsource(MinimalZero.step), flags=re.DOTALL)
    assert textwrap.dedent(source) in README.read_text(encoding="utf-8")
