"""`zero-ref notebooks`: the chapters for students, for teachers, or for nbgrader."""

from __future__ import annotations

import argparse

from zero_ref.cli._common import CommandError, Subparsers, need, reason


def register_notebooks(subparsers: Subparsers) -> None:
    """Add `zero-ref notebooks`."""
    parser = subparsers.add_parser(
        "notebooks",
        help="write the chapters for a course: with stubs, or with solutions",
        description="Write the chapters to a new folder. For students: stubs, no solutions. For teachers: "
        "solutions in place of the stubs. For nbgrader: the students' edition as the source of an "
        "assignment. In all of them the checks run with the notebook.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="new or empty; nothing is replaced")
    parser.add_argument("--for", dest="audience", required=True, choices=["students", "teachers", "nbgrader"])
    parser.add_argument(
        "--chapter",
        action="append",
        default=[],
        metavar="CHAPTER",
        help="its number or name; give it several times for several (default: all)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="for nbgrader: hidden tests, of cases that are drawn from this number (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--source", default="notebooks", metavar="DIR", help="the book's notebooks (default: %(default)s)"
    )
    parser.set_defaults(run=run_notebooks)


def run_notebooks(arguments: argparse.Namespace) -> int:
    """Write the notebooks and print their names."""
    if arguments.seed and arguments.audience != "nbgrader":
        raise CommandError("--seed is for nbgrader: the other editions have no hidden tests.")
    write_editions = need("zero_ref_course.editions").write_editions
    try:
        written = write_editions(
            arguments.source, arguments.folder, arguments.audience, arguments.chapter, arguments.seed
        )
    except (OSError, ValueError) as error:
        raise CommandError(reason(error)) from None
    for path in written:
        print(path)
    return 0
