"""What was measured, as text: tables that a terminal shows as they are and Markdown sets as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from zero_ref.bench.results import LIMIT, Figure, Spread, SuiteResult, Taken, spread
from zero_ref.bench.targets import OURS_IN, Bounds, Judged
from zero_ref.simulator.ledger import format_bytes


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are as wide as what is in them; those of numbers are set right.

    >>> print(aligned(["who", "ms"], [["ours", "9.5"], ["theirs", "12.0"]]))
    | who    |   ms |
    |--------|-----:|
    | ours   |  9.5 |
    | theirs | 12.0 |
    """
    columns = [[title, *cells] for title, cells in zip(header, zip(*rows, strict=True), strict=True)]
    rule, padded = [], []
    for title, *cells in columns:
        width = max(map(len, (title, *cells)))
        right = all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
        padded.append([cell.rjust(width) if right else cell.ljust(width) for cell in (title, *cells)])
        rule.append("-" * (width + 1) + (":" if right else "-"))
    first, *others = (f"| {' | '.join(cells)} |" for cells in zip(*padded, strict=True))
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])


def suite_table(result: SuiteResult) -> str:
    """A suite on one set: every contender, its times, and how they compare to ours."""
    rows = []
    for name, taken in result.taken.items():
        ours = _ours_for(result, name)
        units = result.wire_units(name)
        rows.append(
            [
                name,
                _spread_of(taken.wall_ms),
                _spread_of(taken.cpu_ms),
                _ratio(result, name, ours, "wall_ms"),
                _ratio(result, name, ours, "cpu_ms"),
                "-" if units is None else f"{units:z.4f}",
                _figures_of(taken),
            ]
        )
    title = (
        f"{result.suite}, {result.set}: {result.ranks} ranks, {result.tensors:,} tensors, "
        f"{result.parameters:,} parameters"
    )
    header = ["contender", "wall ms", "CPU ms", "wall, x ours", "CPU, x ours", "sent, (N-1)Ψ", "figures"]
    filled = [any(row[column] not in ("", "-") for row in rows) for column in range(len(header))]
    header, *rows = (list(compress(cells, filled)) for cells in (header, *rows))
    return f"{title}\n\n{aligned(header, rows)}"


def figures_table(figures: Sequence[Figure]) -> str:
    """The figures of one suite: a line for each case and number of ranks, a column for each name."""
    names = list(dict.fromkeys((figure.name, figure.unit) for figure in figures))
    lines = list(dict.fromkeys((figure.case, figure.ranks) for figure in figures))
    value_of = {(figure.case, figure.ranks, figure.name): figure.value for figure in figures}
    rows = [
        [case, f"{ranks:,}", *(_cell(value_of.get((case, ranks, name))) for name, _ in names)]
        for case, ranks in lines
    ]
    header = [figures[0].suite, "ranks", *(f"{name}, {unit}" if unit else name for name, unit in names)]
    return aligned(header, rows)


def targets_table(judged: Sequence[Judged]) -> str:
    """All targets: what was measured, and whether that was enough."""
    return aligned(
        ["what", "set", "ranks", "ours", "number", "measured", "target", ""],
        [
            [
                row.what,
                row.set or "",
                "" if row.ranks is None else f"{row.ranks:,}",
                row.ours,
                row.says,
                "-" if row.measured is None else _spread(row.measured),
                _bounds(row.bounds),
                {True: "reached", False: "MISSED", None: row.why_not}[row.reached],
            ]
            for row in judged
        ],
    )


def _ours_for(result: SuiteResult, name: str) -> str | None:
    """The contender of ours to stand beside; where a suite measures two things, the one of the same thing."""
    thing = name.rpartition(": ")[2] if ": " in name and not name.startswith(LIMIT) else result.suite
    ours = OURS_IN.get(thing)
    return ours if ours in result.taken else None


def _ratio(result: SuiteResult, name: str, ours: str | None, of: str) -> str:
    if ours is None or not getattr(result.taken[ours], of):
        return "-"
    return "1" if name == ours else _spread(result.ratio(name, ours, of))


def _spread_of(values: Sequence[float]) -> str:
    return _spread(spread(values)) if values else "-"


def _spread(value: Spread) -> str:
    """The median, and the quartiles where there are any.

    >>> _spread(Spread(12.34, 11.1, 13.06)), _spread(Spread(2.0, 2.0, 2.0))
    ('12.3 (11.1-13.1)', '2')
    """
    if value.low == value.high:
        return _cell(value.median)
    return f"{_cell(value.median)} ({_cell(value.low)}-{_cell(value.high)})"


def _cell(value: float | None) -> str:
    """Three figures; whole numbers whole; thousandths where ratios are near a target.

    >>> _cell(1234.5), _cell(12.34), _cell(1.0009), _cell(0.01234), _cell(3.0), _cell(None)
    ('1,234', '12.3', '1.001', '0.0123', '3', '-')
    """
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _bounds(bounds: Bounds) -> str:
    if bounds.low is None:
        return f"at most {bounds.high:g}"
    return f"at least {bounds.low:g}" if bounds.high is None else f"{bounds.low:g} to {bounds.high:g}"


def _figures_of(taken: Taken) -> str:
    parts = []
    for name, value in taken.figures.items():
        if name.endswith("_bytes") or "_bytes_" in name:
            parts.append(f"{name.replace('_bytes', '').replace('_', ' ')} {format_bytes(round(value))}")
        else:
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return ", ".join(parts)
