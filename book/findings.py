"""Measured results for the book's pages, as Markdown and pictures, made from the files that hold them.

Each function of VIEWS takes a folder for its pictures and yields blocks of text, which book/_ext/measured.py
puts into pages. The files are in benchmarks/results/; `python -m benchmarks --json` writes them, and
tests/optimizer_table.py writes the one of the optimizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import plots as of_bench
from benchmarks.comparisons import (
    LOST,
    Comparison,
    comparisons,
    outcome,
)
from benchmarks.contenders import ADDED, DEFAULT_IN, FAIRSCALE, FORMS, REFERENCE, TORCH
from benchmarks.gpu.report import GpuReport
from benchmarks.results import Report, Spread, SuiteResult
from benchmarks.tables import aligned, gpu_text, suite_table, where
from zero_ref.lab import plots
from zero_ref.live.numbers import short

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
COMPARING = ("benchmarks", "sharded", "step")
NOT_YET = "*Not among the results yet.*"

# What was timed, in the words of the page.
SAID = {
    "step": "the step",
    "sync": "gradients and step",
    "iteration": "a whole iteration",
    "consolidate": "`consolidate_state_dict`",
    "load": "`load_state_dict`",
    "construction": "construction",
}
IN_PICTURES = {"sync": "gradients and step", "iteration": "whole iteration"}


@cache
def report(name: str) -> Report:
    """Read the report in benchmarks/results/NAME.json."""
    file = RESULTS / f"{name}.json"
    if not file.is_file():
        raise ValueError(f"{file} is not there: the page says which command writes it.")
    return Report.from_json(json.loads(file.read_text(encoding="utf-8")))


def spread_of(value: Spread) -> str:
    """The median and, where there are any, the quartiles.

    >>> spread_of(Spread(2.314, 2.1, 2.5)), spread_of(Spread(2.0, 2.0, 2.0))
    ('2.31 (2.1 to 2.5)', '2')
    """
    quartiles = "" if value.low == value.high else f" ({short(value.low)} to {short(value.high)})"
    return short(value.median) + quartiles


# ------------------------------------------------------------------------------------------ beside others


def reports() -> list[Report]:
    """The reports that compare contenders, the newest last."""
    names = [name for name in COMPARING if (RESULTS / f"{name}.json").is_file()]
    return sorted(map(report, names), key=lambda one: max(session.date for session in one.sessions))


def results() -> list[SuiteResult]:
    """The newest result for each suite, set and number of ranks."""
    measured = [result for one in reports() for result in one.results]
    return list({(one.suite, one.set, one.ranks): one for one in measured}.values())


def compared() -> list[Comparison]:
    """The comparisons of our optimizer with every peer and limit."""
    return comparisons(results())


def against_peers(folder: Path, thing: str) -> Iterator[str]:
    """Pictures of one thing, one for each set, with a panel for each number of ranks; all its numbers."""
    rows = [row for row in compared() if row.thing == thing]
    yield f"Ours here is *{rows[0].ours}*." if rows else NOT_YET
    for set_name in dict.fromkeys(row.set for row in rows):
        of_set = [row for row in rows if row.set == set_name]
        counts = sorted({row.ranks for row in of_set})
        by_ranks = [[row for row in of_set if row.ranks == count] for count in counts]
        fig, axes = plots.panels(
            [(1.0 if group is not by_ranks[-1] else 1.35) + 0.3 * len(group) for group in by_ranks]
        )
        for group, ax in zip(by_ranks, axes, strict=True):
            first = group[0]
            of_bench.benchmarks(
                {row.other: row.wall for row in group},
                ax,
                ours=first.ours,
                title=f"{IN_PICTURES.get(thing, thing)}, {set_name}, {first.ranks} ranks",
            )
            if ax is not axes[-1]:
                ax.set_xlabel("")  # the same as the last one's
        alt = f"Times of {SAID[thing]}, {set_name}, over those of {of_set[0].ours}. " + " ".join(
            f"{count} ranks: "
            + "; ".join(f"{row.other.removeprefix('limit: ')} {short(row.wall.median)}" for row in group)
            + "."
            for count, group in zip(counts, by_ranks, strict=True)
        )
        yield from picture(fig, folder / f"{thing}-{set_name}.svg", alt)
    half = f": {thing}" if thing in ("consolidate", "load") else ""
    tables = _tables("checkpoint" if half else thing, half)
    yield from folded(f"All numbers of {SAID[thing].replace('`', '')}", tables)


def numbers(folder: Path, suite: str) -> Iterator[str]:
    """A suite's tables alone."""
    yield from _tables(suite) or [NOT_YET]


def _tables(suite: str, half: str = "") -> list[str]:
    return [
        suite_table(replace(one, taken={name: of for name, of in one.taken.items() if name.endswith(half)}))
        for one in results()
        if one.suite == suite
    ]


def forms(folder: Path, ranks: str) -> Iterator[str]:
    """The form to choose, by which rule, and the cost of a whole iteration with it, beside plain DDP's."""
    of_set = [one for one in results() if (one.suite, f"{one.ranks}") == ("iteration", ranks)]
    if not of_set:
        yield NOT_YET
        return
    rows = []
    for name, rule in FORMS.items():
        costs = [cost for result in of_set for cost in _costs(result, name)]
        rows.append([name, rule, *costs])
    titles = [f"{what}, {result.set}" for result in of_set for what in ("time", "state", "sent")]
    yield aligned(["form", "choose it if", *titles], rows)


def _costs(result: SuiteResult, name: str) -> tuple[str, str, str]:
    """DDP's time with fused AdamW over the form's, the fullest rank's part of the state, the bytes sent."""
    if name not in result.taken:
        return "-", "-", "-"
    state, whole = (result.taken[each].figures["state_bytes"] for each in (name, REFERENCE))
    units = result.wire_units(name)
    return (
        "1" if name == REFERENCE else spread_of(result.ratio(REFERENCE, name)),
        short(state / whole),
        "-" if units is None else f"{units:.2f}",
    )


def by_import(folder: Path) -> Iterator[str]:
    """Give a table of what changing the import gives: the time of a peer over ours, both as they come."""
    found = [row for row in comparisons(results(), DEFAULT_IN) if row.other in (TORCH, FAIRSCALE)]
    sets = list(dict.fromkeys(row.set for row in found))
    of = {(row.thing, row.ranks, row.other, row.set): row.wall for row in found}
    rows = []
    for thing, ranks, other in dict.fromkeys((row.thing, row.ranks, row.other) for row in found):
        times = [of.get((thing, ranks, other, name)) for name in sets]
        said = ["-" if time is None else spread_of(time) for time in times]
        rows.append([SAID[thing], f"{ranks}", f"*{other}*", *said])
    yield aligned(["what is timed", "ranks", "against", *sets], rows) if rows else NOT_YET


def added(folder: Path, ranks: str) -> Iterator[str]:
    """Give a table of what each keyword, hook or wrapper adds: the time without it over the time with it."""
    of = {(one.suite, one.set): one for one in results() if f"{one.ranks}" == ranks}
    sets = list(dict.fromkeys(name for _, name in of))
    rows = []
    for what, (suite, without, with_it) in ADDED.items():
        times = []
        for name in sets:
            result = of.get((suite, name))
            known = result is not None and {without, with_it} <= result.taken.keys()
            times.append(spread_of(result.ratio(without, with_it)) if known else "-")
        rows.append([what, f"*{without}*", SAID[suite], *times])
    yield aligned(["added", "to", "what is timed", *sets], rows)


def lost(folder: Path) -> Iterator[str]:
    """Every comparison that was lost in wall or in processor time, the worst first."""
    found = [row for row in _peers() if LOST in map(outcome, (row.wall, row.cpu))]
    if not found:
        yield "In no comparison was a peer faster."
        return
    rows = [
        [
            f"{SAID[row.thing]}, {row.set}, {row.ranks} ranks",
            row.other,
            *(
                f"**{spread_of(one)}**" if outcome(one) == LOST else spread_of(one)
                for one in (row.wall, row.cpu)
            ),
        ]
        for row in sorted(found, key=lambda row: min(row.wall.median, row.cpu.median))
    ]
    yield aligned(["what", "against", "wall time over ours", "CPU time over ours"], rows)


def _peers() -> list[Comparison]:
    """The comparisons with peers that do the same job as our optimizer."""
    return [row for row in compared() if not row.is_limit and row.other != "fsdp2"]


# --------------------------------------------------------------------------------------------- optimizers


@cache
def table_of_optimizers() -> dict[str, Any]:
    """The rows that tests/optimizer_table.py wrote, and the classes that it left out."""
    content: dict[str, Any] = json.loads((RESULTS / "optimizers.json").read_text(encoding="utf-8"))
    return content


def optimizers_tally(folder: Path) -> Iterator[str]:
    """The numbers of classes that were equal, refused or different, and the versions."""
    rows = table_of_optimizers()["rows"]
    for what, runs in {
        "10 updates of whole parameters": lambda row: [
            one for name, two in row["partitions"].items() if name != "even" for one in two
        ],
        "a checkpoint in between": lambda row: [*row["checkpoint"].values()],
    }.items():
        kinds = [{one.partition(":")[0] for one in runs(row)} for row in rows if runs(row)]
        different = sum("different" in kind for kind in kinds)
        refused = sum("refused" in kind and "different" not in kind for kind in kinds)
        equal = sum(kind == {"equal"} for kind in kinds)
        yield f"- {what}: {len(kinds)} classes, {equal} equal, {refused} refused, {different} different"
    may_be_cut = [row for row in rows if row["cut"] and set(row["partitions"]["even"]) == {"equal"}]
    yield f"- parameters of {len(may_be_cut)} of them may be cut"
    versions = table_of_optimizers()["made_with"]
    yield "- versions: " + ", ".join(f"{package} {version}" for package, version in versions.items())


def optimizers(folder: Path, package: str) -> Iterator[str]:
    """A package's classes with the result of each; the reasons; the classes that were left out."""
    reasons: dict[str, int] = {}

    def cell(row: dict[str, Any], verdicts: Iterable[str], equal: str = "equal") -> str:
        said = []
        for verdict in verdicts:
            kind, _, about = verdict.partition(": ")
            if kind == "equal":
                said.append(equal)
                continue
            about = about.replace(row["name"], "*the class*")
            text = row["why"] if kind == "different" else about
            number = reasons.setdefault(text, len(reasons) + 1)
            said.append(f"{kind} ({number})" if kind == "refused" else f"**different** ({number}), {about}")
        return "; ".join(dict.fromkeys(said)) or "-"

    def cut(row: dict[str, Any], verdicts: Iterable[str]) -> str:
        if not row["cut"]:
            return cell(row, verdicts, equal="equal, whole")
        if any(verdict.startswith("different") for verdict in verdicts):
            return "may not be cut"
        return cell(row, verdicts, equal="equal, cut")

    of_package = [row for row in table_of_optimizers()["rows"] if row["package"] == package]
    rows = []
    for row in of_package:
        *whole, even = row["partitions"].values()
        rows.append(
            [
                row["name"],
                cell(row, (one for two in whole for one in two)),
                cut(row, even),
                cell(row, row["checkpoint"].values()),
            ]
        )
    yield aligned(["class", "whole parameters", "`even`", "state handed on"], rows)
    yield "\n".join(f"{number}. {text.rstrip('.')}." for text, number in reasons.items())
    left_out = table_of_optimizers()["left_out"].get(package, {})
    if left_out:
        why = "; ".join(f"{name} (`{text.replace('`', '')}`)" for name, text in left_out.items())
        yield f"Left out, because they do not run like this by themselves: {why}."


# ---------------------------------------------------------------------------------------------- where, when


def machine(folder: Path) -> Iterator[str]:
    """Give where and when the numbers were taken."""
    for one in reports():
        yield where(one)


def gpu(folder: Path) -> Iterator[str]:
    """The measurements of `make gpu`; or a sentence that nobody has run it, if there is no such file."""
    file = RESULTS / "gpu.json"
    if not file.is_file():
        yield (
            "No GPU has been measured yet. On a machine that has one, `make gpu` measures it and writes "
            "`benchmarks/results/gpu.json`, and the next `make book` shows that here."
        )
        return
    yield gpu_text(GpuReport.from_json(json.loads(file.read_text(encoding="utf-8"))))


# ------------------------------------------------------------------------------------------------ pieces


def picture(fig: plots.Picture, file: Path, alt: str) -> Iterator[str]:
    """Save a figure, and yield the Markdown that shows it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    plots.save(fig, file)
    yield f"```{{figure}} {file}\n:alt: {alt}\n```"


def folded(title: str, tables: Sequence[str]) -> Iterator[str]:
    """Tables that a reader may open."""
    if tables:
        body = "\n\n".join(tables)
        yield f"::::{{dropdown}} {title}\n{body}\n::::"


VIEWS: dict[str, Callable[..., Iterator[str]]] = {
    view.__name__: view
    for view in (
        against_peers,
        numbers,
        by_import,
        forms,
        added,
        lost,
        optimizers_tally,
        optimizers,
        machine,
        gpu,
    )
}
