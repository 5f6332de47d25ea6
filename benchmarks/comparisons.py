"""What follows from results: ours beside each other contender, and how times grow with a size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.contenders import OURS_IN
from benchmarks.results import GROWING, LIMIT, Spread, SuiteResult, Taken, spread

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


def comparisons(results: Sequence[SuiteResult]) -> list[Comparison]:
    """Ours, in the form that counts (`contenders.OURS_IN`), beside all that is not ours, suite by suite."""
    found = []
    for result in results:
        timed = [name for name, taken in result.taken.items() if taken.wall_ms]
        for thing, ours in OURS_IN.items():
            mine, _, half = ours.partition(": ")
            if result.suite != ("checkpoint" if half else thing) or ours not in timed:
                continue
            for name in timed:
                other, _, of_other = (name, "", half) if name.startswith(LIMIT) else name.partition(": ")
                if of_other == half and not other.startswith("zero_ref"):
                    ratios = result.ratio(name, ours), result.ratio(name, ours, of="cpu_ms")
                    found.append(Comparison(thing, result.set, result.ranks, mine, other, *ratios))
    return found


# ------------------------------------------------------------------------------------------------- growth
# With an exponent of 1 something doubles when the size does. If the time's exponent is below the work's, some
# of the time does not depend on the work; above it, something grows faster than the work.

TOLERANCE = 0.1
"""By so much an exponent may be above that of the work: a quarter more a decade, which pages and caches
take as tensors outgrow them."""


def amount(result: SuiteResult) -> int:
    """Where a result of growth lies on its axis."""
    return int(getattr(result, result.set))


def work(result: SuiteResult) -> float:
    """What there is to do: tensors where these are varied, else bytes of memory traffic of all ranks.

    An element's update moves 28 bytes. Its new value is read and written twice on the way to each other
    rank: by the sender into the kernel, by the receiver out of it. Of state there are 8 bytes an element;
    rank 0 copies its own part and is sent the others. Construction copies all parameters on every rank.

    >>> [work(SuiteResult(what, "ranks", 4, 100, 10**6, {})) / 1e6 for what in GROWING]
    [76.0, 48.0, 28.0, 32.0]
    """
    if result.set == "tensors":
        return result.tensors
    sent = 16 * (result.ranks - 1)
    an_element = (28 + sent, sent, (16 + 2 * sent) / result.ranks, 8 * result.ranks)
    return result.parameters * an_element[GROWING.index(result.suite)]


def growing_ms(result: SuiteResult, taken: Taken) -> list[float]:
    """Wall time; where ranks are varied the processor time of all of them, because they share cores."""
    return taken.cpu_ms if result.set == "ranks" else taken.wall_ms


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the line that fits best on logarithmic axes. All numbers are above 0.

    >>> round(exponent([1, 10, 100], [3, 30, 300]), 12), round(exponent([1, 10, 100], [3, 3, 3]) + 0.0, 12)
    (1.0, 0.0)
    """
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


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


def upper_half(results: Iterable[SuiteResult]) -> list[SuiteResult]:
    """Those with work that lie above the middle of their range on a logarithmic axis, smallest first."""
    with_work = sorted((result for result in results if work(result) > 0), key=amount)
    return [one for one in with_work if amount(one) ** 2 >= amount(with_work[0]) * amount(with_work[-1])]


def growths(results: Iterable[SuiteResult]) -> list[Growth]:
    """The exponents of each thing, contender and axis that has two points or more in its upper half."""
    curves: dict[tuple[str, str, str], list[SuiteResult]] = {}
    for result in results:
        for name in result.taken:
            curves.setdefault((result.set, result.suite, name), []).append(result)
    found = []
    for (axis, what, name), curve in curves.items():
        upper = upper_half(curve)
        if len(upper) > 1:
            amounts = [amount(result) for result in upper]
            rounds = zip(*(growing_ms(result, result.taken[name]) for result in upper), strict=True)
            exponents = spread([exponent(amounts, times) for times in rounds])
            of_work = exponent(amounts, [work(result) for result in upper])
            found.append(Growth(axis, what, name, exponents, of_work, len(upper)))
    return found
