"""The chapters are one book: parts in order, words linked at first use, figures and equations numbered."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_ref_course.editions import chapters_in
from zero_ref_course.plain import numbers_in

ROOT = Path(__file__).parents[2]
CHAPTERS = chapters_in(ROOT / "notebooks")  # in the order in which they are read
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))  # the tour and the appendices, too
NUMBERED = NOTEBOOKS[1:]
APPENDICES = [path for path in NUMBERED if path not in CHAPTERS]
GLOSSARY = (ROOT / "book" / "glossary.md").read_text(encoding="utf-8")
BIBLIOGRAPHY = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")

sys.path.insert(0, str(ROOT / "book" / "_ext"))
anchors = importlib.import_module("anchors")
sys.path.pop(0)

OF_AN_APPENDIX = ["What it is", "A run", "What it costs", "Who needs it"]

PARTS = ["The question", "The picture", "Predict", "Run", "Compare", "Exercises", "What you can do now"]

EVERYDAY = {
    "drift": "the models drift apart",
    "pass": "pass the group in",
    "reduce": "ranks reduce gradients, by any collective",
    "round": "the other way round, each order rounds differently",
    "schedule": "a learning-rate schedule",
    "update": "a rank updates what it owns",
}
"""Words of the glossary that are also needed in another sense, and an example of it."""

TERM = re.compile(r"\[[^][]+\]\(\.\./book/glossary\.md#(term-[\w-]+)\)")
"""A link of a chapter to a word of the glossary."""

CITATION = re.compile(r"\[([^][]+?(?:, \d[\d.]*|\(\d{4}\)))\]\((http[^()\s]*)\)")
"""A link to a work: its authors and year, and where it is."""

each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
each_numbered = pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)


@cache
def cells(path: Path) -> list[dict[str, Any]]:
    """A notebook's cells, their sources joined."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found]


@cache
def text_of(path: Path) -> str:
    """All of a chapter's text, without its cells of code and without blocks of code."""
    text = "\n\n".join(cell["source"] for cell in cells(path) if cell["cell_type"] == "markdown")
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def in_words(text: str) -> str:
    """Return the words of a text, without headings, titles of boxes, formulas, code and links."""
    text = re.sub(r"^#+ .*$|^> \*\*[^*]+\*\*$", "", text, flags=re.M)
    text = re.sub(r"^\$\$$.*?^\$\$[^\n]*$", "", text, flags=re.M | re.S)
    text = re.sub(rf"\$[^$\n]+\$|({TERM.pattern})|\[[^]]*\]\([^)]*\)|<[^>`]*>(?!`)", r"\1", text)
    text = re.sub(rf"({TERM.pattern})|`[^`]*`", r"\1", text)
    return " ".join(text.split())


@cache
def entries() -> dict[str, str]:
    """Each word of the glossary with its definition, in the page's order."""
    (block,) = re.findall(r"^:::\{glossary\}\n(.*?)^:::$", GLOSSARY, re.M | re.S)
    return {
        word: " ".join(text.split()) for word, text in re.findall(r"^(\S.*)\n((?:    .*\n)+)", block, re.M)
    }


def linked(text: str) -> list[str]:
    """The words of the glossary to which a text links, in its order."""
    words = {anchors.slug(word): word for word in entries()}
    return [words[name] for name in TERM.findall(text)]


def stands(term: str, text: str) -> re.Match[str] | None:
    """Find a word of the glossary in a text: in the plural too, but not as a part of a longer one."""
    for longer in entries():
        if term != longer and term.lower() in longer.lower():
            text = re.sub(rf"(?i){re.escape(longer)}", lambda found: "_" * len(found[0]), text)
    case = "i" if term == term.lower() else "-i"
    return re.search(rf"(?<![\w-])(?{case}:{re.escape(term)})(?:e?s)?(?![\w-])", text)


def too_early(term: str, words: str) -> str:
    """The place where a text uses a word before it links it; nothing if there is none."""
    link = next((m.start() for m in TERM.finditer(words) if m[1] == anchors.slug(term)), len(words))
    plain = TERM.sub(lambda found: "_" * len(found[0]), words)
    first = stands(term, plain)
    return plain[max(0, first.start() - 40) : first.end() + 40] if first and first.start() < link else ""


# ------------------------------------------------------------------------------------------------- words


def test_the_examples_of_the_extension_hold() -> None:
    assert doctest.testmod(anchors).failed == 0


def test_a_word_used_before_its_link_is_found() -> None:
    link = "[rank](../book/glossary.md#term-rank)"
    assert too_early("rank", f"On two ranks. A {link} is one.").startswith("On two ranks. A ____")
    assert not too_early("rank", f"A {link}, and its ranks.")
    assert not too_early("rank", "On [two ranks](../book/glossary.md#term-rank) the ranks are frank.")
    assert not too_early("checkpoint", "A sharded checkpoint.")  # another entry
    assert too_early("DDP", "DDP")
    assert not too_early("DDP", "ddp")
    assert in_words(f"# A rank\n\na `rank` of $N$ [ranks](x.ipynb) {link}") == f"a of {link}"


def test_the_glossary_is_in_order_and_says_where_each_word_is_explained() -> None:
    order = [word.lower().replace("ψ", "psi") for word in entries()]
    assert order == sorted(order)
    for word, definition in entries().items():
        ((number, chapter),) = re.findall(r"\{doc\}`Chapter (\d+) <../notebooks/(\w+)>`\.$", definition)
        (path,) = (path for path in NUMBERED if path.stem.startswith(f"{int(number):02}_"))
        assert path.stem == chapter, word
        assert word in linked(text_of(path)), f"{chapter} is to explain {word}, and does not link it"


@pytest.mark.parametrize("page", sorted((ROOT / "book").glob("*.md")), ids=lambda path: path.stem)
def test_linked_words_are_in_the_glossary(page: Path) -> None:
    roles = re.findall(r"\{term\}`(?:[^`<]+\s<([^`>]+)>|([^`]+))`", page.read_text(encoding="utf-8"))
    words = {" ".join((target or word).split()).lower() for target, word in roles}
    assert words <= {word.lower() for word in entries()}


@each_numbered
def test_words_of_the_glossary_are_linked_where_a_chapter_first_uses_them(path: Path) -> None:
    words = in_words(text_of(path))
    early = {term: too_early(term, words) for term in entries() if term not in EVERYDAY}
    assert not {term: place for term, place in early.items() if place}


@each_numbered
def test_a_word_is_linked_once_in_a_part(path: Path) -> None:
    for part in re.split(r"^## ", text_of(path), flags=re.M):
        words = linked(in_words(part))
        assert len(words) == len(set(words)), {word for word in words if words.count(word) > 1}


# ----------------------------------------------------------------------------------------------- the parts


@each_chapter
def test_a_chapter_has_its_number_and_its_parts_in_order(path: Path) -> None:
    assert text_of(path).lstrip().startswith(f"# {int(path.stem[:2])} ")
    assert re.findall(r"^## (.*)$", text_of(path), re.M) == PARTS


@pytest.mark.parametrize("path", APPENDICES, ids=lambda path: path.stem)
def test_an_appendix_is_a_page_with_its_four_parts(path: Path) -> None:
    assert text_of(path).lstrip().startswith(f"# {int(path.stem[:2])} ")
    assert [
        part for part in re.findall(r"^## (.*)$", text_of(path), re.M) if part in OF_AN_APPENDIX
    ] == OF_AN_APPENDIX
    assert len(text_of(path).split()) < 1000


@each_chapter
def test_exercises_are_numbered_by_chapter(path: Path) -> None:
    numbers = re.findall(r"^### Exercise ([\d.]+): ", text_of(path), re.M)
    assert numbers == [f"{int(path.stem[:2])}.{i}" for i in range(1, len(numbers) + 1)]
    assert 2 <= len(numbers) <= 4


@each_chapter
def test_a_chapter_ends_with_what_was_learned_and_where_to_go(path: Path) -> None:
    ending = text_of(path).partition(f"## {PARTS[-1]}\n")[2].strip()
    assert ending.split("\n\n")[0].endswith(".")
    number = CHAPTERS.index(path) + 1
    following = CHAPTERS[number].name if number < len(CHAPTERS) else "../book/running.md"
    assert re.search(rf"^Next: .*\]\({following}\)", ending, re.M | re.S)


# --------------------------------------------------------------------------------- figures and equations


def shows_a_picture(cell: dict[str, Any]) -> bool:
    """Whether the last line is matplotlib's figure, or makes a drawing or an animation."""
    last = "".join(cell["source"].splitlines()[-1:])
    return last == "fig" or last.startswith(("plots.", "animate_"))


@each_numbered
def test_each_figure_has_a_name_a_caption_and_a_text_for_who_cannot_see_it(path: Path) -> None:
    figures = 0
    for cell in cells(path):
        if cell["cell_type"] == "code" and shows_a_picture(cell):
            shown = cell["metadata"].get("mystnb", {})
            assert shown["figure"]["name"].startswith("fig-"), cell["id"]
            assert shown["figure"]["caption"].endswith("."), cell["id"]
            # An animation is no image: it has words of its own, which tests/live/test_animation.py reads.
            animated = cell["source"].splitlines()[-1].startswith("animate_")
            assert animated or len(shown["image"]["alt"]) > 40, cell["id"]
            figures += 1
    assert figures >= 1


NUMBERS = numbers_in((int(path.stem[:2]), {"cells": cells(path)}) for path in NUMBERED)


def test_figures_and_equations_have_names_of_their_own() -> None:
    figures = [
        cell["metadata"].get("mystnb", {}).get("figure", {}) for path in NUMBERED for cell in cells(path)
    ]
    labels = [
        label
        for path in NUMBERED
        for label in re.findall(r"^\$\$$.*?^\$\$([^\n]*)$", text_of(path), re.M | re.S)
    ]
    assert all(re.fullmatch(r" \(eq-[a-z-]+\)", label) for label in labels), labels
    names = [figure["name"] for figure in figures if figure] + [label[2:-1] for label in labels]
    assert sorted(names) == sorted(NUMBERS)


def test_the_text_refers_to_figures_and_equations_by_their_numbers_and_to_every_equation() -> None:
    link = re.compile(r"\[([^][]+)\]\((\w+)\.ipynb#([\w-]+)\)")
    links = [found for path in NUMBERED for found in link.findall(text_of(path))]
    for said, chapter, name in links:
        assert said == NUMBERS[name], name
        assert int(chapter[:2]) == int(re.findall(r"\d+", said)[0]), name
        assert (ROOT / "notebooks" / f"{chapter}.ipynb").exists(), chapter
    assert {name for name in NUMBERS if name.startswith("eq-")} <= {name for *_, name in links}


# ------------------------------------------------------------------------------- plain text, and works cited


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_plain_markdown(path: Path) -> None:
    """It has no marks that GitHub and Jupyter show as they are written."""
    assert not re.findall(r"\{[a-z:]+\}`|^:::+.*$|^```\{.*$|^\([\w-]+\)=$", text_of(path), re.M)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(path)):
        assert (path.parent / target).exists(), target


def works() -> dict[str, tuple[str, str, str]]:
    """By address, the key, the authors and the year of each work of the bibliography."""
    found = {}
    for entry in re.split(r"^@\w+\{", BIBLIOGRAPHY, flags=re.M)[1:]:
        fields = dict(re.findall(r"^\s*(\w+)\s*=\s*\{(.*)\},?\s*$", entry, re.M))
        group = fields["author"].startswith("{")  # whose name is not to be taken apart
        names = [name if group else name.partition(",")[0] for name in fields["author"].split(" and ")]
        authors = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
        address = fields.get("url") or f"https://doi.org/{fields['doi']}"
        found[address] = entry.partition(",")[0], authors.strip("{}"), fields.get("year", "")
    return found


def test_works_are_cited_by_their_authors_and_year() -> None:
    cited = {found for path in NOTEBOOKS for found in CITATION.findall(text_of(path))}
    for said, address in cited:
        _, authors, year = works()[address]
        assert said in (f"{authors}, {year}", f"{authors} ({year})"), address
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "book").glob("*.md"))
    addresses = "".join(text_of(path) for path in NOTEBOOKS)
    for address, (key, *_) in works().items():
        assert f"]({address})" in addresses or key in pages, f"{key} is cited nowhere"


# ------------------------------------------------------------------------------------------------- shape


@each_chapter
def test_a_chapter_says_how_hard_it_is_and_needs_only_what_comes_before(path: Path) -> None:
    said = re.search(r"^\*Difficulty [123] of 3\. Needs (.+)\.\*$", cells(path)[0]["source"], re.M)
    assert said
    before = {int(one.stem[:2]) for one in CHAPTERS[: CHAPTERS.index(path)]}
    assert {int(number) for number in re.findall(r"\d+", said[1])} <= before


def test_chapters_are_numbered_in_the_order_in_which_they_are_read() -> None:
    pages = re.findall(r"- file: notebooks/((?!00_)\w+)", (ROOT / "_toc.yml").read_text(encoding="utf-8"))
    assert pages == sorted(pages) == [path.stem for path in (*CHAPTERS, *APPENDICES)]
    assert [int(page[:2]) for page in pages] == list(range(1, len(pages) + 1))


OLD_NAMES = [
    "06_groups",
    "07_overlap",
    "08_checkpoint",
    "09_clipping",
    "10_join",
    "11_local_sgd",
    "12_rpc",
    "13_stages",
    "14_scale",
    "15_precision",
    "16_matrices",
    "17_sharded",
    "15_join",
    "19_museum",
]
"""Chapters' names before they were numbered in the order of reading: others have linked them."""


def test_an_old_address_of_a_chapter_leads_to_its_new_one() -> None:
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    forwarded = config["sphinx"]["config"]["redirects"]
    names = {path.stem.partition("_")[2]: path.stem for path in NUMBERED}
    assert forwarded == {f"notebooks/{old}": f"{names[old.partition('_')[2]]}.html" for old in OLD_NAMES}
    assert not {path.stem for path in NUMBERED} & set(OLD_NAMES)


@each_chapter
def test_a_chapter_opens_with_its_question_and_picture(path: Path) -> None:
    """Before the first figure only text is unfolded; imports and the code of figures are folded."""
    for cell in cells(path):
        if cell["id"] == "setup" or shows_a_picture(cell):
            assert "hide-input" in cell["metadata"].get("tags", []), cell["id"]
    sources = [cell["source"] for cell in cells(path)]
    question = next(place for place, source in enumerate(sources) if "## The question\n" in source)
    assert question < next(place for place, cell in enumerate(cells(path)) if cell["id"] == "setup")


@each_chapter
def test_a_chapter_ends_with_its_card(path: Path) -> None:
    *_, card, done = (cell for cell in cells(path) if cell["cell_type"] == "markdown")
    assert (card["id"], done["id"]) == ("card", "done")
    assert card["source"].startswith("### The card\n")
    assert 3 <= len(re.findall(r"^\|", card["source"], re.M)) - 2 <= 8
    assert not re.search(r"\$\$|\.ipynb", card["source"])  # it is shown on two pages
