"""Ours beside each other one of a suite: the paired ratios, and whether they say won, lost or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero_ref.bench.results import LIMIT, Spread, SuiteResult, spread
from zero_ref.bench.targets import OURS_IN


class Comparison(NamedTuple):
    """One other contender, or a limit, beside ours.

    Args:
        thing: what was timed: a suite, or one half of the suite "checkpoint".
        ours, other: names of contenders, without what is timed.
        wall, cpu: the other's time over ours, round by round.
        ours_ms, other_ms: wall time.
    """

    thing: str
    set: str
    ranks: int
    ours: str
    other: str
    wall: Spread
    cpu: Spread
    ours_ms: Spread
    other_ms: Spread

    @property
    def is_limit(self) -> bool:
        """Whether the other is what the machine takes for the work alone."""
        return self.other.startswith(LIMIT)


def comparisons(results: Sequence[SuiteResult]) -> list[Comparison]:
    """Ours, in the form that has to reach the targets, beside all that is not ours, suite by suite."""
    found = []
    for result in results:
        for thing, ours in OURS_IN.items():
            mine, _, half = ours.partition(": ")
            if result.suite != _suite_of(thing) or not _was_timed(result, ours):
                continue
            for name in result.taken:
                other, _, of_other = (name, "", half) if name.startswith(LIMIT) else name.partition(": ")
                if of_other != half or other.startswith("zero_ref") or not _was_timed(result, name):
                    continue
                found.append(
                    Comparison(
                        thing,
                        result.set,
                        result.ranks,
                        mine,
                        other,
                        result.ratio(name, ours),
                        result.ratio(name, ours, "cpu_ms"),
                        spread(result.taken[ours].wall_ms),
                        spread(result.taken[name].wall_ms),
                    )
                )
    return found


def _suite_of(thing: str) -> str:
    return {"consolidate": "checkpoint", "load": "checkpoint"}.get(thing, thing)


def _was_timed(result: SuiteResult, name: str) -> bool:
    return name in result.taken and bool(result.taken[name].wall_ms)
