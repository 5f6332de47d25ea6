"""The tour comes first, leads to every chapter, shows the demo's pictures, and asks nothing of its reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zero_ref_course.editions import chapters_in
from zero_ref_course.notebook import exercises_in

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "notebooks" / "00_tour.ipynb"
CELLS: list[dict[str, Any]] = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
TEXT = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")


def test_the_tour_comes_before_the_chapters_and_is_no_chapter() -> None:
    pages = re.findall(r"- file: (\S+)", (ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [f"notebooks/{path.stem}" for path in chapters_in(ROOT / "notebooks")]
    assert pages[: 1 + len(chapters)] == ["notebooks/00_tour", *chapters]


def test_the_front_page_links_to_the_tour_before_any_chapter() -> None:
    front = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", front)
    assert linked[0] == "00_tour"


def test_the_tour_ends_with_a_way_to_every_chapter() -> None:
    table = TEXT.partition("## Where next")[2]
    assert set(re.findall(r"\]\((\w+)\.ipynb\)", table)) == {
        path.stem for path in (ROOT / "notebooks").glob("*.ipynb") if path != TOUR
    }


def test_the_tour_has_no_exercises() -> None:
    assert exercises_in(TOUR) == []
    assert not {"exercise", "check", "solution"} & {
        tag for cell in CELLS for tag in cell["metadata"].get("tags", ())
    }


def test_each_picture_of_the_tour_has_a_name_a_caption_and_a_text_for_who_cannot_see_it() -> None:
    drawn = [cell for cell in CELLS if re.search(r"_picture\(|\nplots\.\w+\(.*\)$", "".join(cell["source"]))]
    assert len(drawn) == 4
    for cell in drawn:
        shown = cell["metadata"]["mystnb"]
        assert shown["figure"]["name"].startswith("fig-tour-")
        assert shown["figure"]["caption"]
        assert len(shown["image"]["alt"]) > len(shown["figure"]["caption"])
