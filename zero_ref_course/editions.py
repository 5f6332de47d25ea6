"""The chapters for a course: `zero-ref notebooks FOLDER --for students` and the other editions.

All editions are made from the book's own notebooks, which have a stub, a check and a solution for each
exercise. The book skips the check when it is built; in an edition it runs, so that running the notebook
grades it. The text includes the captions and the numbers of equations, which the book's pages add.

The edition for nbgrader is the students', with the metadata that `nbgrader generate_assignment` asks for.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from zero_ref_course import APPENDICES, CHAPTERS
from zero_ref_course.notebook import read_notebook
from zero_ref_course.plain import numbers_in, plain

Audience = Literal["students", "teachers", "nbgrader"]

PREDICT = re.compile(r'(predict\("[\w.]+")\)')
"""A cell that asks for a prediction."""

TO_WRITE = re.compile(r"^( *)raise NotImplementedError.*$", re.MULTILINE)
"""The line of a stub that an answer replaces."""

NOT_RUN = {"skip-execution", "nbval-skip"}
"""The tags that keep a check from running: the first for Jupyter Book, the second for nbval."""


def edition(notebook: dict[str, Any], audience: Audience, seed: int = 0) -> dict[str, Any]:
    """Return one edition of a chapter: the stubs alone, or for teachers the solutions in their place.

    The checks run in both, and there are no outputs. Cell ids and all other cells stay, so
    `zero-ref check` finds the exercises of an edition as it does those of the chapter.

    >>> stub = {"cell_type": "code", "id": "floor-stub", "metadata": {"tags": ["exercise"]},
    ...         "source": "def floor(): raise NotImplementedError"}
    >>> solution = {"cell_type": "code", "id": "floor-solution", "metadata": {"tags": ["solution"]},
    ...             "source": "def floor(): return 16"}
    >>> for audience in ("students", "teachers"):
    ...     [cell["source"] for cell in edition({"cells": [stub, solution]}, audience)["cells"]]
    ['def floor(): raise NotImplementedError']
    ['def floor(): return 16']

    Args:
        notebook: the contents of the file, with cells tagged as CONTRIBUTING.md says. It is not changed.
        seed: for nbgrader: each check has a hidden test, of cases drawn from the seed; 0 for none.
    Raises:
        ValueError: an exercise and its solution do not follow each other, or the stub is not blank.
    """
    made = copy.deepcopy(notebook)
    cells: list[dict[str, Any]] = []
    stub: dict[str, Any] | None = None  # the one whose solution has not come yet
    for cell in made["cells"]:
        tags = cell["metadata"].get("tags", [])
        if "solution" in tags:
            if stub is None:
                raise ValueError(f"cell {cell.get('id')!r} is a solution, and there is no stub before it.")
            if audience == "teachers":
                stub["source"] = cell["source"]
            stub = None
            continue
        if "exercise" in tags:
            _expect_no(stub)
            # Who works in the book's own notebooks and saves them must not hand out the answers.
            if "raise NotImplementedError" not in "".join(cell["source"]):
                raise ValueError(
                    f"cell {cell.get('id')!r} is filled in. Make editions from stubs as they are in the "
                    "repository: put the notebook back to that state, or use another clone."
                )
            stub = cell
        if "check" in tags:
            cell["metadata"]["tags"] = [tag for tag in tags if tag not in NOT_RUN]
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            source = "".join(cell["source"])
            if asked := PREDICT.fullmatch(source):  # what is written into the cell is handed in with it
                cell["source"] = f"{asked[1]}, mine=None)"
        cells.append(cell)
    _expect_no(stub)
    made["cells"] = cells
    if audience == "nbgrader":
        for cell in cells:
            _mark_for_nbgrader(cell, seed)
    return made


def _mark_for_nbgrader(cell: dict[str, Any], seed: int) -> None:
    """Make a stub a solution of nbgrader's, and a check a test that is worth a point."""
    tags, source = cell["metadata"].get("tags", []), "".join(cell["source"])
    is_answer = "exercise" in tags
    if not is_answer and "check" not in tags:
        return
    if is_answer:
        # generate_assignment puts its own stub in place of what is between these two lines.
        cell["source"] = TO_WRITE.sub(r"\1### BEGIN SOLUTION\n\g<0>\n\1### END SOLUTION", source)
    elif seed:
        hidden = source.rstrip().removesuffix(")") + f", seed={seed})"
        cell["source"] = f"{source.rstrip()}\n### BEGIN HIDDEN TESTS\n{hidden}\n### END HIDDEN TESTS"
    cell["metadata"]["nbgrader"] = {
        "schema_version": 3,
        "cell_type": "code",
        "grade_id": cell["id"],
        "solution": is_answer,
        "grade": not is_answer,
        "locked": not is_answer,
        "task": False,
    }
    if not is_answer:
        cell["metadata"]["nbgrader"]["points"] = 1


def write_editions(
    source: str | Path,
    folder: str | Path,
    audience: Audience,
    chapters: Sequence[str] = (),
    seed: int = 0,
) -> list[Path]:
    """Write one edition of the chapters to a folder, which is made if there is none; return the new files.

    Nothing is written unless all of it can be made.

    Args:
        source: the folder with the book's notebooks.
        folder: new or empty.
        chapters: numbers or names of chapters, such as `["3", "step"]`; if empty, all chapters.
        seed: as in `edition`.
    Raises:
        OSError: a file cannot be read or written.
        ValueError: there is no such audience or chapter, the folder is not empty, `source` has no
            notebooks, or one of them has no edition (see `edition`).
    """
    if audience not in get_args(Audience):
        raise ValueError(f"there is no edition for {audience!r}; there are {', '.join(get_args(Audience))}.")
    chosen = chapters_in(source, chapters)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{folder} is there and is not an empty folder. Name a new one: nothing is replaced."
        )
    book = {path: read_notebook(path) for path in chapters_in(source)}  # a chapter names figures of others
    numbers = numbers_in((int(path.stem.partition("_")[0]), notebook) for path, notebook in book.items())
    texts: dict[str, str] = {}
    for path in chosen:
        try:
            made = plain(edition(book[path], audience, seed), numbers)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        texts[path.name] = json.dumps(made, indent=1, ensure_ascii=False) + "\n"  # as Jupyter writes it
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def chapters_in(source: str | Path, chapters: Sequence[str] = ()) -> list[Path]:
    """The notebooks of these chapters, in the order of `CHAPTERS`; all of them if none is named.

    The appendices are no chapters.

    >>> [path.name for path in chapters_in("notebooks", ["step", "3"])]                  # doctest: +SKIP
    ['03_partition.ipynb', '04_step.ipynb']

    Raises:
        ValueError: there are no notebooks in `source`, or no such chapter.
    """
    names_of: dict[Path, set[str]] = {}
    for path in sorted(Path(source).glob("[0-9]*_*.ipynb"), key=_place):
        number, _, name = path.stem.partition("_")
        if number.strip("0") and name not in APPENDICES:  # 00 is the tour: a way in, and no chapter
            names_of[path] = {number, number.lstrip("0"), name, path.stem, path.name}
    if not names_of:
        raise ValueError(
            f"there are no chapters in {str(source)!r}: they are in the folder notebooks of a clone."
        )
    known = set().union(*names_of.values())
    for chapter in chapters:
        if chapter not in known:
            there = ", ".join(path.stem for path in names_of)
            raise ValueError(f"there is no chapter {chapter!r}; there are {there}.")
    return [path for path, names in names_of.items() if not chapters or names & set(chapters)]


def _place(path: Path) -> tuple[int, str]:
    """A chapter's position in the book, by its name: a new chapter may come between two numbers."""
    name = path.stem.partition("_")[2]
    return (CHAPTERS.index(name) if name in CHAPTERS else len(CHAPTERS)), path.name


def _expect_no(stub: dict[str, Any] | None) -> None:
    if stub is not None:
        raise ValueError(f"cell {stub.get('id')!r} has no solution after it.")
