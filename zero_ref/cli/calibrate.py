"""`zero-ref calibrate`: measure this machine, and write a cluster for the simulator."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from dataclasses import asdict
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, reason, write_text
from zero_ref.lab._arguments import OutputFile, json_text, rank_processes
from zero_ref.lab.simulated import cluster_named
from zero_ref.simulator.calibrate import COMPUTATIONS, Calibration, Fit, calibrate, calibrate_from_logs
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.logs import read_nccl_tests, read_products

OF_COMPUTING = (
    " Train is forward and backward, in 10^9 operations a second; update an optimizer step, in 10^9 bytes a "
    "second."
)


def register_calibrate(subparsers: Subparsers) -> None:
    """Add `zero-ref calibrate`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine's links and cores, with error bounds, for the simulator",
        description="Time collectives and training steps on ranks of this machine, fit latencies and rates "
        "on every other size, and predict the sizes in between. Best with nothing else running. With "
        "--products or --nccl-tests nothing is timed: the logs of GPUs are fitted instead, and what they do "
        "not say is that of --cluster.",
    )
    parser.add_argument("--ranks", type=rank_processes, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer repeats: some 15 seconds")
    parser.add_argument(
        "--products",
        metavar="FILE",
        help="times of matrix products, as CSV with the columns m, k, n and ms, us, s or tflops",
    )
    parser.add_argument(
        "--nccl-tests",
        action="append",
        default=[],
        metavar="FILE",
        help="what a program of nccl-tests printed, such as all_reduce_perf; may be given several times",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help=f"with logs: the cluster that they are of, {', '.join(CLUSTERS)}, or a file (default: h100-ib)",
    )
    parser.add_argument("--out", type=OutputFile, metavar="FILE", help="write the cluster here, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_calibrate)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure, fit, print, and write the cluster if asked to."""
    from_logs = arguments.products or arguments.nccl_tests
    if arguments.cluster and not from_logs:
        raise CommandError("--cluster is for logs: give --products or --nccl-tests, or measure without it.")
    if from_logs and arguments.quick:
        raise CommandError("--quick is for measuring, and with logs nothing is measured: leave it out.")
    if arguments.ranks < 2:
        raise CommandError("--ranks must be at least 2: a single rank sends nothing.")
    if not arguments.json:
        need("rich")  # before the work, not after it
    if from_logs:
        calibration = _from_logs(arguments)
        measured = calibration.cluster.source
    else:
        calibration = _measured(arguments, need("zero_ref.lab.pieces"), need("zero_ref.lab.ranks"))
        measured = f"{arguments.ranks} ranks"
    if arguments.out:
        write_text("--out", arguments.out, calibration.cluster.to_json() + "\n")
    if arguments.json:
        print(json_text(as_json(calibration)))
    else:
        print_calibration(calibration, measured)
        if arguments.out:
            print(f"\nwritten: {arguments.out}")
    return 0


def _from_logs(arguments: argparse.Namespace) -> Calibration:
    """Fit the logs that are named."""
    option, path = "--products", arguments.products
    try:
        products = read_products(path) if path else ()
        option, logs = "--nccl-tests", []
        for path in arguments.nccl_tests:
            logs.append(read_nccl_tests(path))
    except (OSError, ValueError) as error:
        raise CommandError(f"{option} {path} cannot be used: {reason(error).rstrip('.')}.") from None
    files = [path for path in (arguments.products, *arguments.nccl_tests) if path]
    try:
        base = cluster_named(arguments.cluster or "h100-ib")
        source = f"{', '.join(map(os.path.basename, files))}; else as {base.name}"
        return calibrate_from_logs(base, products, logs, source=f"zero-ref calibrate from {source}")
    except ValueError as error:
        raise CommandError(f"the logs make no sense together: {error}") from None


def _measured(arguments: argparse.Namespace, pieces: Any, ranks: Any) -> Calibration:
    """Measure this machine, and fit."""
    before = pieces.load_average()
    try:
        times = pieces.measure(arguments.ranks, pieces.QUICK if arguments.quick else pieces.FULL)
    except ranks.RankError as error:
        raise CommandError(str(error), code=1) from None
    try:
        return calibrate(
            times.collectives,
            times.works,
            backend=ranks.choose_backend(arguments.ranks),
            source=f"zero-ref calibrate --ranks {arguments.ranks}{' --quick' * arguments.quick}, "
            f"{platform.system()} {platform.machine()}, load average before: {_number(before)}",
        )
    except ValueError as error:
        raise CommandError(f"the times make no sense, so nothing is written: {error}", code=1) from None


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


def print_calibration(calibration: Calibration, measured: str, width: int | None = None) -> None:
    """Print the fits as tables.

    Args:
        measured: on what.
        width: columns; None for those of the terminal.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, highlight=False)
    console.print(f"[bold]{calibration.cluster.name}, {measured}, {calibration.cluster.backend}[/]\n")
    computing = [each for each in calibration.fits if each.what in COMPUTATIONS]
    products = [each for each in calibration.fits if each.what == "product"]
    collectives = [each for each in calibration.fits if each not in (*computing, *products)]
    for title, fits, per_call, per_second in (
        ("collective", collectives, "round", "GB/s"),
        ("computing", computing, "tensor", "G/s"),
        ("matrix products", products, "MB", "G/s"),
    ):
        if not fits:
            continue
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column(title)
        for heading in (f"us a {per_call}", "", per_second, "", "miss", "worst"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for each in fits:
            table.add_row(*_row(each, calibration))
        console.print(table)
        console.print()
    if products:
        device = calibration.cluster.device
        console.print(
            f"Large products reach {device.reached:.1%} of {device.tflops:g} TFLOPS, and half of that with "
            f"{device.knee:.0f} operations for each byte.\n"
        )
    console.print(
        "In parentheses: where nine of ten resamplings lie. Miss and worst: median and largest error at "
        "sizes that no fit has seen, against the lower quartile of the times measured."
        + (OF_COMPUTING if computing else "")
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
