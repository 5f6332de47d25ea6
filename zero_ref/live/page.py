"""An explorer as a page shows it: still, until the reader starts it. And the parts that other pages share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from zero_ref.live import explorer
from zero_ref.live.explorer import Explorer, Value
from zero_ref.live.svg import Drawing, element

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
        data_along=None if values else _along(shown),
        data_alone="alone" if len(shown.controls) == 1 else None,
        aria_labelledby=heading,
    )


def _along(shown: Explorer) -> str | None:
    """Return as JSON the name, label, options and place of the control that the page's slider moves."""
    for control in shown.controls:
        if control.name == shown.along:
            words = [control.written(option) for option in control.options]
            place = list(control.options).index(control.value)
            return json.dumps({"name": control.name, "label": control.label, "words": words, "place": place})
    return None


def frames(name: str) -> dict[str, Any]:
    """An explorer's answers along its control `along`, the others where they start, for a page.

    Returns:
        `control`, as `Control.as_dict`; `answers`, for each of its options two pictures, words and a table.
    Raises:
        ValueError: there is no such explorer, or it has no such control.
    """
    shown = explorer(name)
    found = [control for control in shown.controls if control.name == shown.along]
    if not found:
        raise ValueError(f"{name} has no pictures to take along.")
    answers = []
    for value in found[0].options:
        wide, narrow = (shown.answer(width, **{shown.along: value}) for width in (WIDE, NARROW))
        answers.append({"wide": wide.svg, "narrow": narrow.svg, "words": wide.words, "table": wide.table})
    return {"control": found[0].as_dict(), "answers": answers}


def two_widths(name: str, wide: str, narrow: str) -> str:
    """A picture in two widths, of which the page's style sheet shows one; `name` begins the classes."""
    both = (element("div", wide, class_=f"{name}-wide"), element("div", narrow, class_=f"{name}-narrow"))
    return element("div", *both, class_=f"{name}-picture")


def style_of_two_widths(name: str) -> str:
    """The style sheet of an element of class `name` around `two_widths`: it shows the picture that fits.

    It goes along with the picture, so that a notebook has it too.
    """
    return f"""
.{name}{{container-type:inline-size;margin:1em 0}}
.{name} svg{{display:block;width:100%;height:auto;margin:0 auto}}
.{name}-wide svg{{max-width:760px}}
.{name}-narrow svg{{max-width:440px}}
.{name}-narrow{{display:none}}
@container (max-width:660px){{.{name}-wide{{display:none}}.{name}-narrow{{display:block}}}}
"""


class Fitted(NamedTuple):
    """A drawing that a page or a notebook shows in two widths, of which one fits: `fitted` makes it."""

    drawing: Drawing

    def _repr_html_(self) -> str:
        both = two_widths("zero-fitted", self.drawing.svg(WIDE), self.drawing.svg(NARROW))
        return element(
            "div", element("style", style_of_two_widths("zero-fitted")), both, class_="zero-fitted"
        )


def fitted(drawing: Drawing) -> Fitted:
    """Show a drawing as wide as the page, and on a phone in a narrow form whose text is as large.

    A drawing alone is drawn for one width, and a phone shrinks it. As the last line of a cell.

    >>> fitted(Drawing("nothing", lambda width: ([], 10.0)))._repr_html_().count("<svg")
    2
    """
    return Fitted(drawing)


def table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table, of pieces of HTML: the heads; for each row its name and its `td` elements."""
    columns = [element("th", head, scope="col") for head in heads]
    body = [element("tr", element("th", name, scope="row"), *cells) for name, *cells in rows]
    return element("table", element("thead", element("tr", *columns)), element("tbody", *body))
