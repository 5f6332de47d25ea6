"""The cause of a departure, found by playing each known mistake in a plain loop and comparing.

A cause is named if a plain loop with that mistake has, within what reordered sums explain, every value that
departs, in all steps. Several may: then all are named. Two kinds need no loop: values of an earlier step, as
after a broadcast that is lost, and values that differ between ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from zero_ref.doctor import (
    mistakes_of_accumulation,
    mistakes_of_clipping,
    mistakes_of_gradients,
    mistakes_of_state,
    mistakes_of_unused,
    mistakes_of_updates,
)
from zero_ref.doctor.compare import differing
from zero_ref.doctor.mistake import Mistake, Patient, explains
from zero_ref.doctor.trace import Snapshot

MISTAKES: tuple[type[Mistake], ...] = (
    *mistakes_of_gradients.MISTAKES,
    *mistakes_of_accumulation.MISTAKES,
    *mistakes_of_unused.MISTAKES,
    *mistakes_of_clipping.MISTAKES,
    *mistakes_of_updates.MISTAKES,
    *mistakes_of_state.MISTAKES,
)


class Causes:
    """Finds the causes of departures. What was a cause in one trial is tried first in the next."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def of(self, patient: Patient) -> tuple[str, ...]:
        """Return the causes that give what was observed; none if no known cause does."""
        ranks_of = stale_values(patient)
        if not ranks_of:
            return self.mistakes(patient)
        says = in_words(patient, ranks_of)
        if not is_everywhere(patient, ranks_of):
            return (says,)
        # Values of an earlier step on all ranks may have a reason that has a name.
        step = patient.case.trial.steps[patient.where.step]
        by_name = patient.where.phase == "load" or patient.masters or step.freezes is not None
        return (self.mistakes(patient) if by_name else ()) or (says,)

    def mistakes(self, patient: Patient) -> tuple[str, ...]:
        """The mistakes that give what was observed, those that are known from another trial first."""
        variants = list(variants_for(patient))
        known = [one for one in variants if one[0] in self.known]
        first = [one for one in variants if not one[1][0].last_resort]
        last = [one for one in variants if one[1][0].last_resort]
        for candidates in (known, first, last):
            too_many: dict[str, int] = {}
            for says, variant in candidates:
                supposed = gives(patient, variant)
                if supposed is not None:
                    too_many[says] = min(supposed, too_many.get(says, supposed))
            if too_many:
                least = min(too_many.values())
                found = tuple(says for says, supposed in too_many.items() if supposed == least)
                self.known += [says for says in found if says not in self.known]
                return found
        return ()


Variant = tuple[type[Mistake], dict[str, Any]]


def variants_for(patient: Patient) -> Iterator[tuple[str, Variant]]:
    """The mistakes that this trial could show, each with what it says."""
    for mistake in MISTAKES:
        # Some cannot be looked for here, such as in an optimizer whose groups have other keys.
        with contextlib.suppress(Exception):
            found = list(mistake.variants(patient)) if mistake.applies(patient) else []
            yield from ((says, (mistake, chosen)) for says, chosen in found)


def gives(patient: Patient, variant: Variant) -> int | None:
    """Return the result of `explains` for a plain loop with this mistake."""
    mistake, chosen = variant
    # Some mistakes cannot be made here, such as a class that refuses these options or this step count.
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        return explains(patient, mistake(patient, **chosen).play())
    return None


def stale_values(patient: Patient) -> dict[str, set[int]]:
    """Return, by name, the ranks with values of an earlier step; empty if other values depart too."""
    ranks_of: dict[str, set[int]] = {}
    begun = {f"added.layer.{name}": param for name, param in patient.case.added_layer().named_parameters()}
    beginning = Snapshot(0, "start", dict(begun))
    for number, part in enumerate(patient.expected):
        for rank, trace in enumerate(part.traces):
            first = patient.expected[0].traces[0]
            seen = [one for one in (*first, *(trace if number else ())) if one.phase in VALUES]
            for place, snapshot in enumerate(trace):
                if snapshot.phase not in VALUES:
                    continue
                history = [beginning, *(one for one in seen if one.step <= snapshot.step)]
                ours = patient.observed[number].traces[rank][place].tensors
                bounds = patient.bounds[number][snapshot.step, snapshot.phase]
                for name, right in snapshot.tensors.items():
                    found = stale(name, ours.get(name), right, history, bounds.get(name, 0.0))
                    if found is None:
                        return {}
                    if found:
                        ranks_of.setdefault(name, set()).add(rank)
    return ranks_of


def is_everywhere(patient: Patient, ranks_of: dict[str, set[int]]) -> bool:
    """Whether some parameter is stale on all ranks, and so nobody has updated it."""
    size = len(patient.observed[patient.where.part].traces)
    return any(ranks >= set(range(size)) for ranks in ranks_of.values())


VALUES = ("start", "load", "step")
"""The phases whose snapshots are values of parameters."""


def stale(
    name: str,
    ours: torch.Tensor | None,
    right: torch.Tensor | None,
    history: list[Snapshot],
    bound: float,
) -> bool | None:
    """Whether elements depart, and all of them are those of a snapshot of the history; None if others do."""
    departs = differing(ours, right, bound)
    if departs is None:
        return None
    if not departs.any():
        return False
    for earlier in history:
        differs = differing(ours, earlier.tensors.get(name), bound)
        if differs is not None:
            departs = departs & differs
    return None if departs.any() else True


def in_words(patient: Patient, ranks_of: dict[str, set[int]]) -> str:
    """Which values are stale, and where."""
    names = sorted(ranks_of)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if all(name.startswith("added.") for name in names):
        return f"the group that was added is stale: {shown} is never updated, or not sent to all ranks"
    if is_everywhere(patient, ranks_of):
        place = patient.where.places[0]
        if all(one.departing < one.numel for one in patient.where.places):
            shown = f"elements {place.start} to {place.stop - 1} of {place.parameter}"
            others = len({one.parameter for one in patient.where.places}) - 1
            shown += f" and a part of {others} more" if others else ""
        return f"no rank has updated {shown}: values of an earlier step stand there"
    on = ", ".join(map(str, sorted(set().union(*ranks_of.values()))))
    return f"stale values on rank {on}: the new values of {shown} did not arrive (a broadcast was lost)"
