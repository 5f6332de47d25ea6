"""What an optimizer's updates depend on is found by trying it out: other parameters, other elements."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn, optim
from training import filled

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard import coupling
from zero_ref.shard.checks import ELEMENTWISE
from zero_ref.shard.coupling import couples_parameters, updates_elementwise


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


class SkipsAll(Each):
    """Leaves out an update if one gradient of all is not finite."""

    def factor(self, grads: list[torch.Tensor]) -> Any:
        return 1.0 if all(bool(grad.isfinite().all()) for grad in grads) else 0.0


class SkipsOne(Each):
    """Leaves out the update of a parameter whose own gradient is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.isfinite().all():
                    param.sub_(param.grad)


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


class WithClosure(Each):
    """Makes a plain update, and cannot step without a closure."""

    def before_closure(self, params: list[torch.Tensor]) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        if self.param_groups[0]["together"]:
            self.before_closure(params)
        with torch.enable_grad():
            closure()
        for param, old in zip(params, before, strict=True):
            param.copy_(old - 0.1 * param.grad)


class Sharpness(WithClosure):
    """As SAM, but by the norm of each tensor alone: what couples them is that all move before the closure."""

    def before_closure(self, params: list[torch.Tensor]) -> None:
        for param in params:
            assert param.grad is not None
            param += param.grad / param.grad.norm()


COUPLED = [ByGlobalNorm, ByMeanOfSquares, Estimating, ByNumberOfTensors, Sharpness, SkipsAll]
APART = [Each, SkipsOne, PerTensor, Noisy, OnlyVectors, WithClosure]


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
def test_of_torchs_optimizers_only_lbfgs_is_one(optimizer_class: Any) -> None:
    assert couples_parameters(optimizer_class, {}, {}) == (optimizer_class is optim.LBFGS)


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


# ------------------------------------------------------------------------------------- element by element


class ElementOrNot(optim.Optimizer):
    """Momentum, after a change of the gradient that is elementwise or not."""

    def __init__(self, params: Any, lr: float = 0.1, settings: Any = ()) -> None:
        super().__init__(params, {"lr": lr})

    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        return grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                grad = self.changed(param.grad, param, state["step"])
                state["momentum"] = grad + 0.9 * state.get("momentum", torch.zeros_like(param))
                param -= group["lr"] * state["momentum"]


class Clamped(ElementOrNot):
    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        return grad.clamp(-1, 1).sign() if step % 5 == 0 else grad.clamp(-1, 1)


class LikeLookahead(ElementOrNot):
    """Goes back half of the way in every fifth update, which each element does by itself."""

    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        slow = self.state[param].setdefault("slow", param.clone())
        if step % 5 == 0:
            slow.lerp_(param, 0.5)
            param.copy_(slow)
        return grad


class LikeLamb(ElementOrNot):
    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        return grad * (param.norm() / grad.norm())


class LateLamb(LikeLamb):
    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        return super().changed(grad, param, step) if step == 26 else grad


class CentralizesConvolutions(ElementOrNot):
    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        return grad - grad.mean((1, 2, 3), keepdim=True) if grad.ndim == 4 else grad


class DecaysMatrices(ElementOrNot):
    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        return grad + 0.1 * param if param.ndim > 1 else grad


class ScalesBlocks(ElementOrNot):
    """As low-bit state: in blocks of 128 elements, and not in small tensors."""

    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        if grad.numel() < 4096 or grad.numel() % 128:
            return grad
        blocks = grad.view(-1, 128)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        return ((blocks / scale).round() * scale).view(grad.shape)


class Jittering(ElementOrNot):
    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        return grad + torch.randn_like(grad)


class KeepsANorm(ElementOrNot):
    """Its updates are elementwise, and its state could not be put together from that of pieces."""

    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        self.state[param]["norm"] = grad.norm()
        return grad


class KeepsTwoRows(ElementOrNot):
    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        self.state[param]["rows"] = torch.stack([grad, grad])
        return grad


class KeepsItsLastSteps(ElementOrNot):
    """In a list, which state of slices must not have."""

    def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
        self.state[param]["last"] = [step - 1, step]
        return grad


CUTTABLE = [ElementOrNot, Clamped, LikeLookahead]
NOT_CUTTABLE = [
    LikeLamb, LateLamb, CentralizesConvolutions, DecaysMatrices, ScalesBlocks, Jittering, KeepsANorm,
    KeepsTwoRows, KeepsItsLastSteps, OnlyVectors, ByGlobalNorm, Estimating, WithClosure,
]  # fmt: skip


@pytest.mark.parametrize("optimizer_class", [*CUTTABLE, *NOT_CUTTABLE])
def test_whether_a_cut_changes_anything_is_found(optimizer_class: Any) -> None:
    assert updates_elementwise(optimizer_class, {}, {"lr": 0.1}) == (optimizer_class in CUTTABLE)


@pytest.mark.parametrize(
    "optimizer_class",
    [cls for cls in vars(optim).values() if isinstance(cls, type) and issubclass(cls, optim.Optimizer)],
)
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_the_list_of_torchs_elementwise_optimizers_is_what_the_trial_finds(
    optimizer_class: Any, options: dict[str, bool]
) -> None:
    takes = options.keys() <= inspect.signature(optimizer_class).parameters.keys()
    assert updates_elementwise(optimizer_class, {}, options) == (optimizer_class in ELEMENTWISE and takes)


def test_the_second_trial_is_made_once_for_a_class_and_its_options() -> None:
    made = 0

    class Counted(ElementOrNot):
        def __init__(self, params: Any, lr: float = 0.1, settings: Any = ()) -> None:
            nonlocal made
            made += 1
            super().__init__(params, lr)

    def trials(*args: Any) -> bool:
        nonlocal made
        made = 0
        assert updates_elementwise(Counted, *args)
        return made > 6  # the other trial makes a few as well

    assert trials({"lr": 0.1}, {})
    assert not trials({"lr": 0.1}, {})
    assert trials({"lr": 0.2}, {})
    assert trials({}, {"settings": [1]}), "a list is no key"
    assert trials({}, {"settings": [1]})


def test_the_second_trial_too_draws_none_of_the_users_random_numbers() -> None:
    before = torch.get_rng_state()
    assert not updates_elementwise(Jittering, {}, {"lr": 0.3})
    assert torch.equal(torch.get_rng_state(), before)


def test_large_tensors_are_not_tried_where_a_small_one_shows_enough() -> None:
    numels = set()

    class Expensive(LikeLamb):
        def changed(self, grad: torch.Tensor, param: torch.Tensor, step: int) -> torch.Tensor:
            numels.add(param.numel())
            return super().changed(grad, param, step)

    assert not updates_elementwise(Expensive, {}, {})
    assert max(numels) == 384


def test_pieces_divide_blocks_of_128_and_are_not_small() -> None:
    for shape, numels in coupling.CUT.items():
        assert sum(numels) == math.prod(shape) <= 2**15 - 64 * coupling.UPDATES
        starts = [sum(numels[:index]) for index in range(1, len(numels))]
        assert all(start % 128 == 64 for start in starts)
        assert min(numels) >= 4096
