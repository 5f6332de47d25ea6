"""A mistake that can be run: a plain loop in which one thing is done wrongly, and what it would explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn, optim

from zero_ref.doctor.compare import Bounds, Where, differing, last_places
from zero_ref.doctor.on_rank import Case
from zero_ref.doctor.plain import Make, Part, PlainLoop


@dataclass(frozen=True)
class Patient:
    """A trial that departs, with all that is needed to play it again.

    Attributes:
        ranks: before the save and after it, as for `PlainLoop`.
        observed, expected: what the program's ranks noted, and what the plain loop gives.
        where: the first departure.
        options: of the program's optimizer, as `on_rank.options_of` reads them.
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
    options: dict[str, Any] = field(default_factory=dict)

    def any_step(self, of_step: Callable[[Any], Any]) -> bool:
        """Whether one of the trial's steps up to the departure has something."""
        return any(of_step(step) for step in self.case.trial.steps[: self.where.step + 1])

    def optimizer(self) -> Any:
        """A plain optimizer, to be looked at."""
        return self.make(self.model)


OTHERS: tuple[type[optim.Optimizer], ...] = (
    *(optim.SGD, optim.AdamW, optim.Adam, optim.Adagrad, optim.RMSprop, optim.Adamax, optim.NAdam),
    *(optim.RAdam, optim.Adadelta),
)
"""Classes that may step in place of the one that was asked for. Each updates every element by itself."""


def optimizers_in(optimizer: Any) -> list[Any]:
    """The optimizer, or those of which it consists."""
    inner = getattr(optimizer, "optimizers", None)
    if isinstance(inner, dict):
        return list(inner.values())
    return list(inner) if isinstance(inner, list | tuple) else [optimizer]


def updates_elements(patient: Patient) -> bool:
    """Whether the plain optimizer is known to update each element by itself: pieces then give the same."""
    return all(type(one) in OTHERS for one in optimizers_in(patient.optimizer()))


class Mistake(PlainLoop):
    """A plain loop with a mistake in it.

    Attributes:
        says: the cause, in words; a variant may say more.
        last_resort: it fits what was observed, so it is tried only if no other mistake explains it.
    """

    says: ClassVar[str]
    last_resort: ClassVar[bool] = False

    def __init__(self, patient: Patient, **chosen: Any) -> None:
        vars(self).update(chosen)
        super().__init__(patient.case, patient.model, patient.make, patient.ranks, masters=patient.masters)

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        """Whether the trial does what the mistake is about."""
        return True

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the sentence of each variant, and its attributes."""
        yield cls.says, {}


def explains(patient: Patient, supposed: Sequence[Part]) -> int | None:
    """Return the number of elements that depart in the supposed loop alone; None if it explains nothing.

    It explains a departure if every element that departs, in any step, is as some rank of the supposed
    loop has it. Elements that do not depart need not agree, as a mistake may concern a part of the
    parameters; but of two explanations the one that supposes less is the better. Losses depend on all
    parameters at once, so they are looked at only where nothing else departs before them.
    """
    departed, too_many = False, 0
    for number, part in enumerate(patient.expected):
        for place, snapshot in enumerate(part.traces[0]):
            if snapshot.of_gradients or (snapshot.phase == "forward" and patient.where.phase != "forward"):
                continue
            for rank in range(len(part.traces)):
                found = _agrees(patient, supposed[number], number, place, rank)
                if found is None:
                    return None
                departed = departed or found[0]
                too_many += found[1]
    return too_many if departed else None


def _agrees(patient: Patient, supposed: Part, number: int, place: int, rank: int) -> tuple[bool, int] | None:
    """Whether something departs in a snapshot of a rank, and how much more does in the supposed loop.

    None if something departs that it does not explain.
    """
    expected = patient.expected[number].traces[rank][place]
    observed = patient.observed[number].traces[rank][place]
    something, too_many = False, 0
    for name, right in expected.tensors.items():
        bound = patient.bounds[number][expected.step, expected.phase].get(name, 0.0)
        ours = observed.tensors.get(name)
        departs = differing(ours, right, bound)
        if departs is None:
            return None
        ranks = [rank] if expected.phase == "forward" else range(len(supposed.traces))
        left = departs
        for other in ranks:
            wrong = supposed.traces[other][place].tensors.get(name)
            # Its values may be larger than the right ones, and each of its steps may round otherwise.
            own = last_places(wrong) * (expected.step + 1) if wrong is not None else 0.0
            differs = differing(ours, wrong, max(bound, own))
            if differs is not None:
                left = left & differs
        if left.any():
            return None
        supposed_departs = differing(supposed.traces[rank][place].tensors.get(name), right, bound)
        if supposed_departs is not None:
            too_many += int((supposed_departs & ~departs).sum())
        something = something or bool(departs.any())
    return something, too_many
