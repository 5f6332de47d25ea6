"""Every exercise of every notebook: the solution passes, the stub fails, wrong answers hear what is wrong."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from changes import changed

from zero_ref.lab import ranks
from zero_ref_course import (
    CHAPTERS,
    Answer,
    ExerciseFailed,
    StillTheStub,
    exercises,
    function_of,
    grade,
    picture_of,
    starts_ranks,
)
from zero_ref_course.editions import chapters_in
from zero_ref_course.notebook import ExerciseCells, exercises_in

NOTEBOOKS = sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb"))
IN_CHAPTERS = chapters_in(Path(__file__).parents[2] / "notebooks")
CELLS = {cells.exercise: cells for notebook in NOTEBOOKS for cells in exercises_in(notebook)}
REGISTERED = exercises()


class Wrong(NamedTuple):
    """A wrong answer, changes of the solution or a whole function, and what the check must say about it."""

    exercise: str
    name: str
    answer: Callable[..., Any] | dict[str, str]
    message: str

    def function(self) -> Callable[..., Any]:
        """The answer; changes of the solution run after the setup cell, as the solution does."""
        if callable(self.answer):
            return self.answer
        cells = CELLS[self.exercise]
        return cells.define(changed(cells.solution, self.answer))


def wrong_answers(chapter: str) -> Iterator[Wrong]:
    """Yield the wrong answers of a chapter: from CHANGED changed solutions, from WRONG whole functions."""
    module = import_module(f"wrong_{chapter}")
    for exercise, rows in module.CHANGED.items():
        for row in rows:
            yield Wrong(exercise, *row)
    for exercise, answer, message in getattr(module, "WRONG", []):
        yield Wrong(exercise, answer.__name__, answer, message)


WRONG = [wrong for chapter in CHAPTERS for wrong in wrong_answers(chapter)]

WAITS = {"receives_once_too_often"}
"""Wrong answers in which virtual ranks wait for each other in vain: only a time-out ends them."""

SLOW = {"no_momentum", "as_many_as_there_are", "where_half_is_saved"}
"""Wrong answers whose check takes seconds: it asks the doctor, or simulates runs on many numbers of ranks."""


def case(exercise: str, *values: Any, name: str = "") -> Any:
    on_ranks = exercise in REGISTERED and starts_ranks(exercise)
    marks = [pytest.mark.ranks] if on_ranks else []
    marks += [pytest.mark.thorough] if name in SLOW else []
    return pytest.param(*values, marks=marks, id=f"{exercise}-{name}" if name else exercise)


each_exercise = pytest.mark.parametrize("cells", [case(exercise, cells) for exercise, cells in CELLS.items()])


@pytest.fixture(autouse=True)
def _only_marked_tests_start_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("ranks"):

        def refuse(*args: object, **kwargs: object) -> None:
            pytest.fail("this grader starts ranks: register it with @exercise(..., on_ranks=True)")

        monkeypatch.setattr(ranks, "run", refuse)
        monkeypatch.setattr(ranks, "Pool", refuse)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    ranks.shutdown()


@each_exercise
def test_the_solution_passes(cells: ExerciseCells) -> None:
    assert grade(cells.exercise, cells.define(cells.solution))


@each_exercise
def test_the_blank_stub_fails(cells: ExerciseCells) -> None:
    with pytest.raises(StillTheStub, match=f"{cells.function} is still the stub"):
        grade(cells.exercise, cells.define(cells.stub))


@pytest.mark.parametrize("wrong", [case(wrong.exercise, wrong, name=wrong.name) for wrong in WRONG])
def test_a_wrong_answer_hears_what_is_wrong(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong.name in WAITS:
        monkeypatch.setenv("ZERO_REF_PATIENCE", "0.3")
    answer = Answer(wrong.function())
    with pytest.raises(ExerciseFailed) as failed:
        grade(wrong.exercise, answer)
    picture_of(wrong.exercise, answer, passed=False)  # some are too odd to be drawn, and none raises
    assert re.search(wrong.message, str(failed.value), re.DOTALL), str(failed.value)


@pytest.mark.parametrize("exercise", REGISTERED)
def test_every_exercise_has_two_wrong_answers_that_hear_different_things(exercise: str) -> None:
    wrongs = [wrong for wrong in WRONG if wrong.exercise == exercise]
    assert len({wrong.name for wrong in wrongs}) >= 2
    assert len({wrong.message for wrong in wrongs}) >= 2


def test_every_exercise_is_in_one_notebook_and_every_one_there_has_a_grader() -> None:
    in_notebooks = Counter(cells.exercise for path in NOTEBOOKS for cells in exercises_in(path))
    assert in_notebooks == Counter(REGISTERED)
    assert {name: cells.function for name, cells in CELLS.items()} == {
        name: function_of(name) for name in REGISTERED
    }


@pytest.mark.parametrize("notebook", IN_CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_two_to_four_exercises_that_are_its_own(notebook: Path) -> None:
    chapter = notebook.stem.partition("_")[2]
    names = [cells.exercise for cells in exercises_in(notebook)]
    assert 2 <= len(names) <= 4
    assert [name.partition(".")[0] for name in names] == [chapter] * len(names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_exercise_cells_have_their_ids_and_tags(notebook: Path) -> None:
    code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code[:2]] == ["install", "setup"]
    expected = [
        (f"{cells.exercise.partition('.')[2].replace('_', '-')}-{part}", tags)
        for cells in exercises_in(notebook)
        for part, tags in (
            ("stub", {"exercise"}),
            ("check", {"check", "skip-execution", "nbval-skip"}),
            ("solution", {"solution", "hide-cell", "skip-execution", "nbval-skip"}),
        )
    ]
    tagged = [(cell["id"], set(cell["metadata"].get("tags", ()))) for cell in code]
    assert [cell for cell in tagged if cell[1] & {"exercise", "check", "solution"}] == expected


@pytest.mark.parametrize("notebook", IN_CHAPTERS, ids=lambda path: path.stem)
def test_every_exercise_says_how_hard_it_is(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    headings = [cell["source"][0].rstrip("\n") for cell in cells if cell["id"].endswith("-task")]
    assert [heading for heading in headings if not re.search(r" \((easy|medium|hard)\)$", heading)] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_task_has_a_hint_that_folds_in_jupyter_and_on_colab_too(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    tasks = ["".join(cell["source"]) for cell in cells if cell["id"].endswith("-task")]
    assert len(tasks) == len(exercises_in(notebook))
    # Without the empty lines the Markdown in between is shown as it is written. The summary says that it
    # opens, because jupyterlab-myst shows no triangle (https://github.com/jupyter-book/jupyterlab-myst/issues/232).
    summary = re.escape("<summary><b>Hint</b> (click)</summary>")
    hint = re.compile(rf"^<details>\n{summary}\n\n.+?\n\n</details>$", re.DOTALL | re.MULTILINE)
    assert [task for task in tasks if not hint.search(task)] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_page_folds_or_leaves_out_is_folded_in_jupyter_too(notebook: Path) -> None:
    cells = [cell["metadata"] for cell in json.loads(notebook.read_text())["cells"]]
    hidden = {"solution", "hide-cell", "hide-input", "remove-cell"}
    folded = [metadata for metadata in cells if hidden.intersection(metadata.get("tags", ()))]
    assert folded
    assert all(metadata.get("jupyter") == {"source_hidden": True} for metadata in folded)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_is_as_narrow_as_a_page(notebook: Path) -> None:
    code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line.rstrip("\n") for cell in code for line in cell["source"]]
    assert [line for line in lines if len(line) > 86] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(notebook: Path) -> None:
    code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
