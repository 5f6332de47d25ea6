"""What a benchmark brings home: every sample, as plain values, and what follows. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from zero_ref.bench.growth_point import AXES, TIMED, GrowthPoint
from zero_ref.bench.machine import Commit, Machine
from zero_ref.simulator._records import record


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


WON, UNDECIDED, LOST = "won", "undecided", "lost"


def outcome(ratio: Spread) -> str:
    """What a paired ratio of another's time to ours says: won, lost, or undecided where the quartiles hold 1.

    >>> outcome(Spread(2.0, 1.8, 2.1)), outcome(Spread(1.02, 0.9, 1.1)), outcome(Spread(0.8, 0.7, 0.99))
    ('won', 'undecided', 'lost')
    """
    if ratio.low > 1:
        return WON
    return LOST if ratio.high < 1 else UNDECIDED


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


LIMIT = "limit: "
"""What the name of a limit begins with."""

BYTES_OF_A_PARAMETER = 4


@dataclass
class SuiteResult:
    """One suite on one set: what every contender and every limit took, round by round.

    Args:
        suite: "step", "sync", "iteration", "checkpoint", "memory" or "construction".
        set: of `sets.SETS`.
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

    def ratio(self, one: str, other: str, of: str = "wall_ms") -> Spread:
        """How many times as long `one` took as `other`, round by round."""
        return spread(
            [a / b for a, b in zip(getattr(self.taken[one], of), getattr(self.taken[other], of), strict=True)]
        )

    def over(self, one: str, limits: Sequence[str], of: str = "wall_ms") -> Spread:
        """How many times as long `one` took as all limits one after the other, round by round."""
        together = [
            sum(times) for times in zip(*(getattr(self.taken[name], of) for name in limits), strict=True)
        ]
        return spread([a / b for a, b in zip(getattr(self.taken[one], of), together, strict=True)])

    def wire_units(self, name: str) -> float | None:
        """Bytes on the wire in units of (N-1)Ψ, Ψ the bytes of all parameters; None where nobody counted."""
        sent = self.taken[name].wire_bytes
        unit = (self.ranks - 1) * self.parameters * BYTES_OF_A_PARAMETER
        return None if sent is None or not unit else sent / unit

    @property
    def of(self) -> tuple[str, str, int]:
        """What tells it from other results."""
        return self.suite, self.set, self.ranks

    def as_json(self) -> dict[str, Any]:
        """As plain values, for json."""
        return asdict(self)


# ------------------------------------------------------------------------------------------- a whole run


class Figure(NamedTuple):
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
    unit: str


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
    """All that was measured, and where: what `zero-ref bench --json` writes.

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
        return {**asdict(self), "figures": [figure._asdict() for figure in self.figures]}

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
            _check_amounts(f"figure {figure.name!r}", ranks=figure.ranks)
            _check_figure(f"figure {figure.name!r}", figure.value)
        _check_growth(report.growth)
        return report


def _check_result(result: SuiteResult) -> None:
    what = f"{result.suite}, {result.set}"
    _check_amounts(what, ranks=result.ranks, tensors=result.tensors, parameters=result.parameters)
    for name, taken in result.taken.items():
        _check_times(f"{what}, {name}", (*taken.wall_ms, *taken.cpu_ms))
        for figure in taken.figures.values():
            _check_figure(f"{what}, {name}", figure)
    rounds = {len(times) for taken in result.taken.values() for times in (taken.wall_ms, taken.cpu_ms)}
    if len(rounds) > 1:
        raise ValueError(f"{what}: all contenders take turns, but these have {sorted(rounds)} rounds")


def _check_growth(points: Sequence[GrowthPoint]) -> None:
    seen: set[tuple[str, str, str, int]] = set()
    rounds_of: dict[tuple[str, str, str], int] = {}
    for point in points:
        if point.axis not in AXES or point.what not in TIMED:
            raise ValueError(
                f"growth of {point.what!r} with {point.axis!r}: choose from {', '.join(TIMED)}, and from "
                f"{', '.join(AXES)}"
            )
        what = f"growth of {point.what} with {point.axis}, {point.contender}"
        _check_amounts(what, ranks=point.ranks, tensors=point.tensors, parameters=point.parameters)
        _check_times(what, (*point.wall_ms, *point.cpu_ms))
        of = point.axis, point.what, point.contender
        rounds = rounds_of.setdefault(of, len(point.wall_ms))
        if not len(point.wall_ms) == len(point.cpu_ms) == rounds > 0:
            raise ValueError(f"{what}: all sizes have as many rounds, 1 or more")
        if (*of, point.amount) in seen:
            raise ValueError(f"{what}: {point.amount:,} {point.axis} are there twice")
        seen.add((*of, point.amount))


MOST = 10**12
"""Of what is counted and timed here. Above it, sizes and times could not be told apart or divided."""


def _check_amounts(what: str, **amounts: int) -> None:
    for name, amount in amounts.items():
        if not 1 <= amount <= MOST:
            raise ValueError(f"{what}: {name} must be 1 to {MOST:,}, not {amount:,}")


def _check_times(what: str, times_ms: Sequence[float]) -> None:
    for ms in times_ms:
        if not 1 / MOST <= ms <= MOST:
            raise ValueError(f"{what}: a time in milliseconds is above 0, up to {MOST:,}, not {ms:g}")


def _check_figure(what: str, value: float) -> None:
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
    results = [result for report in reports for result in report.results]
    figures = [figure for report in reports for figure in report.figures]
    seen: set[tuple[object, ...]] = set()
    for key in [result.of for result in results] + [figure[:4] for figure in figures]:
        if key in seen:
            raise ValueError(f"{key} is in more than one report: leave all but one of them out")
        seen.add(key)
    sessions = [session for report in reports for session in report.sessions]
    growth = [point for report in reports for point in report.growth]
    return Report(first.machine, first.versions, first.commit, sessions, results, figures, growth)
