"""A mistake that can be run: a plain loop in which one thing is done wrongly, and what it would explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from zero_ref.doctor.compare import Bounds, Where, differing
from zero_ref.doctor.on_rank import Case
from zero_ref.doctor.plain import Make, Part, PlainLoop


@dataclass(frozen=True)
class Patient:
    """A trial that departs, with all that is needed to play it again.

    Attributes:
        ranks: before the save and after it, as for `PlainLoop`.
        observed, expected: what the program's ranks noted, and what the plain loop gives.
        where: the first departure.
    """

    case: Case
    model: nn.Module
    make: Make
    ranks: tuple[int, int]
    masters: bool
    observed: list[Part]
    expected: list[Part]
    bounds: Bounds
    where: Where

    def any_step(self, of_step: Callable[[Any], Any]) -> bool:
        """Whether one of the trial's steps up to the departure has something."""
        return any(of_step(step) for step in self.case.trial.steps[: self.where.step + 1])

    def optimizer(self) -> Any:
        """A plain optimizer, to be looked at."""
        return self.make(self.model)


class Mistake(PlainLoop):
    """A plain loop with a mistake in it.

    Attributes:
        says: the cause, in words; a variant may say more.
    """

    says: ClassVar[str]

    def __init__(self, patient: Patient, **chosen: Any) -> None:
        vars(self).update(chosen)
        super().__init__(patient.case, patient.model, patient.make, patient.ranks, masters=patient.masters)

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        """Whether the trial does what the mistake is about."""
        return True

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        """What each variant says, and the attributes that it has."""
        yield cls.says, {}


def explains(patient: Patient, supposed: Sequence[Part]) -> bool:
    """Whether every element that departs is as some rank of the supposed loop has it.

    Elements that do not depart need not agree: a mistake may concern a part of the parameters. All steps from
    the first departure on must agree.
    """
    departed = False
    for number, part in enumerate(patient.expected):
        for place, snapshot in enumerate(part.traces[0]):
            if snapshot.of_gradients:
                continue
            for rank in range(len(part.traces)):
                found = _agrees(patient, supposed[number], number, place, rank)
                if found is False:
                    return False
                departed = departed or found is True
    return departed


def _agrees(patient: Patient, supposed: Part, number: int, place: int, rank: int) -> bool | None:
    """Whether all that departs in a snapshot of one rank is explained; None if nothing departs."""
    expected = patient.expected[number].traces[rank][place]
    observed = patient.observed[number].traces[rank][place]
    something: bool | None = None
    for name, right in expected.tensors.items():
        bound = patient.bounds[number][expected.step, expected.phase].get(name, 0.0)
        ours = observed.tensors.get(name)
        departs = differing(ours, right, bound)
        if departs is None:
            return False
        if not departs.any():
            continue
        ranks = [rank] if expected.phase == "forward" else range(len(supposed.traces))
        left = departs
        for other in ranks:
            wrong = supposed.traces[other][place].tensors.get(name)
            differs = differing(ours, wrong, bound)
            if differs is not None:
                left = left & differs
        if left.any():
            return False
        something = True
    return something
