"""A report of a GPU as text: a terminal shows the tables as they are, Markdown sets them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.gpu.report import FAILED, MEASURED, GpuReport, SectionResult
from benchmarks.tables import aligned
from zero_ref.simulator.ledger import format_bytes

Row = Mapping[str, Any]


def where(report: GpuReport) -> str:
    """The device, the machine, versions and commit: one line each."""
    device, machine = report.accelerator, report.machine
    memory = (
        "" if device.memory_bytes is None else f" with {format_bytes(device.memory_bytes, 'GB', digits=0)}"
    )
    versions = {**report.versions, **device.software}
    commit = "no checkout"
    if report.commit is not None:
        commit = f"{report.commit.name[:12]}" + (", with changes" if report.commit.changed else "")
    quick = "; quick: to see that it runs, not to compare" if report.quick else ""
    lines = [
        f"- device: {device.count} of {device.name}{memory}",
        f"- machine: {machine.processor}, {machine.cores} cores; {machine.kernel}",
        "- versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        f"- commit: {commit}",
        f"- date: {report.date}{quick}",
    ]
    return "\n".join(lines)


def section_text(result: SectionResult) -> str:
    """A section: how it went, and its tables.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not what a section gives.
    """
    parts = [f"{result.name}: {result.status} in {result.seconds:g} s"]
    if result.why:
        parts[0] += f": {result.why}"
    if result.status == MEASURED or (result.status == FAILED and result.found):
        parts += TABLES[result.name](result.found)
    return "\n\n".join(parts)


def report_text(report: GpuReport) -> str:
    """All of a report. Raises: as `section_text`."""
    return "\n\n".join([where(report), *map(section_text, report.sections)])


def _step(found: Row) -> Iterator[str]:
    rows = []
    for one in found["steps"]:
        if "left_out" in one:
            rows.append([one["model"], f"left out: {one['left_out']}", *[""] * 7])
            continue
        share, low, high = one["share_of_copy"]
        rows.append(
            [
                one["model"],
                one["what"],
                _number(statistics.median(one["ms"])),
                _number(statistics.median(one["host_ms"])),
                f"{one['bytes_a_parameter']}",
                _number(one["gb_per_s"]),
                _number(one["copy_gb_per_s"]),
                f"{share:.0%} ({low:.0%}-{high:.0%})",
                f"{one['share_of_copy_by_least_bytes'][0]:.0%} of {one['least_bytes_a_parameter']}",
            ]
        )
    header = ["model", "step", "ms", "host ms", "bytes a parameter", "GB/s", "copy GB/s"]
    yield aligned([*header, "of the copy's", "in one kernel"], rows)
    yield (
        "ms is the device's time behind other work, host ms what it takes to queue the step. The last column "
        "counts only the bytes that a single kernel would move."
    )


def _memory(found: Row) -> Iterator[str]:
    rows = [
        [one["convention"], one["what"], *(_bytes(one[name]) for name in ("predicted", "held", "allocated"))]
        for one in found["state"]
    ]
    yield aligned(["convention", "state", "predicted", "tensors", "allocated"], rows)
    names = ("predicted_blocks", "predicted", "when_backward_begins", "peak")
    rows = [
        [
            one["checkpointing"],
            *(one.get("left_out", "-") if name not in one else _bytes(one[name]) for name in names),
        ]
        for one in found["activations"]
    ]
    header = ["checkpointing", "predicted, blocks", "with the head", "allocated when backward begins", "peak"]
    yield aligned(header, rows)


def _gemm(found: Row) -> Iterator[str]:
    rows = []
    for one in found["products"]:
        shape = f"{one['tokens']:,} x {one['inputs']:,} x {one['outputs']:,}"
        if "left_out" in one:
            rows.append([one["model"], shape, one["left_out"], *[""] * 3])
            continue
        rates = [_number(rate) for rate in one["tflops"].values()]
        share = one["share_of_peak"]
        rows.append([one["model"], shape, *rates, "-" if share is None else f"{share:.0%}"])
    header = ["model", "tokens x inputs x outputs", "forward", "of the input", "of the weight", "of the peak"]
    yield aligned(header, rows)
    peak = found["peak_tflops"]
    of_preset = "no preset has a peak for this device" if peak is None else f"the preset's peak is {peak:g}"
    yield f"TFLOP/s in {found['dtype']}; {of_preset}."


def _synchronisations(found: Row) -> Iterator[str]:
    rows = []
    for one in found["ways"]:
        if "parts" not in one:
            rows.append([one["way"], one.get("error") or one["left_out"]])
            continue
        waits = [f"{part}: {text}" for part, text in one["parts"].items() if text is not None]
        rows.append([one["way"], "; ".join(waits) or ("none" if found["checked"] else "not checked")])
    yield aligned(["way", "the host waits for the device"], rows)
    if not found["checked"]:
        yield "This device cannot tell when the host waits for it."


def _overlap(found: Row) -> Iterator[str]:
    rows = []
    for one in found["traces"]:
        if "left_out" in one:
            rows.append([one["way"], one["left_out"], "", ""])
            continue
        share = one["hidden_share"]
        times = [_number(one[name]) for name in ("communication_ms", "computing_ms")]
        rows.append([one["way"], *times, "-" if share is None else f"{share:.0%}"])
    yield aligned([f"way, {found['ranks']} ranks", "communication ms", "computing ms", "hidden"], rows)


def _tests(found: Row) -> Iterator[str]:
    rows = []
    for one in found["runs"]:
        if "passed" not in one:
            rows.append([one["what"], one.get("error") or one["left_out"], "", "", ""])
            continue
        counts = [f"{one['passed']}", f"{len(one['failed'])}", f"{len(one['skipped'])}"]
        rows.append([one["what"], *counts, _number(one["seconds"])])
    yield aligned(["tests", "passed", "failed", "skipped", "s"], rows)
    failed = [f"- {name}: {why}" for one in found["runs"] for name, why in one.get("failed", {}).items()]
    if failed:
        yield "\n".join(failed)


def _number(value: float) -> str:
    """Three figures, without an exponent where that is readable.

    >>> _number(1234.5), _number(12.34), _number(0.01234)
    ('1,234', '12.3', '0.0123')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


TABLES: dict[str, Callable[[Row], Iterator[str]]] = {
    "synchronisations": _synchronisations,
    "gemm": _gemm,
    "step": _step,
    "memory": _memory,
    "overlap": _overlap,
    "notebooks": _tests,
    "tests": _tests,
}
"""By section: blocks of text from what it has found."""
