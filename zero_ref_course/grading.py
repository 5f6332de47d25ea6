"""Grade the notebooks of a class, as `zero-ref grade FOLDER` does.

    for row in grade_class("submissions", seed=2026):
        print(row.file, row.exercise, row.status)

The registered exercises say what there is to grade, whatever a student has deleted or renamed, and a cell is
found by its id. Each answer is checked in a process of its own, with a time-out, as `notebook.grade_alone`
says. The process has the rights of whoever grades: answers that may be hostile belong in a container.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zero_ref.lab._arguments import printable
from zero_ref_course import exercises, function_of
from zero_ref_course.notebook import ExerciseCells, grade_alone, read_notebook


class Row(NamedTuple):
    """The result of one exercise of one notebook.

    Args:
        file: the notebook, by its path in the folder of the class: two students of one name have two paths.
        exercise: "partition.even_split"; empty where the file as a whole cannot be graded.
        status: the status of the `Verdict`; or "missing": no cell has the exercise's id; or "unreadable": the
            file is no notebook, or has no exercise of the book.
        message: the message of the check. The message of a hidden case has the case's input.
    """

    file: str
    exercise: str
    status: Literal["passed", "hidden cases failed", "failed", "not started", "missing", "unreadable"]
    message: str


def grade_class(
    folder: str | os.PathLike[str], *, seed: int = 0, seconds: float = 120.0, workers: int = 2
) -> Iterator[Row]:
    """Grade all notebooks in a folder and in the folders inside it, in the order of their paths.

    If a notebook has one exercise of a chapter, all exercises of that chapter count.

    Args:
        seed: of hidden cases; 0 for none. The statuses of one class are comparable with one seed.
        seconds: for one exercise, times `patience()`.
        workers: exercises that are checked at the same time.
    Raises:
        OSError: the folder cannot be read.
        ValueError: there are no notebooks in it.
    """
    folder = Path(os.path.realpath(folder))
    files = _notebooks_in(folder)
    if not files:
        raise ValueError(f"there are no notebooks in {folder}.")
    with ThreadPoolExecutor(workers) as pool:
        rows: list[Row | Future[Row]] = []
        for path in files:
            file = str(path.relative_to(folder))
            try:
                answers = answers_in(read_notebook(path))
            except (OSError, ValueError, RecursionError) as error:
                rows.append(Row(file, "", "unreadable", str(error).removeprefix(str(path)).strip()))
                continue
            if not answers:
                rows.append(Row(file, "", "unreadable", "no cell of it has the id of an exercise."))
            for exercise, cells in answers.items():
                if cells is None:
                    missing = f"no cell has the id {cell_id(exercise)!r}."
                    rows.append(Row(file, exercise, "missing", missing))
                else:
                    rows.append(pool.submit(_row, file, cells, path.parent, seconds, seed))
        try:
            for row in rows:
                yield row.result() if isinstance(row, Future) else row
        finally:  # after Ctrl-C no further exercise is begun
            pool.shutdown(wait=False, cancel_futures=True)


def _notebooks_in(folder: Path) -> list[Path]:
    """Return all notebooks but those in hidden folders, where Jupyter keeps copies.

    Raises:
        OSError: the folder cannot be read.
    """
    os.listdir(folder)  # rglob finds nothing in a folder that cannot be read
    found = sorted(folder.rglob("*.ipynb"))
    return [path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts)]


def _row(file: str, cells: ExerciseCells, folder: Path, seconds: float, seed: int) -> Row:
    return Row(file, cells.exercise, *grade_alone(cells, folder, seconds, seed))


def cell_id(exercise: str, part: str = "stub") -> str:
    """Return the id of a cell of an exercise.

    >>> cell_id("partition.even_split"), cell_id("partition.even_split", "check")
    ('even-split-stub', 'even-split-check')
    """
    return f"{exercise.partition('.')[2].replace('_', '-')}-{part}"


def answers_in(notebook: dict[str, Any]) -> dict[str, ExerciseCells | None]:
    """Return the answers in a notebook by exercise; None for one that is missing.

    If the notebook has one exercise of a chapter, the result has all exercises of that chapter.

    >>> cell = {"cell_type": "code", "id": "even-split-stub", "metadata": {}, "source": "even_split = sum"}
    >>> {name: cells and cells.stub for name, cells in answers_in({"cells": [cell]}).items()}
    {'partition.largest_first': None, 'partition.even_split': 'even_split = sum', 'partition.adversary': None}
    """
    sources = {
        _id_of(cell): "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
    }
    chapters = {name.partition(".")[0] for name in exercises() if cell_id(name) in sources}
    answers: dict[str, ExerciseCells | None] = {}
    for name in exercises():
        if name.partition(".")[0] in chapters:
            source = sources.get(cell_id(name))
            answers[name] = (
                None
                if source is None
                else ExerciseCells(
                    name, function_of(name), setup=sources.get("setup", ""), stub=source, solution=""
                )
            )
    return answers


def _id_of(cell: dict[str, Any]) -> str:
    """Return the id that the book gave to a cell. Colab keeps it in the metadata."""
    return str(cell.get("id") or cell["metadata"].get("id", ""))


def as_csv(rows: Iterable[Row]) -> str:
    """Return a table with a line for each row. What is not printable in names and messages is escaped.

    >>> print(as_csv([Row("ada.ipynb", "partition.even_split", "missing", "no cell ...")]), end="")
    file,exercise,status,message
    ada.ipynb,partition.even_split,missing,no cell ...
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows([printable(field) for field in row] for row in rows)
    return table.getvalue()
