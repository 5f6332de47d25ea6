"""Sphinx extension: the differences between a stair and the one before, and the stub of a stair.

`{stair} buckets` shows the difference between `zero_ref/stairs/buckets.py` and the stair before it, as the
chapters do. `{stub} buckets` shows the file that a reader begins with.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from zero_ref.lab.stairs import StairDiff, path_of
from zero_ref.stairs import STAIRS
from zero_ref_course.stubs import stub


class StairDirective(SphinxDirective):
    """```{stair} buckets```: the difference to the stair before."""

    required_arguments = 1

    def shown(self, stair: str) -> nodes.Node:
        """Return the comparison as HTML."""
        return nodes.raw("", StairDiff(stair)._repr_html_(), format="html")

    def run(self) -> list[nodes.Node]:
        """Called for each directive."""
        for name in STAIRS:
            self.env.note_dependency(str(path_of(name)))
        return [self.shown(self.arguments[0])]


class StubDirective(StairDirective):
    """```{stub} buckets```: the file of the reader, to be filled in."""

    def shown(self, stair: str) -> nodes.Node:
        """Return the stub as a block of Python."""
        text = stub(stair)
        return nodes.literal_block(text, text, language="python")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("stair", StairDirective)
    app.add_directive("stub", StubDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
