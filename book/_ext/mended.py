"""Sphinx extension: mends in the written pages for which the theme, MyST-NB and docutils have no setting.

If a new version of these writes other pages, tests/browser and the weights in book/check_pages.py notice.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

MENDED = {
    # A label that says less than the words it stands for hides them from a screen reader.
    r'<summary aria-label="Toggle hidden content">': "<summary>",
    r'(<button class="btn search-button-field [^>]*title="Search") aria-label="Search"': r"\1",
    # The fold of a part of the table of contents has only an icon.
    r'<summary>(<span class="toctree-toggle")': r'<summary aria-label="The pages below this one">\1',
    # This role is deprecated, and what is in a list has to be list items.
    r'role="doc-biblioentry"': 'role="listitem"',
    # A signature of several lines is a list of definitions without the words they define.
    r'<dl>(?=\n<dd><em class="sig-param">)': '<dl role="list">',
    r'<dd>(?=<em class="sig-param">)': '<dd role="listitem">',
    # In the list of modules those of a package whose own code is shown are a list outside of any item.
    r'</li>\n<ul>(?=<li><a href="zero_ref/)': "</li>\n",
    r'</ul>(?=<li><a href="zero_ref/)': "",
    # 1.5 MB that draw as SVG the icons which the page's style sheet draws from a font.
    r'<script src="[^"]*/fontawesome/[^"]*/js/all\.min\.js[^"]*"></script>': "",
    r'<link rel="preload" as="font"[^>]*/fa-(brands|regular)-400\.woff2" />': "",
}


def mend(app: Sphinx, exception: Exception | None) -> None:
    """Replace the pieces in every page, when all pages are written."""
    if exception is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        written = mended = page.read_text(encoding="utf-8")
        for piece, meant in MENDED.items():
            mended = re.sub(piece, meant, mended)
        if mended != written:
            page.write_text(mended, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("build-finished", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
