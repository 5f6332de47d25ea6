"""What a benchmark brings home: every sample, as plain values. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from benchmarks.machine import Commit, Machine
from zero_ref.simulator._records import record

AXES = ("parameters", "tensors", "ranks")
GROWING = ("step", "sync", "consolidate", "construct")
"""What is timed along each of AXES."""

LIMIT = "limit: "
"""What the name of a limit begins with."""

BYTES_OF_A_PARAMETER = 4
MOST = 10**12
"""Of what is counted and timed here. Above it, sizes and times could not be told apart or divided."""


class Spread(NamedTuple):
    """The median of some samples and the quartiles beside it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    Spread(median=3.0, low=1.5, high=4.5)
    """
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(middle, low, high)


@dataclass
class Taken:
    """What one contender took.

    Args:
        wall_ms: for each round the milliseconds from a barrier until the slowest rank was done.
        cpu_ms: for each round the processor time of all ranks together, their backend's threads included.
        wire_bytes: what all ranks sent together in one go; None where nobody counted.
        figures: other numbers, by name: "state_bytes", "peak_bytes".
    """

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    wire_bytes: int | None = None
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class SuiteResult:
    """One suite on one set: what every contender and every limit took, round by round.

    Args:
        suite: "step", "sync", "iteration", "checkpoint", "memory" or "construction".
        set: of `contenders.SETS`.
        ranks: the number of ranks.
        tensors, parameters: of the model.
        taken: by contender. A limit's name begins with "limit: ".
    """

    suite: str
    set: str
    ranks: int
    tensors: int
    parameters: int
    taken: dict[str, Taken]

    def ratio(self, one: str, *others: str, of: str = "wall_ms") -> Spread:
        """How many times as long `one` took as the others one after the other, round by round."""
        times, *of_others = (getattr(self.taken[name], of) for name in (one, *others))
        together = map(sum, zip(*of_others, strict=True))
        return spread([a / b for a, b in zip(times, together, strict=True)])

    def wire_units(self, name: str) -> float | None:
        """Bytes on the wire in units of (N-1)Ψ, Ψ the bytes of all parameters; None where nobody counted."""
        sent = self.taken[name].wire_bytes
        unit = (self.ranks - 1) * self.parameters * BYTES_OF_A_PARAMETER
        return None if sent is None or not unit else sent / unit


@dataclass(frozen=True)
class GrowthPoint:
    """What one contender took for one thing at one size: a point of a curve of growth.

    Args:
        axis: what is varied: of AXES.
        what: of GROWING.
        contender: a limit's name begins with "limit: ".
        tensors, parameters: of the model; all tensors but the first have one size, and it what is left.
        wall_ms, cpu_ms: of each round, as `Taken` has them.
    """

    axis: str
    what: str
    contender: str
    ranks: int
    tensors: int
    parameters: int
    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]

    @property
    def amount(self) -> int:
        """Where the point lies on its axis."""
        return int(getattr(self, self.axis))

    @property
    def work(self) -> float:
        """What there is to do: tensors where these are varied, else bytes of memory traffic of all ranks.

        An element's update moves 28 bytes. Its new value is read and written twice on the way to each other
        rank: by the sender into the kernel, by the receiver out of it. Of state there are 8 bytes an element;
        rank 0 copies its own part and is sent the others. Construction copies all parameters on every rank.

        >>> [GrowthPoint("ranks", what, "ours", 4, 100, 10**6, (), ()).work / 1e6 for what in GROWING]
        [76.0, 48.0, 28.0, 32.0]
        """
        if self.axis == "tensors":
            return self.tensors
        sent = 16 * (self.ranks - 1)
        an_element = (28 + sent, sent, (16 + 2 * sent) / self.ranks, 8 * self.ranks)
        return self.parameters * an_element[GROWING.index(self.what)]

    @property
    def times_ms(self) -> tuple[float, ...]:
        """Wall time; where ranks are varied the processor time of all of them, because they share cores."""
        return self.cpu_ms if self.axis == "ranks" else self.wall_ms


@dataclass(frozen=True)
class Figure:
    """A single number, where nobody takes turns.

    Args:
        suite: "starts", "plan", "simulate" or "predicted".
        name: what it is, as a table names it.
        case: of what, where there are several: a strategy, a size.
        ranks: real or on paper.
        value: in `unit`.
    """

    suite: str
    name: str
    case: str
    ranks: int
    value: float
    unit: str = ""


@dataclass
class Session:
    """One run of the command.

    Args:
        date: when it began, UTC, ISO 8601.
        rounds: of every suite that takes turns.
        quick: whether it was only to see that all of it runs.
        wire_counter: where the bytes on the wire were read.
        load_average: before and after; None where the system does not tell.
    """

    date: str
    rounds: int
    quick: bool
    wire_counter: str
    load_average: tuple[float | None, float | None]


@dataclass
class Report:
    """All that was measured, and where: what `python -m benchmarks --json` writes.

    Args:
        versions: of Python and the packages; None for what is not installed.
        commit: None outside a checkout.
        sessions: one for each run of the command.
    """

    machine: Machine
    versions: dict[str, str | None]
    commit: Commit | None
    sessions: list[Session]
    results: list[SuiteResult] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    growth: list[GrowthPoint] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """As plain values, for json."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Report:
        """What `as_json` made plain values of, by way of json too.

        Raises:
            ValueError: it is something else, or says what no measurement can: a time that is not above 0,
                contenders with more rounds than others, no rank.
        """
        report = record(cls, value, "report")
        for result in report.results:
            _check_result(result)
        for figure in report.figures:
            _check_numbers(f"figure {figure.name!r}", figure, figures=[figure.value])
        _check_growth(report.growth)
        return report


def _check_result(result: SuiteResult) -> None:
    what = f"{result.suite}, {result.set}"
    _check_numbers(what, result)
    for name, taken in result.taken.items():
        _check_numbers(f"{what}, {name}", result, taken.wall_ms + taken.cpu_ms, [*taken.figures.values()])
    rounds = {len(times) for taken in result.taken.values() for times in (taken.wall_ms, taken.cpu_ms)}
    if len(rounds) > 1:
        raise ValueError(f"{what}: all contenders take turns, but these have {sorted(rounds)} rounds")


def _check_growth(points: Sequence[GrowthPoint]) -> None:
    seen: set[tuple[str, str, str, int]] = set()
    rounds_of: dict[tuple[str, str, str], int] = {}
    for point in points:
        if point.axis not in AXES or point.what not in GROWING:
            raise ValueError(
                f"growth of {point.what!r} with {point.axis!r}: choose from {', '.join(GROWING)}, and from "
                f"{', '.join(AXES)}"
            )
        what = f"growth of {point.what} with {point.axis}, {point.contender}"
        _check_numbers(what, point, (*point.wall_ms, *point.cpu_ms))
        of = point.axis, point.what, point.contender
        rounds = rounds_of.setdefault(of, len(point.wall_ms))
        if not len(point.wall_ms) == len(point.cpu_ms) == rounds > 0:
            raise ValueError(f"{what}: all sizes have as many rounds, 1 or more")
        if (*of, point.amount) in seen:
            raise ValueError(f"{what}: {point.amount:,} {point.axis} are there twice")
        seen.add((*of, point.amount))


def _check_numbers(
    what: str, sizes: object, times_ms: Sequence[float] = (), figures: Sequence[float] = ()
) -> None:
    for name in AXES:
        amount = getattr(sizes, name, 1)  # a figure has no tensors
        if not 1 <= amount <= MOST:
            raise ValueError(f"{what}: {name} must be 1 to {MOST:,}, not {amount:,}")
    for ms in times_ms:
        if not 1 / MOST <= ms <= MOST:
            raise ValueError(f"{what}: a time in milliseconds is above 0, up to {MOST:,}, not {ms:g}")
    for value in figures:
        if abs(value) > MOST**1.5:
            raise ValueError(f"{what}: {value:g} is nothing that was measured")


def merge(reports: Sequence[Report]) -> Report:
    """One report of several, for suites that were run one at a time.

    Raises:
        ValueError: there is none; they are of different machines, versions or commits; or two have the same
            suite, set and number of ranks, and which of them counts is not for this function to say.
    """
    if not reports:
        raise ValueError("merge needs at least one report, got none")
    first = reports[0]
    for name in ("machine", "versions", "commit"):
        for other in reports[1:]:
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"reports of different {name} cannot be one: {ours} and {theirs}")
    sessions, results, figures, growth = (
        [one for report in reports for one in getattr(report, name)]
        for name in ("sessions", "results", "figures", "growth")
    )
    seen: set[tuple[object, ...]] = set()
    for key in [(one.suite, one.set, one.ranks) for one in results] + [
        (one.suite, one.name, one.case, one.ranks) for one in figures
    ]:
        if key in seen:
            raise ValueError(f"{key} is in more than one report: leave all but one of them out")
        seen.add(key)
    return Report(first.machine, first.versions, first.commit, sessions, results, figures, growth)
