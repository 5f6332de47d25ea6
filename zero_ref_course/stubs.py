"""The reader's own file, from the stairs: whole, as an answer, or as a stub to be filled in.

The rungs of `my_zero.py` are the stairs in `zero_ref/stairs/`, one or two rungs each. The reader's file
stands alone and calls its class `MyZero`; otherwise an answer is the stair, word for word.
"""

from __future__ import annotations

import ast

from zero_ref.lab.own import CLASS
from zero_ref.lab.stairs import CLASS as OUR_CLASS, in_one_file
from zero_ref.stairs import BEFORE


def answer(stair: str) -> str:
    """A stair as the reader's file, which also has the functions of the stairs before.

    >>> "def assign_owners(" in answer("buckets"), "zero_ref" in answer("buckets")
    (True, False)
    """
    return '"""My own ZeRO."""\n\n' + in_one_file(stair).replace(OUR_CLASS, CLASS)


def stub(stair: str) -> str:
    """The reader's file with what this stair adds or changes left to be written.

    >>> answer("shards").count("raise NotImplementedError"), stub("shards").count("raise NotImplementedError")
    (0, 5)
    """
    source = answer(stair)
    before = _functions(answer(BEFORE[stair])) if stair in BEFORE else {}
    lines = source.splitlines()
    for name, function in reversed(_functions(source).items()):
        if name not in before or _body(before[name]) != _body(function):
            # Comments above the first statement are part of the body.
            kept = function.body[0] if ast.get_docstring(function) else function.returns
            assert kept is not None
            indent = " " * function.body[0].col_offset
            lines[kept.end_lineno : function.end_lineno] = [f"{indent}raise NotImplementedError"]
    return "\n".join(lines) + "\n"


def _functions(source: str) -> dict[str, ast.FunctionDef]:
    """Functions and methods by name, in their order in the file."""
    found = {}
    for node in ast.parse(source).body:
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef):
                found[one.name] = one
    return found


def _body(function: ast.FunctionDef) -> str:
    return "\n".join(map(ast.unparse, function.body[bool(ast.get_docstring(function)) :]))
