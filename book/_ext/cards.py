"""Sphinx extension: the cards of all chapters on one page, to print. The directive `{cards}` puts them in.

A chapter's card is its cell `card`: a heading and a table of its formulas. It is written there alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from zero_ref_course.editions import chapters_in

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def cards(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each chapter with its card in Markdown: the chapter's title in place of the card's own heading."""
    for path in chapters_in(folder):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title = "".join(cells[0]["source"]).partition("\n")[0].removeprefix("# ")
        for cell in cells:
            if cell["id"] == "card":
                table = "".join(cell["source"]).partition("\n")[2].strip()
                yield path, f"## [{title}](../notebooks/{path.name})\n\n{table}"


class CardsDirective(SphinxDirective):
    """```{cards}```: a section for each chapter."""

    def run(self) -> list[nodes.Node]:
        """Called for each directive."""
        made = nodes.container(classes=["cards"])
        for path, text in cards(NOTEBOOKS):
            self.env.note_dependency(str(path))
            self.state.nested_parse(
                StringList([*text.splitlines(), ""], path.name), self.content_offset, made, match_titles=True
            )
        return made.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("cards", CardsDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
