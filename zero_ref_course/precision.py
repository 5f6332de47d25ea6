"""Graders of chapter 12, precision: why do small updates vanish?"""

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

# ------------------------------------------------------------------------------- 12.1 which updates are lost?

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
    """Half the distance to the next value, held against what torch rounds to."""
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
    """What the mistake was; `factor` is what was returned, over what is right."""
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


# ------------------------------------------------------------------------------------ 12.2 a step on a master

STEPS = 40

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD, lr=0.001": lambda params: SGD(params, lr=1e-3),
    "SGD, lr=0.01, momentum=0.9": lambda params: SGD(params, lr=1e-2, momentum=0.9),
    "AdamW, lr=0.0001": lambda params: AdamW(params, lr=1e-4),
}
"""What steps the master."""


@exercise("precision.master_step", may_return_none=True)
def master_step(answer: Answer) -> str:
    """Steps of a bfloat16 weight through its master, beside the same steps in float32."""
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


# ------------------------------------------------------------------------------------ 12.3 rounding at random

NEIGHBOURS: list[tuple[float, float]] = [
    (1.0, 1.0078125),
    (2.0, 2.015625),
    (0.0302734375, 0.0303955078125),
    (-1.0078125, -1.0),
    (256.0, 258.0),
]
SHARES = [0.25, 0.5, 0.125, 0.875]
"""Where a value lies between its neighbours: the distance from the lower one over the gap."""

CHANCES = [count / 200 for count in range(200)]


@exercise("precision.round_at_random")
def round_at_random(answer: Answer) -> str:
    """The shares and the mean over evenly spread random numbers; values that the dtype has stay."""
    for low, high in NEIGHBOURS + answer.drawn(_drawn_neighbours, 2):
        for share in SHARES:
            value = low + share * (high - low)
            _check_shares(answer, value, low, high, share)
        for chance in (0.0, 0.5, 0.999):
            stays = _number(answer, answer(low, low, high, chance))
            assert stays == low, (
                f"{answer.name}({low}, {low}, {high}, {chance}) returns {stays}. bfloat16 has the value "
                f"{low} itself, so it stays, whatever the random number is, 0 too."
            )
    return f"the mean is the value in {len(NEIGHBOURS) * len(SHARES)} places, and representable values stay"


def _drawn_neighbours(rng: random.Random) -> tuple[float, float]:
    low = abs(_drawn_weight(rng)[0])
    low = torch.tensor(low, dtype=BF16).item()
    return low, low + 2 * _half_gap(low, BF16)


def _check_shares(answer: Answer, value: float, low: float, high: float, share: float) -> None:
    rounded = [_number(answer, answer(value, low, high, chance)) for chance in CHANCES]
    given = f"{answer.name}({value}, {low}, {high}, chance)"
    others = set(rounded) - {low, high}
    assert not others, (
        f"{given} returns {min(others)}. bfloat16 has no value between {low} and {high}: "
        "return one of the two."
    )
    ups = rounded.count(high)
    if abs(ups - share * len(CHANCES)) > 1:  # `chance < share` and `chance > 1 - share` differ by one
        raise AssertionError(
            f"{given} returns the upper one for {ups} of {len(CHANCES)} evenly spread random numbers, and "
            f"the mean is {math.fsum(rounded) / len(rounded):.8g}. {_mistake_in_share(ups, share)}"
        )


def _mistake_in_share(ups: int, share: float) -> str:
    if abs(ups - (1 - share) * len(CHANCES)) <= 1:
        return "The nearer one must come more often, not the farther one."
    if ups in (0, len(CHANCES)):
        return "The random number must decide: always the same one is what rounding to the nearest does."
    if ups == 1:
        return "Compare the random number with a share of the gap: divide the distance by the gap."
    if abs(ups - len(CHANCES) / 2) <= 1:
        return "That is a coin. How often it is the upper one must depend on where the value lies."
    return (
        f"For the mean to be the value it must be {share:.0%}: the distance from the lower one, over the gap."
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
    "Masters of 1.01, rounded at random: how many percent of the weights take the upper neighbour?",
    unit="%",
)
def _share_rounded_up() -> float:
    low, high = 1.0078125, 1.015625
    return 100 * (1.01 - low) / (high - low)
