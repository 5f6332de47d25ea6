"""An optimizer whose updates depend on its other parameters is found by trying it out, and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from training import filled

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.coupling import couples_parameters
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class Each(optim.Optimizer):
    """Scales each gradient by a number that `factor` computes from all of them."""

    def __init__(self, params: Any, lr: float = 0.1, together: bool = True) -> None:
        super().__init__(params, {"lr": lr, "together": together})

    def factor(self, grads: list[torch.Tensor]) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params if param.grad is not None]
            factor = self.factor(grads) if group["together"] else 1.0
            for param, grad in zip(params, grads, strict=True):
                param.sub_(grad * (group["lr"] * factor))


class ByGlobalNorm(Each):
    def factor(self, grads: list[torch.Tensor]) -> Any:
        return 1 / torch.stack([grad.norm() for grad in grads]).norm()


class ByMeanOfSquares(Each):
    def factor(self, grads: list[torch.Tensor]) -> Any:
        return sum(grad.square().sum() for grad in grads) / sum(grad.numel() for grad in grads)


class Estimating(Each):
    """Keeps an estimate in its groups, which changes nothing in the first updates."""

    def factor(self, grads: list[torch.Tensor]) -> Any:
        for group in self.param_groups:
            group["d"] = float(sum(grad.abs().sum() for grad in grads))
        return 1.0


class ByNumberOfTensors(Each):
    def factor(self, grads: list[torch.Tensor]) -> Any:
        return 1 / len(grads)


class PerTensor(Each):
    """As LARS: each by a norm of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * (group["lr"] * param.norm() / param.grad.norm()))


class Noisy(Each):
    def factor(self, grads: list[torch.Tensor]) -> Any:
        return torch.rand(())


class OnlyVectors(Each):
    def factor(self, grads: list[torch.Tensor]) -> Any:
        raise ValueError("it takes vectors")


COUPLED = [ByGlobalNorm, ByMeanOfSquares, Estimating, ByNumberOfTensors]
APART = [Each, PerTensor, Noisy, OnlyVectors]


@pytest.mark.parametrize("optimizer_class", COUPLED)
def test_what_is_computed_from_all_parameters_is_found(optimizer_class: Any) -> None:
    assert couples_parameters(optimizer_class, {}, {"lr": 0.1})
    assert couples_parameters(optimizer_class, {"lr": 0.1}, {})
    assert not couples_parameters(optimizer_class, {"together": False}, {}), "options decide"
    assert not couples_parameters(optimizer_class, {}, {"together": False})


@pytest.mark.parametrize("optimizer_class", APART)
def test_what_is_computed_for_each_tensor_or_cannot_be_tried_passes(optimizer_class: Any) -> None:
    assert not couples_parameters(optimizer_class, {}, {"lr": 0.1})


@pytest.mark.parametrize(
    "optimizer_class",
    [cls for cls in vars(optim).values() if isinstance(cls, type) and issubclass(cls, optim.Optimizer)],
)
def test_no_optimizer_of_torchs_is_taken_for_one(optimizer_class: Any) -> None:
    assert not couples_parameters(optimizer_class, {}, {})


@pytest.mark.parametrize("optimizer_class", [*COUPLED, *APART])
def test_the_constructor_refuses_it_on_all_ranks(optimizer_class: Any) -> None:
    def on_rank(comm: Collectives) -> None:
        def construct(**options: Any) -> None:
            ZeroRedundancyOptimizer(filled(nn.Linear(3, 3)).parameters(), optimizer_class, comm, **options)

        if optimizer_class in COUPLED:
            with pytest.raises(ValueError, match=f"{optimizer_class.__name__} moved a tensor otherwise"):
                construct()
            construct(together=False)
        else:
            construct()

    virtual.run(on_rank, 2)


def test_one_that_says_it_is_elementwise_is_not_tried() -> None:
    class Claiming(ByGlobalNorm):
        elementwise = True

    virtual.run(
        lambda comm: ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], Claiming, comm) and None, 2
    )


def test_trying_out_draws_none_of_the_users_random_numbers() -> None:
    before = torch.get_rng_state()
    assert not couples_parameters(Noisy, {}, {})
    assert torch.equal(torch.get_rng_state(), before)
