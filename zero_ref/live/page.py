"""An explorer as a page shows it: still, until the reader starts it."""

from __future__ import annotations

import json
from html import escape

from zero_ref.live import explorer
from zero_ref.live.explorer import Answer, Value
from zero_ref.live.svg import element

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
    answers = {width: shown.answer(width, **values) for width in (WIDE, NARROW)}
    heading = f"explorer-{name}"
    return element(
        "section",
        element("p", escape(shown.title), class_="explorer-title", id=heading),
        element("div", "<!-- controls -->", class_="explorer-controls", hidden="hidden"),
        element("p", "The picture stands still: this page has no Python to run.", class_="explorer-note"),
        element(
            "div",
            element("div", answers[WIDE].svg, class_="explorer-wide"),
            element("div", answers[NARROW].svg, class_="explorer-narrow"),
            class_="explorer-picture",
        ),
        element("p", escape(answers[WIDE].words), class_="explorer-words", aria_live="polite"),
        element(
            "details",
            element("summary", "The numbers"),
            element(
                "div",
                table(answers[WIDE]),
                class_="explorer-table",
                tabindex=0,
                role="region",
                aria_label="The numbers",
            ),
            class_="explorer-numbers",
        ),
        class_="explorer",
        data_explorer=name,
        data_values=json.dumps(values),
        aria_labelledby=heading,
    )


def table(answer: Answer) -> str:
    """The numbers for reading, as an HTML table."""
    head, *body = answer.table
    rows = [
        element(
            "tr",
            element("th", escape(first), scope="row"),
            *(element("td", escape(cell) or " ") for cell in others),
        )
        for first, *others in body
    ]
    columns = [element("th", escape(cell) or " ", scope="col") for cell in head]
    return element("table", element("thead", element("tr", *columns)), element("tbody", *rows))
