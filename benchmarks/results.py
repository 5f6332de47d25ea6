"""The results of a benchmark: every sample, as plain values, and the ratios that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import Commit, Machine
from zero_ref.simulator._records import record

LIMIT = "limit: "
"""The beginning of a limit's name."""

BYTES_OF_A_PARAMETER = 4


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
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75), method="weibull").tolist()
    return Spread(median, low, high)


@dataclass
class Taken:
    """The samples of one contender.

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
    """One suite on one set: the samples of every contender and every limit, round by round.

    Args:
        suite: one of `suites.SUITES`.
        set: one of `contenders.SETS`.
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

    def ratio(self, one: str, other: str, *, of: str = "wall_ms") -> Spread:
        """Return the time of `one` over that of `other`, round by round."""
        times, of_other = (getattr(self.taken[name], of) for name in (one, other))
        return spread([a / b for a, b in zip(times, of_other, strict=True)])

    def wire_units(self, name: str) -> float | None:
        """Elements on the wire in units of (N-1)Ψ, Ψ the number of parameters; None if not counted."""
        sent = self.taken[name].wire_bytes
        unit = (self.ranks - 1) * self.parameters * BYTES_OF_A_PARAMETER
        return None if sent is None or not unit else sent / unit


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
    """All measurements, and their machine, as `python -m benchmarks --json` writes them.

    Args:
        versions: of Python and the packages; None for a package that is not installed.
        commit: None outside a checkout.
        sessions: one for each run of the command.
    """

    machine: Machine
    versions: dict[str, str | None]
    commit: Commit | None
    sessions: list[Session]
    results: list[SuiteResult] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Report:
        """Return the report of the plain values that `as_json` has made, also after they went through JSON.

        Raises:
            ValueError: it is something else; a time is not above 0; or some have more rounds than others.
        """
        report = record(cls, value, "report")
        for result in report.results:
            what = f"{result.suite}, {result.set}"
            times = [times for taken in result.taken.values() for times in (taken.wall_ms, taken.cpu_ms)]
            if len({len(of_one) for of_one in times}) > 1:
                raise ValueError(f"{what}: all contenders take turns, but some have more rounds than others")
            if min((ms for of_one in times for ms in of_one), default=1) <= 0:
                raise ValueError(f"{what}: a time in milliseconds is above 0")
        return report


def merge(reports: Sequence[Report]) -> Report:
    """Merge reports of suites that were run one at a time.

    Raises:
        ValueError: there are no reports; they are of different machines, versions or commits; or two have the
            same suite, set and number of ranks, and this function cannot choose between them.
    """
    if not reports:
        raise ValueError("merge needs at least one report, got none")
    first = reports[0]
    for name in ("machine", "versions", "commit"):
        for other in reports[1:]:
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"reports of different {name} cannot be one: {ours} and {theirs}")
    sessions = [one for report in reports for one in report.sessions]
    results = [one for report in reports for one in report.results]
    seen: set[tuple[str, str, int]] = set()
    for key in [(one.suite, one.set, one.ranks) for one in results]:
        if key in seen:
            raise ValueError(f"{key} is in more than one report: leave all but one of them out")
        seen.add(key)
    return Report(first.machine, first.versions, first.commit, sessions, results)
