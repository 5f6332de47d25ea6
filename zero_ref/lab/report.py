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
    page = _PAGE.substitute(
        style=_STYLE,
        title=escape(title),
        lead=f'<p class="lead">{escape(lead)}</p>' if lead else "",
        verdict_class="good" if equal else "bad",
        verdict=escape(text),
        misses="".join(f"<li>{escape(miss)}</li>" for miss in misses),
        head="".join(_head(i, column, rows) for i, column in enumerate(columns)),
        body="\n".join(_row(columns, row) for row in rows),
        figures="\n".join(_figure(Exhibit(*figure)) for figure in figures),
        environment="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
            for name, value in (environment or {}).items()
        ),
    )
    Path(path).write_text(page, encoding="utf-8")


def verdict(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> tuple[bool, str, list[str]]:
    """Whether every prediction equals its measurement, the same in a sentence, and those that do not.

    >>> verdict(["strategy", "calls"], [["ddp", Check(4, 4)], ["zero", Check(8, 9)]])
    (False, '1 of 2 predictions equals its measurement', ['zero, calls: predicted 8, measured 9'])

    A table without a Check has no verdict to be proud of: it counts as not equal.
    """
    checks = [
        (f"{row[0]}, {column}", cell)
        for row in rows
        for column, cell in zip(columns, row)
        if isinstance(cell, Check)
    ]
    if not checks:
        return False, "No prediction was held against a measurement", []
    misses = [
        f"{name}: predicted {_exact(cell.predicted, cell.unit)}, measured {_exact(cell.measured, cell.unit)}"
        for name, cell in checks
        if not cell.equal
    ]
    count = len(checks) - len(misses)
    verb = "equals its" if count == 1 else "equal their"
    noun = "prediction" if len(checks) == 1 else "predictions"
    return not misses, f"{count} of {len(checks)} {noun} {verb} measurement", misses


# ------------------------------------------------------------------------------------------ parts of the page


def _head(index: int, column: str, rows: Sequence[Sequence[Cell]]) -> str:
    checked = any(isinstance(row[index], Check) for row in rows)
    note = "<small>predicted | measured</small>" if checked else ""
    return f'<th scope="col">{escape(column)}{note}</th>'


def _row(columns: Sequence[str], row: Sequence[Cell]) -> str:
    cells = "".join(_cell(column, cell) for column, cell in zip(columns[1:], row[1:]))
    return f'<tr><th scope="row">{escape(_plain(row[0]))}</th>{cells}</tr>'


def _cell(column: str, cell: Cell) -> str:
    label = f' data-label="{escape(column)}"'
    if not isinstance(cell, Check):
        return f"<td{label}><span>{escape(_plain(cell))}</span></td>"
    # Rounded numbers could look equal where the exact ones are not: then the exact ones are shown.
    show = _rounded if cell.equal else _exact
    exact = f"predicted {_exact(cell.predicted, cell.unit)}, measured {_exact(cell.measured, cell.unit)}"
    return (
        f'<td{label} class="{"equal" if cell.equal else "differs"}" title="{escape(exact)}">'
        f"<span>{escape(show(cell.predicted, cell.unit))}<i> | </i>{escape(show(cell.measured, cell.unit))}"
        f"<b>{' =' if cell.equal else ' ≠'}</b></span></td>"
    )


def _plain(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Check):
        raise ValueError(f"the first cell of a row is its name, not a check: {cell}.")
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.6g}"


def _rounded(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else _exact(value, unit)


def _exact(value: float, unit: str) -> str:
    number = f"{int(value):,}" if value == int(value) else repr(value)
    return f"{number} {'B' if unit == 'bytes' else unit}".rstrip()


def _figure(exhibit: Exhibit) -> str:
    if not exhibit.alt.strip():
        raise ValueError(f"the picture {exhibit.caption!r} has no alternative text: say what it shows.")
    return (
        f'<figure><img src="{_data_uri(exhibit.image)}" alt="{escape(exhibit.alt)}">'
        f"<figcaption>{escape(exhibit.caption)}</figcaption></figure>"
    )


def _data_uri(image: str | Path | Drawn) -> str:
    # In an <img>, not inline: two SVGs may use the same ids, and an image can run no script.
    if not isinstance(image, str | Path):
        content, kind = image._repr_svg_().encode(), "svg+xml"
    else:
        kinds = {".png": "png", ".svg": "svg+xml"}
        kind = kinds.get(Path(image).suffix.lower(), "")
        if not kind:
            raise ValueError(f"cannot show {Path(image).name!r}: a picture is a .png or .svg file.")
        content = Path(image).read_bytes()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


_STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --panel: #f5f4f1; --ink: #20242a; --muted: #5c6470; --line: #dedcd6;
  --good: #0b6b4a; --good-ground: #e5f3ec; --bad: #b3001b; --bad-ground: #fdeaea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171b; --panel: #1d2126; --ink: #e8e6e1; --muted: #a2a9b4; --line: #343a42;
    --good: #7fd6b0; --good-ground: #12312a; --bad: #ff9a9a; --bad-ground: #40161b;
  }
  figure img { filter: brightness(.93); }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: clamp(1.25rem, 4vw, 3.5rem) clamp(1rem, 4vw, 2.5rem);
  background: var(--ground); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 3rem 0 1rem; }
.lead { margin: 0; max-width: 44rem; color: var(--muted); }
.verdict {
  margin: 1.75rem 0 0; padding: .9rem 1.2rem; border-radius: 10px; border-left: 5px solid currentColor;
  font-weight: 600; font-size: 1.05rem;
}
.verdict ul { margin: .5rem 0 0; padding-left: 1.2rem; font-weight: 400; font-size: .95rem; }
.verdict ul:empty { display: none; }
.good { color: var(--good); background: var(--good-ground); }
.bad { color: var(--bad); background: var(--bad-ground); }
.narrow { display: none; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .65rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
tr > :last-child { padding-right: 0; }
thead th { color: var(--muted); font-weight: 500; vertical-align: bottom; line-height: 1.3; }
thead small { display: block; font-size: .78rem; font-weight: 400; white-space: nowrap; }
tbody th { font-weight: 600; white-space: nowrap; }
td i { color: var(--muted); font-style: normal; }
td b { font-weight: 600; }
.equal b { color: var(--good); }
.differs, .differs i { color: var(--bad); font-weight: 700; }
.pictures { display: grid; gap: 2.5rem 2rem; align-items: start; }
@media (min-width: 900px) { .pictures { grid-template-columns: 1fr 1fr; } }
figure { margin: 0; }
figure img {
  display: block; width: 100%; height: auto; background: #fcfbf9; border-radius: 10px;
  border: 1px solid var(--line);
}
figcaption { margin-top: .65rem; color: var(--muted); font-size: .92rem; }
dl { display: grid; gap: .35rem 2rem; margin: 0; font-size: .92rem; }
@media (min-width: 900px) { dl { grid-template-columns: 1fr 1fr; } }
dl div { display: flex; gap: .75rem; border-bottom: 1px solid var(--line); padding: .3rem 0; }
dt { color: var(--muted); flex: none; }
dd { margin: 0 0 0 auto; text-align: right; overflow-wrap: anywhere; }
@media (max-width: 720px) {
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody, tr, th, td { display: block; }
  tr { background: var(--panel); border-radius: 10px; padding: .8rem 1rem; margin-bottom: .9rem; }
  tbody th { padding: 0 0 .4rem; border: 0; font-size: 1.02rem; }
  .narrow { display: block; margin: -.6rem 0 1rem; color: var(--muted); font-size: .92rem; }
  td, tr > :last-child { display: flex; align-items: baseline; padding: .4rem 0; }
  td::before {
    content: attr(data-label); margin-right: auto; padding-right: 1rem; color: var(--muted);
    text-align: left; white-space: normal; font-weight: 400; line-height: 1.35;
  }
  tr > :last-child { border-bottom: 0; }
}
"""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<h1>$title</h1>
$lead
<div class="verdict $verdict_class" role="status">$verdict<ul>$misses</ul></div>
<h2>Predicted and measured</h2>
<p class="narrow">Pairs are predicted | measured.</p>
<div class="scroll"><table>
<thead><tr>$head</tr></thead>
<tbody>
$body
</tbody>
</table></div>
<h2>Pictures</h2>
<div class="pictures">
$figures
</div>
<h2>Where this ran</h2>
<dl>$environment</dl>
</main>
</body>
</html>
""")
