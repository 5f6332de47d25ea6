"""The package's code as a chapter shows it: all of it, less docstrings and notes to the type checker."""

from __future__ import annotations

import ast
import inspect

import pytest

from zero_ref import ZeroRedundancyOptimizer
from zero_ref.backward.overlap import OverlappedStep
from zero_ref.lab.source import source_of
from zero_ref.minimal import MinimalZero
from zero_ref.plan.partition import Partition


def as_code(source: str) -> str:
    """A program without its docstrings, from its tree."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


@pytest.mark.parametrize("shown", [MinimalZero, Partition, ZeroRedundancyOptimizer])
def test_what_is_shown_is_the_code_that_runs(shown: type) -> None:
    source = inspect.getsource(shown)
    assert ast.unparse(ast.parse(source_of(shown).text)) == as_code(source)
    assert source.count("\n    # ") == source_of(shown).text.count("\n    # "), "a comment is missing"


def test_it_has_neither_docstrings_nor_notes_to_the_type_checker() -> None:
    text = source_of(OverlappedStep.on_bucket, MinimalZero).text
    assert '"""' not in text
    assert "type: ignore" in inspect.getsource(OverlappedStep.on_bucket)
    assert "type: ignore" not in text
    assert text.startswith("@torch.no_grad()\ndef on_bucket(self, state, bucket):\n    if")
    assert "\n\nclass MinimalZero:\n    def __init__(" in text
