"""Sphinx extension: figures and equations are numbered by chapter, as exercises are: Fig. 3.2, (9.1).

Sphinx does so where it numbers the sections too. Here a chapter's title has its number already, so that it is
there in Jupyter as well; a notebook's name begins with it.
"""

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

CHAPTER = re.compile(r"notebooks/(\d\d)_")


def by_chapter(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Replace the numbers that run through the book, once Sphinx has given them."""
    for page, of_kind in env.toc_fignumbers.items():
        chapter = CHAPTER.match(page)
        if chapter:
            for kind, numbers in of_kind.items():
                in_order = sorted(numbers, key=lambda name: numbers[name])
                of_kind[kind] = {name: (int(chapter[1]), i) for i, name in enumerate(in_order, start=1)}
    return []


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx, behind its own numbering."""
    app.connect("env-get-updated", by_chapter, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
