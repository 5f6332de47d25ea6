"""Graders of the chapter on precision: why do small updates vanish?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab.meter import recording
from zero_ref.simulator.ledger import ledger
from zero_ref_course import Answer, ExerciseFailed, exercise, in_words, shown
from zero_ref_course._company import on_ranks, on_virtual_ranks
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


# ----------------------------------------------------------------------------- no masters, one rounding

SHARE = 64
"""The number of elements in each rank's share."""

RATE = 2.0**-12

SEND_WHAT_YOU_OWN = "Every rank updates its own share, and then all make the same call to exchange shares."


@exercise("precision.without_masters", seconds=20.0, may_return_none=True, on_ranks=True)
def without_masters(answer: Answer) -> str:
    """Check a step without masters, rounded at random, on virtual ranks and then on real ones."""
    for size in (2, 3, 1):
        _check_without_masters(answer, size)
    _check_without_masters(answer, 2, real=True)
    return "1 to 3 ranks end with the same weights, each rounded once, for 2 bytes an element"


class _Rounding:
    """Rounds at random to bfloat16, differently on each rank, and records the values before and after."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.given, self.gave = list[torch.Tensor](), list[torch.Tensor]()

    def round_at_random(self, values: torch.Tensor) -> torch.Tensor:
        """Round each element to one of its two neighbours in bfloat16, more often to the nearer one."""
        assert isinstance(values, torch.Tensor), f"round_at_random takes a tensor, not {shown(values)}."
        self.given.append(values.detach().clone())
        bits = values.detach().float().view(torch.int32)
        noise = torch.randint(2**16, bits.shape, generator=self.generator, dtype=torch.int32)
        rounded = (((bits + noise) >> 16) << 16).view(F32).to(BF16)
        self.gave.append(rounded.clone())
        return rounded


class _Rounded(NamedTuple):
    """A rank's parameters in the end, the tensors before and after rounding, and the bytes of all ranks."""

    flat: torch.Tensor
    given: list[torch.Tensor]
    gave: list[torch.Tensor]
    nbytes: int


def _start(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All weights and all averaged gradients, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    flat, gradient = (1 + torch.rand(size * SHARE, generator=generator) for _ in range(2))
    return flat.to(BF16), gradient.to(BF16)


def _step_without_masters(comm: Collectives, answer: Answer) -> _Rounded:
    flat, gradient = _start(comm.world_size, answer.seed)
    rounding = _Rounding(100 + comm.rank)
    arguments = (flat, gradient, RATE, rounding.round_at_random, comm)
    all_gather, of_others = comm.all_gather, list[int]()

    def counting(tensor: torch.Tensor, op: str = "all_gather") -> list[torch.Tensor]:
        of_others.append(tensor.nbytes * (comm.world_size - 1))  # a call tells what one rank sends
        return all_gather(tensor, op)

    with (
        recording(comm) as calls,
        patch.object(comm, "all_gather", counting),
        in_words("flat, gradient, lr, round_at_random, comm", answer, *arguments),
    ):
        answer(*arguments)
    nbytes = sum(call.nbytes for call in calls) + sum(of_others)
    return _Rounded(flat, rounding.given, rounding.gave, nbytes)


def _on_a_real_rank(answer: Answer) -> _Rounded:
    return _step_without_masters(as_collectives(None), answer)


def _check_without_masters(answer: Answer, size: int, real: bool = False) -> None:
    if real:
        of_ranks = on_ranks(_on_a_real_rank, size, answer)
    else:
        of_ranks = on_virtual_ranks(
            _step_without_masters,
            size,
            answer,
            waiting=lambda why: f"on {size} ranks, ranks wait for each other: {why} {SEND_WHAT_YOU_OWN}",
        )
    flat, gradient = _start(size, answer.seed)
    exact = flat.float() - RATE * gradient.float()
    for rank, found in enumerate(of_ranks):
        where = f"on rank {rank} of {size}, "
        assert found.given, (
            f"{where}round_at_random is not called. Rounding to the nearest loses every update that is below "
            "half the gap, and without a master nothing keeps it."
        )
        for given, gave in zip(found.given, found.gave):
            is_exact = given.dtype == F32 and not torch.equal(given, gave.float())
            assert is_exact, (
                f"{where}what is rounded has only values of bfloat16 already: the update was added in 16 "
                "bits, and lost there. Compute the new values in float32, and round those."
            )
        assert found.flat.dtype == BF16, f"{where}the weights are {found.flat.dtype}. They stay bfloat16."
        assert not torch.equal(found.flat, flat), (
            f"{where}no weight has changed. Write the new values into `flat` itself."
        )
    for rank, found in enumerate(of_ranks[1:], start=1):
        differ = int((found.flat != of_ranks[0].flat).sum())
        each_for_itself = all(sum(gave.numel() for gave in one.gave) >= size * SHARE for one in of_ranks)
        why = (
            "Each rank rounds all weights for itself, by random numbers of its own. Only the owner of a "
            "share rounds it; the others get what came of that."
            if each_for_itself
            else "New values do not arrive: every share has to be sent to all ranks."
        )
        assert not differ, f"{differ} of {size * SHARE} weights differ between rank 0 and rank {rank}. {why}"
    for rank, found in enumerate(of_ranks):
        most = 2 * size * SHARE
        assert found.nbytes <= most, (
            f"the {size} ranks exchange {found.nbytes:,} bytes; {most:,} are enough, 2 for each weight. "
            "Round before you send: the values of 32 bits never have to travel."
        )
        share, owned = found.flat.chunk(size)[rank], exact.chunk(size)[rank]
        roundings = [
            (given, gave)
            for pair in zip(found.given, found.gave)
            for given, gave in zip(*(one.flatten().split(SHARE) for one in pair))
            if torch.equal(share, gave)
        ]
        assert roundings, (
            f"on rank {rank} of {size}, its share is not what round_at_random returned for it. Round once, "
            "and keep the result."
        )
        # Two float32 operations of other rounding are as near; another gradient, or a second step, is not.
        assert any(torch.allclose(given, owned, rtol=0, atol=1e-5) for given, _ in roundings), (
            f"on rank {rank} of {size}, what was rounded is not its old share less lr times the share's "
            "gradient. Share r of `flat` and share r of `gradient` belong together, and there is one step."
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
