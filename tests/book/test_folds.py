"""Every folded cell of a notebook says on its bar what is behind it, and checks print nothing."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

sys.path.insert(0, str(ROOT / "book" / "_ext"))
folds = importlib.import_module("folds")
sys.path.pop(0)


def folded_cells(path: Path) -> list[dict[str, Any]]:
    """The cells whose code a page and Jupyter fold."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if {"hide-input", "hide-cell"} & set(cell["metadata"].get("tags", ()))]


def tree_of(cell: dict[str, Any]) -> ast.Module:
    return ast.parse(TransformerManager().transform_cell("".join(cell["source"])))


def printed_at_once(tree: ast.Module) -> list[str]:
    """Return a cell's outputs but for a prediction's box: the calls of print, and its last value."""
    inside = {
        id(node) for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) for node in ast.walk(one)
    }
    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and id(node) not in inside
    ]
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        called = last.value.func if isinstance(last.value, ast.Call) else None
        if not (isinstance(called, ast.Name) and called.id == "reveal"):
            found.append(ast.unparse(last))
    return found


def test_the_examples_hold() -> None:
    assert doctest.testmod(folds) == (0, 3)


def test_every_folded_cell_has_a_bar_of_its_kind() -> None:
    for path in NOTEBOOKS:
        assert [
            cell["id"]
            for cell in folded_cells(path)
            if folds.kind_of(cell) not in (*folds.BARS, folds.CHECKS)
        ] == []


def test_checks_are_asserts_and_put_nothing_out() -> None:
    """An output below the bar would stand under whatever the text above is about."""
    for cell in (cell for path in NOTEBOOKS for cell in folded_cells(path)):
        if folds.kind_of(cell) == folds.CHECKS:
            tree = tree_of(cell)
            assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), cell["id"]
            assert printed_at_once(tree) == [], cell["id"]


def test_what_is_no_more_than_checks_is_folded() -> None:
    """A reader sees the code that carries an idea. Asserts alone carry none."""
    for cell in (cell for path in NOTEBOOKS for cell in json.loads(path.read_text("utf-8"))["cells"]):
        if cell["cell_type"] == "code" and not set(cell["metadata"].get("tags", ())):
            body = tree_of(cell).body
            asserts = [one for one in body if any(isinstance(node, ast.Assert) for node in ast.walk(one))]
            assert len(asserts) < max(2, len(body) / 2) or printed_at_once(tree_of(cell)), cell["id"]
