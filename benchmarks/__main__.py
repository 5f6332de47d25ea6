"""This optimizer beside its peers and the machine's limits, on real ranks of this machine.

    python -m benchmarks step sync --set gpt --ranks 2 --rounds 9 --json report.json
    python -m benchmarks --from report.json              # the tables again, nothing run
    python -m benchmarks gpu --json gpu.json             # memory and times on GPUs, in ten minutes

Contenders take turns, and each table is printed as it comes. Best with nothing else running. As root under
Linux, `unshare --net python -m benchmarks` also counts headers in the bytes sent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, results, rounds, suites, tables
from benchmarks.contenders import SETS
from benchmarks.gpu import report as of_gpu
from benchmarks.results import Report
from zero_ref.comm import devices
from zero_ref.lab import meter, ranks
from zero_ref.lab._arguments import OutputFile, Parser, json_text, rank_processes, unwritable, whole
from zero_ref.simulator._records import read_json

GPU = "gpu"

SUITE_SECONDS = 3600.0


def make_parser() -> Parser:
    """The words of the command line."""
    parser = Parser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"{', '.join(suites.SUITES)}; by itself, memory and times on GPUs: {GPU} "
        f"(default: all but {GPU})",
    )
    several = "how many ranks; give it several times for several (default: 2)"
    add("--ranks", type=rank_processes, action="append", metavar="N", help=several)
    both = "a language model, or 2,000 tiny tensors; give it twice for both (default: both)"
    add("--set", dest="sets", choices=SETS, action="append", help=both)
    measured = "rounds to measure, after two to warm up (default: 15)"
    add("--rounds", type=whole(1, 10**5), metavar="N", help=measured)
    add("--quick", action="store_true", help="3 rounds: to see that it runs, not to compare")
    add("--json", type=OutputFile, metavar="FILE", help="write all of it here, every sample")
    nothing = "run nothing: print, and merge, what --json wrote; give it several times for several"
    add("--from", dest="reports", action="append", default=[], metavar="FILE", help=nothing)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run suites, or read a report; print the tables, and write the report. Return 1 if a suite failed."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    known = (*suites.SUITES, GPU)
    unknown = [name for name in arguments.suites if name not in known]
    if unknown:
        parser.error(f"there is no suite {unknown[0]!r}: choose from {', '.join(known)}.")
    if 1 in (arguments.ranks or ()):
        parser.error("--ranks must be at least 2: a single rank shares its work with nobody.")
    if arguments.reports and arguments.suites:
        parser.error("--from prints what was measured before: leave the suites out.")
    if problem := unwritable(arguments):
        parser.error(problem)
    if GPU in arguments.suites:
        if len(arguments.suites) > 1 or arguments.ranks or arguments.sets or arguments.rounds:
            parser.error(f"{GPU} writes a report of its own, and takes only --json and --quick beside it.")
        return _measure_gpu(arguments)
    if arguments.reports:
        try:
            return _print_reports(arguments)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            parser.error(f"--from {' '.join(arguments.reports)}: no report that --json wrote: {error}.")
    return _measure(arguments)


def _print_reports(arguments: argparse.Namespace) -> int:
    """Print what --json wrote, and merge several into one."""
    values = [read_json(file) for file in arguments.reports]
    if len(values) == 1 and "accelerator" in values[0]:
        print(tables.gpu_text(of_gpu.GpuReport.from_json(values[0])))
        return 0
    report = results.merge([Report.from_json(value) for value in values])
    for result in report.results:
        print(f"\n{tables.suite_table(result)}")
    _write(report, arguments.json)
    return 0


def _write(report: Any, file: str | None) -> None:
    if file:
        Path(file).write_text(json_text(report.as_json(), indent=1) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ on ranks


def _measure(arguments: argparse.Namespace) -> int:
    """Measure, print and write each suite as it comes. A suite that fails is said, and the others go on."""
    meter.raise_loopback()
    session = results.Session(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rounds=arguments.rounds or (3 if arguments.quick else 15),
        quick=arguments.quick,
        wire_counter=rounds.wire_counter(),
        load_average=(machine.load_average(), None),
    )
    report = Report(machine.read_machine(), machine.read_versions(), machine.read_commit(), [session])
    print(tables.where(report))
    if report.versions["fairscale"] is None:
        print("- FairScale takes no part: pip install --no-deps fairscale==0.4.13")
    failed = 0
    for what, measure in _parts(arguments, report):
        try:
            measure()
        except ranks.RankError as error:
            failed += 1
            print(f"{what}: {error}", file=sys.stderr)
        finally:
            ranks.shutdown()  # all memory goes back before the next
        session.load_average = (session.load_average[0], machine.load_average())
        _write(report, arguments.json)
    if arguments.quick:
        print("\n--quick: so few rounds say that it runs, not what is faster")
    return 1 if failed else 0


def _parts(arguments: argparse.Namespace, report: Report) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name and function of each measurement, which adds its result to the report and prints it."""
    count = report.sessions[0].rounds
    world_sizes = list(dict.fromkeys(arguments.ranks or [2]))

    def in_turns(suite: str, set_name: str, world_size: int) -> None:
        found = ranks.run(suites.SUITES[suite], world_size, set_name, count, timeout=SUITE_SECONDS)[0]
        report.results.append(found)
        print(f"\n{tables.suite_table(found)}", flush=True)

    for suite in dict.fromkeys(arguments.suites or suites.SUITES):
        for set_name in dict.fromkeys(arguments.sets or SETS):
            for world_size in world_sizes:
                what = f"{suite}, {set_name}, {world_size} ranks"
                yield what, partial(in_turns, suite, set_name, world_size)


# ------------------------------------------------------------------------------------------------ on a GPU


def _measure_gpu(arguments: argparse.Namespace) -> int:
    """Measure every section, print each as it comes, and write the report after each.

    Returns:
        1 if a section failed, or if there is no accelerator. Then no file is written, so that a report from
        another machine stays.
    """
    if devices.accelerator() is None:
        print(of_gpu.explain_absence())
        return 1
    device = devices.current_device()
    report = of_gpu.new_report(device, arguments.quick)
    print(tables.where(report), flush=True)

    def tell(result: of_gpu.SectionResult) -> None:
        print(f"\n{tables.section_text(result)}", flush=True)
        _write(report, arguments.json)

    of_gpu.measure(device, report, tell=tell)
    if report.failed:
        print(f"\nfailed: {', '.join(report.failed)}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
