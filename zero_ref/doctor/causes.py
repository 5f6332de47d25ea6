"""What a departure may come from: plain loops with a mistake in them, each held against what was observed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zero_ref.doctor.compare import Bounds, Where
from zero_ref.doctor.on_rank import Case
from zero_ref.doctor.plain import Make, Part


@dataclass(frozen=True)
class Patient:
    """A trial that departs."""

    case: Case
    model: nn.Module
    make: Make
    ranks: tuple[int, int]
    masters: bool
    observed: list[Part]
    expected: list[Part]
    bounds: Bounds
    where: Where


class Causes:
    """Finds the causes of departures."""

    def of(self, patient: Patient) -> tuple[str, ...]:
        """Those that give what was observed; none if no known one does."""
        return ()
