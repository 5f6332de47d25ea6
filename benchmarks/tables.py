"""What was measured, as text: tables that a terminal shows as they are and Markdown sets as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from benchmarks.contenders import OURS_IN
from benchmarks.results import LIMIT, Figure, Report, Spread, SuiteResult, spread
from benchmarks.targets import Bounds, Judged
from zero_ref.simulator.ledger import format_bytes


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are as wide as what is in them; those of numbers are set right.

    >>> print(aligned(["who", "ms"], [["ours", "9.5"], ["theirs", "12.0"]]))
    | who    |   ms |
    |--------|-----:|
    | ours   |  9.5 |
    | theirs | 12.0 |
    """
    columns = []
    for title, *cells in zip(header, *rows, strict=True):
        width = max(map(len, (title, *cells)))
        right = all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
        padded = [f" {cell:{'>' if right else '<'}{width}} " for cell in (title, *cells)]
        columns.append([padded[0], "-" * (width + 1) + (":" if right else "-"), *padded[1:]])
    return "\n".join(f"|{'|'.join(cells)}|" for cells in zip(*columns))


def where(report: Report) -> str:
    """The machine, the versions, and how it is measured."""
    session, machine = report.sessions[0], report.machine
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items())
    memory = "?" if machine.memory_bytes is None else f"{machine.memory_bytes / 1e9:.0f}"
    peer = "" if report.versions["fairscale"] else "\nanother peer: pip install --no-deps fairscale==0.4.13"
    return (
        f"{machine.processor}, {machine.cores} cores, {memory} GB, {machine.kernel}; {versions}\n"
        f"{session.rounds} rounds; bytes sent: {session.wire_counter}; load average {session.load_average[0]}"
        f"{peer}"
    )


def suite_table(result: SuiteResult) -> str:
    """A suite on one set: every contender, its times, and how they compare to ours."""
    rows = []
    for name, taken in result.taken.items():
        ours = _ours_for(result, name)
        units = result.wire_units(name)
        times = [_spread(spread(ms)) if ms else "-" for ms in (taken.wall_ms, taken.cpu_ms)]
        ratios = [_ratio(result, name, ours, of) for of in ("wall_ms", "cpu_ms")]
        figures = ", ".join(_figure(figure, value) for figure, value in taken.figures.items())
        rows.append([name, *times, *ratios, "-" if units is None else f"{units:z.4f}", figures])
    title = (
        f"{result.suite}, {result.set}: {result.ranks} ranks, {result.tensors:,} tensors, "
        f"{result.parameters:,} parameters"
    )
    header = ["contender", "wall ms", "CPU ms", "wall, x ours", "CPU, x ours", "sent, (N-1)Ψ", "figures"]
    filled = [any(cell not in ("", "-") for cell in column) for column in zip(*rows)]
    header, *rows = (list(compress(cells, filled)) for cells in (header, *rows))
    return f"{title}\n\n{aligned(header, rows)}"


def figures_table(figures: Sequence[Figure]) -> str:
    """The figures of one suite: a line for each case and number of ranks, a column for each name."""
    names = list(dict.fromkeys((figure.name, figure.unit) for figure in figures))
    lines = list(dict.fromkeys((figure.case, figure.ranks) for figure in figures))
    value_of = {(figure.case, figure.ranks, figure.name): figure.value for figure in figures}
    header = [figures[0].suite, "ranks", *(f"{name}, {unit}" if unit else name for name, unit in names)]
    rows = [
        [case, f"{ranks:,}", *(_cell(value_of.get((case, ranks, name))) for name, _ in names)]
        for case, ranks in lines
    ]
    return aligned(header, rows)


def targets_table(judged: Sequence[Judged]) -> str:
    """All targets: what was measured, and whether that was enough."""
    rows = []
    for row in judged:
        ranks = "" if row.ranks is None else f"{row.ranks:,}"
        measured = "-" if row.measured is None else _spread(row.measured)
        verdict = {True: "reached", False: "MISSED", None: row.why_not}[row.reached]
        target = _bounds(row.bounds)
        rows.append([row.what, row.set or "", ranks, row.ours, row.says, measured, target, verdict])
    return aligned(["what", "set", "ranks", "ours", "number", "measured", "target", ""], rows)


def _ours_for(result: SuiteResult, name: str) -> str | None:
    """The contender of ours to stand beside; where a suite measures two things, the one of the same thing."""
    thing = name.rpartition(": ")[2] if ": " in name and not name.startswith(LIMIT) else result.suite
    ours = OURS_IN.get(thing)
    return ours if ours in result.taken else None


def _ratio(result: SuiteResult, name: str, ours: str | None, of: str) -> str:
    if ours is None or not getattr(result.taken[ours], of):
        return "-"
    return "1" if name == ours else _spread(result.ratio(name, ours, of=of))


def _spread(value: Spread) -> str:
    """The median, and the quartiles where there are any.

    >>> _spread(Spread(12.34, 11.1, 13.06)), _spread(Spread(2.0, 2.0, 2.0))
    ('12.3 (11.1-13.1)', '2')
    """
    quartiles = "" if value.low == value.high else f" ({_cell(value.low)}-{_cell(value.high)})"
    return _cell(value.median) + quartiles


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


def _figure(name: str, value: float) -> str:
    of_bytes = name.endswith("_bytes") or "_bytes_" in name
    said = format_bytes(round(value)) if of_bytes else f"{value:.4g}"
    return f"{name.replace('_bytes', '').replace('_', ' ')} {said}"
