"""An explorer as a page shows it: still, until the reader starts it. And the parts that other pages share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from zero_ref.live import explorer
from zero_ref.live.explorer import Value
from zero_ref.live.svg import element

BUILT = "ZERO_REF_PAGE"
"""Set in the environment while the book is built, by book/execute.py and book/_ext/explorer.py."""

WIDE, NARROW = 720.0, 340.0
"""Pixels of the two still pictures: a style sheet shows the one that fits."""


def html(name: str, **values: Value) -> str:
    """A piece of a page: the picture at these values, in words, as a table, and the place of the controls.

    Whether it moves is not decided here. `book/static/live/explorer.js` looks for such pieces, fetches Python
    when the reader asks for it, and replaces picture, words and table by `live.answer`'s. Without that script
    the piece stands still and says so.

    >>> html("memory").startswith('<section class="explorer" data-explorer="memory"')
    True

    Raises:
        ValueError: there is no such explorer, control or option.
    """
    shown = explorer(name)
    wide, narrow = (shown.answer(width, **values) for width in (WIDE, NARROW))
    heading = f"explorer-{name}"
    # A cell without a character would close itself, which HTML does not know.
    head, *body = [[escape(cell) or " " for cell in row] for row in wide.table]
    numbers = table(head, [[first, *(element("td", cell) for cell in others)] for first, *others in body])
    region = element(
        "div", numbers, class_="explorer-table", tabindex=0, role="region", aria_label="The numbers"
    )
    return element(
        "section",
        element("p", escape(shown.title), class_="explorer-title", id=heading),
        element("div", "<!-- controls -->", class_="explorer-controls", hidden="hidden"),
        element("p", "The picture stands still: this page has no Python to run.", class_="explorer-note"),
        two_widths("explorer", wide.svg, narrow.svg),
        element("p", escape(wide.words), class_="explorer-words", aria_live="polite"),
        element("details", element("summary", "The numbers"), region, class_="explorer-numbers"),
        class_="explorer",
        data_explorer=name,
        data_values=json.dumps(values),
        aria_labelledby=heading,
    )


def two_widths(name: str, wide: str, narrow: str) -> str:
    """A picture in two widths, of which the page's style sheet shows one; `name` begins the classes."""
    both = (element("div", wide, class_=f"{name}-wide"), element("div", narrow, class_=f"{name}-narrow"))
    return element("div", *both, class_=f"{name}-picture")


def table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table, of pieces of HTML: the heads; for each row its name and its `td` elements."""
    columns = [element("th", head, scope="col") for head in heads]
    body = [element("tr", element("th", name, scope="row"), *cells) for name, *cells in rows]
    return element("table", element("thead", element("tr", *columns)), element("tbody", *body))
