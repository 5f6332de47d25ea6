"""`zero-ref bench`: this optimizer beside its peers and the machine's limits, and what was wanted of it."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, read_input, write_text
from zero_ref.cli._gpu import is_of_gpu, measure_gpu, print_gpu_report
from zero_ref.cli.calibrate import print_calibration
from zero_ref.lab._arguments import OutputFile, json_text, rank_processes, short, whole

IN_TURNS = ("step", "sync", "iteration", "checkpoint", "memory", "construction")
SINGLE = ("starts", "plan", "simulate", "predicted")
GROWTH = "growth"
GPU = "gpu"
SUITES = (*IN_TURNS, *SINGLE, GROWTH, GPU)
SETS = ("gpt", "tiny")

SUITE_SECONDS = 3600.0


def register_bench(subparsers: Subparsers) -> None:
    """Add `zero-ref bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="this optimizer beside its peers and the machine's limits, on real ranks of this machine",
        description="Let contenders take turns on ranks of this machine, print what each took, and at the "
        "end what was wanted and whether it was reached. Best with nothing else running. As root under "
        "Linux, `unshare --net zero-ref bench` also counts headers in the bytes sent.",
    )
    add = parser.add_argument
    add(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"in turns: {', '.join(IN_TURNS)}; single figures: starts (how many overlapped runs hang or lose"
        " an update), plan (time to partition), simulate (time to simulate a trillion parameters), predicted "
        f"(the simulator against measurements); how times grow with sizes: {GROWTH}; by itself, all that "
        f"needs a GPU, at most ten minutes: {GPU} (default: all but these two)",
    )
    several = "how many ranks; give it several times for several (default: 2)"
    add("--ranks", type=rank_processes, action="append", metavar="N", help=several)
    both = "a language model, or 2,000 tiny tensors; give it twice for both (default: both)"
    add("--set", dest="sets", choices=SETS, action="append", help=both)
    measured = "rounds to measure, after two to warm up (default: 15)"
    add("--rounds", type=whole(1, 10**5), metavar="N", help=measured)
    starts = "of an overlapped run, for `starts` (default: 100)"
    add("--starts", type=whole(1, 10**5), metavar="N", help=starts)
    add("--quick", action="store_true", help="3 rounds and 4 starts: to see that it runs, not to compare")
    add("--json", type=OutputFile, metavar="FILE", help="write all of it here, every sample")
    nothing = "run nothing: print, and merge, what --json wrote; give it several times for several"
    add("--from", dest="reports", action="append", default=[], metavar="FILE", help=nothing)
    parser.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Run suites, or read what they gave, print the tables and write the report; 1 if a suite failed."""
    unknown = [name for name in arguments.suites if name not in SUITES]
    if unknown:
        raise CommandError(f"there is no suite {short(unknown[0])!r}: choose from {', '.join(SUITES)}.")
    if 1 in (arguments.ranks or ()):
        raise CommandError("--ranks must be at least 2: a single rank shares its work with nobody.")
    if arguments.reports and arguments.suites:
        raise CommandError("--from prints what was measured before: leave the suites out.")
    if GPU in arguments.suites:
        if (
            set(arguments.suites) != {GPU}
            or arguments.ranks
            or arguments.sets
            or arguments.rounds
            or arguments.starts
        ):
            raise CommandError(
                f"{GPU} writes a report of its own, and takes only --json and --quick beside it."
            )
        return measure_gpu(arguments.json, arguments.quick)
    need("rich")  # before the work, not after it
    failed = 0
    if len(arguments.reports) == 1 and is_of_gpu(values := read_input("--from", arguments.reports[0])):
        if arguments.json:
            raise CommandError(
                "--from a report of a GPU prints it, and has nothing to write: leave --json out."
            )
        return print_gpu_report(arguments.reports[0], values)
    if arguments.reports:
        report = _read(arguments.reports)
        for result in report.results:
            _print_suite(result)
        for suite in SINGLE:
            _print_figures([figure for figure in report.figures if figure.suite == suite])
    else:
        report, failed = _measured(arguments)
    judged = need("zero_ref.bench.targets").judge(report.results, report.figures, report.growth)
    print(f"\n{need('zero_ref.bench.tables').targets_table(judged)}")
    if any(session.quick for session in report.sessions):
        print("\n--quick: so few rounds say that it runs, not what is faster")
    if arguments.json:
        _write(report, arguments.json)
        print(f"\nwritten: {arguments.json}")
    return 1 if failed else 0


def _measured(arguments: argparse.Namespace) -> tuple[Any, int]:
    """The report, and how many suites failed. Each table is printed, and written, as it comes."""
    ranks, pieces = need("zero_ref.lab.ranks"), need("zero_ref.bench.pieces")
    machine, results, rounds = (need(f"zero_ref.bench.{name}") for name in ("machine", "results", "rounds"))
    try:
        need("zero_ref.lab.meter").raise_loopback()
    except PermissionError:
        raise CommandError("loopback is off, and only root may switch it on: ranks cannot talk.") from None
    session = results.Session(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rounds=arguments.rounds or (3 if arguments.quick else 15),
        quick=arguments.quick,
        wire_counter=rounds.wire_counter(),
        load_average=(pieces.load_average(), None),
    )
    report = results.Report(machine.read_machine(), machine.read_versions(), machine.read_commit(), [session])
    _print_surroundings(report)
    failed = 0
    for what, measure in _parts(arguments, report):
        try:
            measure()
        except ranks.RankError as error:
            failed += 1
            print(f"zero-ref: {what}: {error}", file=sys.stderr)
        finally:
            ranks.shutdown()  # all memory goes back before the next
        session.load_average = (session.load_average[0], pieces.load_average())
        if arguments.json:
            _write(report, arguments.json)
    return report, failed


def _parts(arguments: argparse.Namespace, report: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """What to measure, by name; each adds to the report and prints what it found."""
    suites, growth = need("zero_ref.bench.suites"), need("zero_ref.bench.growth")
    count, few = report.sessions[0].rounds, arguments.quick
    world_sizes = list(dict.fromkeys(arguments.ranks or [2]))
    starts, repeats = arguments.starts or (4 if few else 100), 1 if few else 3
    amount = suites.Amount(count, starts, repeats, tell=_print_prediction)

    def in_turns(suite: str, set_name: str, world_size: int) -> None:
        run = need("zero_ref.lab.ranks").run
        found = run(suites.SUITES[suite], world_size, set_name, count, timeout=SUITE_SECONDS)[0]
        report.results.append(found)
        _print_suite(found)

    def single(suite: str) -> None:
        figures = list(suites.SINGLES[suite](world_sizes, amount))
        report.figures += figures
        _print_figures(figures)

    def growing() -> None:
        report.growth = growth.measure_growth(count, few, tell=partial(print, flush=True))

    for suite in dict.fromkeys(arguments.suites or IN_TURNS + SINGLE):
        if suite in IN_TURNS:
            for set_name in dict.fromkeys(arguments.sets or SETS):
                for world_size in world_sizes:
                    what = f"{suite}, {set_name}, {world_size} ranks"
                    yield what, partial(in_turns, suite, set_name, world_size)
        else:
            yield suite, growing if suite == GROWTH else partial(single, suite)


def _read(files: list[str]) -> Any:
    results = need("zero_ref.bench.results")
    reports = []
    for file in files:
        try:
            reports.append(results.Report.from_json(read_input("--from", file)))
        except ValueError as error:
            raise CommandError(f"--from {file} is no report that `--json` wrote: {error}.") from None
    try:
        return results.merge(reports)
    except ValueError as error:
        raise CommandError(f"--from: {error}.") from None


def _write(report: Any, file: str) -> None:
    write_text("--json", file, json_text(report.as_json(), indent=1) + "\n")


def _print_surroundings(report: Any) -> None:
    session, machine = report.sessions[0], report.machine
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items())
    memory = "?" if machine.memory_bytes is None else f"{machine.memory_bytes / 1e9:.0f}"
    print(f"{machine.processor}, {machine.cores} cores, {memory} GB, {machine.kernel}; {versions}")
    print(
        f"{session.rounds} rounds; bytes sent: {session.wire_counter}; load average {session.load_average[0]}"
    )
    if report.versions["fairscale"] is None:
        print("fairscale takes no part: pip install --no-deps fairscale==0.4.13")


def _print_suite(result: Any) -> None:
    print(f"\n{need('zero_ref.bench.tables').suite_table(result)}", flush=True)


def _print_figures(figures: list[Any]) -> None:
    if figures:
        print(f"\n{need('zero_ref.bench.tables').figures_table(figures)}", flush=True)


def _print_prediction(world_size: int, calibration: Any, compared: Sequence[Any]) -> None:
    """The fits behind the step times of `predicted`, and how many of these came close."""
    print()
    print_calibration(calibration, f"{world_size} ranks")
    against_median = [one.predicted_ms / statistics.median(one.repeats_ms) - 1 for one in compared]
    for what, errors in (
        ("lower quartile", [one.error for one in compared]),
        ("median", against_median),
    ):
        off = [abs(error) for error in errors]
        print(
            f"iterations against the {what} of their repeats: {sum(error <= 0.25 for error in off)} of "
            f"{len(off)} within 25%, median {statistics.median(off):.0%}, worst {max(off):.0%}"
        )
    print(f"calls and bytes held as planned: {sum(one.as_planned for one in compared)} of {len(compared)}")
