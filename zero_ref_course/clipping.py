"""Graders of chapter 11, clipping: what must be global?"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT
from zero_ref.plan.choice import plan_partition
from zero_ref.simulator.models import from_module
from zero_ref_course import Answer, ExerciseFailed, exercise, shown
from zero_ref_course._company import Outcome, outcomes_of
from zero_ref_course.predictions import prediction

Gradients = list[list[float]]
"""The slices that one rank owns, each a list of its elements."""

MOST_BYTES = 512
"""The most bytes that an answer may send: enough for a few numbers from each rank, not for gradients."""


ALIKE = (
    "Every rank must make every call, with tensors of one shape and dtype, also a rank that owns nothing or "
    "has already found what it looked for."
)


def _outcomes(
    answer: Answer, given: str, of_ranks: Sequence[tuple[Any, ...]], *, real: bool = False
) -> list[Outcome]:
    """Call the answer on each rank; `given` describes the arguments, which it must not change."""
    outcomes = outcomes_of(answer, of_ranks, given, ALIKE, real=real)
    for rank, (outcome, before) in enumerate(zip(outcomes, of_ranks)):
        for tensor, was in zip(_tensors(outcome.arguments), _tensors(before), strict=True):
            assert torch.equal(tensor.nan_to_num(), was.nan_to_num()), (
                f"{answer.name} changed the tensors of rank {rank}. It is only to look at them."
            )
    return outcomes


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    lists = [argument for argument in arguments if isinstance(argument, list)]
    return [each for one in lists for each in one if isinstance(each, torch.Tensor)]


def _of_gradients(gradients: Sequence[Gradients], *options: Any) -> list[tuple[Any, ...]]:
    return [([torch.tensor(elements) for elements in of_rank], *options) for of_rank in gradients]


def _values(answer: Answer, outcomes: Sequence[Outcome]) -> list[Any]:
    for rank, (_, calls, _) in enumerate(outcomes):
        nbytes = sum(call.nbytes for call in calls)
        assert nbytes <= MOST_BYTES, (
            f"{answer.name} sends {nbytes:,} bytes on rank {rank} of {len(outcomes)}. Gradients stay where "
            "they are: only a number or two for each rank has to travel."
        )
    return [outcome.value for outcome in outcomes]


def _shown(gradients: Sequence[Gradients]) -> str:
    owned = ", ".join(f"{shown(of_rank)} on rank {rank}" for rank, of_rank in enumerate(gradients))
    return f"the gradients {owned}"


# ----------------------------------------------------------------------------------------- the global norm


def _random_gradients(sizes: Sequence[Sequence[int]]) -> list[Gradients]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(numel, generator=generator).tolist() for numel in of_rank] for of_rank in sizes]


OWNED: list[list[Gradients]] = [
    [[[3.0, 0.0]], [[-4.0], [12.0]]],
    [[[3.0, 4.0, -12.0], [1.0]]],
    [[[1.0, -2.0]], [], [[-3.0], [0.0, 0.5]]],
    [[], [[5.0, -5.0]]],
    _random_gradients([[400, 7], [300], [1], [200, 200, 50], []]),
]
"""The gradients of each rank in each case: two ranks, one, ranks that own nothing, many elements."""

NORM_TYPES = [2.0, 1.0, 3.0, math.inf]


@exercise("clipping.global_norm", on_ranks=True)
def global_norm(answer: Answer) -> str:
    """Check the norm of all ranks' gradients against torch's, on virtual ranks and once on real ones."""
    for gradients in OWNED + answer.drawn(_drawn_gradients, 3):
        for norm_type in NORM_TYPES:
            outcomes = _outcomes(answer, _shown(gradients), _of_gradients(gradients, norm_type))
            _check_norms(answer, gradients, norm_type, _values(answer, outcomes))
    for norm_type in (2.0, math.inf):
        outcomes = _outcomes(answer, "", _of_gradients(OWNED[0], norm_type), real=True)
        _check_norms(answer, OWNED[0], norm_type, _values(answer, outcomes))
    return f"torch's norm of all gradients, on 1 to {len(OWNED[-1])} ranks and for p = 1, 2, 3 and infinity"


def _drawn_gradients(rng: random.Random) -> list[Gradients]:
    def slices() -> Gradients:
        return [[rng.gauss(0, 1) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(0, 3))]

    return [*(slices() for _ in range(rng.randint(1, 4))), [[rng.gauss(0, 1)]]]


def _drawn_spoiled(rng: random.Random) -> list[Gradients]:
    gradients = _drawn_gradients(rng)
    slices = [one for of_rank in gradients for one in of_rank]
    rng.choice(slices)[0] = rng.choice((1.0, -1.0, INF, -INF, NAN))
    return gradients


def _check_norms(answer: Answer, gradients: Sequence[Gradients], norm_type: float, values: list[Any]) -> None:
    right = _norm([part for of_rank in gradients for part in of_rank], norm_type)
    given = f"norm_type={norm_type:g} and {_shown(gradients)}"
    for rank, value in enumerate(values):
        try:
            ours = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ExerciseFailed(
                f"{answer.name} returned {shown(value)} on rank {rank}. It must return one number."
            ) from None
        if not math.isclose(ours, right, rel_tol=1e-5):
            raise AssertionError(
                f"with {given}, {answer.name} returns {ours:.6g} on rank {rank}; the norm of them all is "
                f"{right:.6g}. {_mistake_in_norm(gradients, norm_type, rank, ours)}"
            )


def _norm(parts: Sequence[Sequence[float]], norm_type: float) -> float:
    elements = [element for part in parts for element in part]
    return torch.linalg.vector_norm(torch.tensor(elements, dtype=torch.float64), norm_type).item()


def _ones(parts: Sequence[Sequence[float]]) -> int:
    """The sum of x**inf over elements up to 1: the number of elements with absolute value 1."""
    return sum(abs(element) == 1 for part in parts for element in part)


def _mistake_in_norm(gradients: Sequence[Gradients], norm_type: float, rank: int, value: float) -> str:
    parts = [part for of_rank in gradients for part in of_rank]
    own = [_norm(of_rank, norm_type) for of_rank in gradients]
    of_slices = [_norm([part], norm_type) for part in parts]

    def is_(number: float) -> bool:
        return math.isclose(value, number, rel_tol=1e-5)

    if not math.isfinite(value):
        return (
            "For p = infinity the largest element counts: no power and no root gives it. An all-reduce adds; "
            "let each rank write its norm into a place of its own, among zeros."
        )
    if norm_type == math.inf and value in (0.0, 1.0, float(_ones(parts))):
        return (
            "A sum of powers says nothing for p = infinity: x**inf is 0, 1 or infinite, and its root is 1. "
            "The largest element counts: let each rank write its own into a place among zeros."
        )
    if is_(own[rank]) and len(gradients) > 1:
        return "That is what this rank owns, alone. What do the others own?"
    if is_(sum(own)) or is_(sum(of_slices)):
        return "That is the sum of norms. Norms are the sides of right angles: their p-th powers add up."
    if norm_type != math.inf:
        if is_(_norm(parts, norm_type) ** norm_type):
            return "That is the sum of the p-th powers. Take the p-th root of it."
        if is_(_norm(parts, norm_type) / len(gradients)) or is_(
            _norm(parts, norm_type) / len(gradients) ** (1 / norm_type)
        ):
            return "That is divided by the number of ranks. Gradients are averaged; parts of a norm add up."
        if is_(sum(norm**norm_type for norm in of_slices) ** 0.5) and norm_type != 2:
            return "The p-th powers are added; their root must be the p-th one, too."
    if is_(_norm(parts, 2.0)):
        return "That is the 2-norm, whatever `norm_type` is."
    return "Each rank's norm is the norm of its slices' norms, and the global one the norm of those."


# -------------------------------------------------------------------------------------------- who may step?

INF, NAN = math.inf, math.nan
SPOILED: list[list[Gradients]] = [
    [[[1.0, 2.0]], [[3.0]]],
    [[[1.0, INF]], [[3.0]]],
    [[[1.0]], [[2.0], [0.0, -INF]]],
    [[[1.0]], [[NAN, 2.0]], [[3.0]]],
    [[[INF]], [[-INF]]],
    [[], [[INF]], [[1.0]]],
    [[], [[0.0, 1.0]]],
    [[[INF, 1.0]]],
    [[[3e38, 3e38]], [[3e38], [-3e38]]],
]
"""Gradients that are finite and not; in the last case their sum would overflow, but no element does."""


@exercise("clipping.may_step", on_ranks=True)
def may_step(answer: Answer) -> str:
    """Check that all ranks decide alike whether to step, on virtual ranks and once on real ones."""
    for gradients in SPOILED + answer.drawn(_drawn_spoiled):
        outcomes = _outcomes(answer, _shown(gradients), _of_gradients(gradients))
        _check_decisions(answer, gradients, _values(answer, outcomes))
    for gradients in SPOILED[:2]:
        outcomes = _outcomes(answer, "", _of_gradients(gradients), real=True)
        _check_decisions(answer, gradients, _values(answer, outcomes))
    return f"all ranks decide alike in {len(SPOILED)} cases"


def _check_decisions(answer: Answer, gradients: Sequence[Gradients], values: list[Any]) -> None:
    for value in values:
        is_truth = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        assert is_truth, f"{answer.name} returned {shown(value)}. It must return True or False."
    ours = [bool(value) for value in values]
    finite = [all(math.isfinite(x) for part in of_rank for x in part) for of_rank in gradients]
    if ours == [all(finite)] * len(finite):
        return
    given = f"with {_shown(gradients)}, {answer.name} returns {ours}"
    if ours == finite:
        hint = "Each rank looks at its own gradients only, so some step and some do not."
    elif len(set(ours)) > 1:
        hint = "Ranks that step send parameters to ranks that do not: the decision must be one."
    elif all(finite):
        hint = "Every element is finite, so nothing forbids the step. (A sum of finite numbers may overflow.)"
    elif not any(math.isinf(x) for of_rank in gradients for part in of_rank for x in part):
        hint = "A NaN is not infinite, but it is not finite either. One is enough to spoil the parameters."
    else:
        hint = "One element that is not finite, on any rank, is enough: then no rank may step."
    raise AssertionError(f"{given}. {hint}")


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "clipping.factor",
    "Gradients (3, 0) on rank 0 and (0, 4) on rank 1, max_norm 2.5: by which factor is each multiplied?",
)
def _factor() -> float:
    return 2.5 / math.hypot(3.0, 4.0)


@prediction(
    "clipping.bytes",
    "The small GPT, even split over 4 ranks: how many bytes are in the all-reduce of the norms?",
    unit="bytes",
)
def _bytes_of_the_norms() -> float:
    specs = from_module(GPT(GPTConfig(layers=1, heads=2, width=32, context=32)))
    return 8.0 * (sum(map(len, plan_partition("even", specs, 4).slices_of_rank)) + 4)


@prediction(
    "clipping.sees",
    "Rank 0 has an infinity in a parameter of rank 1, reduced to its owner: whose scaler sees it?",
    choices=("rank 0's", "rank 1's", "both", "neither"),
)
def _sees_the_infinity() -> str:
    specs = from_module(GPT(GPTConfig(layers=1, heads=2, width=32, context=32)))
    owner_of = dict(
        zip([spec.name for spec in specs], plan_partition("sorted_greedy", specs, 2).owner_of_param)
    )
    return f"rank {owner_of['norm.bias']}'s"
