"""Sphinx extension: measured results, in pages that hold no measured number of their own.

So a page cannot disagree with the measurements. The directive `{measured} against_peers step` puts in the
result of the view with that name, called with the argument. book/findings.py makes it; benchmarks/judged.py
makes the tables of the page of validation, from simulated runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# The benchmarks are in the repository, not in the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from findings import RESULTS, VIEWS as MEASURED

from benchmarks.judged import VIEWS as VALIDATED

VIEWS = MEASURED | VALIDATED


class MeasuredDirective(SphinxDirective):
    """```{measured} view argument```: the result of the view."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called for each directive."""
        for file in RESULTS.glob("*.json"):
            self.env.note_dependency(str(file))
        # Beside the pages, as MyST-NB keeps those of notebooks; a path from the book's root begins with "/".
        folder = Path(self.env.app.outdir).parent / "measured"
        root = Path("/", os.path.relpath(folder, self.env.srcdir))
        view, *arguments = self.arguments
        pieces = list(VIEWS[view](folder, *arguments))
        joint = "\n" if all(piece.startswith("- ") for piece in pieces) else "\n\n"
        text = joint.join(pieces).replace(str(folder), str(root))
        made = nodes.container()
        self.state.nested_parse(StringList(text.splitlines(), view), self.content_offset, made)
        return made.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("measured", MeasuredDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
