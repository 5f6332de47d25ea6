"""Grade what a class hands in: which exercises there are, where a student's answers are, how each one went.

The book's own notebooks say which exercises there are, so nothing that a student renames or deletes changes
that. Of a submission only the cells of answers and of imports are used, and they run in processes of their
own (`isolated`). `submissions` reads a folder of a class; `marks` writes what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zero_ref.lab.own import CLASS
from zero_ref_course import ExerciseFailed, StillTheStub, forbidden_in, grade
from zero_ref_course._own_apart import OwnApart
from zero_ref_course.apart import ASKED_FOR
from zero_ref_course.editions import chapters_in
from zero_ref_course.isolated import Cells, Nursery, modules_in
from zero_ref_course.notebook import exercises_in, tags_of
from zero_ref_course.rungs import RUNGS, check_rung

Status = Literal["passed", "failed", "hidden cases failed", "not started", "missing"]


OF_OWN = "my_zero."
"""What the names of the rungs of `my_zero.py` begin with, among exercises."""

WRAPS = "so it wraps an optimizer of others, and this one is to be your own"
"""Said of a `my_zero.py` in place of `ASKED_FOR`."""

AS_STATUS: dict[str, Status] = {"holds": "passed", "FAILED": "failed", "not yet": "not started"}


class Assigned(NamedTuple):
    """An exercise as the book has it: chapter, name, the function that it asks for, the chapter's imports."""

    chapter: str
    exercise: str
    function: str
    setup: str


class Verdict(NamedTuple):
    """How an answer went.

    Args:
        message: what the check says; of hidden cases it is for the teacher, because it has their inputs.
    """

    status: Status
    message: str

    def share(self, hidden_share: float) -> float:
        """Of the points, where the hidden cases have `hidden_share` of them.

        >>> Verdict("hidden cases failed", "").share(hidden_share=0.5)
        0.5
        """
        return {"passed": 1.0, "hidden cases failed": 1.0 - hidden_share}.get(self.status, 0.0)


def assigned_in(source: str | Path, chapters: Sequence[str] = ()) -> list[Assigned]:
    """The exercises of chapters, in the book's order.

    >>> [one.function for one in assigned_in("notebooks", ["3"])]                        # doctest: +SKIP
    ['largest_first', 'even_split', 'adversary']

    Args:
        source: the folder with the book's notebooks.
        chapters: each by its number or its name; none named: all.
    Raises:
        OSError, ValueError: as `chapters_in`, or a notebook cannot be read.
    """
    return [
        Assigned(path.stem, cells.exercise, cells.function, cells.setup)
        for path in chapters_in(source, chapters)
        for cells in exercises_in(path)
    ]


def rungs_up_to(last: str) -> list[Assigned]:
    """The rungs of `my_zero.py` as exercises.

    >>> [one.exercise for one in rungs_up_to("step")]
    ['my_zero.owners', 'my_zero.step']

    Raises:
        ValueError: there is no such rung.
    """
    if last not in RUNGS:
        raise ValueError(f"there is no rung {last!r}; there are {', '.join(RUNGS)}.")
    names = list(RUNGS)[: list(RUNGS).index(last) + 1]
    return [Assigned("my_zero", f"{OF_OWN}{name}", CLASS, "") for name in names]


def cells_of_own(source: str) -> Cells:
    """A student's `my_zero.py` as an answer, which may use nothing of the package."""
    return Cells((), source, CLASS, ("zero_ref",))


def modules_of(assigned: Iterable[Assigned]) -> list[str]:
    """What the chapters import, for a `Nursery`."""
    return modules_in("\n".join({one.setup for one in assigned}))


def answer_in(notebook: dict[str, Any], wanted: Assigned) -> Cells | None:
    """A student's answer to an exercise; None where no cell defines its function.

    The last cell counts that is tagged `exercise` and defines the function, else the last one that defines
    it, whatever its tags, its place and its check have become.
    """
    cell = answer_cell_in(notebook, wanted)
    if cell is None:
        return None
    first = _own_code(notebook)[0]
    is_setup = first is not cell and not {"exercise", "check"} & {*tags_of(first)}
    own = [_source(first)] if is_setup and _source(first) != wanted.setup else []
    return Cells((wanted.setup, *own), _source(cell), wanted.function, forbidden_in(wanted.exercise))


def answer_cell_in(notebook: dict[str, Any], wanted: Assigned) -> dict[str, Any] | None:
    """The cell of a notebook that has a student's answer, as `answer_in` finds it."""
    defines = re.compile(
        rf"^(?:(?:async )?def {wanted.function}\b|class {wanted.function}\b|{wanted.function}\s*[:=])",
        re.MULTILINE,
    )
    found = [
        cell for cell in _own_code(notebook) if "check" not in tags_of(cell) and defines.search(_source(cell))
    ]
    tagged = [cell for cell in found if "exercise" in tags_of(cell)]
    return (tagged or found)[-1] if found else None


def _own_code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return [cell for cell in code if "install" not in tags_of(cell)]


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def judge(nursery: Nursery, exercise: str, cells: Cells, seed: int) -> Verdict:
    """How an answer does in the cases that everybody knows, and in those of the seed, if it is not 0."""
    verdict = _judge(nursery, exercise, cells, seed)  # the known cases are among them
    if seed == 0 or verdict.status != "failed":
        return verdict
    known = _judge(nursery, exercise, cells, 0)
    return Verdict("hidden cases failed", verdict.message) if known.status == "passed" else known


def _judge(nursery: Nursery, exercise: str, cells: Cells, seed: int) -> Verdict:
    if exercise.startswith(OF_OWN):
        own = OwnApart(nursery.room(cells.forbids), cells.source, seed)
        result = check_rung(exercise.removeprefix(OF_OWN), own)
        return Verdict(AS_STATUS[result.state], result.message.replace(ASKED_FOR, WRAPS))
    try:
        answer = nursery.answer(cells)
        try:
            return Verdict("passed", grade(exercise, answer, seed))
        finally:
            answer.end()
    except StillTheStub as error:
        return Verdict("not started", str(error))
    except ExerciseFailed as error:
        return Verdict("failed", str(error))
    except Exception as error:
        return Verdict("failed", f"the check itself failed: {type(error).__name__}: {error}")
