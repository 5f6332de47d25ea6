"""Marks of a class: points, and the files that other programs read, CSV, JUnit and Gradescope's."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zero_ref_course.grading import Verdict
from zero_ref_course.submissions import Graded, rows_in

FAILED = {"failed", "hidden cases failed"}
SAID_TO_STUDENTS = "It passes the cases that are in the check, and fails in hidden ones."


class Scale(NamedTuple):
    """What exercises count.

    Args:
        points: of each exercise, those of a right answer; by default 1.
        hidden_share: the part of them that the hidden cases have.
        late_per_day: the part of a student's points that each day begun after the date takes off.
    """

    points: Mapping[str, float] = {}
    hidden_share: float = 0.5
    late_per_day: float = 0.0

    def worth(self, exercise: str) -> float:
        """The points of a right answer.

        >>> Scale({"ledger.floor": 4}).worth("ledger.floor"), Scale().worth("ledger.floor")
        (4, 1.0)
        """
        return self.points.get(exercise, 1.0)

    def score(self, exercise: str, verdict: Verdict) -> float:
        """The points of an answer.

        >>> Scale(hidden_share=0.25).score("ledger.floor", Verdict("hidden cases failed", ""))
        0.75
        """
        return verdict.share(self.hidden_share) * self.worth(exercise)

    def kept_after(self, days_late: int) -> float:
        """The part of the points that a late student keeps.

        >>> Scale(late_per_day=0.25).kept_after(days_late=2), Scale(late_per_day=0.25).kept_after(days_late=9)
        (0.5, 0.0)
        """
        return max(0.0, 1.0 - self.late_per_day * days_late)


class Comments(NamedTuple):
    """What the teacher says, to students by name: of everything, and of single exercises."""

    of_student: Mapping[str, str] = {}
    of_exercise: Mapping[tuple[str, str], str] = {}


NO_COMMENTS = Comments()


def read_comments(text: str, exercises: Sequence[str]) -> Comments:
    """Comments from a CSV with the columns `student`, `exercise` and `comment`; no exercise is of everything.

    >>> read_comments("student,exercise,comment\\nada,,Well done.\\n", []).of_student
    {'ada': 'Well done.'}

    Raises:
        ValueError: a column is missing, or an exercise is none of those.
    """
    of_student, of_exercise = dict[str, str](), dict[tuple[str, str], str]()
    for row in rows_in(text, ("student", "exercise", "comment")):
        student, exercise, comment = row.values()
        if not exercise:
            of_student[student] = comment
        elif exercise in exercises:
            of_exercise[student, exercise] = comment
        else:
            raise ValueError(f"there is a comment on {exercise!r}; assigned are {', '.join(exercises)}.")
    return Comments(of_student, of_exercise)


def read_points(text: str, exercises: Sequence[str]) -> dict[str, float]:
    """Points from JSON, {"partition.largest_first": 5}.

    Raises:
        ValueError: it is none, names no exercise of those, or has what is no number of 0 or more.
    """
    points = json.loads(text)
    if not isinstance(points, dict):
        raise ValueError('points are a JSON object, such as {"partition.largest_first": 5}.')
    for name, number in points.items():
        if name not in exercises:
            raise ValueError(f"there are points for {name!r}; assigned are {', '.join(exercises)}.")
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ValueError(f"the points of {name!r} are {number!r}. They are a number of 0 or more.")
    return points


def total(graded: Graded, scale: Scale) -> float:
    """The points of one student, less what lateness takes off."""
    points = sum(scale.score(exercise, verdict) for exercise, verdict in graded.verdicts.items())
    return points * scale.kept_after(graded.submission.days_late)


def remarks(graded: Graded, scale: Scale, comments: Comments = NO_COMMENTS) -> list[str]:
    """What there is to say of all that a student handed in."""
    submission = graded.submission
    said = [f"late: {why}" for why in submission.late]
    if (kept := scale.kept_after(submission.days_late)) < 1:
        days = f"{submission.days_late} day{'s' if submission.days_late > 1 else ''}"
        said.append(f"{days} late: {short(100 * (1 - kept))}% of the points taken off")
    said += [f"cannot be read: {problem}" for problem in submission.problems]
    return said + [one for one in [comments.of_student.get(submission.student)] if one]


def as_csv(graded: Sequence[Graded], scale: Scale, comments: Comments = NO_COMMENTS) -> str:
    """A row for each student: the sum, what is late or broken, points and status of each exercise."""
    exercises = list(graded[0].verdicts) if graded else []
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["student", "points", "of", "late", "days late", "problems", "comment"]
        + [column for exercise in exercises for column in (exercise, f"{exercise} status")]
        + ["predictions", "predicted", "predictions of"]
    )
    worth = sum(map(scale.worth, exercises))
    for one in graded:
        row: list[Any] = [one.submission.student, short(total(one, scale)), short(worth)]
        row += ["; ".join(one.submission.late), str(one.submission.days_late)]
        row += ["; ".join(one.submission.problems), comments.of_student.get(one.submission.student, "")]
        for exercise, verdict in one.verdicts.items():
            row += [short(scale.score(exercise, verdict)), verdict.status]
        made = [points for points in one.predictions.values() if points is not None]
        row += [short(sum(made)), str(len(made)), str(len(one.predictions))]
        table.writerow([_as_cell(value) for value in row])
    return text.getvalue()


def as_junit(
    graded: Sequence[Graded],
    scale: Scale,
    comments: Comments = NO_COMMENTS,
    held: Mapping[str, str] = {},
) -> str:
    """A test suite for each student and a test for each exercise; missing and blank ones are skipped.

    Valid by the schema of Apache Ant's reports, the strictest in use, and so by Jenkins' too. It asks for the
    date of a run too. A run may have been resumed, so that is always the same one.

    Args:
        held: what kept answers apart, by the name of the protection.
    """
    suites = ET.Element("testsuites")
    for number, one in enumerate(graded):
        statuses = [verdict.status for verdict in one.verdicts.values()]
        skipped = sum(status in ("missing", "not started") for status in statuses)
        suite = ET.SubElement(
            suites,
            "testsuite",
            name=for_files(one.submission.student),
            package="zero_ref_course",
            id=str(number),
            timestamp="1970-01-01T00:00:00",
            hostname="localhost",
            time=short(round(sum(one.seconds.values()), 3)),
            tests=str(len(statuses)),
            failures=str(sum(status in FAILED for status in statuses)),
            errors="0",
            skipped=str(skipped),
        )
        properties = ET.SubElement(suite, "properties")
        for name, value in held.items():
            ET.SubElement(properties, "property", name=name, value=value)
        for exercise, verdict in one.verdicts.items():
            student = for_files(one.submission.student)
            took = short(one.seconds.get(exercise, 0.0))
            case = ET.SubElement(suite, "testcase", classname=student, name=exercise, time=took)
            message = for_files(verdict.message)
            if verdict.status in FAILED:
                first, _, rest = message.partition("\n")
                ET.SubElement(case, "failure", type=verdict.status, message=first).text = rest
            elif verdict.status != "passed":
                ET.SubElement(case, "skipped", message=f"{verdict.status}: {message}")
        said = remarks(one, scale, comments)
        for exercise in one.verdicts:
            if comment := comments.of_exercise.get((one.submission.student, exercise)):
                said.append(f"{exercise}: {comment}")
        ET.SubElement(suite, "system-out").text = for_files("\n".join(said))
        ET.SubElement(suite, "system-err")
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def told(exercise: str, graded: Graded, comments: Comments = NO_COMMENTS) -> str:
    """What a student hears of an exercise: no input of a hidden case, and the teacher's comment below."""
    verdict = graded.verdicts[exercise]
    hidden = verdict.status == "hidden cases failed"
    said = SAID_TO_STUDENTS if hidden else f"{verdict.status}: {verdict.message}"
    comment = comments.of_exercise.get((graded.submission.student, exercise), "")
    return for_files(f"{said}\n{comment}" if comment else said)


def as_gradescope(graded: Graded, scale: Scale, comments: Comments = NO_COMMENTS) -> str:
    """One student's results.json of a Gradescope autograder. Hidden cases stay hidden: no input is named."""
    tests = []
    for exercise, verdict in graded.verdicts.items():
        tests.append(
            {
                "name": exercise,
                "score": scale.score(exercise, verdict),
                "max_score": scale.worth(exercise),
                "status": "passed" if verdict.status == "passed" else "failed",
                "output": told(exercise, graded, comments),
                "output_format": "text",
                "visibility": "visible",
            }
        )
    said = remarks(graded, scale, comments)
    made = [points for points in graded.predictions.values() if points is not None]
    if graded.predictions:
        said.append(
            f"Predictions: {short(sum(made))} of {len(graded.predictions)} points; no part of the marks."
        )
    results = {
        "score": total(graded, scale),
        "output": for_files("\n".join(said)),
        "output_format": "text",
        "tests": tests,
    }
    return json.dumps(results, indent=1, allow_nan=False) + "\n"


def short(points: float) -> str:
    """Points without zeros at the end."""
    return f"{points:.10g}"


def _as_cell(value: str) -> str:
    """A spreadsheet takes what begins like this for a formula, and a student has named the file."""
    value = for_files(value)
    return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def for_files(text: str) -> str:
    """The text with a replacement for what neither UTF-8 nor XML has, such as a name in another encoding."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
