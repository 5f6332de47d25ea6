"""`benchmarks/seams.py` counts what it says it counts, and modules keep to their own private names."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable

import pytest

from benchmarks import seams


def module(text: str, name: str = "one") -> seams.Module:
    return seams.Module(name, textwrap.dedent(text))


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("return 1", 0),
        ("if a: return 1\nelif b: return 2\nelse: return 3", 2),
        ("return 1 if a else 2", 1),
        ("return a and b and c or d", 3),
        ("for x in a:\n    while x: x -= 1", 2),
        ("try: a()\nexcept KeyError: b()\nexcept ValueError: c()\nfinally: d()", 2),
        ("return [x for y in a for x in y if x if y]", 4),
        ("match a:\n    case 1: return b\n    case _: return c", 2),
        ("with a: return b", 0),
        ("def inner():\n    if a: return b\nreturn inner", 1),
    ],
)
def test_branches_are_the_cyclomatic_complexity_less_1(body: str, count: int) -> None:
    function = f"def function():\n{textwrap.indent(body, '    ')}\n"
    assert seams.branches(ast.parse(function)) == count


def test_lines_of_code_have_no_docstring_no_comment_and_no_empty_line() -> None:
    one = module(
        '''
        """A module,
        on two lines."""

        # A comment.
        x = {
            "key": 1,  # another
            # a third
        }
        """A docstring of x."""


        class Class:
            """A class."""

            first: int = 1  # type: ignore
            kind: ClassVar[int] = 2

            def set(self):
                self.second = """text
                that is no docstring"""
        '''
    )
    assert one.comments == 3
    assert len(one.code_lines) == 3 + 6
    ((name, node),) = one.classes
    assert (name, one.lines_of(node), seams.attributes(node)) == ("one.Class", 6, {"first", "second"})
    assert [name for name, _ in one.functions] == ["one.Class.set"]
    assert seams.comment_rate([one]) == 100 * 3 / 9


NOT_PRIVATE = {"_", "_asdict", "_replace", "_fields", "_make", "_indices", "_values"}


def is_private(name: str) -> bool:
    """Whether it has one leading underscore; methods of named tuples and of sparse tensors are public."""
    return name.startswith("_") and not name.startswith("__") and name not in NOT_PRIVATE


def private_names(one: seams.Module) -> tuple[set[str], set[str]]:
    """The private names that a module defines, and those that it uses of an object or of another module."""
    defined: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(one.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero_ref"):
            used.update(alias.name for alias in node.names)
    return set(filter(is_private, defined)), set(filter(is_private, used))


def private_uses(modules: Iterable[seams.Module]) -> list[str]:
    """The private names that a module uses, that it does not define itself, and that another one defines."""
    names = {one.name: private_names(one) for one in modules}
    uses = []
    for name, (defined, used) in names.items():
        of_others = set().union(*(theirs for other, (theirs, _) in names.items() if other != name))
        uses += [f"{name}: {private}" for private in sorted(used & of_others - defined)]
    return uses


def test_no_module_of_the_core_uses_a_private_name_of_another() -> None:
    core = [one for folder in (*seams.CORE, *seams.STAIRS) for one in seams.modules_of(folder)]
    assert len(core) > 40
    assert private_uses(core) == []


NAME = re.compile(r"`(\w+)`")
LISTED = (*seams.CORE, "stairs", "simulator", "lab")


@pytest.mark.parametrize("folder", LISTED)
def test_a_folder_says_in_its_first_lines_what_each_file_has(folder: str) -> None:
    """CONTRIBUTING.md has one line for a folder and points there."""
    files = {path.stem for path in (seams.PACKAGE / folder).iterdir() if not path.name.startswith("_")}
    text = ast.get_docstring(ast.parse((seams.PACKAGE / folder / "__init__.py").read_text())) or ""
    lists = re.findall(r"^- (`.*?(?:;|\.)$)", text, flags=re.M | re.S)
    named = {
        name for line in lists for part in line.split("; ") for name in NAME.findall(part.split(": ")[0])
    }
    assert named == files
