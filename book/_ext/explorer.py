"""Sphinx extension: explorers in pages, with the files that let them move.

The directive `{explorer} memory` puts in the piece of page that `zero_ref.live.page` makes; a notebook's
`explore("memory")` gives the same when the book is built. If book/vendor/ has Pyodide, pages also get the
script that starts it, and the package's standard-library modules as one archive for it to run. If not, the
pictures stand still, and say so.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from zero_ref.live import EXPLORERS
from zero_ref.live.page import frames, html

BOOK = Path(__file__).resolve().parents[1]
PACKAGE = BOOK.parent / "zero_ref"
PYODIDE = BOOK / "vendor" / "pyodide" / "pyodide.js"
MODULES = (
    "__init__.py",
    "plan/*.py",
    "local_sgd/__init__.py",
    "local_sgd/averaging.py",
    "simulator/*.py",
    "live/*.py",
)


class ExplorerDirective(SphinxDirective):
    """```{explorer} name```: controls, picture, words and numbers."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called for each directive."""
        return [nodes.raw("", html(self.arguments[0]), format="html")]


def add_script(app: Sphinx) -> None:
    """Add the slider's script to all pages; add the script that starts Python if book/vendor/ has Pyodide."""
    app.add_js_file("live/frames.js", loading_method="defer", priority=900)
    if PYODIDE.is_file():
        app.add_js_file("live/python.js", loading_method="defer", priority=400)
        for name in ("explorer.js", "cells.js"):
            app.add_js_file(f"live/{name}", loading_method="defer")
    else:
        logging.getLogger(__name__).info("book/vendor/ has no Pyodide: explorers will stand still")


def write_modules(app: Sphinx, exception: Exception | None) -> None:
    """Write the modules that Python in the browser imports to one archive, the same for the same files."""
    static = Path(app.outdir, "_static", "live")
    if exception or app.builder.format != "html" or not static.is_dir():
        return
    with zipfile.ZipFile(static / "zero_ref.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for pattern in MODULES for path in PACKAGE.glob(pattern)):
            entry = zipfile.ZipInfo(f"zero_ref/{path.relative_to(PACKAGE).as_posix()}")
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())


def write_frames(app: Sphinx, exception: Exception | None) -> None:
    """Write the pictures along one control of an explorer to a script that a page fetches for its slider."""
    if exception or app.builder.format != "html":
        return
    folder = Path(app.outdir, "_static", "live", "frames")
    folder.mkdir(parents=True, exist_ok=True)
    for name, explorer in EXPLORERS.items():
        if explorer.along:
            script = f"(window.zeroFrames ??= {{}})[{json.dumps(name)}] = {json.dumps(frames(name))};\n"
            (folder / f"{name}.js").write_text(script, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    os.environ["ZERO_REF_PAGE"] = "1"  # for notebooks that are run by the build: see zero_ref.lab.widgets
    app.add_directive("explorer", ExplorerDirective)
    app.connect("builder-inited", add_script)
    app.connect("build-finished", write_modules)
    app.connect("build-finished", write_frames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
