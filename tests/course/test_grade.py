"""`zero-ref grade`: a class in a folder, and the table that comes out."""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.plan.rules import sorted_greedy
from zero_ref_course import grade
from zero_ref_course.editions import edition
from zero_ref_course.grading import Row, answers_in, as_csv, grade_class
from zero_ref_course.notebook import ExerciseCells, Verdict, grade_alone, read_notebook

# Some start processes that import torch: one test after another, as for those on ranks.
pytestmark = pytest.mark.ranks

CHAPTER = Path(__file__).parents[2] / "notebooks" / "03_partition.ipynb"
NAMES = ["partition.largest_first", "partition.even_split", "partition.adversary"]
Notebook = dict[str, Any]

RIGHT = "def adversary():\n    return [3, 3, 2, 2, 2]\n"
WITHOUT_ANSWER = {
    "wrong": ("def adversary(): return [1]", "failed", "[1] on 2 ranks: "),
    "prints": (
        "def adversary():\n    print('passed')\n    print('[\"passed\", \"right\"]')\n    return [1]",
        "failed",
        "[1] on 2 ranks: ",
    ),
    "exits": ("import sys\ndef adversary(): sys.exit(0)", "failed", "its process ended with code 0 before"),
    "exits in its cell": ("raise SystemExit", "failed", "its process ended with code 0 before"),
    "crashes": (
        "import os, signal\ndef adversary(): os.kill(os.getpid(), signal.SIGSEGV)",
        "failed",
        "its process ended with code -11 before",
    ),
    "never ends": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "def adversary():\n    while True: pass",
        "failed",
        "it did not end within ",
    ),
    "asks": ("def adversary(): return input()", "failed", "adversary() raised EOFError"),
    "no Python": ("def adversary(:", "failed", "its cell raises SyntaxError"),
    "stub": ("def adversary(): raise NotImplementedError", "not started", "adversary is still the stub"),
}
"""An answer that is none by its kind: the cell, the status, and how the message begins."""
ALWAYS = ("crashes", "stub")
"""A process that ends, and nothing to check. The check and the clock end others in test_notebook.py."""


def cells_of(stub: str, exercise: str = NAMES[2]) -> ExerciseCells:
    return ExerciseCells(exercise, exercise.partition(".")[2], setup="", stub=stub, solution="")


def written(
    path: Path, change: Callable[[Notebook], object] = lambda _: None, audience: Any = "teachers"
) -> Path:
    """A notebook that is handed in: an edition of chapter 3, changed."""
    made = copy.deepcopy(edition(read_notebook(CHAPTER), audience))
    change(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    return path


def without(cell_id: str) -> Callable[[Notebook], object]:
    """Delete a cell."""

    def change(made: Notebook) -> None:
        made["cells"] = [cell for cell in made["cells"] if cell["id"] != cell_id]

    return change


def with_answer(name: str, source: str) -> Callable[[Notebook], object]:
    def change(made: Notebook) -> None:
        [cell] = [cell for cell in made["cells"] if cell["id"] == f"{name}-stub"]
        cell["source"] = source

    return change


# ------------------------------------------------------------------------------------- one answer


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.thorough) for kind in WITHOUT_ANSWER],
)
@pytest.mark.usefixtures("impatient")
def test_nothing_but_a_right_answer_passes(kind: str, tmp_path: Path) -> None:
    stub, status, message = WITHOUT_ANSWER[kind]
    verdict = grade_alone(cells_of(stub), tmp_path, seconds=8.0 if kind == "never ends" else 300.0, seed=3)
    assert verdict.status == status, verdict
    assert verdict.message.startswith(message), verdict


def test_an_answer_that_knows_the_open_cases_alone_fails_those_of_a_seed(tmp_path: Path) -> None:
    """It is longer than an argument of a command line can be."""
    table = {}

    def noted(numels: list[int], world_size: int) -> list[int]:
        owners = list(sorted_greedy(numels, world_size).owner_of_param)
        table[tuple(numels), world_size] = owners
        return owners

    grade(NAMES[0], noted)
    stub = f"def largest_first(numels, world_size): return {table}.get((tuple(numels), world_size), [])\n"
    stub += f"# {'long ' * 50_000}"
    assert grade_alone(cells_of(stub, NAMES[0]), tmp_path, 300.0).status == "passed"
    verdict = grade_alone(cells_of(stub, NAMES[0]), tmp_path, 300.0, seed=11)
    assert verdict.status == "hidden cases failed"
    assert "returned 0 owners" in verdict.message


# ------------------------------------------------------------------------------------- a class


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """A class: two students are called ada, and no process is started."""

    def read(cells: ExerciseCells, folder: Path, seconds: float, seed: int) -> Verdict:
        assert (folder.is_dir(), seconds, seed) == (True, 120.0, 7)
        return Verdict("failed" if "SystemExit" in cells.stub else "passed", "")

    monkeypatch.setattr("zero_ref_course.grading.grade_alone", read)
    folder = tmp_path / "class"
    written(folder / "group 1" / "ada" / CHAPTER.name)
    written(folder / "group 2" / "ada" / CHAPTER.name, with_answer("adversary", "raise SystemExit"))
    written(folder / "bob.ipynb", without("adversary-stub"))
    written(folder / "carol" / ".ipynb_checkpoints" / "copy.ipynb")
    (folder / "dan.ipynb").write_text("{")
    written(folder / "eve" / "diary.ipynb", lambda made: made.update(cells=made["cells"][:1]))
    return list(grade_class(folder, seed=7))


def test_two_students_of_one_name_are_two_and_no_file_stops_the_class(rows: list[Row]) -> None:
    found = {(row.file, row.exercise): row.status for row in rows}
    assert found == {
        ("bob.ipynb", NAMES[0]): "passed",
        ("bob.ipynb", NAMES[1]): "passed",
        ("bob.ipynb", NAMES[2]): "missing",
        ("dan.ipynb", ""): "unreadable",
        ("eve/diary.ipynb", ""): "unreadable",
        **{(f"group 1/ada/{CHAPTER.name}", name): "passed" for name in NAMES},
        (f"group 2/ada/{CHAPTER.name}", NAMES[0]): "passed",
        (f"group 2/ada/{CHAPTER.name}", NAMES[1]): "passed",
        (f"group 2/ada/{CHAPTER.name}", NAMES[2]): "failed",
    }
    assert list(found) == sorted(found, key=lambda key: Path(key[0])), "in the order of the paths"


def test_the_table_has_a_line_for_each_exercise(rows: list[Row]) -> None:
    table = list(csv.DictReader(io.StringIO(as_csv(rows)), strict=True))
    assert [(row["file"], row["exercise"], row["status"]) for row in table] == [row[:3] for row in rows]
    [missing] = [row["message"] for row in table if row["status"] == "missing"]
    assert missing == "no cell has the id 'adversary-stub'."


def test_an_answer_that_ends_its_process_does_not_stop_the_class(tmp_path: Path) -> None:
    def change(made: Notebook) -> None:
        without("largest-first-stub")(made)
        with_answer("even-split", "raise SystemExit")(made)

    written(tmp_path / "ada.ipynb", change)
    assert [row.status for row in grade_class(tmp_path)] == ["missing", "failed", "passed"]


def test_a_name_in_another_encoding_costs_nobody_the_table() -> None:
    """A zip made on Windows has such names."""
    text = as_csv([Row("b\udcf6b\x1b[2J.ipynb", "", "unreadable", "f() raised ValueError:\x00")])
    assert text.splitlines()[1].encode() == rb"b\udcf6b\x1b[2J.ipynb,,unreadable,f() raised ValueError:\x00"


def test_a_cell_is_found_by_the_id_that_jupyter_or_colab_keeps() -> None:
    notebook = edition(read_notebook(CHAPTER), "teachers")
    for cell in notebook["cells"]:
        cell["metadata"] = {"id": cell.pop("id")}  # as Colab writes it; the tags are gone
    answers = answers_in(notebook)
    assert list(answers) == NAMES
    assert all(cells and cells.stub and "import" in cells.setup for cells in answers.values())


# ------------------------------------------------------------------------------------- the command


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def passed(*_: object) -> Verdict:
        return Verdict("passed", "as it should")

    monkeypatch.setattr("zero_ref_course.grading.grade_alone", passed)


@pytest.mark.usefixtures("nothing_runs")
def test_the_command_prints_lines_writes_the_table_and_ends_with_1_if_a_file_is_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table = written(tmp_path / "in" / "ada.ipynb"), tmp_path / "marks.csv"
    assert cli.main(["grade", str(tmp_path / "in"), "--csv", str(table)]) == 0
    lines = [f"passed               ada.ipynb  {name}" for name in NAMES]
    assert capsys.readouterr().out.splitlines() == lines
    assert table.read_text() == as_csv(Row("ada.ipynb", name, "passed", "as it should") for name in NAMES)
    path.write_text("[]")
    assert cli.main(["grade", str(tmp_path / "in")]) == 1
    assert capsys.readouterr().out.startswith("unreadable           ada.ipynb  is not a Jupyter notebook")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["nowhere"], "No such file or directory"),
        (["."], "there are no notebooks in"),
        ([".", "--workers", "0"], "--workers is 1 or more"),
        ([".", "--seconds", "0"], "--seconds above 0"),
    ],
)
def test_a_mistake_in_the_command_ends_with_2(
    words: list[str],
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["grade", *words]) == 2
    assert answer in capsys.readouterr().err
