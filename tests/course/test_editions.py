"""The chapters for students and for teachers, and what the course guide says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from zero_ref import cli
from zero_ref_course.editions import NOT_RUN, Audience, chapters_in, edition, write_editions
from zero_ref_course.notebook import exercises_in

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
CHAPTERS = chapters_in(NOTEBOOKS)
AUDIENCES: tuple[Audience, ...] = ("students", "teachers")

each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
for_both = pytest.mark.parametrize("audience", AUDIENCES)


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def cell(name: str, source: str, *tags: str) -> dict[str, Any]:
    """A code cell, run once."""
    return {
        "cell_type": "code",
        "id": name,
        "source": [source],
        "metadata": {"tags": list(tags)},
        "outputs": [{"output_type": "stream", "name": "stdout", "text": ["seen\n"]}],
        "execution_count": 3,
    }


def exercise_cells(name: str) -> list[dict[str, Any]]:
    return [
        cell(f"{name}-stub", f"def {name}(): raise NotImplementedError", "exercise"),
        cell(f"{name}-check", f"check('partition.{name}', {name})", "check", *sorted(NOT_RUN)),
        cell(f"{name}-solution", f"def {name}(): return 1", "solution", "hide-cell", *sorted(NOT_RUN)),
    ]


def chapter_of(cells: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def saved(folder: Path, *cells: dict[str, Any]) -> Path:
    """A folder of chapters that holds one, number 3."""
    folder.mkdir()
    (folder / "03_partition.ipynb").write_text(json.dumps(chapter_of(cells)))
    return folder


def sources(notebook: dict[str, Any]) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"]]


# ------------------------------------------------------------------------------------------- example


@for_both
def test_a_stub_a_check_and_a_solution_become_two_cells(audience: Audience) -> None:
    chapter = chapter_of([cell("setup", "import math"), *exercise_cells("floor")])
    before = json.dumps(chapter)
    made = edition(chapter, audience)
    assert json.dumps(chapter) == before, "the chapter itself was changed"
    body = {"students": "raise NotImplementedError", "teachers": "return 1"}[audience]
    assert sources(made) == [
        "import math",
        f"def floor(): {body}",
        "check('partition.floor', floor)",
    ]
    assert [cell["id"] for cell in made["cells"]] == ["setup", "floor-stub", "floor-check"]
    assert [cell["metadata"]["tags"] for cell in made["cells"]] == [[], ["exercise"], ["check"]]
    assert [(cell["outputs"], cell["execution_count"]) for cell in made["cells"]] == [([], None)] * 3


def test_a_chapter_is_found_by_its_number_and_by_its_name() -> None:
    def names(*chapters: str) -> list[str]:
        return [path.name for path in chapters_in(NOTEBOOKS, chapters)]

    assert names("step", "3") == ["03_partition.ipynb", "04_step.ipynb"]  # in the book's order
    assert names("03") == names("03_partition") == names("partition") == names("3", "partition")
    assert len(names()) == 16
    assert names("museum", "precision", "clipping") == [
        "11_clipping.ipynb", "12_precision.ipynb", "15_museum.ipynb",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- every chapter


@each_chapter
@for_both
def test_an_edition_is_the_chapter_but_for_its_exercises(path: Path, audience: Audience) -> None:
    chapter, made = read(path), edition(read(path), audience)
    nbformat.validate(nbformat.from_dict(made))
    assert {key: made[key] for key in chapter if key != "cells"} == {
        key: chapter[key] for key in chapter if key != "cells"
    }
    is_exercise = {"exercise", "check", "solution"}.intersection
    here = [cell for cell in chapter["cells"] if not is_exercise(cell["metadata"].get("tags", ()))]
    there = [cell for cell in made["cells"] if not is_exercise(cell["metadata"].get("tags", ()))]
    for cell in here:  # a place to write what is predicted
        if "".join(cell["source"]).startswith("predict("):
            cell["source"] = "".join(cell["source"]).replace(")", ", mine=None)")
    assert here == there


@each_chapter
def test_students_get_the_stubs_and_no_solution(path: Path, tmp_path: Path) -> None:
    chapter = exercises_in(path)
    assert chapter
    [written] = write_editions(NOTEBOOKS, tmp_path, "students", [path.stem])
    assert exercises_in(written) == [cells._replace(solution="") for cells in chapter]
    handed_out = "\n".join(sources(read(written)))
    assert [cells.exercise for cells in chapter if cells.solution in handed_out] == []


OF_THE_READER = {"my_zero.py"}
WRITTEN_BY_A_CELL = {"save.json"}


@for_both
def test_an_edition_names_no_file_that_is_not_there(audience: Audience, tmp_path: Path) -> None:
    """A class has a folder anywhere: its text names files there, of the package, or said to be in a clone."""
    written = write_editions(NOTEBOOKS, tmp_path, audience)
    of_package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero_ref").rglob("*.py")}
    there = {path.name for path in written} | of_package | {path.split("/")[-1] for path in of_package}
    named, missing = 0, []
    for path in written:
        for text in sources(read(path)):
            for file in re.findall(
                r"[\w./-]+\.(?:ipynb|py|md|json|toml|csv)\b", re.sub(r"https?:\S+", "", text)
            ):
                in_clone = (ROOT / file).is_file() and not file.startswith("notebooks/") and " clone" in text
                named += 1
                if not (in_clone or file in there | OF_THE_READER | WRITTEN_BY_A_CELL):
                    missing.append((path.name, file))
    assert named >= len(written)
    assert missing == []


@each_chapter
def test_the_command_that_a_chapter_prints_checks_this_chapter_from_its_own_folder(path: Path) -> None:
    [exercises_cell] = [cell for cell in read(path)["cells"] if cell["id"] == "exercises"]
    assert re.findall(r"`!zero-ref check (\S+)`", "".join(exercises_cell["source"])) == [path.name]


# ------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (exercise_cells("floor")[:2], "cell 'floor-stub' has no solution after it"),
        (exercise_cells("floor")[:2] + exercise_cells("roof"), "cell 'floor-stub' has no solution after it"),
        (exercise_cells("floor")[2:], "cell 'floor-solution' is a solution, and there is no stub before it"),
        ([cell("floor-stub", "def floor(): return 1", "exercise")], "cell 'floor-stub' is filled in"),
    ],
)
@for_both
def test_a_chapter_out_of_order_is_refused_by_name(
    tmp_path: Path, cells: list[dict[str, Any]], message: str, audience: Audience
) -> None:
    source = saved(tmp_path / "book", *cells)
    with pytest.raises(ValueError, match=rf"03_partition\.ipynb: {message}"):
        write_editions(source, tmp_path / "course", audience)
    assert not (tmp_path / "course").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    answers = tmp_path / "03_partition.ipynb"
    answers.write_text("a student's work")
    for folder in (tmp_path, answers):
        with pytest.raises(ValueError, match="is not an empty folder"):
            write_editions(NOTEBOOKS, folder, "students")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["a student's work"]


def test_the_command_writes_to_a_new_folder_and_prints_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, course = saved(tmp_path / "book", *exercise_cells("floor")), tmp_path / "a" / "course"
    words = ["notebooks", str(course), "--for", "teachers", "--source", str(source), "--chapter", "3"]
    assert cli.main(words) == 0
    [printed] = capsys.readouterr().out.splitlines()
    assert sources(read(Path(printed)))[0] == "def floor(): return 1"
    assert list(course.iterdir()) == [Path(printed)]
    assert cli.main(words) == 2
    assert "is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["--chapter", "88"], ["there is no chapter '88'; there are 01_ledger, 02_", "16_scale."]),
        (["--source", "nowhere"], ["there are no chapters in 'nowhere'", "in the folder notebooks"]),
        (["--source", "{not_notebooks}"], ["03_partition.ipynb is not a Jupyter notebook"]),
    ],
)
def test_the_command_ends_with_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], answers: list[str]
) -> None:
    not_notebooks = saved(tmp_path / "book")
    (not_notebooks / "03_partition.ipynb").write_text("[1]")
    words = [word.format(not_notebooks=not_notebooks) for word in words]
    course = tmp_path / "course"
    assert cli.main(["notebooks", str(course), "--for", "students", "--source", str(NOTEBOOKS), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for answer in answers:
        assert answer in printed.err
    assert not course.exists()


# ------------------------------------------------------------------------------------------- as a class does


@pytest.mark.ranks
@pytest.mark.thorough
def test_nbval_passes_the_solutions_and_fails_each_blank_stub(tmp_path: Path) -> None:
    for audience in AUDIENCES:
        [path] = write_editions(NOTEBOOKS, tmp_path / audience, audience, ["partition"])
        notebook = read(path)
        ids = [cell["id"] for cell in notebook["cells"]]
        # `make notebooks` runs the cells in between, which have no edition.
        notebook["cells"] = [
            notebook["cells"][ids.index("setup")],
            *notebook["cells"][ids.index("exercises") :],
        ]
        path.write_text(json.dumps(notebook))
    report = tmp_path / "report.xml"
    # With executed.py beside it nbval is patient, and no other test takes a port from a kernel that starts.
    nbval = [
        "-p",
        "library.executed",
        "--nbval-lax",
        "--nbval-current-env",
        "--nbval-kernel-startup-timeout=300",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *nbval, f"--junitxml={report}", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    said: dict[str, list[str | None]] = {audience: [] for audience in AUDIENCES}
    for case in ET.parse(report).iter("testcase"):
        failure = case.find("failure")
        text = None if failure is None else re.sub(r"\x1b\[\d+m|#x1B\[\d+m", "", failure.text or "")
        said[case.attrib["classname"].partition(".")[0]].append(text)
    assert said["teachers"] == [None] * 8, (
        "the setup, a stub and a check for each of 3 exercises, the own file"
    )
    assert [text is None for text in said["students"]] == [True, True, False, True, False, True, False, True]
    for text, cells in zip(said["students"][2:7:2], exercises_in(NOTEBOOKS / "03_partition.ipynb")):
        assert text is not None
        assert f"StillTheStub: {cells.function} is still the stub: write its body" in text


# ------------------------------------------------------------------------------------------- the guide


def test_the_course_guide_plans_all_chapters_in_order_with_their_exercises() -> None:
    guide = (ROOT / "book" / "course.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d.*", guide, re.MULTILINE)
    listed = re.findall(r"notebooks/(\w+)\.ipynb\)", "".join(rows))
    assert listed == [path.stem for path in CHAPTERS]
    assert f"{len(rows)} sessions" in guide
    assert {len(exercises_in(path)) for path in CHAPTERS} <= {2, 3}
    assert "two exercises or three" in guide


def test_questions_for_each_chapter_in_reading_order_with_what_a_good_answer_has() -> None:
    page = (ROOT / "book" / "questions.md").read_text()
    chapters = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    linked = [re.search(r"notebooks/(\w+)\.ipynb", chapter) for chapter in chapters]
    assert [found and found[1] for found in linked] == [path.stem for path in CHAPTERS]
    for path, chapter in zip(CHAPTERS, chapters):
        number = int(path.stem.partition("_")[0])
        questions = re.split(r"^(?=\*\*\d+[ab]\.\*\* )", chapter, flags=re.MULTILINE)[1:]
        assert [question.split(".")[0] for question in questions] == [
            f"**{number}{letter}" for letter in "ab"[: len(questions)]
        ]
        assert questions
        for question in questions:
            [answer] = re.findall(
                r"^:::\{dropdown\} A good answer\n((?:- .*\n)+):::$", question, flags=re.MULTILINE
            )
            assert 3 <= answer.count("\n") <= 5, question
