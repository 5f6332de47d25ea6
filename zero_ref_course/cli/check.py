"""`zero-ref check`: grade the exercises of a notebook, or the reader's own optimizer."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from zero_ref.cli._common import CommandError, Subparsers, need, reason
from zero_ref.lab._arguments import printable


def register_check(subparsers: Subparsers) -> None:
    """Add `zero-ref check`."""
    parser = subparsers.add_parser(
        "check",
        help="grade what you wrote: the exercises in a notebook of the book, or your my_zero.py",
        description="A notebook: grade each exercise as it stands in the file, in a process of its own. A "
        "Python file: say on real ranks which rungs hold of the optimizer that the book has you build. Both "
        "run the file's code: check only what you would run. Ends with code 1 if something failed.",
    )
    parser.add_argument("file", metavar="FILE", help="such as 03_partition.ipynb, or my_zero.py")
    parser.add_argument(
        "--rung",
        help="of a Python file: look no further than this rung, which must hold: owners, step, buckets, "
        "in_backward, to_owners, shards, stage_3, checkpoint, masters or options",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the messages in full")
    parser.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Print how each exercise or rung went; return 1 if one failed."""
    if arguments.file.endswith(".py"):
        return _check_own(arguments)
    if arguments.rung:
        raise CommandError(f"--rung is for a Python file, and {arguments.file} is none.")
    return _check_notebook(arguments)


def _check_notebook(arguments: argparse.Namespace) -> int:
    check_notebook = need("zero_ref_course.notebook").check_notebook
    try:
        results = check_notebook(arguments.file)
    except (OSError, ValueError) as error:
        raise CommandError(reason(error)) from None
    if not results:
        raise CommandError(f"{arguments.file} has no exercises.")
    if arguments.json:
        print(json.dumps([result._asdict() for result in results], indent=2, allow_nan=False))
    else:
        width = max(len(result.exercise) for result in results)
        for exercise, passed, message in results:
            first, *rest = message.splitlines() or [""]
            print(f"{'passed' if passed else 'FAILED'}  {exercise:<{width}}  {printable(first)}")
            for line in rest:
                print(f"        {printable(line)}")
    return 0 if all(result.passed for result in results) else 1


def _check_own(arguments: argparse.Namespace) -> int:
    rungs = need("zero_ref_course.rungs")
    results, out = [], sys.stdout
    try:
        # What the reader's code prints is no part of the answer.
        with contextlib.redirect_stdout(sys.stderr):
            for result in rungs.check_rungs(arguments.file, arguments.rung):
                results.append(result)
                if not arguments.json:
                    said = "\n".join(map(printable, rungs.line(result).splitlines()))
                    print(said, file=out, flush=True)
    except (OSError, ValueError) as error:
        raise CommandError(reason(error)) from None
    if arguments.json:
        print(json.dumps([result._asdict() for result in results], indent=2, allow_nan=False))
    last = results[-1]
    wanting = arguments.rung and (last.rung, last.state) != (rungs.rung_named(arguments.rung), "holds")
    return 1 if wanting or any(result.state == "FAILED" for result in results) else 0
