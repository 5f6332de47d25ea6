"""`zero-ref grade`: a class of ten, one of each kind, and the files that come out."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import jsonschema
import nbformat
import pytest
from class_of_students import CHAPTER, KINDS, write_class

from zero_ref import cli
from zero_ref_course.feedback import feedback
from zero_ref_course.grading import Assigned, Status, Verdict, answer_in, assigned_in, rungs_up_to
from zero_ref_course.isolated import Cells
from zero_ref_course.marks import Comments, Scale, as_csv, as_gradescope, as_junit, read_points
from zero_ref_course.notebook import read_notebook, tags_of
from zero_ref_course.predictions import predictions
from zero_ref_course.submissions import (
    Graded,
    Job,
    Submission,
    _Worker,
    cells_for,
    grade_submissions,
    read_submitted,
    submissions_in,
)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="answers are graded where there is fork"),
]
ASSIGNED = assigned_in(CHAPTER.parent, ["partition"])
NAMES = [one.exercise for one in ASSIGNED]
SEED = 7
DUE = datetime.fromisoformat("2026-05-01T00:00").astimezone()

VISIBILITY = {"enum": ["hidden", "after_due_date", "after_published", "visible"]}
FORMAT = {"enum": ["text", "html", "simple_format", "md", "ansi"]}
NUMBER, TEXT, OBJECT = {"type": "number"}, {"type": "string"}, {"type": "object"}
GRADESCOPE = {
    "type": "object",
    "anyOf": [{"required": ["score"]}, {"required": ["tests"]}],
    "additionalProperties": False,
    "properties": {
        "score": NUMBER,
        "execution_time": NUMBER,
        "output": TEXT,
        "output_format": FORMAT,
        "test_output_format": FORMAT,
        "test_name_format": FORMAT,
        "visibility": VISIBILITY,
        "stdout_visibility": VISIBILITY,
        "extra_data": OBJECT,
        "leaderboard": {"type": "array", "items": {"type": "object", "required": ["name", "value"]}},
        "tests": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "score": NUMBER,
                    "max_score": NUMBER,
                    "status": {"enum": ["passed", "failed"]},
                    "name": TEXT,
                    "name_format": FORMAT,
                    "number": TEXT,
                    "output": TEXT,
                    "output_format": FORMAT,
                    "tags": {"type": "array", "items": TEXT},
                    "visibility": VISIBILITY,
                    "extra_data": OBJECT,
                },
            },
        },
    },
}
"""The fields of an autograder's results.json as https://gradescope-autograders.readthedocs.io/en/latest/specs/
has them: all are optional, and without a score of its own the file needs tests."""

WHOLE = r"-?\d+"
DECIMAL = r"-?\d+(\.\d*)?"
TOKEN = r"(?s)\S(.*\S)?"
JUNIT = {
    "testsuites": ({}, r"(testsuite )*"),
    "testsuite": (
        {
            "name": TOKEN, "timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "hostname": TOKEN, "tests": WHOLE,
            "failures": WHOLE, "errors": WHOLE, "skipped?": WHOLE, "time": DECIMAL, "package": TOKEN,
            "id": WHOLE,
        },
        r"properties (testcase )*system-out system-err ",
    ),
    "properties": ({}, r"(property )*"),
    "property": ({"name": TOKEN, "value": r"(?s).*"}, ""),
    "testcase": ({"name": TOKEN, "classname": TOKEN, "time": DECIMAL}, r"((skipped|error|failure) )?"),
    "failure": ({"message?": r"(?s).*", "type": r"(?s).*"}, ""),
    "error": ({"message?": r"(?s).*", "type": r"(?s).*"}, ""),
    "skipped": ({"message?": r"(?s).*"}, ""),
    "system-out": ({}, ""),
    "system-err": ({}, ""),
}  # fmt: skip
"""Of each element its attributes, those with ? optional, and its children in order. This is the schema of
Apache Ant's reports, https://github.com/windyroad/JUnit-Schema/blob/master/JUnit.xsd, in other words. It
leaves open what `skipped` has; Jenkins reads its message."""


def check_junit(text: str) -> list[ET.Element]:
    """The suites, once the file is valid and its counts are right."""
    root = ET.fromstring(text)
    assert root.tag == "testsuites"
    for element in root.iter():
        attributes, children = JUNIT[element.tag]
        assert re.fullmatch(children, "".join(f"{child.tag} " for child in element)), element.tag
        for name, pattern in attributes.items():
            if not name.endswith("?") or name[:-1] in element.attrib:
                assert re.fullmatch(pattern, element.attrib[name.rstrip("?")]), (element.tag, element.attrib)
        assert element.attrib.keys() <= {name.rstrip("?") for name in attributes}, element.attrib
    for number, suite in enumerate(root):
        assert suite.attrib["id"] == str(number)
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
        for outcome, attribute in (("failure", "failures"), ("skipped", "skipped"), ("error", "errors")):
            assert len(suite.findall(f"testcase/{outcome}")) == int(suite.attrib[attribute])
    return list(root)


def check_csv(text: str) -> list[dict[str, str]]:
    """The rows, once the file is as RFC 4180 has it: one header, every line with as many fields."""
    lines = list(csv.reader(io.StringIO(text), strict=True))
    assert len(set(lines[0])) == len(lines[0])
    assert {len(line) for line in lines} == {len(lines[0])}
    return [dict(zip(lines[0], line)) for line in lines[1:]]


class Class(list[Graded]):
    """A graded class, with the file of its verdicts."""

    folder: Path
    kept: Path
    kind: dict[str, str]


def submissions(folder: Path) -> list[Submission]:
    submitted = read_submitted(Path(f"{folder}.csv").read_text())
    return submissions_in(folder, [CHAPTER.stem], DUE, ["absent"], submitted)


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Class]:
    folder = tmp_path_factory.mktemp("class")
    kind = write_class(folder / "in", len(KINDS)) | {"absent": "nothing"}
    kept = folder / "kept.jsonl"
    graded = Class(grade_submissions(submissions(folder / "in"), ASSIGNED, seed=SEED, kept=kept))
    graded.folder, graded.kept, graded.kind = folder / "in", kept, kind
    return graded


def test_everybody_gets_what_their_kind_deserves(ten: Class) -> None:
    expected = {
        **dict.fromkeys(("right", "late", "renamed", "checks deleted", "untagged"), "passed"),
        **dict.fromkeys(("wrong", "cheat"), "failed"),
        **dict.fromkeys(("broken", "nothing"), "missing"),
        "blank": "not started",
    }
    statuses = {one.submission.student: {verdict.status for verdict in one.verdicts.values()} for one in ten}
    assert statuses == {student: {expected[kind]} for student, kind in ten.kind.items()}
    late = {ten.kind[one.submission.student] for one in ten if one.submission.late}
    broken = {ten.kind[one.submission.student] for one in ten if one.submission.problems}
    assert (late, broken) == ({"late"}, {"broken"})
    assert {one.submission.days_late for one in ten if one.submission.late} == {3}


@pytest.mark.thorough
def test_what_was_graded_already_is_not_graded_again(ten: Class, tmp_path: Path) -> None:
    lines = ten.kept.read_text().splitlines(keepends=True)
    kept, again = tmp_path / "kept.jsonl", list[str]()
    kept.write_text("".join(lines[:-3]) + lines[-2][:40])  # ended in the middle of a line

    def note(student: str, exercise: str, verdict: Verdict) -> None:
        again.append(f"{student} {exercise}")

    resumed = grade_submissions(submissions(ten.folder), ASSIGNED, seed=SEED, kept=kept, progress=note)
    assert len(again) == 3
    assert as_csv(resumed, Scale()) == as_csv(ten, Scale())
    without_times = [[one._replace(seconds={}) for one in graded] for graded in (resumed, ten)]
    assert without_times[0] == without_times[1]
    assert sum(one.seconds == then.seconds for one, then in zip(resumed, ten)) >= len(ten) - 3


def test_the_csv_has_a_row_for_each_student(ten: Class) -> None:
    rows = check_csv(as_csv(ten, Scale({NAMES[0]: 4})))
    assert [row["student"] for row in rows] == sorted(ten.kind)
    points = {ten.kind[row["student"]]: (row["points"], row["of"]) for row in rows}
    assert points["right"] == ("6", "6")
    assert points["wrong"] == points["cheat"] == points["nothing"] == ("0", "6")


def test_junit_and_gradescope_are_valid(ten: Class) -> None:
    suites = check_junit(as_junit(ten, Scale()))
    assert [suite.attrib["name"] for suite in suites] == sorted(ten.kind)
    for one in ten:
        results = json.loads(as_gradescope(one, Scale()))
        jsonschema.validate(results, GRADESCOPE)
        assert [test["name"] for test in results["tests"]] == NAMES


def test_predictions_are_collected_and_are_no_marks(ten: Class) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(ten, Scale()))))
    asked = str(len(predictions("partition")))
    made = {ten.kind[row["student"]]: [row["predictions"], row["predicted"]] for row in rows}
    assert {row["predictions of"] for row in rows} == {asked}
    assert made["nothing"] == ["0", "0"]
    one = graded("ada", Verdict("passed", "✓"), predictions={"a.b": 1.0, "a.c": 0.5, "a.d": None})
    [row] = csv.DictReader(io.StringIO(as_csv([one], Scale())))
    assert [row[name] for name in ("predictions", "predicted", "predictions of", "points")] == [
        "1.5",
        "2",
        "3",
        "1",
    ]
    assert "Predictions: 1.5 of 3 points" in json.loads(as_gradescope(one, Scale()))["output"]


# ------------------------------------------------------------------------- without a process


def graded(
    student: str, *verdicts: Verdict, predictions: Mapping[str, float | None] = {}, **more: Any
) -> Graded:
    return Graded(Submission(student, {}, **more), dict(zip(NAMES, verdicts)), predictions)


def test_hidden_cases_have_a_share_of_the_points_and_are_not_shown_to_students() -> None:
    secret = Verdict("hidden cases failed", "largest_first([9, 9], 2) gives ...")
    one = graded("ada", secret, Verdict("passed", "✓"), Verdict("not started", "stub"))
    scale = Scale({NAMES[0]: 8.0}, hidden_share=0.25)
    results = json.loads(as_gradescope(one, scale))
    assert [test["score"] for test in results["tests"]] == [6.0, 1.0, 0.0]
    assert "[9, 9]" not in json.dumps(results)
    assert "[9, 9]" in as_junit([one], scale)


def test_lateness_is_what_the_platform_says_and_no_files_time(tmp_path: Path) -> None:
    for name in ("ada/a.ipynb", "bob_LATE_4711_815_03_partition.ipynb", "carol/c.ipynb", "dan/d.ipynb"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(CHAPTER.read_text())
        os.utime(path, (2_000_000_000, 2_000_000_000))
    times = "\ufeffStudent, Submitted,x\nada,2026-05-01T00:01,\ncarol,2026-04-30 23:59,\nzoe,,\n"
    found = submissions_in(tmp_path, [CHAPTER.stem], DUE, submitted=read_submitted(times))
    assert {one.student: (one.days_late, len(one.late)) for one in found} == {
        "ada": (1, 1),
        "bob": (0, 1),  # Canvas says that it is late, and not how much
        "carol": (0, 0),
        "dan": (0, 0),
    }
    with pytest.raises(ValueError, match="'yesterday' of ada is no time"):
        read_submitted("student,submitted\nada,yesterday\n")


def test_a_my_zero_is_found_beside_notebooks_and_by_canvas_name(tmp_path: Path) -> None:
    for name in ("ada/work/my_zero.py", "bob_4711_815_my_zero-2.py", "carol/notes.py", "dan/3.ipynb"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CHAPTER.read_text() if name.endswith("ipynb") else f"# {name}\n")
    found = {one.student: one for one in submissions_in(tmp_path, [CHAPTER.stem])}
    assert {name: one.own for name, one in found.items()} == {
        "ada": "# ada/work/my_zero.py\n",
        "bob": "# bob_4711_815_my_zero-2.py\n",
        "carol": None,
        "dan": None,
    }
    assert [name for name, one in found.items() if one.is_empty] == ["carol"]
    [rung] = rungs_up_to("owners")
    cells = cells_for(found["ada"], rung)
    assert cells is not None
    assert cells.forbids == ("zero_ref",)
    [graded] = grade_submissions([found["dan"]], [rung], seed=0)
    assert graded.verdicts[rung.exercise] == ("missing", "there is no my_zero.py among what was handed in.")


def test_feedback_is_below_each_answer_and_says_no_input_of_a_hidden_case() -> None:
    secret = Verdict("hidden cases failed", "largest_first([9, 9], 2) gives ...")
    wrong = Verdict("failed", "even_split raised ValueError: <img src=x>\n# no heading\x1b[31m")
    notebook = read_notebook(CHAPTER)
    one = graded("ada", secret, wrong, Verdict("passed", "✓"))
    one = one._replace(submission=Submission("ada", {Path("3.ipynb"): notebook}))
    comments = Comments({}, {("ada", NAMES[1]): "See page 3."})
    [(name, text)] = feedback(one, ASSIGNED, Scale(), comments)
    made = json.loads(text)
    places = [number for number, cell in enumerate(made["cells"]) if "feedback" in tags_of(cell)]
    said = ["".join(made["cells"][number]["source"]) for number in places]
    assert name == "3.ipynb"
    assert "[9, 9]" not in text
    assert "def largest_first" in "".join(made["cells"][places[1] - 1]["source"])
    assert said[2].endswith("    # no heading\ufffd[31m\n    See page 3.")
    again = one._replace(submission=Submission("ada", {Path("3.ipynb"): made}))
    assert list(feedback(again, ASSIGNED, Scale(), comments)) == [(name, text)], "it replaces what was there"


def test_what_students_write_is_no_formula_and_no_markup() -> None:
    verdict = Verdict("failed", 'f() raised ValueError: </failure>\x00\x1b[31m & "quoted"')
    one = graded("=cmd|' /C calc'!A0", verdict, verdict, verdict, late=("@late",))
    [row] = check_csv(as_csv([one], Scale()))
    assert row["student"] == "'=cmd|' /C calc'!A0"
    assert row["late"] == "'@late"
    [suite] = check_junit(as_junit([one], Scale()))
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "</failure>\ufffd\ufffd[31m & " in failure.attrib["message"]
    assert not failure.text, "the message is there already"
    jsonschema.validate(json.loads(as_gradescope(one, Scale())), GRADESCOPE)


def test_names_in_another_encoding_and_with_control_characters_are_written_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A zip made on Windows has such names: one must not cost the whole class its marks."""
    ada, bob = tmp_path / "in" / "ada", os.fsencode(tmp_path / "in") + b"/b\xf6b\x1b[2J\n9 of 9"
    ada.mkdir(parents=True)
    os.mkdir(bob)
    cell = {"cell_type": "code", "source": "a = '\ud800'", "metadata": {}}
    notebook = {"cells": [cell], "nbformat": 4}
    (ada / "3.ipynb").write_text(json.dumps(notebook))
    with open(bob + b"/\xdcbung 3.ipynb", "w") as file:
        file.write("{}")
    words = ["grade", str(tmp_path / "in"), "--source", str(CHAPTER.parent), "--chapter", "3"]
    for option, name in (
        ("--csv", "m.csv"),
        ("--junit", "m.xml"),
        ("--gradescope", "g"),
        ("--feedback", "f"),
    ):
        words += [option, str(tmp_path / name)]
    assert cli.main(words) == 1
    [row, _] = check_csv((tmp_path / "m.csv").read_text())[::-1]
    assert row["student"] == "b\ufffdb\ufffd[2J\n9 of 9"
    assert "\ufffdbung 3.ipynb" in row["problems"]
    check_junit((tmp_path / "m.xml").read_text())
    assert len(list((tmp_path / "g").glob("*/results.json"))) == 2
    assert (
        json.loads((tmp_path / "f" / "ada" / "3.ipynb").read_text())["cells"][1]["source"] == cell["source"]
    )
    [_, line, _] = capsys.readouterr().out.splitlines()
    assert r"b\udcf6b\x1b[2J\n9 of 9  cannot be read: b\udcf6b\x1b[2J\n9 of 9/\udcdcbung 3.ipynb" in line


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        (' time="1.5"', ""),
        (' hostname="localhost"', ""),
        ("1970-01-01T00:00:00", "yesterday"),
        ("<properties />", ""),
        ("<system-err />", "<system-err /><system-out />"),
        ('tests="3"', 'tests="4"'),
        ("<testsuites>", '<testsuites name="marks">'),
    ],
)
def test_an_invalid_junit_file_is_found_to_be_one(what: str, instead: str) -> None:
    verdict = Verdict("failed", "wrong")
    one = graded("ada", verdict, verdict, verdict)._replace(seconds={NAMES[0]: 1.5})
    text = as_junit([one], Scale())
    assert check_junit(text)
    assert what in text
    with pytest.raises((AssertionError, KeyError)):
        check_junit(text.replace(what, instead, 1))


def test_who_handed_in_what_is_read_from_names(tmp_path: Path) -> None:
    text = CHAPTER.read_text()
    for name in (
        "ada/week-2/03_partition.ipynb",
        "ada/week-2/.ipynb_checkpoints/03_partition-checkpoint.ipynb",
        "bob_LATE_4711_815_03_partition-1.ipynb",
        "carol.ipynb",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "dan").mkdir()
    (tmp_path / "...ipynb").write_text(text)  # a student's name is a folder's, and this would be called ..
    found = submissions_in(tmp_path, [CHAPTER.stem], roster=["eve"])
    assert {one.student: (len(one.notebooks), bool(one.late)) for one in found} == {
        "ada": (1, False),
        "bob": (1, True),
        "carol": (1, False),
        "dan": (0, False),
        "eve": (0, False),
    }
    with pytest.raises(ValueError, match="there are no notebooks in"):
        submissions_in(tmp_path / "dan", [CHAPTER.stem])


def test_no_link_is_followed_and_each_is_named(tmp_path: Path) -> None:
    ada = tmp_path / "ada"
    ada.mkdir()
    (ada / CHAPTER.name).write_text(CHAPTER.read_text())
    for link, to in (
        ("eve", ada),
        ("fred", Path("/")),
        ("gil_03_partition.ipynb", ada / CHAPTER.name),
        ("hal/03_partition.ipynb", ada / CHAPTER.name),
        ("ida/broken.ipynb", tmp_path / "nowhere"),
        ("notes.txt", ada / CHAPTER.name),
    ):
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(to)
    found = {one.student: one for one in submissions_in(tmp_path, [CHAPTER.stem], DUE)}
    assert {name: list(one.notebooks) for name, one in found.items() if one.notebooks} == {
        "ada": [ada / CHAPTER.name]
    }
    assert {name: one.problems for name, one in found.items() if one.problems} == {
        name: (f"{link}: it is a link, and links are not followed",)
        for name, link in (
            ("eve", "eve"),
            ("fred", "fred"),
            ("gil", "gil_03_partition.ipynb"),
            ("hal", "hal/03_partition.ipynb"),
            ("ida", "ida/broken.ipynb"),
        )
    }


def test_an_exercise_that_runs_out_of_time_is_told_from_a_check_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, job = _Worker("nowhere"), Job("ada", NAMES[0], Cells((), "", "f"), SEED)
    for error, said in (
        (TimeoutError, "it did not end within 2 s, and was ended."),
        (EOFError, "the check ended before it had a verdict."),
        (BrokenPipeError, "the check ended before it had a verdict."),
    ):
        monkeypatch.setattr(worker, "_started", Mock(side_effect=error))
        assert worker.judge(job, 2.0) == Verdict("failed", said)


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (["import a", "def f():\n    return 1"], "def f():\n    return 1"),
        (["import a", "f = lambda: 1", "def g(): pass"], "f = lambda: 1"),
        (["import a", "def f(): old", "def f(): new"], "def f(): new"),
        (["import a", "check('x', f)", "def f_2(): pass", "  def f(): pass"], None),
    ],
)
def test_an_answer_is_found_by_what_it_defines(sources: list[str], found: str | None) -> None:
    cells = [{"cell_type": "code", "source": source, "metadata": {}} for source in sources]
    cells_found = answer_in({"cells": cells}, Assigned("", "partition.adversary", "f", "import b"))
    assert (cells_found and cells_found.source) == found
    if cells_found:
        assert cells_found.setup == ("import b", "import a")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "points are a JSON object"), ('{"x": 1}', "there are points for 'x'"), ("{", "Expecting")]
    + [(f'{{"{NAMES[0]}": {number}}}', "a number of 0 or more") for number in ("-1", '"2"', "true", "NaN")],
)
def test_points_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_points(text, NAMES)


# ------------------------------------------------------------------------- the command


def test_the_command_writes_all_files_and_ends_with_1_because_some_handed_in_nothing(
    ten: Class, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roster, points, comments = tmp_path / "roster", tmp_path / "points", tmp_path / "comments"
    comments.write_text("student,exercise,comment\nstudent-000,,Well done.\n")
    roster.write_text("absent\n\n")
    points.write_text(json.dumps({NAMES[0]: 4}))
    words = ["grade", str(ten.folder), "--source", str(CHAPTER.parent), "--keep", str(ten.kept)]
    words += ["--seed", str(SEED), "--due", "2026-05-01", "--roster", str(roster), "--points", str(points)]
    words += ["--submitted", f"{ten.folder}.csv", "--late-per-day", "0.1", "--comments", str(comments)]
    words += ["--feedback", str(tmp_path / "f")]
    words += [
        "--csv",
        str(tmp_path / "m.csv"),
        "--junit",
        str(tmp_path / "m.xml"),
        "--gradescope",
        str(tmp_path / "g"),
    ]
    assert cli.main(words) == 1  # nothing is graded again: all is kept
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(ten) + 1
    assert printed[-1].startswith("Kept apart: limits by resource limits; files by ")
    assert printed[0] == "      0 of 6  absent  handed in nothing"
    assert printed[1] == "      6 of 6  student-000  Well done."
    [late] = [line for line in printed if "late" in line]
    assert late.startswith("    4.2 of 6  student-005  late: handed in 2026-05-03 12:00")
    assert late.endswith("; 3 days late: 30% of the points taken off")
    assert printed[5].startswith(
        "      0 of 6  student-004  cannot be read: student-004/03_partition.ipynb: is not"
    )
    scale, said = Scale({NAMES[0]: 4}, late_per_day=0.1), Comments({"student-000": "Well done."})
    assert (tmp_path / "m.csv").read_text() == as_csv(ten, scale, said)
    check_junit((tmp_path / "m.xml").read_text())
    back = read_notebook(tmp_path / "f" / "student-000" / CHAPTER.name)
    assert [cell["source"].split("\n")[0] for cell in back["cells"] if "feedback" in tags_of(cell)] == [
        "**6 of 6 points**",
        *(f"**{name}: {worth} of {worth} points**" for name, worth in zip(NAMES, (4, 1, 1))),
    ]
    nbformat.validate(nbformat.from_dict(back))
    for student in ten.kind:
        jsonschema.validate(json.loads((tmp_path / "g" / student / "results.json").read_text()), GRADESCOPE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the folder"),
        (["{nothing}"], "there are no notebooks in"),
        (["{nowhere}"], "No such file"),
        (["{class}", "--chapter", "99"], "there is no chapter '99'"),
        (["{class}", "--hidden-share", "2"], "is no part"),
        (["{class}", "--workers", "0"], "--workers is 1 or more"),
        (["{class}", "--due", "tomorrow", "--submitted", "{class}.csv"], "Invalid isoformat string"),
        (["{class}", "--due", "2026-05-01"], "--due and --submitted belong together"),
        (["{class}", "--due", "2026-05-01", "--submitted", "{nowhere}"], "cannot be read: No such file"),
        (["{class}", "--comments", "{class}.csv"], "has no column 'exercise'"),
        (["{class}", "--late-per-day", "10"], "is no part"),
        (["{class}", "--my-zero", "leap"], "there is no rung 'leap'"),
        (["{class}", "--csv", "{nowhere}/m.csv"], "cannot be written"),
        (["{class}", "--points", "/dev/zero"], "--points /dev/zero cannot be read: it is a folder, a pipe"),
        (["{class}", "--roster", "/dev/zero"], "--roster /dev/zero cannot be read: it is a folder, a pipe"),
        (["{class}", "--points", "{pipe}"], "a pipe or a device, and no file"),
        (["{class}", "--roster", "{pipe}"], "a pipe or a device, and no file"),
        (["{class}", "--roster", "{nowhere}"], "cannot be read: No such file"),
    ],
)
def test_a_users_mistake_ends_with_2(
    ten: Class, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    places = {name: tmp_path / name for name in ("nothing", "nowhere", "pipe")} | {"class": ten.folder}
    filled = [word.format(**places) for word in words]
    assert cli.main(["grade", *filled, "--source", str(CHAPTER.parent)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_says_what_keeps_answers_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grade", "--protections"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "limits", "files", "network and processes",
    ]  # fmt: skip


# ------------------------------------------------------------------------- the page, and the container

ROOT = CHAPTER.parents[1]
PAGE = (ROOT / "book" / "grading.md").read_text()


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " ").replace("$PWD", "/here"), comments=True)


def commands_in(text: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.+?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words_of(line) for line in lines]


def test_every_command_of_the_page_is_one() -> None:
    parser, _ = cli.make_parser()
    commands = [words for words in commands_in(PAGE) if words[0] == "zero-ref"]
    assert len(commands) == 4
    for words in commands:
        parser.parse_args([*words[1:]])
    assert len(commands_in(PAGE.partition("## If you use")[0])) <= 10, "from a clone to marks"


def test_the_page_has_every_status() -> None:
    assert all(f"| `{status}` |" in PAGE for status in get_args(Status))


def test_the_dockerfile_copies_what_is_there_and_starts_a_command_that_is_one() -> None:
    lines = (ROOT / "grade.Dockerfile").read_text().splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {name for name, _ in instructions} == {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT"}
    copied = [path for name, rest in instructions if name == "COPY" for path in rest.split()[:-1]]
    assert [path for path in copied if not (ROOT / path).exists()] == []
    [program, *words] = json.loads(instructions[-1][1])
    assert program.endswith("/.venv/bin/zero-ref")
    [run] = [command for command in commands_in(PAGE) if command[:2] == ["docker", "run"]]
    own = run[run.index("zero-ref-grade") + 1 :]
    arguments = cli.make_parser()[0].parse_args([*words, *own])
    assert arguments.submissions == "/in"
    assert {*run} >= {"none", "--read-only", "--memory", "--pids-limit", "ALL", "no-new-privileges"}
    # make install needs these, and a container that has no others is not built in vain
    needed = "Makefile pyproject.toml requirements zero_ref zero_ref_course notebooks README.md"
    assert {*needed.split()} <= {*copied}


@pytest.mark.thorough
def test_the_instructors_page_leads_from_a_clone_to_marks_in_ten_commands(tmp_path: Path) -> None:
    page = (CHAPTER.parents[1] / "book" / "grading.md").read_text(encoding="utf-8")
    [block] = re.findall(r"## From a clone to marks\n.*?```bash\n(.*?)```", page, re.DOTALL)
    commands = block.replace("\\\n", "").splitlines()
    assert len(commands) <= 10
    assert commands[:2] == ["make install", "source .venv/bin/activate"]  # this environment is there already
    for folder in ("notebooks", "tests", "zero_ref", "zero_ref_course", "book"):
        (tmp_path / folder).symlink_to(CHAPTER.parents[1] / folder)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in commands[2:]:
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        # Of the class one file is broken, and one student handed in nothing.
        assert ended.returncode == ("verdicts" in command), (command, ended.stdout, ended.stderr)
    points = [row["points"] for row in check_csv((tmp_path / "marks.csv").read_text())]
    assert points == ["3", "0", "0", "0", "0", "2.4", "3", "3", "3", "0"]
    assert "late" in ended.stdout
