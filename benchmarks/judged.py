"""The simulator compared with the published runs: the prediction of every run, and its error.

`python -m benchmarks.judged` prints the tables of the book's page of validation, which is made from VIEWS
here. A ratio is published over predicted, of milliseconds for a token or of bytes, so that a prediction times
the ratio is the published value. `simulator.spread` has the interval that follows from the ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.published import Run, published
from benchmarks.tables import aligned
from zero_ref.simulator.spread import MEMORY, TIME, Spread, spread_of

FIGURES = ("time", "memory")

GIB = 2**30

# ------------------------------------------------------------------------------------------------ judging


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
        """Predicted minus published, as a share of what was published: of the time or of the memory."""
        return 1 / self.ratio - 1

    @property
    def tested(self) -> bool:
        """Say whether the figure was kept out of all fitting."""
        return self.run.tests(self.figure)


class Predicted(NamedTuple):
    """The simulator's figures of a run.

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
    simulated = published().scenario(run).run(run.strategy)
    memory = simulated.memory
    nbytes = {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "driver": memory.peak_bytes,
        "unpooled": memory.allocated_bytes + memory.library_bytes,
    }[run.memory_of]
    return Predicted(simulated.tokens_per_second / run.ranks, nbytes / GIB, simulated.fits)


def compare(run: Run) -> list[Compared]:
    """Set a run's published figures beside the simulator's.

    >>> [one.figure for one in compare(published().run("titan-8b-8"))]
    ['time', 'memory']
    """
    said, rate = predict(run.id), run.tokens_per_s_gpu(published().models[run.model])
    found = []
    if rate is not None:
        found.append(Compared(run, "time", rate, said.tokens_per_s_gpu))
    if run.memory_gib is not None:
        found.append(Compared(run, "memory", run.memory_gib, said.gib))
    return found


@dataclass(frozen=True)
class Summary:
    """The errors of some figures.

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

    def of(self, figure: str, *, tested: bool | None = True) -> list[Compared]:
        """List the figures of one kind: the tested ones, the fitted ones (False), or both (None)."""
        return [
            one for one in self.compared if one.figure == figure and (tested is None or one.tested is tested)
        ]

    def spread(self, figure: str, *, without: str | None = None) -> Spread:
        """Give the interval that the tested figures imply, `without` those of one source."""
        ratios: dict[str, list[float]] = {}
        for one in self.of(figure):
            if one.run.source != without:
                ratios.setdefault(one.run.source, []).append(one.ratio)
        return spread_of(ratios)

    def interval(self, one: Compared) -> tuple[float, float]:
        """Give the interval around a prediction, in its unit, from the figures of all other sources."""
        low, high = self.spread(one.figure, without=one.run.source).around(1.0)
        factors = (1 / high, 1 / low) if one.figure == "time" else (low, high)
        return one.predicted * factors[0], one.predicted * factors[1]

    def inside(self, one: Compared) -> bool:
        """Say whether the published figure lies in the interval."""
        low, high = self.interval(one)
        return low <= one.published <= high

    def summary(self, some: Sequence[Compared]) -> Summary:
        """Summarize the errors of one or more figures."""
        errors = [abs(one.error) for one in some]
        return Summary(len(some), median(errors), max(errors), sum(map(self.inside, some)) / len(some))


@cache
def validate() -> Validation:
    """Predict every published figure. It takes some seconds."""
    return Validation([one for run in published().runs for one in compare(run)])


def verdicts() -> list[tuple[Run, bool | None]]:
    """Say of each run, if its device's memory is known, whether it fits; None is undecided.

    A verdict is wrong if it is False of a run that ran, or True of one that ended out of memory.
    """
    unknown = {"device", "memory of the GPU"}
    known = [run for run in published().runs if not unknown & set(published().supposed(run))]
    return [(run, predict(run.id).fits) for run in known]


def summaries(some: Sequence[Compared]) -> list[tuple[str, Summary]]:
    """Summarize the tested figures among these by source, then all tested ones, then the fitted ones."""
    tested = [one for one in some if one.tested]
    by_source: dict[str, list[Compared]] = {}
    for one in tested:
        by_source.setdefault(one.run.source, []).append(one)
    groups = [*by_source.items(), ("all tested", tested), ("fitted", [one for one in some if not one.tested])]
    return [(label, validate().summary(group)) for label, group in groups if group]


# ------------------------------------------------------------------------------------ the tables of the page


def shown(value: float) -> str:
    """A rate or an amount with three or more digits.

    >>> shown(5762.4), shown(82.44), shown(331.0)
    ('5,762', '82.4', '331')
    """
    return f"{value:,.0f}" if value >= 200 else f"{value:.1f}"


def sources(_folder: Path) -> Iterator[str]:
    """List each source, how many runs it has, what they are used for, and what was read."""
    data = published()
    rows = []
    for name, source in data.sources.items():
        runs = [run for run in data.runs if run.source == name]
        use = sorted({run.use.replace("test", "") for run in runs} - {""})
        rows.append([f"`{name}`", str(len(runs)), ", ".join(use), f"[{source.title}]({source.url})"])
    yield aligned(["source", "runs", "used to", "published in"], rows)
    for name, source in data.sources.items():
        yield f"- `{name}`: {source.read}"


def figures(_folder: Path, figure: str) -> Iterator[str]:
    """Show every run's time, or memory, beside its prediction."""
    result = validate()
    rows = []
    for one in result.of(figure, tested=None):
        low, high = result.interval(one)
        notes = {
            "fitted": not one.tested,
            "supposed": bool(published().supposed(one.run)),
            "outside": not result.inside(one),
        }
        rows.append(
            [
                f"`{one.run.id}`",
                ", ".join(note for note, applies in notes.items() if applies),
                shown(one.published),
                shown(one.predicted),
                f"{shown(low)} to {shown(high)}",
                f"{one.error:+.0%}",
            ]
        )
    yield aligned(["run", "", "reported", "predicted", "interval", "error"], rows)


def summary(_folder: Path, figure: str) -> Iterator[str]:
    """Show medians, worst errors and the share inside, by source."""
    rows = [
        [label, str(each.count), *map(_percent, (each.median_error, each.worst_error, each.inside))]
        for label, each in summaries(validate().of(figure, tested=None))
    ]
    yield aligned(["source", "figures", "median error", "worst", "inside"], rows)


def intervals(_folder: Path) -> Iterator[str]:
    """Show the factors around a prediction."""
    both = (("of time", TIME), ("of memory", MEMORY))
    yield aligned(
        ["prediction", "times", "to"], [[what, f"{one.low:.2f}", f"{one.high:.2f}"] for what, one in both]
    )


def fitting(_folder: Path) -> Iterator[str]:
    """Count what the simulator says of the memory of runs that ran, and of those that did not."""
    said = {True: "fits", False: "does not fit", None: "undecided"}
    every = verdicts()
    rows = []
    for ran, outcome in {True: "ran", False: "ended out of memory"}.items():
        of_outcome = [verdict for run, verdict in every if run.ran is ran]
        rows.append([outcome, *(str(of_outcome.count(verdict)) for verdict in said)])
    yield aligned(["", *said.values()], rows)


def _percent(share: float) -> str:
    return f"{share:.0%}"


VIEWS: dict[str, Callable[..., Iterator[str]]] = {
    f"validation_{view.__name__}": view for view in (sources, figures, summary, intervals, fitting)
}


def main() -> None:
    """Print all tables of the page."""
    here = Path()
    tables: list[tuple[str, Iterable[str]]] = [("the runs", sources(here))]
    for figure in FIGURES:
        tables += [(figure, figures(here, figure)), (f"{figure}, by source", summary(here, figure))]
    tables += [("intervals", intervals(here)), ("does it fit?", fitting(here))]
    for title, lines in tables:
        print(f"{title}\n")
        for line in lines:
            print(line)
        print()


if __name__ == "__main__":
    main()
