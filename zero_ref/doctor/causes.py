"""What a departure comes from: each mistake that may have been made is played, and compared.

A cause is named if a plain loop with that mistake has, within what reordered sums explain, every value that
departs, in all steps. Several may: then all are named. Two kinds need no loop: values of an earlier step, as
after a broadcast that is lost, and values that differ between ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from zero_ref.doctor import (
    mistakes_of_clipping,
    mistakes_of_gradients,
    mistakes_of_state,
    mistakes_of_updates,
)
from zero_ref.doctor.compare import differing
from zero_ref.doctor.mistake import Mistake, Patient, explains
from zero_ref.doctor.trace import Snapshot

MISTAKES: tuple[type[Mistake], ...] = (
    *mistakes_of_gradients.MISTAKES,
    *mistakes_of_clipping.MISTAKES,
    *mistakes_of_updates.MISTAKES,
    *mistakes_of_state.MISTAKES,
)


class Causes:
    """Finds the causes of departures. What was a cause in one trial is tried first in the next."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def of(self, patient: Patient) -> tuple[str, ...]:
        """Those that give what was observed; none if no known one does."""
        stale = stale_values(patient)
        is_specific = patient.where.phase == "load" or patient.any_step(lambda step: step.freezes is not None)
        if stale and not is_specific:
            return (stale,)
        return self.mistakes(patient) or ((stale,) if stale else ())

    def mistakes(self, patient: Patient) -> tuple[str, ...]:
        """The mistakes that give what was observed, those that are known from another trial first."""
        variants = list(variants_for(patient))
        first = [one for one in variants if one[0] in self.known]
        for candidates in (first, variants):
            too_many = {}
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
        if mistake.applies(patient):
            for says, chosen in mistake.variants(patient):
                yield says, (mistake, chosen)


def gives(patient: Patient, variant: Variant) -> int | None:
    """What `explains` says of a plain loop with this mistake."""
    mistake, chosen = variant
    # Some mistakes cannot be made here, such as a class that refuses these options or this step count.
    with contextlib.suppress(Exception):
        return explains(patient, mistake(patient, **chosen).play())
    return None


def stale_values(patient: Patient) -> str | None:
    """A cause if every value that departs is one of an earlier step."""
    by_rank: dict[int, set[str]] = {}
    begun = {f"added.layer.{name}": param for name, param in patient.case.added_layer().named_parameters()}
    beginning = Snapshot(0, "start", dict(begun))
    for number, part in enumerate(patient.expected):
        for rank, trace in enumerate(part.traces):
            history = [s for s in patient.expected[0].traces[0] if s.phase in ("start", "step", "load")]
            history += [beginning, *(s for s in trace if number and s.phase in ("step", "load"))]
            for place, snapshot in enumerate(trace):
                if snapshot.of_gradients or snapshot.phase == "forward":
                    continue
                ours = patient.observed[number].traces[rank][place].tensors
                for name, right in snapshot.tensors.items():
                    bound = patient.bounds[number][snapshot.step, snapshot.phase].get(name, 0.0)
                    departs = differing(ours.get(name), right, bound)
                    if departs is None:
                        return None
                    if not departs.any():
                        continue
                    for earlier in history:
                        differs = differing(ours[name], earlier.tensors.get(name), bound)
                        if differs is not None and earlier.step <= snapshot.step:
                            departs = departs & differs
                    if departs.any():
                        return None
                    by_rank.setdefault(rank, set()).add(name)
    return in_words(patient, by_rank) if by_rank else None


def in_words(patient: Patient, by_rank: dict[int, set[str]]) -> str:
    """Which values are stale, and where."""
    names = sorted(set().union(*by_rank.values()))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    everywhere = len(by_rank) == len(patient.observed[patient.where.part].traces)
    if all(name.startswith("added.") for name in names):
        return f"the group that was added is stale: {shown} is never updated, or not sent to all ranks"
    if everywhere:
        return f"no rank has updated {shown}: values of an earlier step stand there"
    ranks = ", ".join(map(str, sorted(by_rank)))
    return f"stale values on rank {ranks}: the new values of {shown} did not arrive (a broadcast was lost)"
