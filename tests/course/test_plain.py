"""Notebooks for a class stand by themselves: captions and equation numbers in the text, no link to a file."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from zero_ref_course.editions import write_editions
from zero_ref_course.plain import numbers_in, plain, plain_text

ROOT = Path(__file__).parents[2]

NUMBERS = {"fig-ring": "Fig. 2.1", "eq-time": "(2.3)"}


def markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": "text", "metadata": {}, "source": source}


def drawing(cell_id: str, **figure: str) -> dict[str, Any]:
    metadata = {"mystnb": {"image": {"alt": "Bars."}, "figure": figure}}
    return {
        "cell_type": "code",
        "id": cell_id,
        "metadata": metadata,
        "source": "draw()",
        "outputs": [],
        "execution_count": None,
    }


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("a [shard](../book/glossary.md#term-shard)", "a shard"),
        ("the [`nbytes`](../book/glossary.md#term-nbytes)", "the `nbytes`"),
        ("see [chapter\n3](03_partition.ipynb)", "see chapter\n3"),
        ("as in [Fig. 2.1](02_collectives.ipynb#fig-ring)", "as in Fig. 2.1"),
        ("([Graham, 1969](https://doi.org/10.1137/0117039))",) * 2,
        ("[notes](https://example.org/notes.md)",) * 2,
        ("$$\nt = r\n$$ (eq-time)\n", "\\begin{equation*}\nt = r \\tag{2.3}\n\\end{equation*}\n"),
        (
            "$$\nt = r\n$$\n\nand\n\n$$\nu\n$$ (eq-time)",
            "$$\nt = r\n$$\n\nand\n\n\\begin{equation*}\nu \\tag{2.3}\n\\end{equation*}",
        ),
        ("```\n[a](b.md)\n```\n[a](b.md)", "```\n[a](b.md)\n```\na"),
    ],
)
def test_links_to_files_become_words_and_equations_get_numbers(marked: str, expected: str) -> None:
    assert plain_text(marked, NUMBERS) == expected


def test_a_figure_has_its_number_and_caption_below_it() -> None:
    notebook = {"cells": [drawing("ring", caption="A rank.", name="fig-ring"), markdown("After it.")]}
    before = copy.deepcopy(notebook)
    made = plain(notebook, NUMBERS)
    assert notebook == before
    assert [cell["id"] for cell in made["cells"]] == ["ring", "ring-caption", "text"]
    assert "".join(made["cells"][1]["source"]) == "**Fig. 2.1** A rank."
    assert made["cells"][0] == notebook["cells"][0]


def test_figures_and_equations_are_numbered_by_chapter_each_by_itself() -> None:
    second = {
        "cells": [
            drawing("a", caption="One.", name="fig-a"),
            markdown("$$\nx\n$$ (eq-a)\n\n$$\ny\n$$\n\n$$\nz\n$$ (eq-b)"),
            drawing("unnamed", caption="Not named, so never referred to."),
            drawing("b", caption="Two.", name="fig-b"),
        ]
    }
    third = {"cells": [drawing("c", caption="Three.", name="fig-c")]}
    assert numbers_in([(2, second), (3, third)]) == {
        "fig-a": "Fig. 2.1",
        "fig-b": "Fig. 2.2",
        "eq-a": "(2.1)",
        "eq-b": "(2.2)",
        "fig-c": "Fig. 3.1",
    }


@pytest.mark.parametrize("audience", ["students", "teachers"])
def test_an_edition_links_to_no_file_and_names_no_figure_or_equation(audience: Any, tmp_path: Path) -> None:
    mark = re.compile(r"\]\((?!https?:)|^\$\$ *\(|\b(?:fig|eq)-\w", re.MULTILINE)
    left = []
    for path in write_editions(ROOT / "notebooks", tmp_path, audience):
        notebook = json.loads(path.read_text())
        nbformat.validate(nbformat.from_dict(notebook))
        texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        left += [(path.stem, match[0]) for text in texts for match in mark.finditer(text)]
    assert left == []
