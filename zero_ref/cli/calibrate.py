"""`zero-ref calibrate`: measure this machine, and write a cluster for the simulator."""

from __future__ import annotations

import argparse
import json
import math
import platform
from dataclasses import asdict
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, write_text
from zero_ref.lab._arguments import OutputFile, json_text, rank_processes
from zero_ref.simulator.calibrate import COMPUTATIONS, Calibration, Fit, calibrate


def register_calibrate(subparsers: Subparsers) -> None:
    """Add `zero-ref calibrate`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine's links and cores, with error bounds, for the simulator",
        description="Time collectives and training steps on ranks of this machine, fit latencies and rates "
        "on every other size, and predict the sizes in between. Best with nothing else running.",
    )
    parser.add_argument("--ranks", type=rank_processes, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer repeats: some 15 seconds")
    parser.add_argument("--out", type=OutputFile, metavar="FILE", help="write the cluster here, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_calibrate)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure, fit, print, and write the cluster if asked to."""
    if arguments.ranks < 2:
        raise CommandError("--ranks must be at least 2: a single rank sends nothing.")
    if not arguments.json:
        need("rich")  # before the work, not after it
    pieces, ranks = need("zero_ref.bench.pieces"), need("zero_ref.lab.ranks")
    before = pieces.load_average()
    try:
        times = pieces.measure(arguments.ranks, pieces.QUICK if arguments.quick else pieces.FULL)
    except ranks.RankError as error:
        raise CommandError(str(error), code=1) from None
    try:
        calibration = calibrate(
            times.collectives,
            times.works,
            backend=ranks.choose_backend(arguments.ranks),
            source=f"zero-ref calibrate --ranks {arguments.ranks}{' --quick' * arguments.quick}, "
            f"{platform.system()} {platform.machine()}, load average before: {_number(before)}",
        )
    except ValueError as error:
        raise CommandError(f"the times make no sense, so nothing is written: {error}", code=1) from None
    if arguments.out:
        write_text("--out", arguments.out, calibration.cluster.to_json() + "\n")
    if arguments.json:
        print(json_text(as_json(calibration)))
    else:
        print_calibration(calibration, arguments.ranks)
        if arguments.out:
            print(f"\nwritten: {arguments.out}")
    return 0


def _number(load: float | None) -> str:
    return "unknown" if load is None else f"{load:.1f}"


def as_json(calibration: Calibration) -> dict[str, Any]:
    """The cluster, the fits and the held-out sizes as plain values; an unbounded interval ends in inf."""
    return {
        "cluster": json.loads(calibration.cluster.to_json()),
        "fits": [asdict(fitted) for fitted in calibration.fits],
        "held_out": [
            {**prediction._asdict(), "error": prediction.error} for prediction in calibration.held_out
        ],
    }


def print_calibration(calibration: Calibration, ranks: int, width: int | None = None) -> None:
    """Print the fits as tables.

    Args:
        width: columns; None for those of the terminal.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, highlight=False)
    console.print(f"[bold]{calibration.cluster.name}, {ranks} ranks, {calibration.cluster.backend}[/]\n")
    for title, fits, per_call, per_second in (
        ("collective", [each for each in calibration.fits if each.what not in COMPUTATIONS], "round", "GB/s"),
        ("computing", [each for each in calibration.fits if each.what in COMPUTATIONS], "tensor", "G/s"),
    ):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column(title)
        for heading in (f"us a {per_call}", "", per_second, "", "miss", "worst"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for each in fits:
            table.add_row(*_row(each, calibration))
        console.print(table)
        console.print()
    console.print(
        "In parentheses: where nine of ten resamplings lie. Miss and worst: median and largest error at "
        "sizes that no fit has seen, against the lower quartile of the times measured. Train is forward and "
        "backward, in 10^9 operations a second; update an optimizer step, in 10^9 bytes a second."
    )


def _row(fitted: Fit, calibration: Calibration) -> list[str]:
    return [
        fitted.what,
        _rounded(fitted.overhead_us),
        _bounds(fitted.overhead_us_interval),
        _rounded(fitted.giga_per_s),
        _bounds(fitted.giga_per_s_interval),
        f"{calibration.error_bound(fitted.what, 0.5):.0%}",
        f"{calibration.error_bound(fitted.what):.0%}",
    ]


def _bounds(interval: tuple[float, float]) -> str:
    # Parentheses, since rich takes square brackets for a style.
    return f"({_rounded(interval[0])}-{_rounded(interval[1])})"


def _rounded(value: float) -> str:
    """A number with three figures and no exponent.

    >>> _rounded(1234.5), _rounded(0.71234), _rounded(75.25), _rounded(0.0)
    ('1,234', '0.712', '75.2', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"
