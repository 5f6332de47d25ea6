"""What we want of the optimizer, as data, and whether it was reached. Plain arithmetic on what was measured.

A target names the contender that has to reach it, beforehand: never the best of several, picked afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zero_ref.bench.contenders import OURS, TORCH, TORCH_BEST
from zero_ref.bench.exponents import TOLERANCE, Growth, growths
from zero_ref.bench.growth_point import AXES, GrowthPoint
from zero_ref.bench.measures import ExtraMemory, Measure, OverLimits, StateShare, TimesFaster, Wire
from zero_ref.bench.results import LIMIT, Figure, Spread, SuiteResult, spread
from zero_ref.bench.training import REFERENCE, TO_OWNERS

OURS_IN = {
    "step": OURS,
    "sync": TO_OWNERS,
    "iteration": TO_OWNERS,
    "consolidate": "zero_ref: consolidate",
    "load": f"{OURS}: load",
    "construction": OURS,
    "state": f"{OURS}, even",
    "memory": OURS,
}
"""Which of our forms has to reach the targets, for each thing that is measured."""

TOUCHED_MB = 1.0
"""Memory that counts as none: what the kernel counts has pages of code in it that run for the first time, and
lists of a few thousand names."""

HEADERS = 0.005
"""On top of what is predicted to be sent: headers of Gloo's messages, and on an interface those of TCP and IP
and acknowledgements. They were 0.1 to 0.2% in bench/wire.py's tables."""


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


class Target(NamedTuple):
    """A row that contenders of a suite can reach."""

    what: str
    suite: str
    set: str
    ours: str
    measure: Measure
    bounds: Bounds


class FigureTarget(NamedTuple):
    """A row about a single figure; of several cases the one with the largest number counts.

    Args:
        ranks: only of so many; None for every number of ranks that there is.
    """

    what: str
    suite: str
    figure: str
    bounds: Bounds
    ranks: int | None = None


class Judged(NamedTuple):
    """A row, measured.

    Args:
        set, ranks: None where nothing says of which.
        ours: the contender, or the figure's case that counts.
        says: what the number is.
        reached: None where it was not measured.
        why_not: it was not measured.
    """

    what: str
    set: str | None
    ranks: int | None
    ours: str
    says: str
    bounds: Bounds
    measured: Spread | None
    reached: bool | None
    why_not: str = ""


def _targets() -> Iterator[Target]:
    alone = (f"{LIMIT}fused AdamW of a share", f"{LIMIT}exchange of shares")
    of_torch, of_torch_best = TimesFaster(TORCH), TimesFaster(TORCH_BEST)

    def both(what: str, suite: str, thing: str, *goals: tuple[Measure, Bounds]) -> Iterator[Target]:
        """The same goals on both sets."""
        for set_name in ("gpt", "tiny"):
            for measure, bounds in goals:
                yield Target(what, suite, set_name, OURS_IN[thing], measure, bounds)

    for set_name, measure, bounds in (
        ("gpt", of_torch, Bounds(low=2.5)),
        ("gpt", of_torch_best, Bounds(low=1.1)),
        ("gpt", OverLimits(alone), Bounds(high=1.1)),
        ("tiny", of_torch, Bounds(low=25)),
        ("tiny", of_torch_best, Bounds(low=1.5)),
    ):
        yield Target("the step", "step", set_name, OURS_IN["step"], measure, bounds)
    yield from both(
        "gradients and step",
        "sync",
        "sync",
        (of_torch, Bounds(low=2.2)),
        (of_torch_best, Bounds(low=1.4)),
        (Wire(), Bounds(2, 2 * (1 + HEADERS))),
    )
    yield from both(
        "whole iteration",
        "iteration",
        "iteration",
        (TimesFaster(TORCH, "cpu_ms"), Bounds(low=1.5)),
        (TimesFaster(TORCH_BEST, "cpu_ms"), Bounds(low=1.1)),
        (TimesFaster(REFERENCE, "cpu_ms"), Bounds(low=1.0)),
    )
    yield from both(
        "consolidate_state_dict",
        "checkpoint",
        "consolidate",
        (TimesFaster(f"{TORCH}: consolidate"), Bounds(low=60)),
        (TimesFaster("fairscale: consolidate"), Bounds(low=5)),
        (ExtraMemory("peak_bytes_others", "on other ranks"), Bounds(high=TOUCHED_MB)),
    )
    at_least_as_fast = Bounds(low=1.0)
    loading = TimesFaster(f"{TORCH_BEST}: load")
    yield from both("load_state_dict", "checkpoint", "load", (loading, at_least_as_fast))
    yield from both("construction", "construction", "construction", (of_torch_best, at_least_as_fast))
    yield from both("optimizer state", "memory", "state", (StateShare("ddp"), Bounds(high=1.001)))
    peak = ExtraMemory("peak_bytes", "at the peak of a warm step")
    yield from both("memory of a step", "memory", "memory", (peak, Bounds(high=TOUCHED_MB)))


TARGETS: tuple[Target, ...] = tuple(_targets())

FIGURE_TARGETS: tuple[FigureTarget, ...] = (
    FigureTarget("overlapped starts", "starts", "hung, failed or lost an update", Bounds(high=0)),
    FigureTarget("overlapped starts", "starts", "first iteration that updates", Bounds(high=1)),
    FigureTarget("2,000 tensors over 4,096 ranks", "plan", "partition", Bounds(high=50)),
    FigureTarget("a 1T model on paper", "simulate", "processor time", Bounds(high=1), ranks=1024),
    FigureTarget("a 1T model on paper", "simulate", "processor time", Bounds(high=4), ranks=4096),
    FigureTarget("a 1T model on paper", "simulate", "peak memory", Bounds(high=500)),
    FigureTarget("calls, payload, bytes held", "predicted", "quantities not as predicted", Bounds(high=0)),
    FigureTarget("step time, held-out sizes", "predicted", "relative error", Bounds(high=0.25)),
)

NOT_HERE = Judged(
    "the whole test suite",
    set=None,
    ranks=None,
    ours="",
    says="minutes on 2 cores",
    bounds=Bounds(high=15),
    measured=None,
    reached=None,
    why_not="not measured here: time make test",
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
    row = Judged(
        target.what,
        target.set,
        result.ranks if result else None,
        target.ours,
        target.measure.says(),
        target.bounds,
        measured=None,
        reached=None,
    )
    if result is None:
        return row._replace(why_not="not measured")
    missing = [name for name in (target.ours, *target.measure.needs()) if name not in result.taken]
    if missing:
        return row._replace(why_not=f"{missing[0]} did not take part")
    measured = target.measure.of(result, target.ours)
    if measured is None:
        return row._replace(why_not="this system does not count it")
    return row._replace(measured=measured, reached=target.bounds.hold(measured.median))


def _judged_figures(target: FigureTarget, figures: Sequence[Figure]) -> Iterator[Judged]:
    found = [
        one
        for one in figures
        if (one.suite, one.name) == (target.suite, target.figure) and target.ranks in (None, one.ranks)
    ]
    row = Judged(target.what, None, target.ranks, "", target.figure, target.bounds, None, None)
    if not found:
        yield row._replace(why_not="not measured")
    for ranks in sorted({one.ranks for one in found}):
        worst = max((one for one in found if one.ranks == ranks), key=lambda one: one.value)
        says = f"{target.figure}, {worst.unit}" if worst.unit else target.figure
        yield row._replace(
            ranks=ranks,
            ours=worst.case,
            says=says,
            measured=spread([worst.value]),
            reached=target.bounds.hold(worst.value),
        )


def _judged_growth(axis: str, found: Sequence[Growth]) -> Judged:
    says = "exponent of the time less that of the work"
    row = Judged(f"growth with {axis}", None, None, "", says, Bounds(high=TOLERANCE), None, None)
    if not found:
        return row._replace(why_not="not measured")
    worst = max(found, key=lambda one: one.exponent.low - one.of_work)
    above = Spread(*(value - worst.of_work for value in worst.exponent))
    return row._replace(
        ours=f"{worst.contender}: {worst.what}", measured=above, reached=not worst.faster_than_work
    )
