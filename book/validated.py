"""The tables of the page of validation, made from `zero_ref.simulator.validation` when the book is built.

Each function of VIEWS is called as those of findings.py; book/_ext/measured.py puts what it gives into pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.tables import aligned
from zero_ref.cli.validate import shown, summaries
from zero_ref.simulator.published import operations_of_token, published
from zero_ref.simulator.spread import MEMORY, TIME
from zero_ref.simulator.validation import Compared, validate, verdicts

BEFORE: dict[tuple[str, str], float] = {
    ("titan-8b-8", "time"): 6425,
    ("titan-8b-8-compiled", "time"): 6425,
    ("titan-8b-8", "memory"): 89.2,
    ("titan-8b-8-compiled", "memory"): 89.2,
    ("titan-8b-8-32k", "memory"): 44.7,
    ("titan-a100-8b-op", "time"): 2283,
    ("titan-a100-70b-full", "time"): 215.5,
    ("gpt-175b-384", "time"): 140,
    ("gpt-175b-768", "time"): 140,
    ("gpt-175b-1536", "time"): 140,
}
"""What this simulator said of the rows that began this page, before kernels were priced by their shape, links
by the size of their messages, and memory by architecture. GPT-3's are TFLOP/s, as published."""


def sources(_folder: Path) -> Iterator[str]:
    """Where the runs stand, how many there are, and what was read."""
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
    """Every run's time, or memory."""
    result = validate()
    rows = []
    for one in result.of(figure, tested=None):
        low, high = result.interval(one)
        outside = "" if result.inside(one) else ", outside"
        rows.append(
            [
                f"`{one.run.id}`",
                "" if one.tested else "fitted",
                shown(one.published),
                shown(one.predicted),
                f"{shown(low)} to {shown(high)}{outside}",
                f"{one.error:+.0%}",
            ]
        )
    yield aligned(["run", "", "reported", "predicted", "interval", "error"], rows)


def summary(_folder: Path, figure: str) -> Iterator[str]:
    """Medians, worst and coverage, by source."""
    result = validate()
    yield aligned(
        ["source", "figures", "median error", "worst", "inside"],
        [
            [
                label,
                str(each.count),
                f"{each.median_error:.0%}",
                f"{each.worst_error:.0%}",
                f"{each.inside:.0%}",
            ]
            for label, each in summaries(result, result.of(figure, tested=None))
        ],
    )


def six_rows(_folder: Path) -> Iterator[str]:
    """The rows that began this page, before and after."""
    found = {(one.run.id, one.figure): one for one in validate().compared}
    rows = []
    for key, before in BEFORE.items():
        one = found[key]
        factor, unit = _in_unit_of_source(one)
        numbers = [shown(number) for number in (one.published * factor, before, one.predicted * factor)]
        rows.append([f"`{one.run.id}`", unit, *numbers])
    yield aligned(["run", "unit", "reported", "before", "now"], rows)


def _in_unit_of_source(one: Compared) -> tuple[float, str]:
    """What a rate is multiplied with to be in the unit in which the source gives it."""
    if one.figure == "memory":
        return 1.0, "GiB"
    if "tflops" in (one.run.time or {}):
        model = published().models[one.run.model]
        return operations_of_token(model, one.run.sequence) / 1e12, "TFLOP/s a GPU"
    return 1.0, "tokens/s a GPU"


def intervals(_folder: Path) -> Iterator[str]:
    """The factors around a prediction."""
    yield aligned(
        ["prediction", "times", "to"],
        [
            [what, f"{spread.low:.2f}", f"{spread.high:.2f}"]
            for what, spread in (("of time", TIME), ("of memory", MEMORY))
        ],
    )


def fitting(_folder: Path) -> Iterator[str]:
    """What the simulator says of the memory of runs that ran and of those that ended out of memory."""
    said = {True: "fits", False: "does not fit", None: "undecided"}
    ran = {True: "ran", False: "ended out of memory"}
    every = [(run, verdict) for run, verdict in verdicts()]
    yield aligned(
        ["", *said.values()],
        [
            [
                outcome,
                *(str(sum((run.ran, verdict) == (did, says) for run, verdict in every)) for says in said),
            ]
            for did, outcome in ran.items()
        ],
    )


VIEWS: dict[str, Callable[..., Iterator[str]]] = {
    f"validation_{view.__name__}": view for view in (sources, figures, summary, six_rows, intervals, fitting)
}
