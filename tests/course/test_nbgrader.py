"""The edition for nbgrader, and nbgrader itself: a class of four is assigned it, graded, and told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.plan.rules import sorted_greedy
from zero_ref_course import grade
from zero_ref_course.editions import chapters_in, edition
from zero_ref_course.grading import cell_id
from zero_ref_course.notebook import exercises_in, import_path, read_notebook

ROOT = Path(__file__).parents[2]
CHAPTER = ROOT / "notebooks" / "03_partition.ipynb"
SOLUTIONS = {cell_id(cells.exercise): cells.solution for cells in exercises_in(CHAPTER)}
HANGS = "def largest_first(numels, world_size):\n    while True:\n        pass\n"
WRONG = "def even_split(numels, world_size):\n    return []\n"


def knows_the_open_cases() -> str:
    table = {}

    def noted(numels: list[int], world_size: int) -> list[int]:
        table[tuple(numels), world_size] = list(sorted_greedy(numels, world_size).owner_of_param)
        return table[tuple(numels), world_size]

    grade("partition.largest_first", noted)
    return (
        f"def largest_first(numels, world_size):\n    return {table}.get((tuple(numels), world_size), [])\n"
    )


def hand_in(release: dict[str, Any], path: Path, answers: dict[str, str]) -> None:
    """The assignment as a student saves it, with these cells written."""
    made = json.loads(json.dumps(release))
    for cell in made["cells"]:
        if cell["id"] in answers:
            cell["source"] = answers[cell["id"]]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(made))


@pytest.mark.parametrize("path", chapters_in(CHAPTER.parent), ids=lambda path: path.stem)
def test_each_stub_is_an_answer_and_each_check_a_test_of_one_point(path: Path) -> None:
    made = {
        cell["id"]: cell
        for cell in edition(read_notebook(path), "nbgrader", seed=11)["cells"]
        if "nbgrader" in cell["metadata"]
    }
    names = [cells.exercise for cells in exercises_in(path)]
    assert list(made) == [cell_id(name, part) for name in names for part in ("stub", "check")]
    for name, cells in zip(names, exercises_in(path)):
        stub, check = made[cell_id(name)], made[cell_id(name, "check")]
        assert (
            stub["metadata"]["nbgrader"].items()
            >= {"solution": True, "grade": False, "locked": False}.items()
        )
        assert check["metadata"]["nbgrader"].items() >= {"grade": True, "locked": True, "points": 1}.items()
        begin, end = re.findall(r"^ *### (BEGIN|END) SOLUTION$", stub["source"], re.MULTILINE)
        assert (begin, end) == ("BEGIN", "END")
        open_tests, hidden = check["source"].split("\n### BEGIN HIDDEN TESTS\n")
        assert open_tests == f'check("{name}", {cells.function})'
        assert hidden == f'check("{name}", {cells.function}, seed=11)\n### END HIDDEN TESTS'


def test_without_a_seed_there_are_no_hidden_tests_and_the_other_editions_take_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "HIDDEN" not in json.dumps(edition(read_notebook(CHAPTER), "nbgrader"))
    assert cli.main(["notebooks", str(tmp_path / "new"), "--for", "students", "--seed", "1"]) == 2
    assert "--seed is for nbgrader" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.thorough
def test_nbgrader_assigns_grades_and_returns_an_edition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbgrader")
    from nbgrader.api import Gradebook

    monkeypatch.chdir(tmp_path)
    (tmp_path / "nbgrader_config.py").write_text("c = get_config()\nc.Execute.timeout = 600\n")
    # The answer that never ends is named after 10 seconds.
    monkeypatch.setenv("ZERO_REF_PATIENCE", "1")
    monkeypatch.setenv("PYTHONPATH", import_path())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(
        "PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )  # for alembic

    def nbgrader(command: str) -> None:
        words = [sys.executable, "-m", "nbgrader", command, "--assignment", "partition"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    words = ["--for", "nbgrader", "--chapter", "3", "--seed", "11", "--source", str(CHAPTER.parent)]
    assert cli.main(["notebooks", str(tmp_path / "source" / "partition"), *words]) == 0
    # `make notebooks` runs the cells of the chapter; here those of imports and of exercises are enough.
    source = tmp_path / "source" / "partition" / CHAPTER.name
    made = read_notebook(source)
    made["cells"] = [
        cell for cell in made["cells"] if cell["id"] == "setup" or "nbgrader" in cell["metadata"]
    ]
    source.write_text(json.dumps(made))
    nbgrader("generate_assignment")
    release = json.loads((tmp_path / "release" / "partition" / CHAPTER.name).read_text())
    text = json.dumps(release)
    assert "seed=11" not in text, "a hidden test is handed out"
    assert text.count("# YOUR CODE HERE") == 3

    answers = {
        "right": SOLUTIONS,
        "wrong": SOLUTIONS | {"largest-first-stub": knows_the_open_cases(), "even-split-stub": WRONG},
        "empty": {},
        "hangs": SOLUTIONS | {"largest-first-stub": HANGS},
    }
    for student, cells in answers.items():
        hand_in(release, tmp_path / "submitted" / student / "partition" / CHAPTER.name, cells)
    nbgrader("autograde")
    nbgrader("generate_feedback")

    with Gradebook(f"sqlite:///{tmp_path}/gradebook.db") as book:
        scores = {}
        for student in answers:
            graded = book.find_submission_notebook(CHAPTER.stem, "partition", student)
            scores[student] = {each.name: each.auto_score for each in graded.grades}
    names = ("largest-first-check", "even-split-check", "adversary-check")
    assert scores == {
        "right": dict.fromkeys(names, 1.0),
        "wrong": dict(zip(names, (0.0, 0.0, 1.0))),
        "empty": dict.fromkeys(names, 0.0),
        "hangs": dict(zip(names, (0.0, 1.0, 1.0))),
    }
    said = {
        student: (tmp_path / "feedback" / student / "partition" / f"{CHAPTER.stem}.html").read_text()
        for student in answers
    }
    assert "models on 1 to 1,024 ranks" in said["right"]
    assert "returned 0 owners for" in said["wrong"]
    assert "largest_first is still the stub" in said["empty"]
    assert "did not return within 10 s. Is there a loop that never ends?" in said["hangs"]
