"""`zero-ref grade`: grade what a class has handed in."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, read_input, reason, write_text
from zero_ref.lab._arguments import OutputFile, OutputFolder, printable
from zero_ref.simulator._records import read_text


def register_grade(subparsers: Subparsers) -> None:
    """Add `zero-ref grade`."""
    parser = subparsers.add_parser(
        "grade",
        help="grade the notebooks of a class",
        description="Grade every exercise of everybody in a folder. Each answer runs in a process of its own "
        "and cannot see the grader, the hidden cases or another answer; --protections says what keeps it "
        "there on this machine. Ends with code 1 if something could not be graded: a notebook that cannot "
        "be read, or a student who has handed in nothing. Marks do not change the code.",
    )
    parser.add_argument(
        "submissions", metavar="SUBMISSIONS", nargs="?", help="has a folder or a file for each student"
    )
    parser.add_argument("--protections", action="store_true", help="only say what keeps answers apart here")
    parser.add_argument(
        "--chapter", action="append", default=[], metavar="CHAPTER",
        help="its number or name; give it several times for several (default: those that anybody handed in)",
    )  # fmt: skip
    parser.add_argument(
        "--my-zero", metavar="RUNG", help="grade the rungs of each my_zero.py too, up to this one"
    )
    parser.add_argument(
        "--source", default="notebooks", metavar="DIR",
        help="the book's notebooks, which say what the exercises are (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--points", metavar="FILE", help='JSON: {"partition.largest_first": 5}; others count 1'
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="draw hidden cases from this number (default: none)"
    )
    parser.add_argument(
        "--hidden-share", type=float, default=0.5, metavar="SHARE",
        help="the part of the points that the hidden cases have (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--due", metavar="TIME", help="what --submitted has later than this is late: 2026-05-01T23:59"
    )
    parser.add_argument(
        "--submitted",
        metavar="FILE",
        help="CSV: student,submitted, with the times of the learning platform",
    )
    parser.add_argument(
        "--late-per-day",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="the part of the points that each day begun after --due takes off (default: %(default)s)",
    )
    parser.add_argument(
        "--comments",
        metavar="FILE",
        help="CSV: student,exercise,comment; without an exercise it is of everything",
    )
    parser.add_argument("--roster", metavar="FILE", help="a student a line: who handed in nothing is named")
    parser.add_argument("--csv", type=OutputFile, metavar="FILE", help="write a row for each student")
    parser.add_argument(
        "--junit", type=OutputFile, metavar="FILE", help="write JUnit's XML: a suite for each student"
    )
    parser.add_argument(
        "--gradescope", type=OutputFolder, metavar="DIR", help="write DIR/STUDENT/results.json"
    )
    parser.add_argument(
        "--feedback",
        type=OutputFolder,
        metavar="DIR",
        help="write DIR/STUDENT/NOTEBOOK, the student's own with the verdict below each answer",
    )
    parser.add_argument(
        "--keep",
        type=OutputFile,
        metavar="FILE",
        help="verdicts as they come; a run that was ended goes on from there",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for one exercise of one student (default: %(default)s)"
    )
    parser.set_defaults(run=run_grade)


def run_grade(arguments: argparse.Namespace) -> int:
    """Grade, print a line for each student, write the files that were asked for."""
    held = need("zero_ref_course.apart.confine").protections()
    if arguments.protections:
        for name, by in held.items():
            print(f"{name:<22} {by or 'NO: grade in a container'}")
        return 0
    _check(arguments)
    submissions, marks = need("zero_ref_course.submissions"), need("zero_ref_course.marks")
    try:
        handed_in, every = _read_class(arguments, submissions)
        names = [one.exercise for one in every]
        points = marks.read_points(_text("--points", arguments.points) or "{}", names)
        comments = _rows("--comments", arguments.comments, lambda text: marks.read_comments(text, names))
    except (OSError, ValueError) as error:
        raise CommandError(reason(error)) from None
    scale = marks.Scale(points, arguments.hidden_share, arguments.late_per_day)
    comments = comments or marks.Comments()

    def tell(student: str, exercise: str, verdict: Any) -> None:
        print(f"{verdict.status:<19}  {printable(student)}  {exercise}", flush=True)

    try:
        graded = submissions.grade_submissions(
            handed_in, every, seed=arguments.seed, workers=arguments.workers, seconds=arguments.seconds,
            kept=Path(arguments.keep) if arguments.keep else None, progress=tell,
        )  # fmt: skip
    except (OSError, RuntimeError) as error:
        raise CommandError(printable(str(error)), 1) from None
    if arguments.csv:
        write_text("--csv", arguments.csv, marks.as_csv(graded, scale, comments))
    if arguments.junit:
        said = {name: by or "nothing" for name, by in held.items()}
        write_text("--junit", arguments.junit, marks.as_junit(graded, scale, comments, said))
    for one in graded:
        student = one.submission.student
        if arguments.gradescope:
            results = marks.as_gradescope(one, scale, comments)
            _write_in("--gradescope", arguments.gradescope, student, "results.json", results)
        if arguments.feedback:
            for name, text in need("zero_ref_course.feedback").feedback(one, every, scale, comments):
                _write_in("--feedback", arguments.feedback, student, name, text)
    code = _print_summary(graded, marks, scale, comments)
    print("Kept apart: " + "; ".join(f"{name} by {by or 'NOTHING'}" for name, by in held.items()))
    return code


def _read_class(arguments: argparse.Namespace, submissions: Any) -> tuple[Any, Any]:
    """What was handed in, and the exercises that are graded."""
    grading = need("zero_ref_course.grading")
    every = grading.assigned_in(arguments.source, arguments.chapter)
    roster = [line.strip() for line in _text("--roster", arguments.roster).splitlines() if line.strip()]
    due = datetime.fromisoformat(arguments.due).astimezone() if arguments.due else None
    submitted = _rows("--submitted", arguments.submitted, submissions.read_submitted) or {}
    chapters = {one.chapter for one in grading.assigned_in(arguments.source)}
    handed_in = submissions.submissions_in(arguments.submissions, chapters, due, roster, submitted)
    if not arguments.chapter:
        begun = {one.chapter for one in every if any(submissions.cells_for(each, one) for each in handed_in)}
        every = [one for one in every if one.chapter in begun]
    if arguments.my_zero:
        every += grading.rungs_up_to(arguments.my_zero)
    if not every:
        raise ValueError(f"no notebook in {arguments.submissions} has an exercise of the book.")
    return handed_in, every


def _text(option: str, path: str | None) -> str:
    """The text of a file that the user may have named."""
    return str(read_input(option, path, read_text)) if path else ""


def _rows(option: str, path: str | None, read: Callable[[str], Any]) -> Any:
    """What a CSV says that the user may have named; None without one."""
    try:
        return read(_text(option, path)) if path else None
    except ValueError as error:
        raise ValueError(f"{option} {path}: {error}") from None


def _write_in(option: str, folder: str, student: str, name: str, text: str) -> None:
    path = Path(folder, student, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{option} {path.parent}: {reason(error)}.", 1) from None
    write_text(option, str(path), text)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.submissions is None:
        raise CommandError("name the folder with what was handed in: zero-ref grade SUBMISSIONS")
    if not 0 <= arguments.hidden_share <= 1:
        raise CommandError(f"--hidden-share {arguments.hidden_share:g} is no part: it is between 0 and 1.")
    if not 0 <= arguments.late_per_day <= 1:
        raise CommandError(f"--late-per-day {arguments.late_per_day:g} is no part: it is between 0 and 1.")
    if bool(arguments.due) != bool(arguments.submitted):
        raise CommandError("--due and --submitted belong together: a file's own time is that of a download.")
    if arguments.workers < 1 or not arguments.seconds > 0:
        raise CommandError("--workers is 1 or more, --seconds above 0.")


def _print_summary(graded: Any, marks: Any, scale: Any, comments: Any) -> int:
    could_not = 0
    for one in graded:
        submission = one.submission
        worth = sum(map(scale.worth, one.verdicts))
        said = marks.remarks(one, scale, comments)
        if submission.is_empty and not submission.problems:
            said.append("handed in nothing")
        could_not += bool(submission.problems) or submission.is_empty
        line = f"{marks.total(one, scale):>7.4g} of {worth:g}  {submission.student}  {'; '.join(said)}"
        print(printable(line.rstrip()))
    return 1 if could_not else 0
