"""Chapter 15's graders: the causes that explain an observation, and a step that passes the doctor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zero_ref.comm.backend import as_collectives
from zero_ref.doctor import Program, diagnose
from zero_ref_course import Answer, ExerciseFailed, exercise, shown
from zero_ref_course._company import outcomes_of
from zero_ref_course.predictions import prediction

# -------------------------------------------------------------------------------- which cause gives it?

BOUND = 1e-6
PLAIN = [1.0, -2.0, 0.5, 4.0]
SUMMED = [2.0, -4.0, 1.0, 8.0]
LAST = [0.25, -1.0, 0.75, 3.0]
NAN = float("nan")
OBSERVED: list[tuple[str, list[float]]] = [
    ("the plain loop's values", PLAIN),
    ("values that rounding alone keeps from the plain loop's", [1.0, -2.0, 0.5, 4.0 + 5e-7]),
    ("the values of the cause 'summed'", SUMMED),
    ("the values of the causes 'last micro-batch' and 'one rank'", LAST),
    ("values that no cause gives", [1.0, -2.0, 0.5, 4.5]),
    ("values of which a single element is the plain loop's no more", [1.0, -2.0, 0.5, 4.0 + 4e-6]),
    ("the values of 'summed' with a NaN among them", [2.0, -4.0, NAN, 8.0]),
    ("values whose differences from the plain loop's add up to 0", [2.0, -3.0, 1.5, 3.0]),
]


@exercise("museum.causes")
def causes(answer: Answer) -> str:
    """Check the causes of several observations, given the plain loop and three possible causes."""
    given = {"summed": SUMMED, "last micro-batch": LAST, "one rank": LAST}
    alternatives = {name: torch.tensor(values) for name, values in given.items()}
    for what, values in OBSERVED:
        right = _causes(torch.tensor(values), torch.tensor(PLAIN), alternatives)
        theirs = answer(torch.tensor(values), torch.tensor(PLAIN), dict(alternatives), BOUND)
        assert isinstance(theirs, list), f"{answer.name} returned {shown(theirs)}, and not a list of names."
        assert theirs == right, f"given {what}, {answer.name} returned {theirs}, and right is {right}. " + (
            _about(theirs, right, values)
        )
    return f"{len(OBSERVED)} observations against a plain loop and {len(alternatives)} causes"


def _causes(observed: torch.Tensor, plain: torch.Tensor, alternatives: dict[str, torch.Tensor]) -> list[str]:
    def agrees(values: torch.Tensor) -> bool:
        return bool(((observed - values).abs() <= BOUND).all())

    if agrees(plain):
        return ["healthy"]
    return [name for name, values in alternatives.items() if agrees(values)] or ["unknown"]


def _about(theirs: list[str], right: list[str], values: Sequence[float]) -> str:
    if any(value != value for value in values):
        return "A NaN is within no bound of anything: every comparison with it is false."
    if right == ["healthy"]:
        return "Look at the plain loop first: what agrees with it within the bound has no cause."
    if theirs == ["healthy"]:
        return "Every element has to be within the bound, whatever the others are, and whatever the sum is."
    if right == ["unknown"]:
        return 'Where nothing agrees, say so: ["unknown"].'
    if len(right) > 1 and set(theirs) < set(right):
        return "Several causes may give the same values. All of them are to be said, in the order given."
    return "A cause is named if each of its values is within the bound of what was observed."


# ------------------------------------------------------------------------------ a step that is healthy

LR, MOMENTUM = 2.0**-4, 0.5
TRIALS = ("plain", "accumulation", "frozen layer", "unused parameters", "unused on a rank")
ALIKE = (
    "Every rank makes every call, in the same order. A rank that has no gradient where another has one still "
    "has to take part: for the sum its gradient is 0."
)


@exercise("museum.healthy_step", seconds=10.0, may_return_none=True, on_ranks=True)
def healthy_step(answer: Answer) -> str:
    """Check a step on virtual ranks, then by the doctor, which compares it with SGD on two real ranks."""
    _rehearse(answer)
    report = diagnose(
        Answered(answer),
        from_plain=torch.optim.SGD,
        options={"lr": LR, "momentum": MOMENTUM},
        ranks=(2,),
        only=TRIALS,
        name=answer.name,
    )
    for raised in report.raised:
        raise ExerciseFailed(f"the doctor could not go on: {str(raised).splitlines()[0]}")
    assert report.healthy, f"the doctor says: {report.departures[0]}"
    return f"the doctor has nothing to say in {len(TRIALS)} trials on two ranks"


OWNERS = [1, 0, 0]


def _rehearse(answer: Answer) -> None:
    """Call the answer with three parameters on two ranks: both have a gradient of the first, one rank has a
    gradient of the second, no rank of the third.
    """
    params = [torch.full((2,), 8.0) for _ in range(3)]
    gradients: list[list[torch.Tensor | None]] = [
        [torch.full((2,), 2.0), None, None],
        [torch.full((2,), 4.0), torch.full((2,), 6.0), None],
    ]
    of_ranks = [
        (
            copy.deepcopy(params),
            copy.deepcopy(of_rank),
            [torch.zeros(2) for _ in params],
            OWNERS,
            LR,
            MOMENTUM,
        )
        for of_rank in gradients
    ]
    given = "a gradient of parameter 1 on rank 1 alone"
    for rank, outcome in enumerate(outcomes_of(answer, of_ranks, given, ALIKE)):
        values, _, momenta = outcome.arguments[:3]
        for number, (value, mean) in enumerate(zip(values, (3.0, 3.0, 0.0))):
            right = 8.0 - LR * mean
            assert (value == right).all(), (
                f"with {given}, rank {rank} has {value.tolist()} in parameter {number} after the step, and "
                f"right is {right}: {_what(value, number, mean)}"
            )
        kept = {number for number, moment in enumerate(momenta) if moment.any()}
        mine = {number for number, owner in enumerate(OWNERS) if owner == rank}
        assert kept <= mine, (
            f"rank {rank} keeps momenta of the parameters {sorted(kept)}, and owns {sorted(mine)}. Only "
            "the owner of a parameter keeps its state."
        )


def _what(value: torch.Tensor, number: int, mean: float) -> str:
    moved = (8.0 - value[0].item()) / LR
    if number == 2:
        return "no rank has a gradient of it, so it stays."
    if moved == 0:
        return "it did not move there. Its owner updates it, and sends it to all ranks."
    if moved == 2 * mean:
        return "that is a step with the sum of the gradients. Divide it by the number of ranks."
    if number == 1 and moved in (0, 6.0):
        return "a rank without a gradient counts as one with a gradient of 0."
    return f"it moved by {moved:g} times the learning rate, and the mean gradient is {mean:g}."


class Answered:
    """A factory for the doctor: a program whose step is an answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def __call__(self, model: nn.Module) -> Program:
        return _WithStep(self.answer, model)


class _WithStep(Program):
    def __init__(self, answer: Answer, model: nn.Module) -> None:
        # For zero_grad and the groups; it never steps.
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        super().__init__(optimizer, model)
        self.answer, self.comm = answer, as_collectives(None)
        self.momenta: list[torch.Tensor] = [torch.zeros_like(param) for param in model.parameters()]

    def step(self) -> None:
        params = list(self.model.parameters())
        arguments: list[Any] = [
            [param.data for param in params],
            [None if param.grad is None else param.grad.clone() for param in params],
            self.momenta,
            [number % self.comm.world_size for number in range(len(params))],
            LR,
            MOMENTUM,
        ]
        self.answer(*arguments, self.comm)


# ------------------------------------------------------------------------------------------ predictions


@prediction(
    "museum.summed",
    "Gradients are summed over four ranks and not averaged. How many times as long is AdamW's first step?",
    unit="times",
)
def _first_step_with_sums() -> float:
    moved = []
    for factor in (1, 4):
        weight = nn.Parameter(torch.zeros(1))
        weight.grad = torch.full((1,), 0.5 * factor)
        torch.optim.AdamW([weight], lr=2.0**-6, weight_decay=0.0).step()
        moved.append(weight.item())
    return round(moved[1] / moved[0], 6)


@prediction(
    "museum.local_norm",
    "On four ranks with equally large shares each clips its own to a norm of 1. What norm have all together?",
)
def _norm_of_clipped_shares() -> float:
    return float(torch.ones(4).norm())
