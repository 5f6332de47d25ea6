"""`zero-ref bench gpu`: everything that needs a GPU, in one command."""

from __future__ import annotations

from typing import Any

from zero_ref.cli._common import CommandError, need, write_text
from zero_ref.lab._arguments import json_text


def measure_gpu(json: str | None, quick: bool) -> int:
    """Measure every section, print each as it comes, and write the report after each.

    Args:
        json: the file to write; None for none.
        quick: with tiny sizes.
    Returns:
        1 if a section failed, or if there is no accelerator: something is missing, and the user has made no
        mistake. Then no file is written, so that a report from another machine stays.
    """
    gpu, tables = need("zero_ref.bench.gpu.report"), need("zero_ref.bench.gpu.tables")
    devices = need("zero_ref.comm.devices")
    if devices.accelerator() is None:
        print(gpu.explain_absence())
        return 1
    device = devices.current_device()
    report = gpu.new_report(device, quick)
    print(tables.where(report), flush=True)

    def tell(result: Any) -> None:
        print(f"\n{tables.section_text(result)}", flush=True)
        if json:
            write_text("--json", json, json_text(report.as_json(), indent=1) + "\n")

    gpu.measure(device, report, tell=tell)
    if json:
        print(f"\nwritten: {json}")
    if report.failed:
        print(f"\nfailed: {', '.join(report.failed)}")
    return 1 if report.failed else 0


def is_of_gpu(values: Any) -> bool:
    """Whether the values of a JSON file are meant as a report of a GPU."""
    return isinstance(values, dict) and "accelerator" in values


def print_gpu_report(file: str, values: Any) -> int:
    """Print what `zero-ref bench gpu --json` wrote.

    Raises:
        CommandError: it is something else.
    """
    gpu, tables = need("zero_ref.bench.gpu.report"), need("zero_ref.bench.gpu.tables")
    try:
        print(tables.report_text(gpu.GpuReport.from_json(values)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommandError(f"--from {file} is no report that `bench gpu --json` wrote: {error}.") from None
    return 0
