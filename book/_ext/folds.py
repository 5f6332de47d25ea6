"""Sphinx extension: the bar of a folded cell describes the code in the cell. Cells of checks leave the page.

MyST-NB would write "Show code cell source" on every bar, and a reader could not tell the imports from the
code of a picture. The kind of a cell is found from its id, from the caption or the alternative text of its
picture, or else from a tag with the name of the kind. `BARS` has the kinds. A cell of checks, whose id ends
in `-asserts`, is run with its notebook, and tells a reader of the page nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

BARS = {
    "imports": "Imports",
    "picture": "How this picture is drawn",
    "functions": "Functions that the next cells use",
    "result": "How this result is computed",
    "solution": "A solution",
}
"""The words on the bar of each kind of folded cell."""

CHECKS = "checks"
"""The kind of cells that stay in the notebook: asserts of the numbers that the text prints."""


def kind_of(cell: dict[str, Any]) -> str | None:
    """The kind of a cell, CHECKS or a key of BARS; None if nothing tells it.

    >>> kind_of({"id": "setup", "metadata": {}})
    'imports'
    >>> kind_of({"id": "run-asserts", "metadata": {"tags": ["hide-input"]}})
    'checks'
    >>> kind_of({"id": "tools", "metadata": {"tags": ["hide-input", "functions"]}})
    'functions'

    Args:
        cell: of a notebook, as in its file.
    """
    metadata = cell["metadata"]
    named = [tag for tag in metadata.get("tags", ()) if tag in BARS or tag == CHECKS]
    if named:
        return str(named[0])
    if cell["id"] == "setup":
        return "imports"
    if metadata.get("mystnb", {}).keys() & {"figure", "image"}:
        return "picture"
    return CHECKS if cell["id"].endswith("-asserts") else None


class NameBars(SphinxTransform):
    """Names the bars, which MyST-NB makes later, when the page is written, and takes checks out."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Called for each page."""
        folded = [one for one in self.document.findall(nodes.container) if one.get("hide_mode")]
        if not folded:
            return
        path = Path(self.env.doc2path(self.env.docname))
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for node in folded:
            cell = cells[node["cell_index"]]
            kind = kind_of(cell)
            if kind == CHECKS:
                node.parent.remove(node)
                continue
            if kind is None:
                logging.getLogger(__name__).warning(
                    "cell %r is folded, and nothing says what it is: give it one of the tags %s",
                    cell["id"],
                    ", ".join(BARS),
                    location=node,
                )
                continue
            node["prompt_show"] = node["prompt_hide"] = BARS[kind]
            node["classes"].append(f"fold-{kind}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_transform(NameBars)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
