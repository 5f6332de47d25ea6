"""Muon for matrices, AdamW for the rest: two sharded optimizers under one plan equal two plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.lab.meter import state_bytes
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.choice import loads_under, plan_partition
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.plan.rules import from_lists, newton_schulz_operations
from zero_ref.simulator.ledger import state_bytes_of_rank
from zero_ref.simulator.models import matrices_whole, shapes, specs

OTHERS = [(32,), (301,), (), (500, 4)]
MATRICES = [(64, 32), (8, 48), (16, 16), (100, 3)]
PARAMS = [
    ParamSpec(torch.Size(shape).numel(), group=group, shape=shape, whole=group == 1)
    for group, listed in enumerate((OTHERS, MATRICES))
    for shape in listed
]
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {"lr": 1e-3, "betas": (0.5, 0.9), "weight_decay": 0.1}),
    (optim.Muon, {"lr": 0.02, "ns_steps": 3}),
]
HALVES = [(0, len(OTHERS)), (len(OTHERS), len(PARAMS))]
RULES = ["sorted_greedy", "registration_greedy", "even", "balanced"]
Values = list[torch.Tensor]


def start() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(param.shape, generator=generator)) for param in PARAMS]


def train(params: list[nn.Parameter], optimizers: list[Any], steps: range) -> Values:
    for step in steps:
        generator = torch.Generator().manual_seed(step + 1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [param.detach().clone() for param in params]


def plain() -> Values:
    params = start()
    made = [of_class(params[slice(*half)], **options) for half, (of_class, options) in zip(HALVES, CLASSES)]
    return train(params, made, range(6))


def part(plan: Partition, first: int, stop: int) -> Partition:
    """The owners of the parameters from number `first` on, numbered from 0."""
    of_ranks = [
        [own._replace(param=own.param - first) for own in of_rank if first <= own.param < stop]
        for of_rank in plan.slices_of_rank
    ]
    return from_lists(plan.numels[first:stop], of_ranks)


def sharded(params: list[nn.Parameter], comm: Collectives, rule: str) -> list[ZeroRedundancyOptimizer]:
    plan = plan_partition(rule, PARAMS, comm.world_size)
    return [
        ZeroRedundancyOptimizer(params[slice(*half)], of_class, comm, partition=part(plan, *half), **options)
        for half, (of_class, options) in zip(HALVES, CLASSES)
    ]


@pytest.mark.parametrize("rule", RULES)
def test_values_equal_the_plain_ones_and_state_the_simulators(rule: str) -> None:
    world_size = 4

    def on_rank(comm: Collectives) -> tuple[Values, int]:
        params = start()
        optimizers = sharded(params, comm, rule)
        return train(params, optimizers, range(6)), sum(map(state_bytes, optimizers))

    plan, expected = plan_partition(rule, PARAMS, world_size), plain()
    assert plan.is_whole == (rule not in ("even", "balanced"))
    predicted = state_bytes_of_rank(plan, PARAMS, "Muon+AdamW")
    for rank, (values, nbytes) in enumerate(virtual.run(on_rank, world_size, timeout=180)):
        assert all(map(torch.equal, values, expected))
        assert nbytes == predicted[rank] > 0


def test_each_is_saved_into_its_own_folder_and_loaded_at_another_world_size(tmp_path: Path) -> None:
    def save(comm: Collectives) -> None:
        params = start()
        optimizers = sharded(params, comm, "sorted_greedy")
        train(params, optimizers, range(3))
        for optimizer, name in zip(optimizers, ("adamw", "muon")):
            save_sharded(optimizer, tmp_path / name, notes={"update": 3})

    def load(comm: Collectives) -> Values:
        params = start()
        optimizers = sharded(params, comm, "balanced")
        notes = [load_sharded(one, tmp_path / name) for one, name in zip(optimizers, ("adamw", "muon"))]
        assert notes == [{"update": 3}] * 2
        return train(params, optimizers, range(3, 6))

    virtual.run(save, 4, timeout=180)
    for values in virtual.run(load, 3, timeout=180):
        assert all(map(torch.equal, values, plain()))


@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 64), ("gpt2-medium", 8), ("gpt2-xl", 64)])
def test_operations_of_muon_are_balanced(model: str, ranks: int) -> None:
    """Under 1.05 times the lower bound.

    That is the mean, or the largest matrix, or the two smallest of one matrix more than there are ranks: two
    of them have the same owner.
    """
    params = matrices_whole(specs(shapes(model)))
    operations = loads_under("balanced", plan_partition("balanced", params, ranks), params)
    costs = sorted((newton_schulz_operations(param) for param in params if param.whole), reverse=True)
    bound = max(sum(operations) / ranks, costs[0], sum(costs[ranks - 1 : ranks + 1]))
    assert max(operations) < 1.05 * bound


def test_elements_are_level_beside_whole_matrices() -> None:
    params = matrices_whole(specs(shapes("gpt2")))
    loads = plan_partition("balanced", params, 8).loads
    assert max(loads) - min(loads) <= 64
