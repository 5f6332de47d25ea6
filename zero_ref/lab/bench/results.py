"""What a benchmark brings home: every sample, as plain values, and what follows. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from zero_ref.lab.bench.growth_point import GrowthPoint
from zero_ref.lab.bench.machine import Commit, Machine


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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SuiteResult:
        """What `as_json` made plain values of."""
        return cls(**{**value, "taken": {name: Taken(**taken) for name, taken in value["taken"].items()}})


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
    def from_json(cls, value: dict[str, Any]) -> Report:
        """What `as_json` made plain values of."""
        return cls(
            machine=Machine(**value["machine"]),
            versions=dict(value["versions"]),
            commit=None if value["commit"] is None else Commit(**value["commit"]),
            sessions=[
                Session(**{**session, "load_average": tuple(session["load_average"])})
                for session in value["sessions"]
            ],
            results=[SuiteResult.from_json(result) for result in value["results"]],
            figures=[Figure(**figure) for figure in value["figures"]],
            growth=[GrowthPoint.from_json(point) for point in value["growth"]],
        )


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
