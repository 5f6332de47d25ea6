"""Sphinx extension: cells that a reader edits and runs in the page. They have the tag `try-it`.

A cell needs names from the cells above it: imports and results. This module finds them, so that a notebook
need not repeat code: from the cell upwards, it takes each statement that gives a missing name, and from an
import only the names that are needed. A cell above that can be edited itself is taken whole, as the reader
left it. book/static/live/cells.js runs all that with `zero_ref.live.cell`, and so does
tests/book/test_try_it.py.
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from docutils import nodes
from explorer import PYODIDE
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

TAG = "try-it"
LEFT_OUT = {"install", "exercise", "check", "solution"}
"""Tags of cells that give no names to others."""


class Trial(TypedDict):
    """A cell to try, as its page needs it.

    `cell` is the cell's id; `before` lists the code that runs first: pieces of it or other cells to try, the
    latter as `{"cell": id}`.
    """

    cell: str
    before: list[str | dict[str, str]]
    source: str


def source_of(cell: dict[str, Any]) -> str:
    """A cell's code."""
    return "".join(cell["source"])


def names_of(source: str) -> tuple[set[str], set[str]]:
    """The names that a piece of code takes from elsewhere, and those that it gives.

    >>> taken, given = names_of("total = sum(n * share for n in numels)\\ntotal += 1")
    >>> sorted(taken), sorted(given)
    (['numels', 'share'], ['total'])
    """
    taken, given = set[str](), set[str]()
    for statement in ast.parse(source).body:
        top = symtable.symtable(ast.unparse(statement), "statement", "exec")
        stored = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
        loaded = {one.get_name() for one in top.get_symbols() if one.is_referenced()}
        tables = list(top.get_children())
        for table in tables:
            tables += table.get_children()
            loaded |= {one.get_name() for one in table.get_symbols() if one.is_global()}
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            loaded.add(statement.target.id)
        elif not isinstance(statement, ast.Assign):
            loaded -= stored  # such as the variable of a loop, which is set before it is read
        taken |= loaded - given
        given |= stored
    return taken - set(dir(builtins)), given


def only(statement: ast.stmt, source: str, wanted: set[str]) -> str:
    """The source of a statement; of an import, only the names that are wanted.

    >>> source = "from math import e, pi"
    >>> only(ast.parse(source).body[0], source, {"pi"})
    'from math import pi'
    """
    if not isinstance(statement, (ast.Import, ast.ImportFrom)):
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))])
        return "\n".join(source.splitlines()[first - 1 : statement.end_lineno])
    kept = [name for name in statement.names if (name.asname or name.name.partition(".")[0]) in wanted]
    if isinstance(statement, ast.Import):
        return ast.unparse(ast.Import(kept))
    return ast.unparse(ast.ImportFrom(statement.module, kept, statement.level))


def without_answer(source: str) -> str:
    """A cell's code without the call of `reveal`: the page has shown the answer already.

    >>> without_answer("print(7)\\nreveal('ledger.stage_1', 7)")
    'print(7)'
    """
    body = ast.parse(source).body
    last = body[-1].value if body and isinstance(body[-1], ast.Expr) else None
    if isinstance(last, ast.Call) and isinstance(last.func, ast.Name) and last.func.id == "reveal":
        return "\n".join(source.splitlines()[: body[-1].lineno - 1]).rstrip()
    return source


def trial(cells: Sequence[dict[str, Any]], index: int) -> Trial:
    """A cell to try, with all that has to run before it.

    >>> cells = [
    ...     {"id": "setup", "metadata": {}, "source": "from math import e, pi\\nradius = 2\\nx = 1"},
    ...     {"id": "area", "metadata": {"tags": ["try-it"]}, "source": "print(pi * radius)"},
    ... ]
    >>> trial([{**cell, "cell_type": "code"} for cell in cells], 1)["before"]
    ['from math import pi\\nradius = 2']

    Args:
        cells: of a notebook, as in its file.
        index: of the cell among them.
    """
    source = without_answer(source_of(cells[index]))
    missing, _ = names_of(source)
    before: list[str | dict[str, str]] = []
    for cell in reversed(cells[:index]):
        tags = set(cell["metadata"].get("tags", ()))
        if cell["cell_type"] != "code" or tags & LEFT_OUT:
            continue
        if TAG in tags:
            taken, given = names_of(without_answer(source_of(cell)))
            if missing & given:
                missing = missing - given | taken
                before.append({"cell": cell["id"]})
            continue
        pieces: list[str] = []
        text = source_of(cell)
        for statement in reversed(ast.parse(text).body):
            taken, given = names_of(ast.unparse(statement))
            if missing & given:
                pieces.append(only(statement, text, missing))
                missing = missing - given | taken
        if pieces:
            before.append("\n".join(reversed(pieces)))
    return {"cell": cells[index]["id"], "before": before[::-1], "source": source}


class AddTrials(SphinxTransform):
    """Adds to each cell to try the data for the page's script, if there is a Python for it to fetch."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Called for each page."""
        tried = [
            one
            for one in self.document.findall(nodes.container)
            if one.get("nb_element") == "cell_code" and TAG in one["cell_metadata"].get("tags", ())
        ]
        if not tried or not PYODIDE.is_file():
            return
        path = Path(self.env.doc2path(self.env.docname))
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for node in tried:
            told = json.dumps(trial(cells, node["cell_index"])).replace("</", "<\\/")
            script = f'<script type="application/json" class="{TAG}">{told}</script>'
            node.insert(1, nodes.raw("", script, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_transform(AddTrials)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
