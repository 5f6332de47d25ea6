"""How times grow with a size, and how the work does: measured points, exponents of lines through them.

With an exponent of 1 something doubles when the size does. If the time's exponent is below the work's, some
of the time does not depend on the work; above it, something grows faster than the work. Standard library
only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zero_ref.bench.growth_point import GrowthPoint
from zero_ref.bench.results import Spread, spread

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
    if not with_work:
        return []
    middle = math.sqrt(with_work[0].amount * with_work[-1].amount)
    return [point for point in with_work if point.amount >= middle]


def growths(points: Iterable[GrowthPoint]) -> list[Growth]:
    """The exponents of each thing, contender and axis that has two points or more in its upper half."""
    together: dict[tuple[str, str, str], list[GrowthPoint]] = {}
    for point in points:
        together.setdefault((point.axis, point.what, point.contender), []).append(point)
    found = []
    for name, of_one in together.items():
        upper = upper_half(of_one)
        if len(upper) < 2:
            continue
        amounts = [point.amount for point in upper]
        rounds = zip(*(point.times_ms for point in upper), strict=True)
        exponents = spread([exponent(amounts, times) for times in rounds])
        of_work = exponent(amounts, [point.work for point in upper])
        found.append(Growth(*name, exponents, of_work, len(upper)))
    return found
