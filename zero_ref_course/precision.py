"""Graders of the chapter on precision: why do small updates vanish?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from zero_ref.simulator.ledger import ledger
from zero_ref_course import Answer, ExerciseFailed, exercise, shown
from zero_ref_course.predictions import prediction

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# ------------------------------------------------------------------------------------ which updates are lost?

WEIGHTS: list[tuple[float, torch.dtype]] = [
    (1.0, BF16),
    (1.5, BF16),
    (3.0, BF16),
    (100.0, BF16),
    (0.0201416015625, BF16),
    (2.0**-100, BF16),
    (-1.5, BF16),
    (-0.0625, BF16),
    (1.0, F16),
    (1.25, F16),
    (-1000.0, F16),
]
"""Weights, each a value of its dtype: powers of two and others, of either sign, in both dtypes."""


@exercise("precision.lost_below")
def lost_below(answer: Answer) -> str:
    """Check half the distance to the next value against torch's rounding."""
    for weight, dtype in WEIGHTS + answer.drawn(_drawn_weight):
        right = _half_gap(weight, dtype)
        returned = _number(answer, answer(weight, dtype))
        if not math.isclose(returned, right, rel_tol=1e-6):
            raise AssertionError(
                f"{answer.name}({weight:g}, {dtype}) returns {returned:g}. The next value beyond {weight:g} "
                f"is {weight + math.copysign(2 * right, weight):.8g}, so updates below {right:g} are lost. "
                + _mistake_in_gap(weight, dtype, returned / right)
            )
    return f"the half gap of {len(WEIGHTS)} weights of bfloat16 and float16"


def _drawn_weight(rng: random.Random) -> tuple[float, torch.dtype]:
    dtype = rng.choice((BF16, F16))
    return torch.tensor(rng.choice((1, -1)) * 2 ** rng.uniform(-8, 8), dtype=dtype).item(), dtype


def _half_gap(weight: float, dtype: torch.dtype) -> float:
    """Half the distance from a value to the next one further from zero."""
    bits = torch.tensor(weight, dtype=dtype).view(torch.int16) + 1
    return abs(bits.view(dtype).item() - weight) / 2


def _mistake_in_gap(weight: float, dtype: torch.dtype, factor: float) -> str:
    """Describe the mistake; `factor` is the returned gap over the right one."""
    right, eps = _half_gap(weight, dtype), torch.finfo(dtype).eps

    def is_(number: float) -> bool:
        return math.isclose(factor * right, number, rel_tol=1e-6)

    if factor < 0:
        return "A weight below zero has the same gaps as its absolute value."
    if math.isclose(factor, 2) and math.frexp(weight)[0] == 0.5:
        return "That is the whole gap. Beyond its middle an update is rounded to the next value, not back."
    if math.isclose(factor, 2):
        return "That is the half gap beyond the next power of two. The power at or below the weight decides."
    if is_(abs(weight) * eps / 2) or is_(abs(weight) * eps):
        return (
            "The gap does not grow with each weight: it is the same from one power of two up to the next, "
            "and then doubles."
        )
    if is_(eps / 2) or is_(eps):
        return "That is the gap at 1. Other weights have other gaps."
    if dtype != BF16 and is_(right * torch.finfo(BF16).eps / eps):
        return "These are bfloat16's gaps. `torch.finfo(dtype).eps` is the gap at 1 in any dtype."
    if math.isclose(factor, 4):
        return "That is two gaps. Half of one is what an update has to reach."
    if factor > 0 and math.isclose(math.log2(factor), round(math.log2(factor)), abs_tol=1e-6):
        return (
            f"That is {factor:g} times half the gap. Look at which power of two is taken: it is the one at "
            "or below the weight, times eps, and of that the half."
        )
    return "From the power of two at or below the weight, the next value is that power times the eps away."


# ----------------------------------------------------------------------------------------- a step on a master

STEPS = 40

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD, lr=0.001": lambda params: SGD(params, lr=1e-3),
    "SGD, lr=0.01, momentum=0.9": lambda params: SGD(params, lr=1e-2, momentum=0.9),
    "AdamW, lr=0.0001": lambda params: AdamW(params, lr=1e-4),
}
"""The optimizers that step the master, by name."""


@exercise("precision.master_step", may_return_none=True)
def master_step(answer: Answer) -> str:
    """Check steps of a bfloat16 weight through its master against the same steps in float32."""
    for name, make in OPTIMIZERS.items():
        _check_steps(answer, name, make)
    _check_no_gradient(answer)
    return f"{STEPS} steps with each of {len(OPTIMIZERS)} optimizers, equal to those of the master"


def _check_steps(answer: Answer, name: str, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    generator = torch.Generator().manual_seed(answer.seed)
    values = 1 + torch.rand(64, generator=generator)  # not of bfloat16: as after some steps
    param, master, exact = (nn.Parameter(values.to(dtype, copy=True)) for dtype in (BF16, F32, F32))
    optimizer, plain = make([master]), make([exact])
    for step in range(1, STEPS + 1):
        param.grad = (0.5 + torch.rand(64, generator=generator)).to(BF16)
        exact.grad = param.grad.float()
        plain.step()
        before = param.detach().clone(), master.detach().clone()
        answer(param, master, optimizer)
        where = f"after step {step} with {name}, "
        assert param.dtype == BF16, (
            f"{where}the parameter is {param.dtype}. The model keeps its 16 bits: copy the values into it, "
            "which rounds them, and do not replace its tensor."
        )
        assert master.dtype == F32, f"{where}the master is {master.dtype}. It keeps its 32 bits."
        if not torch.equal(master, exact):
            raise AssertionError(where + _mistake_in_master(param, master, exact, *before))
        if not torch.equal(param, exact.to(BF16)):
            hint = "Round the master once, after the optimizer has stepped it."
            if torch.equal(param, before[0]):
                hint = "It has not changed in this step: write the master's new values into `param` itself."
            raise AssertionError(f"{where}the parameter is not its master, rounded to the nearest. {hint}")


def _mistake_in_master(
    param: torch.Tensor,
    master: torch.Tensor,
    exact: torch.Tensor,
    old: torch.Tensor,
    old_master: torch.Tensor,
) -> str:
    if torch.equal(master, old_master):
        return (
            "the master has not changed. The optimizer steps what has a gradient in `.grad`: give the master "
            "the parameter's, in float32."
        )
    if torch.equal(master, master.to(BF16).float()):
        return (
            "the master has only values of bfloat16, so small updates are lost on it as on the parameter. "
            "The parameter gets the rounded values; the master keeps its own."
        )
    if torch.allclose(exact - master, old_master - old.float(), rtol=0, atol=1e-5):  # float32 near 1
        return (
            "the master has lost what earlier steps gave it: it was made from the parameter again, which was "
            "rounded. Step it from where it was."
        )
    return (
        "the master is not what the same steps in float32 give. Each step has one gradient, that of the "
        "parameter; gradients of earlier steps do not add up, and the optimizer steps once."
    )


def _check_no_gradient(answer: Answer) -> None:
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    master = nn.Parameter(torch.ones(3))
    optimizer = SGD([master], lr=0.5)
    param.grad = torch.ones_like(param)
    answer(param, master, optimizer)
    param.grad = None
    answer(param, master, optimizer)
    assert torch.equal(master, torch.full((3,), 0.5)), (
        "a parameter whose `.grad` is None has no update in this step, and the master was stepped with the "
        "gradient of the step before. Take that one away."
    )


# --------------------------------------------------------------------------------------------- small parts


def _number(answer: Answer, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ExerciseFailed(f"{answer.name} returned {shown(value)}. It must return one number.") from None


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "precision.lost",
    "From which size on does a bfloat16 weight lose an update of 0.00001?",
)
def _smallest_that_loses() -> float:
    return min(2.0**e for e in range(-20, 0) if _half_gap(2.0**e, BF16) > 1e-5)


@prediction(
    "precision.bytes",
    "Masters, AdamW, 4 ranks: how many bytes do a parameter, its gradient and its state take on a rank?",
    unit="bytes",
)
def _bytes_of_a_parameter() -> float:
    return ledger(1000, 4, stage=1).total_bytes / 1000


@prediction(
    "precision.random",
    "Values of 1.01, rounded at random: how many percent of them take the upper neighbour?",
    unit="%",
)
def _share_rounded_up() -> float:
    low, high = 1.0078125, 1.015625
    return 100 * (1.01 - low) / (high - low)
