"""One HTML page that shows a run: its verdict, its table, its pictures. `report.html` is its template.

The page is a single file. Styles and images are inside it, nothing is fetched, so it can be mailed, archived
or opened from a train. It reads at phone and at desk width, on light and on dark screens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

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

    @property
    def shown(self) -> tuple[str, str]:
        """Both numbers, rounded where they are equal: else rounded ones could look equal, and are exact."""
        return _written(self.predicted, self.unit, self.equal), _written(self.measured, self.unit, self.equal)

    @property
    def in_words(self) -> str:
        """Both numbers, exactly."""
        predicted, measured = (_written(value, self.unit) for value in (self.predicted, self.measured))
        return f"predicted {predicted}, measured {measured}"


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
    is_checked = [any(isinstance(cell, Check) for cell in cells) for cells in zip(*rows)]
    exhibits = [Exhibit(*figure) for figure in figures]
    page = _PAGES.get_template("report.html").render(
        title=title,
        style=Path(__file__).with_suffix(".css").read_text(encoding="utf-8"),
        lead=lead,
        equal=equal,
        verdict=text,
        misses=misses,
        columns=list(zip(columns, is_checked or [False] * len(columns))),
        rows=[(name, list(zip(columns[1:], cells))) for name, *cells in rows],
        figures=[(_data_uri(one), one.caption, one.alt) for one in exhibits],
        environment=environment or {},
    )
    Path(path).write_text(page + "\n", encoding="utf-8")


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
    misses = [f"{name}: {cell.in_words}" for name, cell in checks if not cell.equal]
    count = len(checks) - len(misses)
    verb = "equals its" if count == 1 else "equal their"
    noun = "prediction" if len(checks) == 1 else "predictions"
    return not misses, f"{count} of {len(checks)} {noun} {verb} measurement", misses


# ------------------------------------------------------------------------------------------ parts of the page


def _plain(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Check):
        raise ValueError(f"the first cell of a row is its name, not a check: {cell}.")
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.6g}"


def _written(value: float, unit: str, rounded: bool = False) -> str:
    if rounded and unit == "bytes":
        return format_bytes(value)
    number = f"{int(value):,}" if value == int(value) else repr(value)
    return f"{number} {'B' if unit == 'bytes' else unit}".rstrip()


def _data_uri(exhibit: Exhibit) -> str:
    # In an <img>, not inline: two SVGs may use the same ids, and an image can run no script.
    image = exhibit.image
    if not exhibit.alt.strip():
        raise ValueError(f"the picture {exhibit.caption!r} has no alternative text: say what it shows.")
    if not isinstance(image, str | Path):
        content, kind = image._repr_svg_().encode(), "svg+xml"
    else:
        kind = {".png": "png", ".svg": "svg+xml"}.get(Path(image).suffix.lower(), "")
        if not kind:
            raise ValueError(f"cannot show {Path(image).name!r}: a picture is a .png or .svg file.")
        content = Path(image).read_bytes()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # all that is put into the page but its style sheet
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters["plain"] = _plain
_PAGES.tests["check"] = lambda cell: isinstance(cell, Check)
