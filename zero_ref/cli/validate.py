"""`zero-ref validate`: the simulator held against runs that others published."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, planning
from zero_ref.cli._submitted import UNITS, print_scores, scored_file, scores_as_json, shown
from zero_ref.simulator import validation
from zero_ref.simulator.published import published
from zero_ref.simulator.validation import FIGURES, Compared, Summary, Validation


def register_validate(subparsers: Subparsers) -> None:
    """Add `zero-ref validate`."""
    parser = subparsers.add_parser(
        "validate",
        help="the simulator beside published runs: what was reported, what is predicted, how far off",
        description="Simulate every published run of this package's list, data-parallel and fully sharded "
        "ones. For each, print what was reported, what is predicted, the interval around the prediction, "
        "which comes from the runs of all other sources, and the error of the time or of the memory: "
        "predicted minus reported, as a share of reported. With --run, only the runs of a file of your own.",
    )
    add = parser.add_argument
    sources = ", ".join(published().sources)
    add("--source", choices=list(published().sources), metavar="NAME", help=f"of one source only: {sources}")
    add("--figure", choices=FIGURES, metavar="WHAT", help=f"of one kind only: {', '.join(FIGURES)}")
    add(
        "--run",
        metavar="FILE",
        dest="file",
        help="score the runs of a file in TOML (.toml) or JSON, in the form of the book's page Submit a run: "
        "prediction, interval, error, and which constants of the simulator change the prediction",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run_validate)


def run_validate(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table for times and one for memory, each with its summary."""
    if arguments.file is not None:
        return _run_file(arguments)
    if not arguments.json:
        need("rich")  # before the work, not after it
    with planning():
        result = validation.validate()
    figures = [arguments.figure] if arguments.figure else list(FIGURES)
    chosen = {figure: result.of(figure, tested=None, source=arguments.source) for figure in figures}
    if not any(chosen.values()):
        raise CommandError(f"--source {arguments.source}: it has no figures of {arguments.figure}.")
    if arguments.json:
        print(json.dumps(as_json(result, chosen), indent=2, allow_nan=False))
    else:
        print_validation(result, chosen)
    return 0


def _run_file(arguments: argparse.Namespace) -> int:
    """Score the runs of a file, however far off the simulator is."""
    if arguments.source or arguments.figure:
        raise CommandError("--run scores all runs of a file: leave out --source and --figure.")
    key, data, scores = scored_file(arguments.file)
    if arguments.json:
        print(json.dumps(scores_as_json(key, data, scores), indent=2, allow_nan=False))
    else:
        print_scores(key, data, scores)
    return 0


def as_json(result: Validation, chosen: dict[str, list[Compared]]) -> dict[str, Any]:
    """Plain numbers; a time is tokens a second a GPU, and memory is GiB."""
    return {
        "rule": published().rule,
        "figures": [_figure(result, one) for some in chosen.values() for one in some],
        "summary": {
            figure: {label: vars(summary) for label, summary in summaries(result, some)}
            for figure, some in chosen.items()
        },
        "intervals": {figure: vars(result.spread(figure)) for figure in chosen},
    }


def _figure(result: Validation, one: Compared) -> dict[str, Any]:
    low, high = result.interval(one)
    return {
        "source": one.run.source,
        "run": one.run.id,
        "figure": one.figure,
        "use": "test" if one.tested else "fit",
        "supposed": published().supposed(one.run),
        "reported": one.published,
        "predicted": one.predicted,
        "interval": [low, high],
        "error": one.error,
    }


def summaries(result: Validation, some: Sequence[Compared]) -> list[tuple[str, Summary]]:
    """Of the tested figures among these by source, of all of them, and of the fitted ones."""
    tested = [one for one in some if one.tested]
    fitted = [one for one in some if not one.tested]
    by_source = {
        source: [one for one in tested if one.run.source == source]
        for source in dict.fromkeys(one.run.source for one in tested)
    }
    groups = [*by_source.items(), ("all tested", tested), ("fitted", fitted)]
    return [(label, result.summary(group)) for label, group in groups if group]


def print_validation(result: Validation, chosen: dict[str, list[Compared]], width: int | None = None) -> None:
    """The same for people, on standard output.

    Args:
        width: columns; None for those of the terminal.
    """
    from rich.console import Console

    console = Console(width=width, highlight=False)
    for figure, some in chosen.items():
        if some:
            console.print(f"[bold]{figure}, {UNITS[figure]}[/]")
            console.print(_table(result, some))
            console.print()
            console.print(_summary_table(summaries(result, some)))
            console.print()
    console.print("*  used in fitting    !  outside the interval    ?  something had to be supposed")


def _table(result: Validation, some: Sequence[Compared]) -> Any:
    table = _empty("run", "reported", "predicted", "interval", "error")
    source = ""
    for one in some:
        if source != one.run.source:
            source = one.run.source
            table.add_row(source, style="italic")
        low, high = result.interval(one)
        marks = {
            "*": not one.tested,
            "!": not result.inside(one),
            "?": bool(published().supposed(one.run)),
        }
        table.add_row(
            f"  {one.run.id}",
            shown(one.published),
            shown(one.predicted),
            f"{shown(low)} to {shown(high)}",
            f"{one.error:+.0%} " + "".join(mark if applies else " " for mark, applies in marks.items()),
            style="" if one.tested else "dim",
        )
    return table


def _summary_table(rows: Sequence[tuple[str, Summary]]) -> Any:
    table = _empty("summary", "figures", "median error", "worst", "inside the interval")
    for label, summary in rows:
        numbers = (summary.median_error, summary.worst_error, summary.inside)
        bold = "bold" if label == "all tested" else ""
        table.add_row(label, str(summary.count), *(f"{number:.0%}" for number in numbers), style=bold)
    return table


def _empty(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        left = column in ("run", "summary", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    return table
