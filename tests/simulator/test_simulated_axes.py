"""Accumulation, reductions in another dtype, groups and offload, on real ranks beside their schedules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import HeldBytes
from zero_ref.lab.model import GPT
from zero_ref.lab.strategies import trainable
from zero_ref.plan.calls import Call
from zero_ref.simulator.models import blocks, from_module, ready_order
from zero_ref.simulator.recipe import Recipe, recipe
from zero_ref.simulator.schedule import Schedule, ddp_buckets, schedule

pytestmark = pytest.mark.ranks


class Stack(nn.Module):
    """Blocks of odd sizes, one of them frozen in part, and a head that is no block.

    The first block gets an input with a gradient, as behind an embedding. Otherwise FSDP2 reduces it last.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [5, 7, 9, 3, 8]
        self.blocks = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
        self.blocks[1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(widths[0]))
        self.head = nn.Linear(widths[-1], 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": functools.partial(GPT, GPTConfig(layers=2, heads=2, width=32, context=16)),
    "gpt-16": functools.partial(GPT, GPTConfig(layers=1, heads=2, width=32, context=16, dtype="bfloat16")),
    "stack": Stack,
}


def loss_of(model: Any, module: nn.Module, number: int = 0) -> torch.Tensor:
    if isinstance(module, GPT):
        tokens = torch.arange(16).view(1, 16) + number
        return model(tokens, tokens)  # type: ignore[no-any-return]
    return model(torch.full((2, 5), 1.0 + number))  # type: ignore[no-any-return]


RUNS: list[Recipe] = [
    recipe(strategy, **axes)
    for strategy, several in {
        "ddp": [{"accumulation": 3}, {"reduce_dtype": "bfloat16"}, {"reduce_dtype": "float32"}],
        "zero": [
            {"accumulation": 2, "reduce_dtype": "float16"},
            {"accumulation": 2, "way": "interleaved"},
            {"accumulation": 2, "to_owners": True, "reduced_by": "reduce"},
        ],
        "zero-even": [
            {"accumulation": 2},
            {"reduce_dtype": "float32", "offload": "state"},
            {"to_owners": True},
            {"to_owners": True, "reduced_by": "reduce", "way": "interleaved"},
        ],
        "zero-2": [
            {"accumulation": 3},
            {"accumulation": 3, "no_sync": True},
            {"accumulation": 2, "way": "in_forward"},
            {"reduce_dtype": "float32"},
            {"reduce_dtype": "bfloat16", "shard_group": 2},
            {"offload": "state", "accumulation": 2, "shard_group": 1},
        ],
        "zero-3": [
            {"accumulation": 3},
            {"accumulation": 3, "no_sync": True},
            {"reduce_dtype": "float32"},
            {"reduce_dtype": "bfloat16", "accumulation": 2, "no_sync": True},
            {"shard_group": 2},
            {"shard_group": 2, "accumulation": 2, "reduce_dtype": "bfloat16"},
            {"shard_group": 2, "accumulation": 3, "all_reduce_last": True},
            {"shard_group": 1, "accumulation": 2, "all_reduce_last": True},
            {"shard_group": 1, "no_sync": True, "accumulation": 2},
        ],
    }.items()
    for axes in several
]


class Seen(NamedTuple):
    calls: list[Call]
    held: HeldBytes


def recorded(how: Recipe, make: Callable[[], nn.Module]) -> Seen:
    """On a rank: the second iteration, from which on DDP has its final buckets."""
    module = make()
    made = trainable(how, module)

    def iterate() -> None:
        with made.recording():
            made.optimizer.zero_grad()
            for number in range(how.accumulation):
                with made.passing(number == how.accumulation - 1):
                    loss_of(made.model, module, number).backward()
            made.optimizer.step()

    iterate()
    made.calls.clear()
    iterate()
    calls = list(made.calls)
    if isinstance(made.model, ShardedDataParallel):
        made.model.wait_for_parameters()
    return Seen(calls, made.held())


def all_recorded() -> dict[tuple[int, str], Seen]:
    return {(run, name): recorded(how, MODELS[name]) for run, how in enumerate(RUNS) for name in MODELS}


@functools.cache
def foreseen(run: int, name: str, world_size: int) -> Schedule:
    module = MODELS[name]()
    params = from_module(module)
    order = ready_order(module, lambda: loss_of(module, module).backward())
    return schedule(
        RUNS[run], params, world_size, ddp_buckets=ddp_buckets(params, order), blocks=blocks(params)
    )


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def of_ranks(request: pytest.FixtureRequest) -> list[dict[tuple[int, str], Seen]]:
    return ranks.run(all_recorded, request.param, timeout=240, backend="gloo")


@pytest.mark.parametrize("run", range(len(RUNS)), ids=lambda run: RUNS[run].title)
def test_calls_and_bytes_are_those_of_the_schedule(
    of_ranks: list[dict[tuple[int, str], Seen]], run: int
) -> None:
    for name in MODELS:
        plan = foreseen(run, name, len(of_ranks))
        for rank, each in enumerate(of_ranks):
            seen = each[run, name]
            assert seen.calls == list(plan.calls_of(rank)), (name, rank)
            assert seen.held.optimizer_state == plan.state_bytes[rank], (name, rank)
            assert seen.held.parameters == plan.parameter_bytes[rank], (name, rank)
            if RUNS[run].way != "interleaved":
                assert seen.held.gradients == plan.left_gradient_bytes[rank], (name, rank)
