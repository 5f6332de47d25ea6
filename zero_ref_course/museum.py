"""Chapter 15's graders: the weights of ranks' gradients, and a step that passes the doctor."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from zero_ref.comm.backend import as_collectives
from zero_ref.doctor import Program, diagnose
from zero_ref_course import Answer, ExerciseFailed, exercise, shown
from zero_ref_course._company import outcomes_of
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------------ whose gradients are these?

GRADIENTS = [[1.0, -2.0, 0.5, 4.0, 0.0], [3.0, 0.0, 0.5, -2.0, 1.0], [0.0, 1.0, 2.0, 1.0, -1.0]]
"""Three ranks' gradients of five elements."""


def _observed(*weights: float) -> list[float]:
    return [sum(w * of_rank[at] for w, of_rank in zip(weights, GRADIENTS)) for at in range(len(GRADIENTS[0]))]


OBSERVED: list[tuple[str, list[float], list[float] | None]] = [
    ("the mean of the ranks' gradients", _observed(1 / 3, 1 / 3, 1 / 3), [1 / 3, 1 / 3, 1 / 3]),
    ("their sum", _observed(1, 1, 1), [1.0, 1.0, 1.0]),
    ("the gradient of rank 1 alone", _observed(0, 1, 0), [0.0, 1.0, 0.0]),
    ("a mean in which the sign of rank 2 is turned", _observed(0.5, 0.5, -0.5), [0.5, 0.5, -0.5]),
    ("the sum, of which one element is another", [*_observed(1, 1, 1)[:-1], 7.0], None),
]


@exercise("museum.weights", may_return_none=True)
def weights(answer: Answer) -> str:
    """Check the weights that are read off several observed gradients."""
    for what, values, right in OBSERVED:
        theirs = answer(torch.tensor(values), torch.tensor(GRADIENTS))
        given = f"given {what}, {answer.name} returned {shown(theirs)}"
        if right is None:
            assert theirs is None, f"{given}. No weights give it: compare what yours give in every element."
            continue
        assert isinstance(theirs, list), f"{given}, and not a list of one weight for each rank."
        near = len(theirs) == len(right) and all(abs(one - two) < 1e-3 for one, two in zip(theirs, right))
        assert near, f"{given}, and right is {[round(one, 3) for one in right]}. " + _about(right)
    return f"{len(OBSERVED)} observed gradients of {len(GRADIENTS)} ranks"


def _about(right: list[float]) -> str:
    if min(right) < 0:
        return "A weight may be negative."
    return "The weighted sum of the ranks' gradients has to be the observed one in all elements at once."


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
    "Four ranks clip equally large shares, each to a norm of 1. What is the norm of all shares together?",
)
def _norm_of_clipped_shares() -> float:
    return float(torch.ones(4).norm())
