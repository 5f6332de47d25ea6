"""Sizes of the package against their targets: the road of a call, lines, branches, comments.

python -m benchmarks.seams [FOLDER]     # of the repository; another checkout may be counted with this script

How each row is counted:

- functions, files: those that one call passes on two ranks of Gloo; `roads.py` lists the calls.
- lines: all lines of the files, with docstrings, comments and empty ones. The core is the code that trains.
- branches of a function: one for each if, elif, conditional expression, for, while, except, case, `and` and
  `or`, and for each `for` and `if` of a comprehension. That is the cyclomatic complexity less 1. Nested
  functions belong to the function that has them.
- lines of code of a class: without docstrings, comments and empty lines.
- attributes of a class: names that its methods set on `self`, and annotated names of its body.
- comments: those that tokenize finds, without directives to tools (`# type: ignore`), to 100 lines of code.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

ROOT = Path(
    sys.argv[1] if len(sys.argv) > 1 and __name__ == "__main__" else Path(__file__).parents[1]
).resolve()
PACKAGE = ROOT / "zero_ref"

CORE = ("plan", "comm", "shard", "state", "optimizer", "backward", "files", "clip", "local_sgd", "dropin")
STAIRS = ("stairs", "minimal")
FOLDERS = ("zero_ref", "zero_ref_course", "benchmarks", "tests")

MOST_BRANCHES = 12
MOST_CLASS_LINES = 250
MOST_ATTRIBUTES = 12

DIRECTIVE = re.compile(r"#\s*(type:|noqa|fmt:|pragma|doctest:|ruff:)")
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The file's syntax."""
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> int:
        """The number of all lines of the file."""
        return len(self.text.splitlines())

    @cached_property
    def comments(self) -> int:
        """Comments that are written for a reader."""
        return sum(
            token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)
            for token in tokens(self.text)
        )

    @cached_property
    def code_lines(self) -> set[int]:
        """The numbers of the lines that have code, from 1."""
        found: set[int] = set()
        for token in tokens(self.text):
            if token.type not in NOT_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if is_docstring(node):
                found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return found

    @cached_property
    def functions(self) -> list[tuple[str, Function]]:
        """Functions and methods by their name; nested functions are part of them."""
        return list(functions_in(self.tree, self.name))

    @cached_property
    def classes(self) -> list[tuple[str, ast.ClassDef]]:
        """Classes by their name."""
        return [
            (f"{self.name}.{node.name}", node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef)
        ]

    def lines_of(self, node: ast.ClassDef) -> int:
        """Lines of code of a class."""
        return len(self.code_lines.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Split the text of a module."""
    return tokenize.generate_tokens(io.StringIO(text).readline)


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether it is a string by itself: of a module, a class, a function, or after a name."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def functions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Find the functions of a module or class, and the methods of its classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from functions_in(child, f"{prefix}.{child.name}")
        else:  # a function may stand under an `if`
            yield from functions_in(child, prefix)


def branches(node: ast.AST) -> int:
    """Count the branches of a function."""
    count = 0
    for part in ast.walk(node):
        if isinstance(
            part, (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
        ):
            count += 1
        elif isinstance(part, ast.BoolOp):
            count += len(part.values) - 1
        elif isinstance(part, ast.comprehension):
            count += 1 + len(part.ifs)
    return count


def attributes(node: ast.ClassDef) -> set[str]:
    """Name the attributes of a class's objects."""
    of_self = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if isinstance(part.value, ast.Name) and part.value.id == "self"
    }
    annotated = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        if "ClassVar" not in ast.unparse(part.annotation)
    }
    return of_self | annotated


def modules_of(folder: str) -> list[Module]:
    """Read a folder of the package, or its module of that name."""
    paths = [PACKAGE / f"{folder}.py", *sorted((PACKAGE / folder).rglob("*.py"))]
    return [
        Module(path.relative_to(PACKAGE).with_suffix("").as_posix(), path.read_text())
        for path in paths
        if path.is_file()
    ]


def comment_rate(modules: list[Module]) -> float:
    """Count comments to 100 lines of code."""
    code = sum(len(module.code_lines) for module in modules)
    return 100 * sum(module.comments for module in modules) / code if code else 0.0


def largest_first(sized: Iterable[tuple[int, str]]) -> str:
    """Write names with their numbers."""
    return ", ".join(f"{name} {size}" for size, name in sorted(sized, reverse=True)) or "-"


def print_table(rows: Iterable[tuple[str, object, object]]) -> None:
    """Print what is counted, its size today, and the target."""
    print("| | today | target |\n|---|--:|--:|")
    for what, today, target in rows:
        print(f"| {what} | {today} | {target} |")


def print_sources() -> None:
    """Print the sizes that the sources have."""
    folders = {folder: modules_of(folder) for folder in CORE}
    core = [module for modules in folders.values() for module in modules]
    stairs = [module for folder in STAIRS for module in modules_of(folder)]
    both = core + stairs
    branchy = [
        (count, name)
        for module in both
        for name, node in module.functions
        if (count := branches(node)) > MOST_BRANCHES
    ]
    long = [
        (size, name)
        for module in both
        for name, node in module.classes
        if (size := module.lines_of(node)) > MOST_CLASS_LINES
    ]
    wide = [
        (count, name)
        for module in both
        for name, node in module.classes
        if (count := len(attributes(node))) > MOST_ATTRIBUTES
    ]
    sizes = {folder: sum(module.lines for module in modules) for folder, modules in folders.items()}
    print_table(
        [
            ("lines: core", sum(sizes.values()), 11_000),
            *((f"lines: {folder}", size, "") for folder, size in sizes.items()),
            ("lines: stairs, with minimal.py", sum(module.lines for module in stairs), 820),
            (f"functions of more than {MOST_BRANCHES} branches", len(branchy), 0),
            (f"classes of more than {MOST_CLASS_LINES} lines of code", len(long), 0),
            (f"classes of more than {MOST_ATTRIBUTES} attributes", len(wide), 0),
            ("comments to 100 lines of code: stairs", f"{comment_rate(stairs):.1f}", 15),
            ("comments to 100 lines of code: core", f"{comment_rate(core):.1f}", 6),
        ]
    )
    print(f"\nbranches: {largest_first(branchy)}")
    print(f"\nlines of code: {largest_first(long)}")
    print(f"\nattributes: {largest_first(wide)}")
    for folder in FOLDERS:
        texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
        if texts:
            print(f"\nlines of {folder}: {sum(len(text.splitlines()) for text in texts):,}", end="")
    print()


def print_roads() -> None:
    """Print the functions and files that a call passes."""
    from benchmarks import roads

    targets = {roads.STEP: 25, roads.BACKWARD: 40, roads.SAVE: 60, roads.LOAD: 90, roads.TORCHS_STEP: ""}
    found = roads.on_two_ranks()
    print_table(
        (f"functions (files): {what}", f"{len(found[what].functions)} ({len(found[what].files)})", target)
        for what, target in targets.items()
    )
    names = ", ".join(f"{Path(file).stem}.{name}" for file, name in found[roads.STEP].functions)
    print(f"\nthe road of a step: {names}\n")


if __name__ == "__main__":
    print_roads()
    print_sources()
