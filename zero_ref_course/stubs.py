"""The reader's own file, from the stairs: whole, as an answer, or as a stub to be filled in.

The rungs of `my_zero.py` are the stairs in `zero_ref/stairs/`, one or two rungs each. The reader's file
stands alone and calls its class `MyZero`; otherwise an answer is the stair, word for word.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import zero_ref.stairs
from zero_ref.lab.own import CLASS

STAIRS = ("owners", "buckets", "shards", "overlap", "checkpoint")

OUR_CLASS = "MinimalZero"


def path_of(stair: str) -> Path:
    """The file of a stair."""
    return Path(zero_ref.stairs.__file__).with_name(f"{stair}.py")


def answer(stair: str) -> str:
    """A stair as the reader's file, which also has the functions of the stairs before.

    >>> "def assign_owners(" in answer("buckets"), "zero_ref" in answer("buckets")
    (True, False)
    """
    place = STAIRS.index(stair)
    sources = [path_of(name).read_text(encoding="utf-8") for name in STAIRS[: place + 1]]
    above, classes = zip(*(source.split(f"\n\nclass {OUR_CLASS}") for source in sources))
    begins = [re.search(r"^(def|@)", text, re.MULTILINE) for text in above]
    functions = [text[match.start() :] for text, match in zip(above, begins) if match]
    parts = [_head(sources), *functions, f"class {CLASS}{classes[-1].replace(OUR_CLASS, CLASS)}"]
    return "\n\n\n".join(part.strip() for part in parts) + "\n"


def _head(sources: list[str]) -> str:
    """The first lines of the file, with all imports."""
    plain, names_from = set(), dict[str, set[str]]()
    for line in "\n".join(sources).splitlines():
        if match := re.match(r"from (?!zero_ref|__future__)(\S+) import (.+)", line):
            names_from.setdefault(match[1], set()).update(match[2].split(", "))
        elif line.startswith("import "):
            plain.add(line)
    taken = [
        f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(names_from.items())
    ]
    first = ['"""My own ZeRO."""', "", "from __future__ import annotations", ""]
    return "\n".join([*first, *taken, "", *sorted(plain)])


def stub(stair: str) -> str:
    """The reader's file with what this stair adds or changes left to be written.

    >>> answer("shards").count("raise NotImplementedError"), stub("shards").count("raise NotImplementedError")
    (0, 3)
    """
    source, place = answer(stair), STAIRS.index(stair)
    before = _functions(answer(STAIRS[place - 1])) if place else {}
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
