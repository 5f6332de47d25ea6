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

from benchmarks.offload import offload
from benchmarks.published import Run, published
from benchmarks.tables import aligned
from zero_ref.simulator.spread import (
    KINDS,
    Spread,
    interval_of_memory,
    interval_of_time,
    spread_of_kind,
)

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
    def new(self) -> bool:
        """Say whether the source was added after kinds were fixed, and before it was predicted."""
        return published().sources[self.run.source].added is not None

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

    def spread(self, figure: str, kind: str, *, around: Compared | None = None) -> Spread:
        """Give the interval of a kind of program that the tested figures imply.

        Args:
            around: a figure that is to be judged. Figures of its own source are left out, and, if the source
                was added later, those of all that were.
        """
        ratios: dict[str, dict[str, list[float]]] = {}
        for one in self.of(figure):
            if around is None or not (one.run.source == around.run.source or (around.new and one.new)):
                ratios.setdefault(one.run.kind, {}).setdefault(one.run.source, []).append(one.ratio)
        return spread_of_kind(ratios, kind)

    def interval(self, one: Compared) -> tuple[float, float]:
        """Give the interval around a prediction, in its unit, from the figures of other sources."""
        low, high = self.spread(one.figure, one.run.kind, around=one).around(1.0)
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
    """Summarize these figures: the tested ones of new sources and of others, by kind, and the fitted ones."""
    tested = [one for one in some if one.tested]
    groups: list[tuple[str, list[Compared]]] = []
    for age, new in {"new": True, "others": False}.items():
        of_age = [one for one in tested if one.new is new]
        groups += [(f"{age}, {kind}", [one for one in of_age if one.run.kind == kind]) for kind in KINDS]
        groups.append((f"{age}, all", of_age))
    groups += [("all", tested), ("fitted", [one for one in some if not one.tested])]
    return [(label, validate().summary(group)) for label, group in groups if group]


# ------------------------------------------------------------------------------------ the tables of the page


def shown(value: float) -> str:
    """A rate or an amount with three or more digits.

    >>> shown(5762.4), shown(82.44), shown(331.0)
    ('5,762', '82.4', '331')
    """
    return f"{value:,.0f}" if value >= 200 else f"{value:.1f}"


def sources(_folder: Path) -> Iterator[str]:
    """List each source with its runs and what they are used for, and in a fold what was read of it."""
    data = published()
    rows = []
    for name, source in data.sources.items():
        runs = [run for run in data.runs if run.source == name]
        use = ", ".join(sorted({run.use.replace("test", "") for run in runs} - {""}))
        kinds, added = ", ".join(sorted({run.kind for run in runs})), source.added or ""
        rows.append([f"`{name}`", str(len(runs)), kinds, use, added, f"[{source.title}]({source.url})"])
    yield aligned(["source", "runs", "programs", "used to", "added", "published in"], rows)
    yield from ("", "```{admonition} What was read of each source", ":class: dropdown")
    yield from (f"- `{name}`: {source.read}" for name, source in data.sources.items())
    yield "```"


def figures(_folder: Path, figure: str) -> Iterator[str]:
    """Show every run's time, or memory, beside its prediction."""
    result = validate()
    rows = []
    for one in result.of(figure, tested=None):
        low, high = result.interval(one)
        notes = {
            "fitted": not one.tested,
            "new": one.new,
            "supposed": bool(published().supposed(one.run)),
            "outside": not result.inside(one),
        }
        rows.append(
            [
                f"`{one.run.id}`",
                one.run.kind,
                ", ".join(note for note, applies in notes.items() if applies),
                shown(one.published),
                shown(one.predicted),
                f"{shown(low)} to {shown(high)}",
                f"{one.error:+.0%}",
            ]
        )
    yield aligned(["run", "program", "", "reported", "predicted", "interval", "error"], rows)


def summary(_folder: Path, figure: str) -> Iterator[str]:
    """Show medians, worst errors and the share inside, by age of the source and kind of program."""
    every = validate().of(figure, tested=None)
    rows = [
        [label, str(each.count), *map(_percent, (each.median_error, each.worst_error, each.inside))]
        for label, each in summaries(every)
    ]
    yield aligned(["sources, kind", "figures", "median error", "worst", "inside"], rows)


def intervals(_folder: Path) -> Iterator[str]:
    """Show the factors around a prediction, by kind of program, and what the kind means."""
    rows = []
    for kind, meaning in KINDS.items():
        of_kind = (interval_of_time(kind), interval_of_memory(kind))
        rows.append([f"`{kind}`", *(f"{one.low:.2f} to {one.high:.2f}" for one in of_kind), meaning])
    yield aligned(["program", "time", "memory", "what it is"], rows)


WORST = {"time": 0.30, "memory": 0.15}
"""Errors of tested figures above these are listed with their causes, and so are figures outside."""


def missed() -> dict[str, list[str]]:
    """List the runs with a tested figure that is outside its interval or far off, by the cause."""
    runs: dict[str, list[str]] = {}
    for figure in FIGURES:
        for one in validate().of(figure):
            if abs(one.error) > WORST[figure] or not validate().inside(one):
                cause = one.run.cause or published().sources[one.run.source].cause
                runs.setdefault(cause, []).append(one.run.id)
    return runs


def causes(_folder: Path) -> Iterator[str]:
    """Show these runs with the cause of each."""
    for cause, runs in missed().items():
        yield f"- {', '.join(f'`{name}`' for name in dict.fromkeys(runs))}: {cause}"


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
    f"validation_{view.__name__}": view
    for view in (sources, figures, summary, intervals, causes, fitting, offload)
}


def main() -> None:
    """Print all tables of the page."""
    here = Path()
    tables: list[tuple[str, Iterable[str]]] = [("the runs", sources(here))]
    for figure in FIGURES:
        tables += [(figure, figures(here, figure)), (f"{figure}, by kind", summary(here, figure))]
    last = {
        "intervals": intervals,
        "what is off, and why": causes,
        "does it fit?": fitting,
        "offload": offload,
    }
    tables += [(title, view(here)) for title, view in last.items()]
    for title, lines in tables:
        print(f"{title}\n")
        for line in lines:
            print(line)
        print()


if __name__ == "__main__":
    main()
