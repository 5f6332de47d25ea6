"""The simulator held against the published runs: every run predicted, and how far off.

A ratio is published over predicted, of milliseconds for a token or of bytes, so that a prediction times the
ratio is what was published. `spread` has the interval that follows from the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import NamedTuple

from zero_ref.simulator.published import published
from zero_ref.simulator.runs import Published, Run
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.spread import Spread, spread_of

FIGURES = ("time", "memory")

GIB = 2**30


def scenario_of(run: Run, data: Published | None = None) -> Scenario:
    """A published run as a scenario.

    >>> scenario = scenario_of(published().run("titan-8b-8"))
    >>> scenario.world_size, scenario.batch, scenario.cluster.device.name
    (8, 2, 'H100 96 GB')

    Args:
        data: has the run's model and machines; None for `published`.
    Raises:
        ValueError: as `Scenario`.
    """
    data = data or published()
    return Scenario(
        data.models[run.model],
        data.clusters[run.cluster].cluster(run.cluster),
        run.ranks,
        batch=run.batch,
        sequence=run.sequence,
        accumulation=run.accumulation,
        checkpointing=run.checkpointing,
        **run.options,
    )


@dataclass(frozen=True)
class Compared:
    """A published figure beside the simulator's.

    >>> half = Compared(published().run("titan-8b-8"), "time", published=5762.0, predicted=11524.0)
    >>> half.ratio, half.error                                                 # twice as fast: half the time
    (2.0, -0.5)

    Args:
        figure: one of FIGURES.
        published, predicted: tokens a second a GPU, or GiB.
    """

    run: Run
    figure: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Published over predicted, of the time or of the memory."""
        ratio = self.published / self.predicted
        return 1 / ratio if self.figure == "time" else ratio

    @property
    def error(self) -> float:
        """What was predicted too much, as a share of what was published: of the time or of the memory."""
        return 1 / self.ratio - 1

    @property
    def tested(self) -> bool:
        """Whether the figure was kept out of all fitting."""
        return self.run.tests(self.figure)


class Predicted(NamedTuple):
    """What the simulator says of a run.

    Args:
        gib: of the fullest GPU, of the kind of memory that was published.
        fits: None if it is undecided, or the device's memory is not known.
    """

    tokens_per_s_gpu: float
    gib: float
    fits: bool | None


@cache
def predict(name: str) -> Predicted:
    """Simulate a published run, once.

    >>> predict("nanogpt-4090").fits
    True
    """
    run = published().run(name)
    return predicted(run, scenario_of(run))


def predicted(run: Run, scenario: Scenario) -> Predicted:
    """Simulate a run in its scenario.

    >>> run = published().run("nanogpt-4090")
    >>> predicted(run, scenario_of(run)) == predict("nanogpt-4090")
    True

    Raises:
        ValueError: as `Scenario.run`.
    """
    simulated = scenario.run(run.strategy)
    memory = simulated.memory
    nbytes = {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "unpooled": memory.allocated_bytes + memory.library_bytes,
    }[run.memory_of]
    return Predicted(simulated.tokens_per_second / run.ranks, nbytes / GIB, simulated.fits)


def compare(run: Run, data: Published | None = None) -> list[Compared]:
    """A run's published figures beside the simulator's.

    >>> [one.figure for one in compare(published().run("titan-8b-8"))]
    ['time', 'memory']

    Args:
        data: has the run's model and machines; None for `published`.
    Raises:
        ValueError: as `scenario_of` and `predicted`.
    """
    said = predict(run.id) if data is None else predicted(run, scenario_of(run, data))
    rate = run.tokens_per_s_gpu((data or published()).models[run.model])
    found = []
    if rate is not None:
        found.append(Compared(run, "time", rate, said.tokens_per_s_gpu))
    if run.memory_gib is not None:
        found.append(Compared(run, "memory", run.memory_gib, said.gib))
    return found


@dataclass(frozen=True)
class Summary:
    """How well some figures were predicted.

    Args:
        count: of the figures.
        median_error, worst_error: as shares of the published, without their signs.
        inside: the share of the figures that lie inside the interval.
    """

    count: int
    median_error: float
    worst_error: float
    inside: float


@dataclass(frozen=True)
class Validation:
    """All published figures beside the simulator's."""

    compared: Sequence[Compared]

    def of(self, figure: str, *, tested: bool | None = True, source: str | None = None) -> list[Compared]:
        """The figures of one kind: the tested ones, the fitted ones (False), or both (None)."""
        return [
            one
            for one in self.compared
            if one.figure == figure
            and (tested is None or one.tested is tested)
            and (source is None or one.run.source == source)
        ]

    def spread(self, figure: str, *, without: str | None = None) -> Spread:
        """The interval around a prediction that the tested figures give, `without` those of one source."""
        ratios: dict[str, list[float]] = {}
        for one in self.of(figure):
            if one.run.source != without:
                ratios.setdefault(one.run.source, []).append(one.ratio)
        return spread_of(ratios)

    def interval(self, one: Compared) -> tuple[float, float]:
        """Around a prediction, in the unit of the figure, from the figures of all other sources."""
        low, high = self.spread(one.figure, without=one.run.source).around(1.0)
        factors = (1 / high, 1 / low) if one.figure == "time" else (low, high)
        return one.predicted * factors[0], one.predicted * factors[1]

    def inside(self, one: Compared) -> bool:
        """Whether what was published lies in the interval."""
        low, high = self.interval(one)
        return low <= one.published <= high

    def summary(self, some: Iterable[Compared]) -> Summary:
        """Of these figures.

        Raises:
            ValueError: there are none.
        """
        some = list(some)
        if not some:
            raise ValueError("there is no figure to summarize.")
        errors = [abs(one.error) for one in some]
        inside = sum(map(self.inside, some)) / len(some)
        return Summary(len(some), median(errors), max(errors), inside)

    def sources(self, figure: str) -> list[str]:
        """Those with tested figures of this kind, in the file's order."""
        return list(dict.fromkeys(one.run.source for one in self.of(figure)))


@cache
def validate() -> Validation:
    """Predict every published figure. It takes some seconds."""
    return Validation([one for run in published().runs for one in compare(run)])


def verdicts() -> list[tuple[Run, bool | None]]:
    """What the simulator says of each run's memory: True fits, False does not, None undecided.

    A verdict is wrong if it is False of a run that ran, or True of one that ended out of memory.
    """
    return [(run, predict(run.id).fits) for run in published().runs if _device_known(run)]


def _device_known(run: Run) -> bool:
    return not {"device", "memory of the GPU"} & set(published().supposed(run))


def largest(some: Iterable[Compared], count: int) -> list[Compared]:
    """The figures that are furthest off, the worst first, by the factor between the two."""
    return sorted(some, key=lambda one: -abs(math.log(one.ratio)))[:count]
