"""Ours beside each other contender, from the results of suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.contenders import OURS_IN
from benchmarks.results import LIMIT, Spread, SuiteResult

WON, UNDECIDED, LOST = "won", "undecided", "lost"


def outcome(ratio: Spread) -> str:
    """Judge a paired ratio of another's time to ours: won, lost, or undecided where the quartiles hold 1.

    >>> outcome(Spread(2.0, 1.8, 2.1)), outcome(Spread(1.02, 0.9, 1.1)), outcome(Spread(0.8, 0.7, 0.99))
    ('won', 'undecided', 'lost')
    """
    if ratio.low > 1:
        return WON
    return LOST if ratio.high < 1 else UNDECIDED


class Comparison(NamedTuple):
    """The comparison of one of our contenders with another one or a limit.

    Args:
        thing: the thing timed: a suite, or one half of the suite "checkpoint".
        ours, other: names of contenders, without what is timed.
        wall, cpu: the other's time over ours, round by round.
    """

    thing: str
    set: str
    ranks: int
    ours: str
    other: str
    wall: Spread
    cpu: Spread

    @property
    def is_limit(self) -> bool:
        """Whether the other is what the machine takes for the work alone."""
        return self.other.startswith(LIMIT)


def comparisons(results: Sequence[SuiteResult], ours_in: Mapping[str, str] = OURS_IN) -> list[Comparison]:
    """Ours, in the form that counts for each thing, beside all that is not ours, suite by suite."""
    found = []
    for result in results:
        timed = [name for name, taken in result.taken.items() if taken.wall_ms]
        for thing, ours in ours_in.items():
            mine, _, half = ours.partition(": ")
            if result.suite != ("checkpoint" if half else thing) or ours not in timed:
                continue
            for name in timed:
                other, _, of_other = (name, "", half) if name.startswith(LIMIT) else name.partition(": ")
                if of_other == half and not other.startswith("zero_ref"):
                    ratios = result.ratio(name, ours), result.ratio(name, ours, of="cpu_ms")
                    found.append(Comparison(thing, result.set, result.ranks, mine, other, *ratios))
    return found
