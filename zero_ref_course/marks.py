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
from zero_ref_course.submissions import Graded

FAILED = {"failed", "hidden cases failed"}
SAID_TO_STUDENTS = "It passes the cases that are in the check, and fails in hidden ones."


class Scale(NamedTuple):
    """What exercises count.

    Args:
        points: of each exercise, those of a right answer; by default 1.
        hidden_share: the part of them that the hidden cases have.
    """

    points: Mapping[str, float] = {}
    hidden_share: float = 0.5

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
    """The points of one student."""
    return sum(scale.score(exercise, verdict) for exercise, verdict in graded.verdicts.items())


def as_csv(graded: Sequence[Graded], scale: Scale) -> str:
    """A row for each student: the sum, what is late or broken, points and status of each exercise."""
    exercises = list(graded[0].verdicts) if graded else []
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["student", "points", "of", "late", "problems"]
        + [column for exercise in exercises for column in (exercise, f"{exercise} status")]
        + ["predictions", "predicted", "predictions of"]
    )
    worth = sum(map(scale.worth, exercises))
    for one in graded:
        row: list[Any] = [one.submission.student, _short(total(one, scale)), _short(worth)]
        row += ["; ".join(one.submission.late), "; ".join(one.submission.problems)]
        for exercise, verdict in one.verdicts.items():
            row += [_short(scale.score(exercise, verdict)), verdict.status]
        made = [points for points in one.predictions.values() if points is not None]
        row += [_short(sum(made)), str(len(made)), str(len(one.predictions))]
        table.writerow([_as_cell(value) for value in row])
    return text.getvalue()


def as_junit(graded: Sequence[Graded], scale: Scale) -> str:
    """A test suite for each student and a test for each exercise; missing and blank ones are skipped.

    Valid by the schema of Apache Ant's reports, the strictest in use, and so by Jenkins' too. They ask for
    times, which verdicts do not have, so these are 0: a run that was resumed writes the same file.
    """
    suites = ET.Element("testsuites")
    for number, one in enumerate(graded):
        statuses = [verdict.status for verdict in one.verdicts.values()]
        skipped = sum(status in ("missing", "not started") for status in statuses)
        suite = ET.SubElement(
            suites,
            "testsuite",
            name=_for_files(one.submission.student),
            package="zero_ref_course",
            id=str(number),
            timestamp="1970-01-01T00:00:00",
            hostname="localhost",
            time="0",
            tests=str(len(statuses)),
            failures=str(sum(status in FAILED for status in statuses)),
            errors="0",
            skipped=str(skipped),
        )
        ET.SubElement(suite, "properties")
        for exercise, verdict in one.verdicts.items():
            student = _for_files(one.submission.student)
            case = ET.SubElement(suite, "testcase", classname=student, name=exercise, time="0")
            message = _for_files(verdict.message)
            if verdict.status in FAILED:
                ET.SubElement(
                    case, "failure", type=verdict.status, message=message.split("\n")[0]
                ).text = message
            elif verdict.status != "passed":
                ET.SubElement(case, "skipped", message=f"{verdict.status}: {message}")
        said = [*(f"late: {name}" for name in one.submission.late), *one.submission.problems]
        ET.SubElement(suite, "system-out").text = _for_files("\n".join(said))
        ET.SubElement(suite, "system-err")
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def as_gradescope(graded: Graded, scale: Scale) -> str:
    """One student's results.json of a Gradescope autograder. Hidden cases stay hidden: no input is named."""
    tests = []
    for exercise, verdict in graded.verdicts.items():
        hidden = verdict.status == "hidden cases failed"
        tests.append(
            {
                "name": exercise,
                "score": scale.score(exercise, verdict),
                "max_score": scale.worth(exercise),
                "status": "passed" if verdict.status == "passed" else "failed",
                "output": SAID_TO_STUDENTS if hidden else f"{verdict.status}: {_for_files(verdict.message)}",
                "output_format": "text",
                "visibility": "visible",
            }
        )
    said = [*(f"late: {name}" for name in graded.submission.late), *graded.submission.problems]
    made = [points for points in graded.predictions.values() if points is not None]
    if graded.predictions:
        said.append(
            f"Predictions: {_short(sum(made))} of {len(graded.predictions)} points; no part of the marks."
        )
    results = {"output": _for_files("\n".join(said)), "output_format": "text", "tests": tests}
    return json.dumps(results, indent=1, allow_nan=False) + "\n"


def _short(points: float) -> str:
    return f"{points:.10g}"


def _as_cell(value: str) -> str:
    """A spreadsheet takes what begins like this for a formula, and a student has named the file."""
    value = _for_files(value)
    return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _for_files(text: str) -> str:
    """The text with a replacement for what neither UTF-8 nor XML has, such as a name in another encoding."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
