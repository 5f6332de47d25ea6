"""A cell of the book that its reader edits and runs in the page: what it prints, or how it fails.

Python runs in the reader's browser (`book/static/live/cells.js`), so a cell has the standard library and the
modules of the package that need no more: the plan, the simulator and the explorers.
"""

from __future__ import annotations

import ast
import io
import linecache
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

MOST_PRINTED = 50_000
"""Characters after which a cell is stopped: a page that is to show more stands still."""

MOST_LINES = 16
"""Lines of a traceback that are shown, its last ones."""

THIS, ABOVE = "<this cell>", "<before this cell>"
"""The names of the cell, and of the code that ran before it, in a traceback."""


@dataclass(frozen=True)
class Ran:
    """The outcome of a cell.

    Args:
        printed: the output below the cell in a notebook: printed text, and the value of the last line.
        error: the traceback, from the reader's own code on; empty if there was no error.
    """

    printed: str
    error: str = ""


class _Printed(io.StringIO):
    """The printed text, up to a limit."""

    def write(self, text: str) -> int:
        if self.tell() + len(text) > MOST_PRINTED:
            raise RuntimeError(f"The cell was stopped: it printed more than {MOST_PRINTED:,} characters.")
        return super().write(text)


def run(before: Sequence[str], source: str) -> Ran:
    """Run a cell behind the code that it needs from above, in a namespace of its own.

    Nothing is left of it: the next run begins anew, so what a cell shows follows from what is on the page.

    >>> run(["ranks = 4"], "print(16 / ranks)\\nranks").printed
    '4.0\\n4\\n'
    >>> print(run([], "1 / 0").error)
    Traceback (most recent call last):
      File "<this cell>", line 1, in <module>
        1 / 0
        ~~^~~
    ZeroDivisionError: division by zero

    Args:
        before: pieces that run first, in this order. What they print is not shown.
        source: the cell.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = _Printed()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            _execute("\n".join(before), ABOVE, names)
        with redirect_stdout(printed), redirect_stderr(printed):
            value = _execute(source, THIS, names)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # SystemExit, too: there is no program to end
        return Ran(printed.getvalue(), _traceback(error))
    return Ran(printed.getvalue())


def _execute(source: str, name: str, names: dict[str, Any]) -> object:
    """Run a piece; gives the value of its last line, if that has one. Tracebacks find it by its name."""
    linecache.cache[name] = (len(source), None, f"{source}\n".splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        exec(compile(tree, name, "exec"), names)
        return None
    tree.body.pop()
    exec(compile(tree, name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names)


def _traceback(error: BaseException) -> str:
    """A traceback as Python writes it, from the first line of a cell on."""
    told = traceback.TracebackException.from_exception(error)
    while told.stack and told.stack[0].filename not in (THIS, ABOVE):
        del told.stack[0]
    first, *lines = "".join(told.format()).splitlines()
    if len(lines) > MOST_LINES:
        lines = ["  ...", *lines[-MOST_LINES:]]
    return "\n".join([first, *lines])
