"""One HTML page that shows a run: its verdict, its table, its pictures. Standard library only.

The page is a single file. Styles and images are inside it, nothing is fetched, so it can be mailed, archived
or opened from a train. It reads at phone and at desk width, on light and on dark screens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple, Protocol

from zero_ref.live.page import table
from zero_ref.live.svg import element
from zero_ref.simulator.ledger import format_bytes


class Check(NamedTuple):
    """A cell of the table: a number predicted before the run, and what the run gave.

    >>> Check(4096, 4096, "bytes").equal, Check(40, 44).equal
    (True, False)

    Args:
        unit: "bytes" to print MB and GB, "" for a count.
    """

    predicted: float
    measured: float
    unit: str = ""

    @property
    def equal(self) -> bool:
        return self.predicted == self.measured


class Drawn(Protocol):
    """A picture that a notebook would show as SVG, such as `zero_ref.lab.plots.figure` makes."""

    def _repr_svg_(self) -> str: ...


class Exhibit(NamedTuple):
    """A picture on the page.

    Args:
        image: a .png or .svg file, or a figure of `zero_ref.lab.plots`.
        caption: stands below it.
        alt: what the picture shows, for readers who do not see it.
    """

    image: str | Path | Drawn
    caption: str
    alt: str


Cell = str | int | float | Check


def write_report(
    path: str | Path,
    *,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    figures: Sequence[Exhibit | tuple[str | Path | Drawn, str, str]] = (),
    environment: Mapping[str, object] | None = None,
    lead: str = "",
) -> None:
    """Write the page. The verdict at its top is computed from the table's Checks.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> write_report(
    ...     Path(folder, "run.html"),
    ...     title="Two steps on two ranks",
    ...     columns=["strategy", "collectives"],
    ...     rows=[["ddp", Check(4, 4)], ["zero", Check(8, 9)]],
    ... )
    >>> "1 of 2 predictions equals its measurement" in Path(folder, "run.html").read_text()
    True

    Args:
        path: of the .html file, in a folder that exists.
        columns: heads of the table.
        rows: the first cell of each names the row.
        figures: (image, caption, alternative text) each.
        environment: what the run depended on, by name: versions, device, commit.
        lead: a sentence or two below the title.
    Raises:
        ValueError: a row has not one cell for each column; an image is neither .png nor .svg, or has no
            alternative text.
    """
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"the row of {row[:1]} has {len(row)} cells for {len(columns)} columns.")
    equal, text, misses = verdict(columns, rows)
    listed = [element("ul", *(element("li", escape(miss)) for miss in misses))] if misses else []
    heads = [_head(column, cells) for column, *cells in zip(columns, *rows)]
    body = [[escape(_plain(row[0])), *map(_cell, columns[1:], row[1:])] for row in rows]
    ran = [
        element("div", element("dt", escape(name)), element("dd", escape(str(value))))
        for name, value in (environment or {}).items()
    ]
    parts = [
        element("h1", escape(title)),
        element("p", escape(lead), class_="lead") if lead else "",
        element("div", escape(text), *listed, class_=f"verdict {'good' if equal else 'bad'}", role="status"),
        element("h2", "Predicted and measured"),
        element("p", "Pairs are predicted | measured.", class_="narrow"),
        element("div", table(heads, body), class_="scroll"),
        element("h2", "Pictures"),
        element("div", "", *(_figure(Exhibit(*figure)) for figure in figures), class_="pictures"),
        element("h2", "Where this ran"),
        element("dl", "", *ran),
    ]
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    page = _PAGE.substitute(style=style, title=escape(title), body="\n".join(parts))
    Path(path).write_text(page, encoding="utf-8")


def verdict(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> tuple[bool, str, list[str]]:
    """Whether every prediction equals its measurement, the same in a sentence, and those that do not.

    >>> verdict(["strategy", "calls"], [["ddp", Check(4, 4)], ["zero", Check(8, 9)]])
    (False, '1 of 2 predictions equals its measurement', ['zero, calls: predicted 8, measured 9'])

    A table without a Check has no verdict to be proud of: it counts as not equal.
    """
    cells = [(f"{row[0]}, {column}", cell) for row in rows for column, cell in zip(columns, row)]
    checks = [(name, cell) for name, cell in cells if isinstance(cell, Check)]
    if not checks:
        return False, "No prediction was held against a measurement", []
    misses = [f"{name}: {_in_words(cell)}" for name, cell in checks if not cell.equal]
    count = len(checks) - len(misses)
    verb = "equals its" if count == 1 else "equal their"
    noun = "prediction" if len(checks) == 1 else "predictions"
    return not misses, f"{count} of {len(checks)} {noun} {verb} measurement", misses


# ------------------------------------------------------------------------------------------ parts of the page


def _head(column: str, cells: Sequence[Cell]) -> str:
    checked = any(isinstance(cell, Check) for cell in cells)
    return escape(column) + ("<small>predicted | measured</small>" if checked else "")


def _cell(column: str, cell: Cell) -> str:
    if not isinstance(cell, Check):
        return element("td", element("span", escape(_plain(cell))), data_label=column)
    # Rounded numbers could look equal where the exact ones are not: then the exact ones are shown.
    pair = [escape(_written(value, cell.unit, cell.equal)) for value in (cell.predicted, cell.measured)]
    shown = element("span", "<i> | </i>".join(pair), element("b", " =" if cell.equal else " ≠"))
    look = "equal" if cell.equal else "differs"
    return element("td", shown, data_label=column, class_=look, title=_in_words(cell))


def _plain(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Check):
        raise ValueError(f"the first cell of a row is its name, not a check: {cell}.")
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.6g}"


def _in_words(check: Check) -> str:
    predicted, measured = (_written(value, check.unit) for value in (check.predicted, check.measured))
    return f"predicted {predicted}, measured {measured}"


def _written(value: float, unit: str, rounded: bool = False) -> str:
    if rounded and unit == "bytes":
        return format_bytes(value)
    number = f"{int(value):,}" if value == int(value) else repr(value)
    return f"{number} {'B' if unit == 'bytes' else unit}".rstrip()


def _figure(exhibit: Exhibit) -> str:
    if not exhibit.alt.strip():
        raise ValueError(f"the picture {exhibit.caption!r} has no alternative text: say what it shows.")
    image = f'<img src="{_data_uri(exhibit.image)}" alt="{escape(exhibit.alt)}">'
    return element("figure", image, element("figcaption", escape(exhibit.caption)))


def _data_uri(image: str | Path | Drawn) -> str:
    # In an <img>, not inline: two SVGs may use the same ids, and an image can run no script.
    if not isinstance(image, str | Path):
        content, kind = image._repr_svg_().encode(), "svg+xml"
    else:
        kind = {".png": "png", ".svg": "svg+xml"}.get(Path(image).suffix.lower(), "")
        if not kind:
            raise ValueError(f"cannot show {Path(image).name!r}: a picture is a .png or .svg file.")
        content = Path(image).read_bytes()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>$style</style>
</head><body><main>
$body
</main></body>
</html>
""")
