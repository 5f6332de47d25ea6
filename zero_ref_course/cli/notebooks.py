"""`zero-ref notebooks`: the chapters for students or for teachers."""

from __future__ import annotations

import argparse

from zero_ref.cli._common import CommandError, Subparsers, need, reason


def register_notebooks(subparsers: Subparsers) -> None:
    """Add `zero-ref notebooks`."""
    parser = subparsers.add_parser(
        "notebooks",
        help="write the chapters for a course: with stubs, or with solutions",
        description="Write the chapters to a new folder. For students: stubs, no solutions. For teachers: "
        "solutions in place of the stubs. In both the checks run with the notebook.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="new or empty; nothing is replaced")
    parser.add_argument("--for", dest="audience", required=True, choices=["students", "teachers"])
    parser.add_argument(
        "--chapter",
        action="append",
        default=[],
        metavar="CHAPTER",
        help="its number or name; give it several times for several (default: all)",
    )
    parser.add_argument(
        "--source", default="notebooks", metavar="DIR", help="the book's notebooks (default: %(default)s)"
    )
    parser.set_defaults(run=run_notebooks)


def run_notebooks(arguments: argparse.Namespace) -> int:
    """Write the notebooks and print their names."""
    write_editions = need("zero_ref_course.editions").write_editions
    try:
        written = write_editions(arguments.source, arguments.folder, arguments.audience, arguments.chapter)
    except (OSError, ValueError) as error:
        raise CommandError(reason(error)) from None
    for path in written:
        print(path)
    return 0
