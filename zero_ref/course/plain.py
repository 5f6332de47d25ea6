"""A chapter's text in plain Markdown, for a reader who has the notebook and not the book around it.

The book's pages make links of `{term}` and `{cite:p}`, boxes of `:::{note}`, and number figures and
equations. Jupyter shows such marks as they are written, so `zero-ref notebooks` replaces them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

ROLE = re.compile(r"\{([a-z:]+)\}`([^`]+)`")
WORDS_AND_TARGET = re.compile(r"(.*?)\s*<[^<>]+>\s*", re.DOTALL)
EQUATION = re.compile(r"\$\$((?:(?!\$\$).)+)\$\$ *\(([\w-]+)\)", re.DOTALL)
BOX = re.compile(r"^:::\{(\w+)\} *(.*)\n((?:(?!:::).*\n)*):::$", re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


class Work(NamedTuple):
    """What a citation says of a work: who wrote it, the year if it has one, and where it is on the web."""

    authors: str
    year: str
    url: str


def plain(notebook: dict[str, Any], numbers: Mapping[str, str], works: Mapping[str, Work]) -> dict[str, Any]:
    """The notebook with its text in plain Markdown, and each caption below its figure.

    >>> text = "A {term}`shard` is a part {cite:p}`kingma2015adam`; see {eq}`eq-time`."
    >>> made = plain({"cells": [{"cell_type": "markdown", "metadata": {}, "source": text}]},
    ...              {"eq-time": "(2.3)"}, {"kingma2015adam": Work("Kingma and Ba", "2015", "")})
    >>> "".join(made["cells"][0]["source"])
    'A shard is a part (Kingma and Ba, 2015); see (2.3).'

    Args:
        notebook: what is in the file. It is left as it is.
        numbers: as `numbers_in` gives them for the whole book: a chapter names those of others too.
        works: as `works_in` gives them. What they lack is cited by its key.
    """
    made = copy.deepcopy(notebook)
    cells: list[dict[str, Any]] = []
    for cell in made["cells"]:
        cells.append(cell)
        if cell["cell_type"] == "markdown":
            text = plain_text("".join(cell["source"]), numbers, works)
            cell["source"] = text.splitlines(keepends=True)
        elif figure := _figure(cell):
            caption = plain_text(figure["caption"], numbers, works)
            number = numbers.get(figure.get("name", ""))
            source = f"**{number}** {caption}" if number else caption
            below = {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}
            cells.append(below | ({"id": f"{cell['id']}-caption"} if "id" in cell else {}))
    made["cells"] = cells
    return made


def plain_text(text: str, numbers: Mapping[str, str], works: Mapping[str, Work]) -> str:
    r"""One cell's text. Code between fences stays as it is.

    >>> print(plain_text(":::{note}\nBoth {term}`ranks <rank>`.\n:::", {}, {}))
    > **Note.** Both ranks.
    """

    def box(match: re.Match[str]) -> str:
        kind, title, body = match.groups()
        options_left_out = re.sub(r"^:\w+:.*\n", "", body, flags=re.MULTILINE).strip()
        said = f"**{title or kind.capitalize()}.** {options_left_out}"
        return "\n".join(f"> {line}".rstrip() for line in said.splitlines())

    def equation(match: re.Match[str]) -> str:
        tag = rf" \tag{{{numbers[match[2]].strip('()')}}}" if match[2] in numbers else ""
        return f"$${match[1].rstrip()}{tag}\n$$"

    def role(match: re.Match[str]) -> str:
        kind, inside = match.groups()
        if kind in ("cite:p", "cite:t"):
            cited = [_cite(key.strip(), works, in_text=kind == "cite:t") for key in inside.split(",")]
            return " and ".join(cited) if kind == "cite:t" else f"({'; '.join(cited)})"
        words = WORDS_AND_TARGET.fullmatch(inside)
        if words:
            return words[1]
        if kind in ("numref", "eq"):
            return numbers.get(inside, inside)
        return inside if kind in ("term", "doc") else f"`{inside}`"

    parts = FENCE.split(text)  # every second one is between fences
    for i in range(0, len(parts), 2):
        parts[i] = ROLE.sub(role, EQUATION.sub(equation, BOX.sub(box, parts[i])))
    return "".join(parts)


def numbers_in(chapters: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, str]:
    """The number of each figure and equation that has a name: `Fig. 3.2`, `(9.1)`, as in the book.

    Args:
        chapters: the number of each chapter, and what is in its file.
    """
    numbers: dict[str, str] = {}
    for chapter, notebook in chapters:
        figures = [_figure(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        named = [figure["name"] for figure in figures if figure and "name" in figure]
        numbers |= {name: f"Fig. {chapter}.{n}" for n, name in enumerate(named, start=1)}
        texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        equations = [match[2] for text in texts for match in EQUATION.finditer(text)]
        numbers |= {name: f"({chapter}.{n})" for n, name in enumerate(equations, start=1)}
    return numbers


def works_in(bibliography: str) -> dict[str, Work]:
    """What a BibTeX file says of each work, by its key; one field a line, as in the book's own file.

    >>> works_in("@misc{adam,\\n  author = {Kingma, D. and Ba, J.},\\n  year = {2015},\\n}")
    {'adam': Work(authors='Kingma and Ba', year='2015', url='')}
    """
    works = {}
    for entry in re.split(r"^@", bibliography, flags=re.MULTILINE)[1:]:
        key = entry.partition("{")[2].partition(",")[0].strip()
        fields = dict(re.findall(r"^\s*(\w+)\s*=\s*\{(.*)\},?\s*$", entry, re.MULTILINE))
        url = fields.get("url") or (f"https://doi.org/{fields['doi']}" if "doi" in fields else "")
        works[key] = Work(_names(fields.get("author", key)), fields.get("year", ""), url)
    return works


def _names(author: str) -> str:
    if author.startswith("{"):
        return author.strip("{}")  # a group, whose name is not to be taken apart
    names = [name.partition(",")[0] for name in author.split(" and ")]
    return " and ".join(names) if len(names) < 3 else f"{names[0]} et al."


def _cite(key: str, works: Mapping[str, Work], in_text: bool) -> str:
    if key not in works:
        return key
    authors, year, url = works[key]
    said = authors if not year else f"{authors} ({year})" if in_text else f"{authors}, {year}"
    return f"[{said}]({url})" if url else said


def _figure(cell: dict[str, Any]) -> dict[str, str]:
    """What the cell says of its figure; empty if it draws none, or one without a caption."""
    figure = cell["metadata"].get("mystnb", {}).get("figure") or {}
    return figure if "caption" in figure else {}
