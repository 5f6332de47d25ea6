"""The package's own code as a cell of the book shows it, without what the text around it says.

>>> from zero_ref.plan.partition import check_world_size
>>> source_of(check_world_size)
def check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1 rank, got {world_size}.")
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any


class Source:
    """Code that a notebook shows in colour, and a terminal as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def source_of(*functions: Callable[..., Any] | type) -> Source:
    """The code of functions and classes one after another, without docstrings and notes to the type checker.

    Args:
        functions: of the package or of a reader, as they stand in a file.
    """
    return Source("\n\n".join(without_docstrings(inspect.getsource(one)) for one in functions))


def without_docstrings(source: str) -> str:
    """Return code without its docstrings and its notes to the type checker.

    >>> print(without_docstrings('    def one():  # type: ignore\\n        "One."\\n        return 1'))
    def one():
        return 1
    """
    text = textwrap.dedent(source)
    lines: list[str | None] = list(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            said, *after = node.body
            # Below a class's docstring is a blank line.
            stop = after[0].lineno - 1 if after and isinstance(node, ast.ClassDef) else said.end_lineno
            for number in range(said.lineno - 1, stop or said.lineno):
                lines[number] = None
    return "\n".join(re.sub(r"\s*# type: .*", "", line) for line in lines if line is not None)
