"""What we want of the optimizer, as data, and whether it was reached. Plain arithmetic on what was measured.

A target names the contender that has to reach it, beforehand: never the best of several, picked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.comparisons import TOLERANCE, Growth, growths
from benchmarks.contenders import OURS_IN, PLAIN, REFERENCE, TORCH, TORCH_BEST
from benchmarks.results import AXES, LIMIT, Figure, GrowthPoint, Spread, SuiteResult, spread

TOUCHED_MB = 1.0
"""Memory that counts as none: what the kernel counts has pages of code in it that run for the first time, and
lists of a few thousand names."""

HEADERS = 0.005
"""On top of what is predicted to be sent: headers of Gloo's messages, and on an interface those of TCP and IP
and acknowledgements. They were 0.1 to 0.2% in benchmarks/wire.py's tables."""


class Bounds(NamedTuple):
    """Where a number should lie, both ends included."""

    low: float | None = None
    high: float | None = None

    def hold(self, value: float) -> bool:
        """Whether it lies there.

        >>> Bounds(low=2.0).hold(2.5), Bounds(2.0, 2.01).hold(2.5)
        (True, False)
        """
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


# ---------------------------------------------------------------------------------------------- measures


class Measure(NamedTuple):
    """How a number is read from what the contenders of a suite took.

    Args:
        says: what the number is.
        needs: the other contenders and limits that it reads.
        of: the number for a result and a contender of ours; None where that machine did not count it.
    """

    says: str
    needs: tuple[str, ...]
    of: Callable[[SuiteResult, str], Spread | None]


def times_faster(peer: str, time: str = "wall_ms") -> Measure:
    """A peer's time by ours, round by round."""
    says = f"{peer} / ours, {'wall' if time == 'wall_ms' else 'CPU'} time"
    return Measure(says, (peer,), lambda result, ours: result.ratio(peer, ours, of=time))


def over_limits(*names: str) -> Measure:
    """Our time by the sum of some limits, round by round."""
    says, limits = f"ours / ({' + '.join(names)})", tuple(LIMIT + name for name in names)
    return Measure(says, limits, lambda result, ours: result.ratio(ours, *limits))


def extra_mb(figure: str, where: str) -> Measure:
    """A figure of the contender's that counts bytes, in MB."""

    def of(result: SuiteResult, ours: str) -> Spread | None:
        nbytes = result.taken[ours].figures.get(figure)
        return None if nbytes is None else spread([nbytes / 1e6])

    return Measure(f"extra MB {where}", (), of)


def _sent(result: SuiteResult, ours: str) -> Spread | None:
    units = result.wire_units(ours)
    return None if units is None else spread([units])


def _state_share(result: SuiteResult, ours: str) -> Spread | None:
    mine, whole = (result.taken[name].figures.get("state_bytes") for name in (ours, PLAIN))
    return spread([mine * result.ranks / whole]) if mine is not None and whole else None


SENT = Measure("bytes sent, in (N-1)Ψ", (), _sent)
"""By all ranks."""
STATE_SHARE = Measure("state on the fullest rank, in 1/N of all of it", (PLAIN,), _state_share)

# ----------------------------------------------------------------------------------------------- targets


class Target(NamedTuple):
    """A row that contenders of a suite can reach."""

    what: str
    suite: str
    set: str
    ours: str
    measure: Measure
    bounds: Bounds


GPT, TINY = "gpt", "tiny"
BOTH = (GPT, TINY)
OF_TORCH, OF_BEST = times_faster(TORCH), times_faster(TORCH_BEST)
ALONE = over_limits("fused AdamW of a share", "exchange of shares")
Goal = tuple[Sequence[str], Measure, Bounds]

WANTED: dict[tuple[str, str, str], list[Goal]] = {
    ("the step", "step", "step"): [
        ((GPT,), OF_TORCH, Bounds(low=2.5)),
        ((GPT,), OF_BEST, Bounds(low=1.1)),
        ((GPT,), ALONE, Bounds(high=1.1)),
        ((TINY,), OF_TORCH, Bounds(low=25)),
        ((TINY,), OF_BEST, Bounds(low=1.5)),
    ],
    ("the step with masters", "step", "masters"): [
        (BOTH, over_limits("casts and fused AdamW", "exchange of 16-bit shares"), Bounds(high=1.0)),
        (
            BOTH,
            over_limits("casts in new memory and fused AdamW", "exchange of 16-bit shares"),
            Bounds(high=1.0),
        ),
    ],
    ("gradients and step", "sync", "sync"): [
        (BOTH, OF_TORCH, Bounds(low=2.2)),
        (BOTH, OF_BEST, Bounds(low=1.4)),
        (BOTH, times_faster(REFERENCE), Bounds(low=1.3)),
        (BOTH, over_limits("exchange, update, exchange"), Bounds(high=1.1)),
        (BOTH, SENT, Bounds(2, 2 * (1 + HEADERS))),
    ],
    ("whole iteration", "iteration", "iteration"): [
        (sets, times_faster(peer, time), Bounds(low=low))
        for sets, *wanted in (((GPT,), 1.4, 1.1, 1.03), ((TINY,), 1.0, 1.0, 1.0))
        for peer, low in zip((TORCH, TORCH_BEST, REFERENCE), wanted)
        for time in ("wall_ms", "cpu_ms")
    ],
    ("consolidate_state_dict", "checkpoint", "consolidate"): [
        (BOTH, times_faster(f"{TORCH}: consolidate"), Bounds(low=60)),
        (BOTH, times_faster("fairscale: consolidate"), Bounds(low=5)),
        (BOTH, extra_mb("peak_bytes_others", "on other ranks"), Bounds(high=TOUCHED_MB)),
    ],
    ("load_state_dict", "checkpoint", "load"): [
        (BOTH, times_faster(f"{TORCH_BEST}: load"), Bounds(low=1.0)),
    ],
    ("construction", "construction", "construction"): [(BOTH, OF_BEST, Bounds(low=1.0))],
    ("optimizer state", "memory", "state"): [(BOTH, STATE_SHARE, Bounds(high=1.001))],
    ("memory of a step", "memory", "memory"): [
        (BOTH, extra_mb("peak_bytes", "at the peak of a warm step"), Bounds(high=TOUCHED_MB)),
    ],
}
"""(the row, its suite, the form of ours by OURS_IN) -> the sets, the number and its bounds."""

TARGETS: tuple[Target, ...] = tuple(
    Target(what, suite, set_name, OURS_IN[thing], measure, bounds)
    for (what, suite, thing), goals in WANTED.items()
    for set_name in BOTH
    for sets, measure, bounds in goals
    if set_name in sets
)


class FigureTarget(NamedTuple):
    """A row about a single figure; of several cases the one with the largest number counts.

    Args:
        most: up to which it is reached.
        ranks: only of so many; None for every number of ranks that there is.
    """

    what: str
    suite: str
    figure: str
    most: float
    ranks: int | None = None


FIGURE_TARGETS: tuple[FigureTarget, ...] = (
    FigureTarget("overlapped starts", "starts", "hung, failed or lost an update", 0),
    FigureTarget("overlapped starts", "starts", "first iteration that updates", 1),
    FigureTarget("2,000 tensors over 4,096 ranks", "plan", "partition", 50),
    FigureTarget("a 1T model on paper", "simulate", "processor time", 1, ranks=1024),
    FigureTarget("a 1T model on paper", "simulate", "processor time", 4, ranks=4096),
    FigureTarget("a 1T model on paper", "simulate", "peak memory", 500),
    FigureTarget("calls, payload, bytes held", "predicted", "quantities not as predicted", 0),
    FigureTarget("step time, held-out sizes", "predicted", "relative error", 0.25),
)

# ----------------------------------------------------------------------------------------------- judging


class Judged(NamedTuple):
    """A row, measured.

    Args:
        says: what the number is.
        set, ranks: None where nothing says of which.
        ours: the contender, or the figure's case that counts.
        measured, reached: None where it was not measured.
        why_not: it was not measured.
    """

    what: str
    says: str
    bounds: Bounds
    set: str | None = None
    ranks: int | None = None
    ours: str = ""
    measured: Spread | None = None
    reached: bool | None = None
    why_not: str = ""

    def by(self, measured: Spread) -> Judged:
        """With what was measured; the median decides."""
        return self._replace(measured=measured, reached=self.bounds.hold(measured.median))


NOT_HERE = Judged(
    "the whole test suite", "minutes on 2 cores", Bounds(high=15), why_not="not measured here: time make test"
)


def judge(
    results: Sequence[SuiteResult],
    figures: Sequence[Figure] = (),
    growth: Sequence[GrowthPoint] = (),
) -> list[Judged]:
    """All rows in their order, one for each number of ranks that something was measured on.

    The median of the rounds decides; for how times grow, `Growth.faster_than_work`. A row for which nothing
    was measured is there too, and says so.
    """
    rows: list[Judged] = []
    for target in TARGETS:
        found = [result for result in results if (result.suite, result.set) == (target.suite, target.set)]
        rows += [_judged(target, result) for result in found] or [_judged(target, None)]
    for wanted in FIGURE_TARGETS:
        rows += _judged_figures(wanted, figures)
    ours = [one for one in growths(growth) if one.contender.startswith("zero_ref")]
    rows += [_judged_growth(axis, [one for one in ours if one.axis == axis]) for axis in AXES]
    return [*rows, NOT_HERE]


def _judged(target: Target, result: SuiteResult | None) -> Judged:
    row = Judged(target.what, target.measure.says, target.bounds, target.set, ours=target.ours)
    if result is None:
        return row._replace(why_not="not measured")
    row = row._replace(ranks=result.ranks)
    for name in (target.ours, *target.measure.needs):
        if name not in result.taken:
            return row._replace(why_not=f"{name} did not take part")
    measured = target.measure.of(result, target.ours)
    return row._replace(why_not="this system does not count it") if measured is None else row.by(measured)


def _judged_figures(target: FigureTarget, figures: Sequence[Figure]) -> Iterator[Judged]:
    found = [one for one in figures if (one.suite, one.name) == (target.suite, target.figure)]
    world_sizes = {one.ranks for one in found if target.ranks in (None, one.ranks)}
    row = Judged(target.what, target.figure, Bounds(high=target.most), ranks=target.ranks)
    if not world_sizes:
        yield row._replace(why_not="not measured")
    for ranks in sorted(world_sizes):
        worst = max((one for one in found if one.ranks == ranks), key=lambda one: one.value)
        says = f"{target.figure}, {worst.unit}" if worst.unit else target.figure
        yield row._replace(ranks=ranks, ours=worst.case, says=says).by(spread([worst.value]))


def _judged_growth(axis: str, found: Sequence[Growth]) -> Judged:
    says = "exponent of the time less that of the work"
    row = Judged(f"growth with {axis}", says, Bounds(high=TOLERANCE))
    if not found:
        return row._replace(why_not="not measured")
    worst = max(found, key=lambda one: one.exponent.low - one.of_work)
    above = Spread(*(value - worst.of_work for value in worst.exponent))
    reached = not worst.faster_than_work
    return row._replace(ours=f"{worst.contender}: {worst.what}", measured=above, reached=reached)
