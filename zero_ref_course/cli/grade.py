"""`zero-ref grade`: grade what a class has handed in."""

from __future__ import annotations

import argparse
import os

from zero_ref.cli._common import CommandError, Subparsers, need, reason, write_text
from zero_ref.lab._arguments import OutputFile, printable


def register_grade(subparsers: Subparsers) -> None:
    """Add `zero-ref grade`."""
    parser = subparsers.add_parser(
        "grade",
        help="grade the notebooks of a class",
        description="Grade every exercise in every notebook of a folder. Each answer runs in a process of "
        "its own, with a time-out and with your rights: where answers may be hostile, run this in a "
        "container. Ends with code 1 if a file could not be graded, whatever the answers are worth.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="has the notebooks, in folders or not")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="draw hidden cases from this number (default: none)"
    )
    parser.add_argument("--csv", type=OutputFile, metavar="FILE", help="write a row for each exercise")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for one exercise of one notebook (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    parser.set_defaults(run=run_grade)


def run_grade(arguments: argparse.Namespace) -> int:
    """Print a line for each exercise and write the CSV; return 1 if a file could not be graded."""
    if arguments.workers < 1 or not arguments.seconds > 0:
        raise CommandError("--workers is 1 or more, --seconds above 0.")
    grading = need("zero_ref_course.grading")
    rows = []
    try:
        for row in grading.grade_class(
            arguments.folder, seed=arguments.seed, seconds=arguments.seconds, workers=arguments.workers
        ):
            rows.append(row)
            said = f"{row.status:<19}  {row.file}  {row.exercise or row.message}"
            print(printable(said), flush=True)
    except (OSError, ValueError) as error:
        raise CommandError(reason(error)) from None
    if arguments.csv:
        write_text("--csv", arguments.csv, grading.as_csv(rows))
    return 1 if any(row.status == "unreadable" for row in rows) else 0
