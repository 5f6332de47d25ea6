"""`zero-ref check`: grade the exercises of a notebook."""

from __future__ import annotations

import argparse
import json

from zero_ref.cli._common import CommandError, Subparsers, need, reason


def register_check(subparsers: Subparsers) -> None:
    """Add `zero-ref check`."""
    parser = subparsers.add_parser(
        "check",
        help="grade the exercises in a notebook of the book, as they stand in its file",
        description="Grade every exercise of a notebook, each in a process of its own. This runs the "
        "notebook's code: check only what you would run. Ends with code 1 if an exercise failed.",
    )
    parser.add_argument("notebook", metavar="NOTEBOOK", help="such as notebooks/03_partition.ipynb")
    parser.add_argument("--json", action="store_true", help="print JSON, with the messages in full")
    parser.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Print whether each exercise passed, and the message of its check; return 1 if any failed."""
    check_notebook = need("zero_ref.course.notebook").check_notebook
    try:
        results = check_notebook(arguments.notebook)
    except (OSError, ValueError) as error:
        raise CommandError(reason(error)) from None
    if not results:
        raise CommandError(f"{arguments.notebook} has no exercises.")
    if arguments.json:
        print(json.dumps([result._asdict() for result in results], indent=2, allow_nan=False))
    else:
        width = max(len(result.exercise) for result in results)
        for exercise, passed, message in results:
            first, *rest = message.splitlines() or [""]
            print(f"{'passed' if passed else 'FAILED'}  {exercise:<{width}}  {first}")
            for line in rest:
                print(f"        {line}")
    return 0 if all(result.passed for result in results) else 1
