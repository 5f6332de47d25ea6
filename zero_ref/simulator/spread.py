"""The error of a prediction, as an interval from published runs that nothing was fitted to.

The factors here are what `benchmarks/judged.py` computes from these runs. They are constants, so that a
simulation needs neither the runs nor the time to simulate them.
tests/benchmarks/test_validation.py holds them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.cluster import Cluster

SHARE = 0.8
"""The share of the figures of one more source that an interval is meant to hold."""

KINDS = {
    "deepspeed": "DeepSpeed's engine, whatever the kernels are",
    "hand-written": "kernels of the blocks, forward and backward, that the program's authors wrote",
    "vendor": "Megatron-LM, Transformer Engine, and programs that are built on them",
    "compiled": "PyTorch, and torch.compile takes the whole model at once",
    "pytorch": "PyTorch, eager or with compiled blocks, with kernels of libraries among the operations",
}
"""The kinds of programs. A program is of the first of them that its source says of it."""

DEFAULT = "pytorch"
"""The kind of a program of which nothing is said."""


@dataclass(frozen=True)
class Spread:
    """The two factors that take a prediction to the ends of its interval.

    >>> Spread(0.9, 1.25).around(200.0)
    (180.0, 250.0)

    Raises:
        ValueError: the factors are not positive numbers in this order.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(f"an interval has factors 0 < low <= high, got {self.low:g} and {self.high:g}.")

    def around(self, predicted: float) -> tuple[float, float]:
        """The interval around a prediction."""
        return predicted * self.low, predicted * self.high

    def below(self, predicted: float, limit: float) -> bool | None:
        """Whether the real value is below a limit: True or False if the whole interval is, otherwise None."""
        low, high = self.around(predicted)
        return True if high <= limit else False if low > limit else None


def spread_of(ratios: Mapping[str, Sequence[float]], share: float = SHARE) -> Spread:
    """The interval that is to hold a share of the ratios of one more source.

    Every source counts the same, however many ratios it has, and one more may be further off than all of
    them: with n sources the interval holds (n + 1) / n times the share of their ratios, all at the most. As
    many are left out below as above.

    >>> spread_of({"one": [0.9, 1.1], "another": [1.0] * 8, "third": [1.2]}, share=0.6)
    Spread(low=0.9, high=1.2)

    Args:
        ratios: by source, published over predicted.
    Raises:
        ValueError: there is no ratio, or the share is not between 0 and 1.
    Source: the correction is that of conformal prediction (Lei et al., Journal of the American Statistical
        Association 113, 2018), with sources in the place of single figures.
    """
    weighted = sorted((ratio, 1 / len(some)) for some in ratios.values() for ratio in some)
    if not weighted:
        raise ValueError("an interval needs at least one published figure beside its prediction.")
    if not 0 < share < 1:
        raise ValueError(f"share is above 0 and below 1, got {share:g}.")
    sources = sum(bool(some) for some in ratios.values())
    outside = max(0.0, sources - share * (sources + 1)) / 2
    return Spread(_first_beyond(weighted, outside), _first_beyond(weighted[::-1], outside))


def spread_of_kind(
    ratios: Mapping[str, Mapping[str, Sequence[float]]], kind: str, share: float = SHARE
) -> Spread:
    """The interval of one kind of program.

    It is made from the sources of this kind, if they are enough: not even the whole range of n sources is
    expected to hold more than n / (n + 1) of one more. With fewer it is made from those of all kinds.

    >>> ratios = {"pytorch": {"one": [0.9], "two": [1.0]}, "vendor": {"three": [1.2]}}
    >>> spread_of_kind(ratios, "pytorch", share=0.6), spread_of_kind(ratios, "vendor", share=0.6)
    (Spread(low=0.9, high=1.0), Spread(low=0.9, high=1.2))

    Args:
        ratios: by kind and source, published over predicted.
        kind: of KINDS.
    Raises:
        ValueError: as `spread_of`.
    """
    own = {source: some for source, some in ratios.get(kind, {}).items() if some}
    if len(own) >= share * (len(own) + 1):
        return spread_of(own, share)
    every: dict[str, list[float]] = {}
    for of_kind in ratios.values():
        for source, some in of_kind.items():
            every.setdefault(source, []).extend(some)
    return spread_of(every, share)


def _first_beyond(weighted: Sequence[tuple[float, float]], outside: float) -> float:
    """The ratio before which no more than this weight lies."""
    passed = 0.0
    for ratio, weight in weighted:
        passed += weight
        if passed > outside + 1e-12:
            return ratio
    return weighted[-1][0]


TIME = Spread(0.940, 1.844)
"""The interval of the predicted time of a program of the kind "pytorch"."""

MEMORY = Spread(0.965, 1.137)
"""The interval of the predicted memory of a GPU under such a program."""

OTHERS: dict[str, tuple[Spread, Spread]] = {
    "deepspeed": (Spread(0.883, 9.396), Spread(0.955, 1.927)),
    "hand-written": (Spread(0.779, 1.844), Spread(0.891, 1.248)),
    "vendor": (Spread(0.779, 1.844), Spread(0.891, 1.248)),
    "compiled": (Spread(0.702, 1.235), Spread(0.940, 1.248)),
}
"""The intervals of time and memory under programs of the other kinds.

Source of all of them: the published runs of benchmarks/published_runs that nothing was fitted to.
"""


def interval_of_time(kind: str = DEFAULT) -> Spread:
    """The interval of a predicted time, by the kind of the program.

    >>> interval_of_time() == interval_of_time("pytorch") == TIME
    True

    Raises:
        ValueError: the kind is not in KINDS.
    """
    check_name("kind of program", kind, KINDS)
    return TIME if kind == DEFAULT else OTHERS[kind][0]


def interval_of_memory(kind: str = DEFAULT) -> Spread:
    """The interval of the predicted memory of a GPU, by the kind of the program.

    Raises:
        ValueError: as `interval_of_time`.
    """
    check_name("kind of program", kind, KINDS)
    return MEMORY if kind == DEFAULT else OTHERS[kind][1]


def around(ms: float, kind: str = DEFAULT) -> tuple[float, float]:
    """The interval around a predicted time."""
    return interval_of_time(kind).around(ms)


def fits(nbytes: float, capacity: float, kind: str = DEFAULT) -> bool | None:
    """Whether so many predicted bytes fit in so many: None if the interval has the capacity in it.

    >>> fits(1e9, 80e9), fits(80e9, 80e9), fits(400e9, 80e9)
    (True, None, False)
    """
    return interval_of_memory(kind).below(nbytes, capacity)


def four_cases(machine: Cluster) -> list[Cluster]:
    """The cluster if computing and sending each take the low or the high end of their interval.

    Two ways to train have most of an error in common, because a slower GPU slows both. So the intervals of
    their times say little about which is faster. Simulate both in these four cases instead, and see whether
    the same one is faster in all of them.

    >>> from zero_ref.simulator.cluster import cluster
    >>> [(round(one.device.tflops), round(one.between.gb_per_s)) for one in four_cases(cluster("h100-ib"))]
    [(1052, 53), (1052, 27), (536, 53), (536, 27)]
    """
    cases = []
    for computing, sending in product(TIME.around(1.0), repeat=2):
        device = machine.device.faster(computing=1 / computing, memory=1 / computing)
        links = machine.with_links(latency=sending, bandwidth=1 / sending)
        cases.append(replace(links, device=device))
    return cases
