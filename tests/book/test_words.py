"""The command that counts the book's words, and the hours that the course page takes from it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "book"))

import words  # noqa: E402  # book/words.py


def test_text_and_visible_code_are_counted_and_folded_code_is_not(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["## Two words\n", "and three more"]},
        {"cell_type": "code", "metadata": {}, "source": ["a = 1\n", "b = 2"]},
        {"cell_type": "code", "metadata": {"tags": ["hide-input"]}, "source": ["assert a < b"]},
    ]
    notebook, page = tmp_path / "one.ipynb", tmp_path / "two.md"
    notebook.write_text(json.dumps({"cells": cells}))
    page.write_text("four words of text")
    assert words.length_of(notebook) == (6, 2)
    assert words.total([notebook, page]) == (10, 2)
    assert words.Length(12_000, 1_200).hours == pytest.approx(2.0)


def test_every_notebook_and_page_is_in_one_part() -> None:
    listed = [path for paths in words.parts().values() for path in paths]
    assert len(listed) == len(set(listed))
    assert set((ROOT / "notebooks").glob("*.ipynb")) <= set(listed)


def test_the_course_page_says_the_hours_that_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert words.main() == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("the notebooks"))
    page = (ROOT / "book" / "course.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"an estimate of (\d+) hours to read the notebooks", page)
    # Said in whole hours, and each change of a chapter changes the count.
    assert abs(float(row.split()[-1]) - int(said)) <= 1
