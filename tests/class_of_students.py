"""A folder of submissions of chapter 3, of every kind: `python tests/class_of_students.py 100 FOLDER`."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

from zero_ref_course.editions import edition
from zero_ref_course.notebook import read_notebook

CHAPTER = Path(__file__).parents[1] / "notebooks" / "03_partition.ipynb"
Notebook = dict[str, Any]

CHEATS = [
    """import os, json
def {name}(*args):
    json.dump([True, "fine"], open("result.json", "w"))
    os._exit(0)
""",
    """import zero_ref_course as course
course.grade = course.check = lambda *_: "fine"
def {name}(*args):
    return []
""",
    """import sys
def {name}(*args):
    return sys._getframe(1).f_locals.get("right", [])
""",
    """def {name}(*args):
    return list(sorted_greedy(*args).owner_of_param)
""",
    """class Right(list):
    def __eq__(self, other):
        return True
def {name}(*args):
    return Right()
""",
    """def {name}(*args):
    while True:
        pass
""",
]


def tagged(notebook: Notebook, tag: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if tag in cell["metadata"].get("tags", [])]


def with_answers(notebook: Notebook, answer: str) -> Notebook:
    names = ["largest_first", "even_split", "adversary"]
    for cell, name in zip(tagged(notebook, "exercise"), names, strict=True):
        cell["source"] = answer.format(name=name).splitlines(keepends=True)
    return notebook


def without_checks(notebook: Notebook) -> Notebook:
    notebook["cells"] = [cell for cell in notebook["cells"] if cell not in tagged(notebook, "check")]
    return notebook


def untagged(notebook: Notebook) -> Notebook:
    for number, cell in enumerate(notebook["cells"]):
        cell["metadata"], cell["id"] = {}, f"cell-{number}"
    return notebook


KINDS = (
    "right",
    "wrong",
    "blank",
    "cheat",
    "broken",
    "late",
    "renamed",
    "checks deleted",
    "untagged",
    "nothing",
)
"""In this order, again and again."""


def write_class(folder: Path, count: int) -> dict[str, str]:
    """Write so many submissions, and FOLDER.csv with their times; gives the kind of each student."""
    blank, right = (edition(read_notebook(CHAPTER), audience) for audience in ("students", "teachers"))
    kinds = {}
    for number in range(count):
        kind, student = KINDS[number % len(KINDS)], f"student-{number:03d}"
        kinds[student] = kind
        if kind == "nothing":
            (folder / student).mkdir(parents=True)
            continue
        made = copy.deepcopy(blank if kind == "blank" else right)
        if kind == "wrong":
            with_answers(made, f"def {{name}}(*args):\n    return [{number}]\n")
        elif kind == "cheat":
            with_answers(made, CHEATS[number // len(KINDS) % len(CHEATS)])
        elif kind == "checks deleted":
            made = without_checks(made)
        elif kind == "untagged":
            made = untagged(made)
        name = {"renamed": "homework (final).ipynb"}.get(kind, CHAPTER.name)
        path = folder / student / name
        path.parent.mkdir(parents=True)
        path.write_text("{" if kind == "broken" else json.dumps(made))
    times = {
        student: "2026-05-03T12:00" if kind == "late" else "2026-04-30" for student, kind in kinds.items()
    }
    rows = ["student,submitted", *(f"{student},{time}" for student, time in times.items())]
    Path(f"{folder}.csv").write_text("\n".join(rows) + "\n")
    return kinds


if __name__ == "__main__":
    for student, kind in write_class(Path(sys.argv[2]), int(sys.argv[1])).items():
        print(student, kind)
