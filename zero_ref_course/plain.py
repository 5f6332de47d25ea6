"""A chapter's text for a reader who has the notebook and not the book around it.

A chapter's text is plain Markdown. But figures and equations get their numbers and captions only on the
book's pages, and links to other files lead nowhere without the book. `zero-ref notebooks` writes the numbers
and captions into the text, and replaces each link by its words.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

LINK_TO_FILE = re.compile(r"\[([^][]+)\]\((?!https?:)[^()\s]+\.(?:md|ipynb)(?:#[\w-]*)?\)")
EQUATION = re.compile(r"\$\$((?:(?!\$\$).)+)\$\$ *\(([\w-]+)\)", re.DOTALL)
FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


def plain(notebook: dict[str, Any], numbers: Mapping[str, str]) -> dict[str, Any]:
    """The notebook without links to other files, with equations numbered, and each caption below its figure.

    >>> text = "A [shard](../book/glossary.md#term-shard) is a part."
    >>> made = plain({"cells": [{"cell_type": "markdown", "metadata": {}, "source": text}]}, {})
    >>> "".join(made["cells"][0]["source"])
    'A shard is a part.'

    Args:
        notebook: the contents of the file. It is not changed.
        numbers: the result of `numbers_in`.
    """
    made = copy.deepcopy(notebook)
    cells: list[dict[str, Any]] = []
    for cell in made["cells"]:
        cells.append(cell)
        if cell["cell_type"] == "markdown":
            text = plain_text("".join(cell["source"]), numbers)
            cell["source"] = text.splitlines(keepends=True)
        elif figure := _figure(cell):
            number = numbers.get(figure.get("name", ""))
            source = f"**{number}** {figure['caption']}" if number else figure["caption"]
            below = {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}
            cells.append(below | ({"id": f"{cell['id']}-caption"} if "id" in cell else {}))
    made["cells"] = cells
    return made


def plain_text(text: str, numbers: Mapping[str, str]) -> str:
    r"""The plain text of one cell. Code between fences is not changed.

    >>> print(plain_text("$$\nx\n$$ (eq-time)", {"eq-time": "(2.3)"}))
    \begin{equation*}
    x \tag{2.3}
    \end{equation*}
    """

    def equation(match: re.Match[str]) -> str:
        tag = rf" \tag{{{numbers[match[2]].strip('()')}}}" if match[2] in numbers else ""
        # Between two $$ jupyterlab-myst would put a number of its own beside this one.
        return rf"\begin{{equation*}}{match[1].rstrip()}{tag}" + "\n" + r"\end{equation*}"

    parts = FENCE.split(text)  # every second one is between fences
    for i in range(0, len(parts), 2):
        parts[i] = LINK_TO_FILE.sub(r"\1", EQUATION.sub(equation, parts[i]))
    return "".join(parts)


def numbers_in(chapters: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, str]:
    """The number of each figure and equation that has a name: `Fig. 3.2`, `(9.1)`, as in the book.

    Args:
        chapters: the number of each chapter, and the contents of its file.
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


def _figure(cell: dict[str, Any]) -> dict[str, str]:
    """The name and caption of a cell's figure; empty if the cell draws none, or one without a caption."""
    figure = cell["metadata"].get("mystnb", {}).get("figure") or {}
    return figure if "caption" in figure else {}
