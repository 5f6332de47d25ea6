"""Sphinx extension: what a stair changes in the one before, and the stub of a stair.

`{stair} buckets` shows the difference between `zero_ref/stairs/buckets.py` and the stair before it. The
directive `literalinclude` could, but its first lines have the folder of whoever builds the book.
`{stub} buckets` shows what a reader begins with.
"""

from __future__ import annotations

import difflib
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from zero_ref_course.stubs import STAIRS, path_of, stub


def difference(stair: str) -> str:
    """The lines that a stair changes, with two lines around each place.

    >>> print(difference("buckets").partition("@@")[0])
    --- owners.py
    +++ buckets.py
    <BLANKLINE>
    """
    before = STAIRS[STAIRS.index(stair) - 1]
    old, new = (path_of(name).read_text(encoding="utf-8").splitlines() for name in (before, stair))
    lines = difflib.unified_diff(old, new, f"{before}.py", f"{stair}.py", n=2, lineterm="")
    return "\n".join(lines)


class StairDirective(SphinxDirective):
    """```{stair} buckets```: the difference to the stair before."""

    required_arguments = 1
    language = "diff"

    def text(self, stair: str) -> str:
        """What is shown."""
        return difference(stair)

    def run(self) -> list[nodes.Node]:
        """Called for each directive."""
        for name in STAIRS:
            self.env.note_dependency(str(path_of(name)))
        text = self.text(self.arguments[0])
        return [nodes.literal_block(text, text, language=self.language)]


class StubDirective(StairDirective):
    """```{stub} buckets```: the file of the reader, to be filled in."""

    language = "python"

    def text(self, stair: str) -> str:
        """What is shown."""
        return stub(stair)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("stair", StairDirective)
    app.add_directive("stub", StubDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
