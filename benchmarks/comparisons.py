"""What follows from results: ours beside each other contender, and how times grow with a size.

Standard library only, but for the names of contenders.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.contenders import OURS_IN
from benchmarks.results import LIMIT, GrowthPoint, Spread, SuiteResult, spread

WON, UNDECIDED, LOST = "won", "undecided", "lost"


def outcome(ratio: Spread) -> str:
    """What a paired ratio of another's time to ours says: won, lost, or undecided where the quartiles hold 1.

    >>> outcome(Spread(2.0, 1.8, 2.1)), outcome(Spread(1.02, 0.9, 1.1)), outcome(Spread(0.8, 0.7, 0.99))
    ('won', 'undecided', 'lost')
    """
    if ratio.low > 1:
        return WON
    return LOST if ratio.high < 1 else UNDECIDED


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
        times = {name: taken.wall_ms for name, taken in result.taken.items() if taken.wall_ms}
        for thing, ours in OURS_IN.items():
            mine, _, half = ours.partition(": ")
            if result.suite != ("checkpoint" if half else thing) or ours not in times:
                continue
            for name in times:
                other, _, of_other = (name, "", half) if name.startswith(LIMIT) else name.partition(": ")
                if of_other == half and not other.startswith("zero_ref"):
                    of = thing, result.set, result.ranks, mine, other
                    both_ms = spread(times[ours]), spread(times[name])
                    cpu = result.ratio(name, ours, of="cpu_ms")
                    found.append(Comparison(*of, result.ratio(name, ours), cpu, *both_ms))
    return found


# ------------------------------------------------------------------------------------------------- growth
# With an exponent of 1 something doubles when the size does. If the time's exponent is below the work's, some
# of the time does not depend on the work; above it, something grows faster than the work.

TOLERANCE = 0.1
"""By so much an exponent may be above that of the work: a quarter more a decade, which pages and caches
take as tensors outgrow them."""


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the line that fits best on logarithmic axes.

    >>> round(exponent([1, 10, 100], [3, 30, 300]), 12), round(exponent([1, 10, 100], [3, 3, 3]), 12)
    (1.0, 0.0)

    Raises:
        ValueError: fewer than two points, all of the same size, or a number that is not above 0.
    """
    if len(sizes) < 2 or len(set(sizes)) == 1 or min(*sizes, *values) <= 0:
        raise ValueError(
            f"sizes {list(sizes)}, values {list(values)}: give two or more of different size, all above 0."
        )
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, values))).slope


class Growth(NamedTuple):
    """How one thing of one contender grows along one axis, over the upper half of the range.

    Args:
        exponent: of the time; of the rounds, median and quartiles.
        of_work: the exponent of the work.
        points: how many the fit went through.
    """

    axis: str
    what: str
    contender: str
    exponent: Spread
    of_work: float
    points: int

    @property
    def faster_than_work(self) -> bool:
        """Whether three quarters of the rounds have an exponent above the work's by more than TOLERANCE."""
        return self.exponent.low > self.of_work + TOLERANCE


def upper_half(points: Iterable[GrowthPoint]) -> list[GrowthPoint]:
    """Those with work that lie above the middle of their range on a logarithmic axis, smallest first."""
    with_work = sorted((point for point in points if point.work > 0), key=lambda point: point.amount)
    return [one for one in with_work if one.amount**2 >= with_work[0].amount * with_work[-1].amount]


def growths(points: Iterable[GrowthPoint]) -> list[Growth]:
    """The exponents of each thing, contender and axis that has two points or more in its upper half."""
    together: dict[tuple[str, str, str], list[GrowthPoint]] = {}
    for point in points:
        together.setdefault((point.axis, point.what, point.contender), []).append(point)
    found = []
    for name, of_one in together.items():
        upper = upper_half(of_one)
        if len(upper) > 1:
            amounts = [point.amount for point in upper]
            rounds = zip(*(point.times_ms for point in upper), strict=True)
            exponents = spread([exponent(amounts, times) for times in rounds])
            of_work = exponent(amounts, [point.work for point in upper])
            found.append(Growth(*name, exponents, of_work, len(upper)))
    return found
