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

from zero_ref_course import ExerciseFailed, StillTheStub, forbidden_in, grade
from zero_ref_course.editions import chapters_in
from zero_ref_course.isolated import Cells, Nursery
from zero_ref_course.notebook import exercises_in, tags_of

Status = Literal["passed", "failed", "hidden cases failed", "not started", "missing"]


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


def modules_of(assigned: Iterable[Assigned]) -> list[str]:
    """What the chapters import, for a `Nursery`.

    >>> modules_of([Assigned("", "", "", "import math\\nfrom torch import nn\\n%load_ext x")])
    ['math', 'torch']
    """
    lines = "\n".join({one.setup for one in assigned})
    return sorted(set(re.findall(r"^(?:from|import) ([\w.]+)", lines, re.MULTILINE)))


def answer_in(notebook: dict[str, Any], wanted: Assigned) -> Cells | None:
    """A student's answer to an exercise; None where no cell defines its function.

    The last cell counts that is tagged `exercise` and defines the function, else the last one that defines
    it, whatever its tags, its place and its check have become.
    """
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = [("".join(cell["source"]), tags_of(cell)) for cell in code if "install" not in tags_of(cell)]
    defines = re.compile(
        rf"^(?:(?:async )?def {wanted.function}\b|class {wanted.function}\b|{wanted.function}\s*[:=])",
        re.MULTILINE,
    )
    found = [(source, tags) for source, tags in cells if "check" not in tags and defines.search(source)]
    if not found:
        return None
    source = next((source for source, tags in reversed(found) if "exercise" in tags), found[-1][0])
    first, tags = cells[0]
    own = (
        (first,) if first != source and first != wanted.setup and not {"exercise", "check"} & {*tags} else ()
    )
    return Cells((wanted.setup, *own), source, wanted.function, forbidden_in(wanted.exercise))


def judge(nursery: Nursery, exercise: str, cells: Cells, seed: int) -> Verdict:
    """How an answer does in the cases that everybody knows, and in those of the seed, if it is not 0."""
    verdict = _judge(nursery, exercise, cells, seed)  # the known cases are among them
    if seed == 0 or verdict.status != "failed":
        return verdict
    known = _judge(nursery, exercise, cells, 0)
    return Verdict("hidden cases failed", verdict.message) if known.status == "passed" else known


def _judge(nursery: Nursery, exercise: str, cells: Cells, seed: int) -> Verdict:
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
