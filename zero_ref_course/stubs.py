"""The reader's own file, from the stairs: whole, as an answer, or as a stub to be filled in.

The rungs of `my_zero.py` are the stairs in `zero_ref/stairs/`, one or two rungs each. The reader's file
stands alone and calls its class `MyZero`; otherwise an answer is the stair, word for word. The class of the
last stair, stage 3, is a second one beside that of the stair before.
"""

from __future__ import annotations

import ast

from zero_ref.lab.own import CLASS, CLASS_3
from zero_ref.lab.stairs import CLASS as OUR_CLASS, in_one_file
from zero_ref.stairs import BEFORE

STAGE_3 = "parameters"
"""The stair whose class is given a model, where the others are given parameters."""


def answer(stair: str) -> str:
    """A stair as the reader's file, which also has the functions of the stairs before.

    >>> "def assign_owners(" in answer("buckets"), "zero_ref" in answer("buckets")
    (True, False)
    """
    source = in_one_file(stair)
    if stair == STAGE_3:
        source = with_stage_3(in_one_file(BEFORE[stair]))
    return '"""My own ZeRO."""\n\n' + source.replace(OUR_CLASS, CLASS)


def with_stage_3(source: str) -> str:
    """A file with the classes of stage 3 below its own.

    >>> [line for line in answer("parameters").splitlines() if line.startswith("class")]
    ['class MyZero:', 'class Block:', 'class MyZero3:']
    """
    above, block, below = in_one_file(STAGE_3).partition("\n\nclass Block")
    imports = above.partition("\n\n\ndef")[0]
    return f"{imports}\n\n\ndef{source.partition('def')[2]}{block}{below.replace(OUR_CLASS, CLASS_3)}"


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
    """Functions and methods by name, a method also by its class, in their order in the file."""
    found = {}
    for node in ast.parse(source).body:
        within = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef):
                found[within + one.name] = one
    return found


def _body(function: ast.FunctionDef) -> str:
    return "\n".join(map(ast.unparse, function.body[bool(ast.get_docstring(function)) :]))
