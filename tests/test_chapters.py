"""The chapters are one book: parts in order, words linked at first use, figures and equations numbered."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zero_ref.course.editions import chapters_in

ROOT = Path(__file__).parents[1]
CHAPTERS = chapters_in(ROOT / "notebooks")  # in the order in which they are read
GLOSSARY = (ROOT / "book" / "glossary.md").read_text(encoding="utf-8")

PARTS = ["The question", "The picture", "Predict", "Run", "Compare", "Exercises", "What you can do now"]

EVERYDAY = {
    "drift": "the models drift apart",
    "round": "the other way round, each order rounds differently",
    "schedule": "a learning-rate schedule",
}
"""Words of the glossary that are also needed in another sense, and an example of it."""

TERM = re.compile(r"\{term\}`(?:[^`<]+\s<([^`>]+)>|([^`]+))`")

each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


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
    """What is read as words: no headings, marks of directives, formulas, code and links."""
    text = re.sub(r"^(#+ |:::+).*$", "", text, flags=re.M)
    text = re.sub(r"^\$\$$.*?^\$\$[^\n]*$", "", text, flags=re.M | re.S)
    text = re.sub(r"\$[^$\n]+\$|\[[^]]*\]\([^)]*\)|<[^>`]*>(?!`)", "", text)
    text = re.sub(r"(\{term\}`[^`]*`)|(?:\{[a-z:]+\})?`[^`]*`", r"\1", text)
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
    return [" ".join((target or word).split()) for target, word in TERM.findall(text)]


def stands(term: str, text: str) -> re.Match[str] | None:
    """Where a text has a word of the glossary: in the plural too, but not as a part of a longer one."""
    for longer in entries():
        if term != longer and term.lower() in longer.lower():
            text = re.sub(rf"(?i){re.escape(longer)}", lambda found: "_" * len(found[0]), text)
    case = "i" if term == term.lower() else "-i"
    return re.search(rf"(?<![\w-])(?{case}:{re.escape(term)})(?:e?s)?(?![\w-])", text)


def too_early(term: str, words: str) -> str:
    """The place where a text uses a word before it links it; nothing if there is none."""
    link = next((m.start() for m in TERM.finditer(words) if term in (m[1], m[2])), len(words))
    plain = TERM.sub(lambda found: "_" * len(found[0]), words)
    first = stands(term, plain)
    return plain[max(0, first.start() - 40) : first.end() + 40] if first and first.start() < link else ""


# ------------------------------------------------------------------------------------------------- words


def test_a_word_used_before_its_link_is_found() -> None:
    assert too_early("rank", "On two ranks. A {term}`rank` is one.") == "On two ranks. A ____________ is one."
    assert not too_early("rank", "A {term}`rank`, and its ranks.")
    assert not too_early("rank", "On {term}`two ranks <rank>` the ranks are frank.")
    assert not too_early("checkpoint", "A sharded checkpoint.")  # another entry
    assert too_early("DDP", "DDP")
    assert not too_early("DDP", "ddp")
    assert in_words("# A rank\n\na `rank` of $N$ {doc}`ranks <x>` {term}`rank`") == "a of {term}`rank`"


def test_the_glossary_is_in_order_and_says_where_each_word_is_explained() -> None:
    order = [word.lower().replace("ψ", "psi") for word in entries()]
    assert order == sorted(order)
    for word, definition in entries().items():
        ((number, chapter),) = re.findall(r"\{doc\}`Chapter (\d+) <../notebooks/(\w+)>`\.$", definition)
        (path,) = (path for path in CHAPTERS if path.stem.startswith(f"{int(number):02}_"))
        assert path.stem == chapter, word
        assert word in linked(text_of(path)), f"{chapter} is to explain {word}, and does not link it"


@pytest.mark.parametrize(
    "page", [*CHAPTERS, *sorted((ROOT / "book").glob("*.md"))], ids=lambda path: path.stem
)
def test_linked_words_are_in_the_glossary(page: Path) -> None:
    text = text_of(page) if page in CHAPTERS else page.read_text(encoding="utf-8")
    assert set(linked(text)) <= set(entries())


@each_chapter
def test_words_of_the_glossary_are_linked_where_a_chapter_first_uses_them(path: Path) -> None:
    words = in_words(text_of(path))
    early = {term: too_early(term, words) for term in entries() if term not in EVERYDAY}
    assert not {term: place for term, place in early.items() if place}


@each_chapter
def test_a_word_is_linked_once_in_a_part(path: Path) -> None:
    for part in re.split(r"^## ", text_of(path), flags=re.M):
        words = linked(in_words(part))
        assert len(words) == len(set(words)), {word for word in words if words.count(word) > 1}


# ----------------------------------------------------------------------------------------------- the parts


@each_chapter
def test_a_chapter_has_its_number_and_its_parts_in_order(path: Path) -> None:
    assert text_of(path).lstrip().startswith(f"# {int(path.stem[:2])} ")
    assert re.findall(r"^## (.*)$", text_of(path), re.M) == PARTS


@each_chapter
def test_exercises_are_numbered_by_chapter(path: Path) -> None:
    numbers = re.findall(r"^### Exercise ([\d.]+): ", text_of(path), re.M)
    assert numbers == [f"{int(path.stem[:2])}.{i}" for i in range(1, len(numbers) + 1)]
    assert 2 <= len(numbers) <= 4


@each_chapter
def test_a_chapter_ends_with_what_was_learned_and_where_to_go(path: Path) -> None:
    ending = text_of(path).partition(f"## {PARTS[-1]}\n")[2]
    assert len(re.findall(r"^- ", ending, re.M)) >= 3
    number = CHAPTERS.index(path) + 1
    following = CHAPTERS[number].stem if number < len(CHAPTERS) else "../book/running"
    assert re.search(rf"^Next: .*<{following}>`", ending, re.M | re.S)


# --------------------------------------------------------------------------------- figures and equations


@each_chapter
def test_each_figure_has_a_name_a_caption_and_a_text_for_who_cannot_see_it(path: Path) -> None:
    figures = 0
    for cell in cells(path):
        if cell["cell_type"] == "code" and cell["source"].splitlines()[-1:] == ["fig"]:
            shown = cell["metadata"].get("mystnb", {})
            assert shown["figure"]["name"].startswith("fig-"), cell["id"]
            assert shown["figure"]["caption"].endswith("."), cell["id"]
            assert len(shown["image"]["alt"]) > 40, cell["id"]
            figures += 1
    assert figures >= 1


def test_figures_have_names_of_their_own_and_the_text_names_no_other() -> None:
    names = [
        cell["metadata"]["mystnb"]["figure"]["name"]
        for path in CHAPTERS
        for cell in cells(path)
        if "figure" in cell["metadata"].get("mystnb", {})
    ]
    assert len(names) == len(set(names))
    named = {name for path in CHAPTERS for name in re.findall(r"\{numref\}`([^`]+)`", text_of(path))}
    assert named <= set(names)


def test_displayed_equations_have_a_number_and_are_referred_to_by_it() -> None:
    texts = [text_of(path) for path in CHAPTERS]
    labels = [label for text in texts for label in re.findall(r"^\$\$$.*?^\$\$([^\n]*)$", text, re.M | re.S)]
    assert all(re.fullmatch(r" \(eq-[a-z-]+\)", label) for label in labels), labels
    names = [label[2:-1] for label in labels]
    assert len(names) == len(set(names))
    assert set(names) == {name for text in texts for name in re.findall(r"\{eq\}`([^`]+)`", text)}


# ------------------------------------------------------------------------------------------------- shape


def words_of(path: Path) -> int:
    """Words of all of a chapter's text, formulas and tables too."""
    return sum(len(cell["source"].split()) for cell in cells(path) if cell["cell_type"] == "markdown")


@each_chapter
def test_a_chapter_can_be_read_at_one_sitting(path: Path) -> None:
    assert len(cells(path)) <= 50
    assert words_of(path) <= 2200


@each_chapter
def test_a_chapter_says_how_long_it_takes_and_what_it_needs(path: Path) -> None:
    said = re.search(
        r"^\*(\d+) minutes, and (\d+) for the exercises\. Difficulty [123] of 3\. Needs (.+)\.\*$",
        cells(path)[0]["source"],
        re.M,
    )
    assert said
    reading = max(15, 5 * round(words_of(path) / 90 / 5))
    exercises = len(re.findall(r"^### Exercise ", text_of(path), re.M))
    assert (int(said[1]), int(said[2])) == (reading, 15 * exercises)
    before = {int(one.stem[:2]) for one in CHAPTERS[: CHAPTERS.index(path)]}
    assert {int(number) for number in re.findall(r"\d+", said[3])} <= before


@each_chapter
def test_a_chapter_opens_with_its_question_and_picture(path: Path) -> None:
    """What is shown unfolded before the first figure is text; imports and the code of figures are folded."""
    for cell in cells(path):
        if cell["id"] == "setup" or cell["source"].splitlines()[-1:] == ["fig"]:
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
    assert not re.search(r"\$\$|\{eq\}|\{numref\}", card["source"])  # it is shown on two pages
