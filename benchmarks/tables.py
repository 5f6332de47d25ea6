"""Measurements as text: tables in Markdown, which a terminal can show as they are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

from benchmarks.contenders import OURS_IN
from benchmarks.gpu.report import MEASURED, GpuReport, SectionResult
from benchmarks.machine import Commit, Machine
from benchmarks.results import LIMIT, Report, Spread, SuiteResult, spread
from zero_ref.simulator._records import record
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


def cell(value: float | None) -> str:
    """Three figures; whole numbers whole; thousandths where ratios are near 1.

    >>> cell(1234.5), cell(12.34), cell(1.0009), cell(0.01234), cell(3.0), cell(None)
    ('1,234', '12.3', '1.001', '0.0123', '3', '-')
    """
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def spread_cell(value: Spread) -> str:
    """The median, and the quartiles where there are any.

    >>> spread_cell(Spread(12.34, 11.1, 13.06)), spread_cell(Spread(2.0, 2.0, 2.0))
    ('12.3 (11.1-13.1)', '2')
    """
    quartiles = "" if value.low == value.high else f" ({cell(value.low)}-{cell(value.high)})"
    return cell(value.median) + quartiles


def bytes_cell(value: float | None) -> str:
    """Bytes in a unit that fits."""
    return "-" if value is None else format_bytes(value)


# ------------------------------------------------------------------------------------- where it was measured


def where(report: Report | GpuReport) -> str:
    """The machine, the versions, the commit and each time that something was measured: one line each."""
    if isinstance(report, Report):
        lines = surroundings(report.machine, report.versions, report.commit)
        for session in report.sessions:
            load = " and ".join(cell(value) for value in session.load_average if value is not None)
            how = (
                f"{session.rounds} rounds{QUICK if session.quick else ''}, load averages {load or 'unknown'}"
            )
            lines.append(f"- {session.date}: {how}; bytes sent: {session.wire_counter}")
        return "\n".join(lines)
    device = report.accelerator
    memory = (
        "" if device.memory_bytes is None else f" with {format_bytes(device.memory_bytes, 'GB', digits=0)}"
    )
    versions = {**report.versions, **device.software}
    return "\n".join(
        [
            f"- device: {device.count} of {device.name}{memory}",
            *surroundings(report.machine, versions, report.commit),
            f"- date: {report.date}{QUICK if report.quick else ''}",
        ]
    )


QUICK = "; quick: to see that it runs, not to compare"


def surroundings(machine: Machine, versions: Mapping[str, str | None], commit: Commit | None) -> list[str]:
    """List the machine, the versions and the commit, on which the numbers depend."""
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / 1e9:.0f} GB of memory"
    virtual = ", a virtual machine" if machine.virtual else ""
    name = "no checkout" if commit is None else f"`{commit.name[:12]}`"
    changed = ", with changes" if commit is not None and commit.changed else ""
    return [
        f"- machine: {machine.processor or 'unknown processor'}, {machine.cores} cores{memory}{virtual}; "
        f"{machine.kernel}",
        "- versions: "
        + ", ".join(f"{package} {version}" for package, version in versions.items() if version),
        f"- commit: {name}{changed}",
    ]


# -------------------------------------------------------------------------------------------- beside others


def suite_table(result: SuiteResult) -> str:
    """A suite on one set: every contender, its times, and how they compare to ours."""
    rows = []
    for name, taken in result.taken.items():
        ours = _ours_for(result, name)
        units = result.wire_units(name)
        times = [spread_cell(spread(ms)) if ms else "-" for ms in (taken.wall_ms, taken.cpu_ms)]
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


def _ours_for(result: SuiteResult, name: str) -> str | None:
    """The contender of ours to stand beside; where a suite measures two things, the one of the same thing."""
    thing = name.rpartition(": ")[2] if ": " in name and not name.startswith(LIMIT) else result.suite
    ours = OURS_IN.get(thing)
    return ours if ours in result.taken else None


def _ratio(result: SuiteResult, name: str, ours: str | None, of: str) -> str:
    if ours is None or not getattr(result.taken[ours], of):
        return "-"
    return "1" if name == ours else spread_cell(result.ratio(name, ours, of=of))


def _figure(name: str, value: float) -> str:
    of_bytes = name.endswith("_bytes") or "_bytes_" in name
    said = format_bytes(round(value)) if of_bytes else f"{value:.4g}"
    return f"{name.replace('_bytes', '').replace('_', ' ')} {said}"


# ------------------------------------------------------------------------------------------------- of a GPU

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
"""By their titles: a cell of what was found."""


def gpu_text(report: GpuReport) -> str:
    """The text of a GPU's whole report. Raises: as `section_text`."""
    return "\n\n".join([where(report), *map(section_text, report.sections)])


def section_text(result: SectionResult) -> str:
    """A section: how it went, and its tables.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not what a section gives.
    """
    parts = [f"{result.name}: {result.status} in {result.seconds:g} s"]
    if result.why:
        parts[0] += f": {result.why}"
    if result.status == MEASURED:
        parts += SECTIONS[result.name](result.found)
    return "\n\n".join(parts)


def _listed(found: Sequence[Row], columns: Columns) -> str:
    """A line for each row. One that was left out says why in its second column."""
    rows = []
    for one in found:
        name, *cells = columns.values()
        why = one.get("left_out")
        given = [why, *[""] * (len(cells) - 1)] if why else [make(one) for make in cells]
        rows.append([name(one), *given])
    return aligned(list(columns), rows)


def _step(found: Row) -> Iterator[str]:
    def of_copy(one: Row) -> str:
        share, low, high = one["share_of_copy"]
        return f"{share:.0%} ({low:.0%}-{high:.0%})"

    columns: Columns = {
        "model": lambda one: one["model"],
        "step": lambda one: one["what"],
        "ms": lambda one: cell(statistics.median(one["ms"])),
        "host ms": lambda one: cell(statistics.median(one["host_ms"])),
        "bytes a parameter": lambda one: f"{one['bytes_a_parameter']}",
        "GB/s": lambda one: cell(one["gb_per_s"]),
        "copy GB/s": lambda one: cell(one["copy_gb_per_s"]),
        "of the copy's": of_copy,
        "in one kernel": lambda one: (
            f"{one['share_of_copy_by_least_bytes'][0]:.0%} of {one['least_bytes_a_parameter']}"
        ),
    }
    yield _listed(found["steps"], columns)
    yield (
        "ms is the device's time behind other work, host ms what it takes to queue the step. The last column "
        "counts only the bytes that a single kernel would move."
    )


def _memory(found: Row) -> Iterator[str]:
    of_state: Columns = {
        "convention": lambda one: one["convention"],
        "state": lambda one: one["what"],
        "predicted": lambda one: bytes_cell(one["predicted"]),
        "tensors": lambda one: bytes_cell(one["held"]),
        "allocated": lambda one: bytes_cell(one["allocated"]),
    }
    of_activations: Columns = {
        "checkpointing": lambda one: one["checkpointing"],
        "predicted, blocks": lambda one: bytes_cell(one["predicted_blocks"]),
        "with the head": lambda one: bytes_cell(one["predicted"]),
        "allocated when backward begins": lambda one: bytes_cell(one["when_backward_begins"]),
        "peak": lambda one: bytes_cell(one["peak"]),
    }
    yield _listed(found["state"], of_state)
    yield _listed(found["activations"], of_activations)


def _speed(found: Row) -> Iterator[str]:
    for one in found["results"]:
        if "left_out" in one:
            yield f"{one['suite']}, {one['set']}: {one['left_out']}"
        else:
            yield suite_table(record(SuiteResult, one, "result"))


SECTIONS: dict[str, Callable[[Row], Iterator[str]]] = {"step": _step, "memory": _memory, "speed": _speed}
"""By section: blocks of text from what it has found."""
