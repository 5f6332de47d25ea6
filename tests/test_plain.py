"""Chapters in plain Markdown: what a class is given has no marks that only the book's pages understand."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given, strategies as st

from zero_ref.course.editions import chapters_in, write_editions
from zero_ref.course.plain import Work, numbers_in, plain, plain_text, works_in

ROOT = Path(__file__).parents[1]
CHAPTERS = {path: json.loads(path.read_text()) for path in chapters_in(ROOT / "notebooks")}
BIBLIOGRAPHY = (ROOT / "book" / "references.bib").read_text()

NUMBERS = {"fig-ring": "Fig. 2.1", "eq-time": "(2.3)"}
WORKS = {
    "graham1969": Work("Graham", "1969", "https://doi.org/10.1137/0117039"),
    "adam": Work("Kingma and Ba", "2015", ""),
    "torchrpc": Work("PyTorch", "", "https://docs.pytorch.org/rpc"),
}


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
        ("a {term}`shard`", "a shard"),
        ("{term}`the\nranks <rank>` agree", "the\nranks agree"),
        ("{doc}`chapter 3\n<03_partition>`", "chapter 3"),
        ("as in {numref}`fig-ring` and {eq}`eq-time`", "as in Fig. 2.1 and (2.3)"),
        ("Adam {cite:p}`adam`", "Adam (Kingma and Ba, 2015)"),
        ("{cite:t}`graham1969` shows", "[Graham (1969)](https://doi.org/10.1137/0117039) shows"),
        ("{cite:p}`adam,torchrpc`", "(Kingma and Ba, 2015; [PyTorch](https://docs.pytorch.org/rpc))"),
        ("{cite:p}`somebody1999`", "(somebody1999)"),
        ("{py:class}`Slice`", "`Slice`"),
        ("$$\nt = r\n$$ (eq-time)\n", "$$\nt = r \\tag{2.3}\n$$\n"),
        ("$$\nt = r\n$$\n\nand\n\n$$\nu\n$$ (eq-time)", "$$\nt = r\n$$\n\nand\n\n$$\nu \\tag{2.3}\n$$"),
        (":::{note}\nA {term}`rank`.\n\nTwo.\n:::", "> **Note.** A rank.\n>\n> Two."),
        (":::{admonition} Never\n:class: warning\nDo it.\n:::", "> **Never.** Do it."),
        ("```\n{term}`shard`\n```\n{term}`shard`", "```\n{term}`shard`\n```\nshard"),
    ],
)
def test_a_mark_becomes_what_it_says(marked: str, expected: str) -> None:
    assert plain_text(marked, NUMBERS, WORKS) == expected


@given(st.text(alphabet="ab {}$`:()<>*\n\\", max_size=40))
def test_text_without_marks_stays_as_it_is(text: str) -> None:
    if not re.search(r"\{[a-z:]+\}`|\$\$|:::", text):
        assert plain_text(text, NUMBERS, WORKS) == text


def test_a_figure_has_its_number_and_caption_below_it() -> None:
    notebook = {"cells": [drawing("ring", caption="A {term}`rank`.", name="fig-ring"), markdown("After it.")]}
    before = copy.deepcopy(notebook)
    made = plain(notebook, NUMBERS, WORKS)
    assert notebook == before
    assert [cell["id"] for cell in made["cells"]] == ["ring", "ring-caption", "text"]
    assert "".join(made["cells"][1]["source"]) == "**Fig. 2.1** A rank."
    assert made["cells"][0] == notebook["cells"][0]


def test_a_picture_without_a_caption_gets_none() -> None:
    notebook = {"cells": [drawing("ring")]}
    assert plain(notebook, NUMBERS, WORKS) == notebook


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


def test_authors_are_named_as_the_book_names_them() -> None:
    works = works_in(BIBLIOGRAPHY)
    assert works["rajbhandari2020zero"] == Work(
        "Rajbhandari et al.", "2020", "https://arxiv.org/abs/1910.02054"
    )
    assert works["kingma2015adam"].authors == "Kingma and Ba"
    assert works["fairscale2021"].authors == "FairScale authors"
    assert works["graham1969bounds"] == Work("Graham", "1969", "https://doi.org/10.1137/0117039")
    assert set(works) == set(re.findall(r"^@\w+\{(\w+),", BIBLIOGRAPHY, re.MULTILINE))
    assert not [work for work in works.values() if re.search(r"[{}\\]", work.authors)]


@pytest.mark.parametrize("audience", ["students", "teachers"])
def test_no_mark_is_left_in_an_edition(audience: Any, tmp_path: Path) -> None:
    written = write_editions(ROOT / "notebooks", tmp_path, audience)
    cited = "|".join(works_in(BIBLIOGRAPHY))
    mark = re.compile(rf"\{{[a-z:]+\}}`|^:::|^\$\$ *\(|\b(?:fig|eq)-\w|\b(?:{cited})\b", re.MULTILINE)
    left = []
    for path in written:
        notebook = json.loads(path.read_text())
        nbformat.validate(nbformat.from_dict(notebook))
        texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        left += [(path.stem, match[0]) for text in texts for match in mark.finditer(text)]
    assert left == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_code_is_left_alone(path: Path) -> None:
    def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
        return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]

    assert code(plain(CHAPTERS[path], {}, {})) == code(CHAPTERS[path])
