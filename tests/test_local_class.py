"""Local optimizers of a class that is not torch's: what they keep, draw or couple, and are refused for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.rules import even
from zero_ref.state.sharded import save_sharded

SHAPES = [(64, 32), (8, 48), (16, 16), (100, 3), (32,), (301,), (), (500, 4)]
Values = list[torch.Tensor]


def start() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def fill(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(params: list[nn.Parameter], optimizer: Any, steps: range) -> Values:
    for step in steps:
        fill(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


class Noisy(optim.SGD):
    """Draws random numbers, before its closure or in its update."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(())
        return super().step(closure)


class Averaging(optim.SGD):
    """Keeps something that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": 1.0}


@pytest.mark.filterwarnings("ignore:.* can be trained, but not saved:UserWarning")
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_class_that_draws_random_numbers_is_told_of(with_closure: bool) -> None:
    def on_rank(comm: Collectives, optimizer_class: Any) -> None:
        params = start()
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, comm, lr=0.1)
        fill(params, 0)
        if with_closure:
            optimizer.step(lambda: torch.rand(()))  # which a user's closure may
        else:
            optimizer.step()

    with pytest.warns(UserWarning, match="Noisy drew random numbers in its step"):
        virtual.run(on_rank, 1, Noisy, timeout=180)
    virtual.run(on_rank, 1, Averaging, timeout=180)  # a warning would be an error


@pytest.mark.filterwarnings("ignore:.* can be trained, but not saved:UserWarning")
def test_state_beside_that_of_parameters_is_refused_where_it_would_be_lost(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> None:
        params = start()
        optimizer = ZeroRedundancyOptimizer(params, Averaging, comm, lr=0.1)
        values = train(params, optimizer, range(2))
        lost: list[Any] = [
            optimizer.consolidate_state_dict,
            lambda: save_sharded(optimizer, tmp_path),
        ]
        for action in lost:
            with pytest.raises(TypeError, match=r"Averaging keeps \['average'\] in its state_dict"):
                action()
        assert all(map(torch.equal, values, params))
        train(params, optimizer, range(2, 3))

    virtual.run(on_rank, 2, timeout=180)


# --------------------------------------------------------------------------------- users' odd, legal programs


class Coupled(optim.SGD):
    """Scales by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1, coupled: bool = True) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("coupled", coupled)

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups if group["coupled"] for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None] or [torch.ones(())]).norm()
        for param in params:
            if param.grad is not None:
                param.grad = param.grad / norm
        return super().step(closure)


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_a_class_that_couples_parameters_is_refused_in_any_group_at_any_time(lr: float) -> None:
    def on_rank(comm: Collectives) -> None:
        one, two, three, four = start()[:4]
        groups = [{"params": [one], "coupled": False}, {"params": [two], "coupled": True}]
        with pytest.raises((ValueError, RuntimeError), match="beside another one"):
            ZeroRedundancyOptimizer(groups, Coupled, comm, lr=lr)
        optimizer = ZeroRedundancyOptimizer([three], Coupled, comm, lr=lr, coupled=False)
        with pytest.raises((ValueError, RuntimeError), match="beside another one"):
            optimizer.add_param_group({"params": [four], "coupled": True})

    virtual.run(on_rank, 2, timeout=180)


class Lamb(optim.SGD):
    """Scales each update by the norm of its tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * float(param.norm()))


def test_a_warm_up_from_zero_does_not_hide_that_shapes_are_used() -> None:
    def on_rank(comm: Collectives) -> bool:
        params = [nn.Parameter(torch.ones(200, 100))]
        return ZeroRedundancyOptimizer(params, Lamb, comm, partition="even", lr=0.0).partition.is_whole

    assert virtual.run(on_rank, 2, timeout=180) == [True, True]


def test_an_error_names_the_class_whose_parameters_are_cut() -> None:
    def on_rank(comm: Collectives) -> None:
        first, second, third = start()[:3]
        optimizer = ZeroRedundancyOptimizer([first, second], optim.Adafactor, comm, partition=cut_later)
        with pytest.raises(ValueError, match="Adafactor may look at a parameter's shape"):
            optimizer.add_param_group({"params": [third]})

    def cut_later(numels: Sequence[int], world_size: int) -> Any:
        return [[0], [1]] if len(numels) == 2 else even(numels, world_size)

    virtual.run(on_rank, 2, timeout=180)
