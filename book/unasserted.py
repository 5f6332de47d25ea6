"""Find numbers in the prose that nothing asserts: they would go wrong unseen when the code changes.

    python book/unasserted.py [FILE ...]

Prints `file:cell: number, in its sentence` for each, and fails if there is one. Without names it reads
the notebooks, the pages in `book/` and the README: text, captions, alternative texts.

book/prose.py defines the numbers that count: not "two ranks", not "chapter 18", but "4.2 GB" and "64".

A number is asserted if one of these holds:

- In a notebook the number flows into an `assert` of a code cell: it stands in the assert, or in what the
  assert's names were made from. One with a unit or a ratio has to stand in the assert itself, in plain
  data under a name that the assert uses, or be given to a name that has the unit (`latency_us=10`). In
  the text of an exercise it may also stand in the stub, the solution or the grader.
- On a page it stands in the page's test: test_<page>.py, in a folder of tests/, or a `test_<page>_...` in
  tests/book/test_pages_numbers.py.
- A formula of numbers alone, with an equals sign, is computed: its sides have to be equal.
- A number in the text of a link to the page of numbers stands on that page: so say what others published.
  There, a row with an expression is evaluated by tests/book/test_numbers.py.
- A paragraph that names `benchmarks/NOTES.md` may say what stands there: measured times, which no assert can
  hold.
- The last resort is a comment in the same cell or page, `<!-- number: 29500, the reason -->`. These are
  counted and printed with their reasons. One that excuses nothing is an error.

A number matches a literal that rounds to it, in the number's own unit: "4.2 GB" is 4_195_000_000 and
"4.20 GB".
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from prose import MEASURED, NAMED, PERCENT, SCALES, UNIT, UNTRUE, VALUE, Number, blocks, numbers, sentences

ROOT = Path(__file__).resolve().parent.parent
GRADERS = ROOT / "zero_ref_course"

# ------------------------------------------------------------------------------------------- reading code


def literals(tree: ast.AST) -> Iterator[float]:
    """The numbers in a piece of code, sums and products of them, and those in its texts."""
    arithmetic = ast.BinOp | ast.UnaryOp | ast.Constant | ast.operator | ast.unaryop
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=int() | float() as value):
                yield float(value)
            case ast.Constant(value=str() as text):
                for digits, unit in re.findall(rf"({VALUE})\s?({UNIT})?", text):
                    value = float(digits.replace(",", ""))
                    yield value * SCALES.get(unit, 1.0)
                    if unit not in PERCENT:
                        yield value
            case ast.BinOp() if all(isinstance(part, arithmetic) for part in ast.walk(node)):
                try:
                    yield float(eval(ast.unparse(node)))
                except (TypeError, ValueError, ArithmeticError):
                    continue  # of texts


def names_in(tree: ast.AST) -> set[str]:
    """The names that a piece of code uses."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def bound(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each name that a piece of code gives a value to, and the code of the value."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((name, value) for target in targets for name in names_in(target))
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield from ((name, value) for name in names_in(target))
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield from ((name, value) for name in names_in(target))
            case ast.Call(func=ast.Attribute(value=changed)):
                yield from ((name, node) for name in names_in(changed))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node


def given(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each name of `bound`, each argument's name and each key of a dict, with the code of its value."""
    yield from bound(tree)
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=str() as name, value=value):
                yield name, value
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant):
                        yield str(key.value), value


def is_data(tree: ast.AST) -> bool:
    """Whether code is plain data: numbers, texts, names, and tuples, lists and dicts of them."""
    match tree:
        case ast.Call(func=ast.Name(id="zip" | "enumerate"), args=args):
            return all(map(is_data, args))
    plain_data = ast.Constant | ast.Tuple | ast.List | ast.Dict | ast.UnaryOp | ast.BinOp | ast.Name
    return all(
        isinstance(node, plain_data | ast.operator | ast.unaryop | ast.Load) for node in ast.walk(tree)
    )


class Asserted(NamedTuple):
    """The literals that asserts compare, that flow into them, and that are given to names."""

    compared: set[float]
    flowing: set[float]
    given: dict[str, set[float]]

    def holds(self, number: Number) -> bool:
        """Whether one of the literals is the number."""
        named = (self.given.get(part, set()) for part in NAMED.get(number.unit, ()))
        found = chain(self.compared if number.unit in MEASURED else self.flowing, *named)
        return any(number.is_(literal) for literal in found)

    def and_also(self, more: Iterable[float]) -> Asserted:
        """Return these literals, with more that count as compared."""
        found = {*more}
        return Asserted(self.compared | found, self.flowing | found, self.given)


def asserted(sources: Iterable[str]) -> Asserted:
    """Return the numbers that the asserts of all cells hold."""
    tree = ast.parse("\n".join(sources))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    bindings: dict[str, list[ast.AST]] = {}
    for name, value in bound(tree):
        if name not in imported:
            bindings.setdefault(name, []).append(value)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    held = {name for test in tests for name in names_in(test)}
    data = [value for name in held for value in bindings.get(name, []) if is_data(value)]
    seen: set[str] = set()
    while new := held - seen:
        seen |= new
        held = {name for each in new for value in bindings.get(each, []) for name in names_in(value)}
    parts: dict[str, set[float]] = {}
    for name, value in given(tree):
        for part in name.split("_"):
            parts.setdefault(part, set()).update(literals(value) if is_data(value) else ())
    flow = [value for name in seen for value in bindings.get(name, [])]
    compared, flowing = (
        {number for one in code for number in literals(one)} for code in ([*tests, *data], flow)
    )
    return Asserted(compared, compared | flowing, parts)


# ------------------------------------------------------------------------------------ files and their asserts


class Reading(NamedTuple):
    """The numbers found in a text: those without an assert, and those with a reason."""

    left: list[str]
    excused: list[str]


def numbers_on(page: str) -> set[float]:
    """Return the numbers on a page that others may refer to."""
    return {*literals(ast.Constant((ROOT / page).read_text(encoding="utf-8")))}


def judge(place: str, markdown: str, here: Asserted) -> Reading:
    """Look at every number of a text."""
    comments = re.findall(r"<!-- number: (\S+), (.*?) -->", markdown, flags=re.S)
    reasons = {float(number.replace(",", "")): " ".join(reason.split()) for number, reason in comments}
    left: list[str] = []
    used: set[float] = set()
    for block in blocks(markdown):
        known = here.and_also(numbers_on("benchmarks/NOTES.md")) if "`benchmarks/NOTES.md`" in block else here
        for sentence in sentences(block):
            if place == "numbers.md" and sentence.startswith("|") and sentence.count("`") > 1:
                continue  # evaluated
            linked = re.findall(r"\[([^\]]*)\]\((?:\.\./book/)?numbers\.md[^)]*\)", sentence)
            published = {number.text for text in linked for number in numbers(text)}
            for number in numbers(sentence):
                if number.value in reasons:
                    used.add(number.value)
                elif number.text in published and known.and_also(numbers_on("book/numbers.md")).holds(number):
                    continue
                elif not known.holds(number):
                    what = "an equation that is not true" if number.text == UNTRUE else number.text
                    left.append(f"{place}: {what}, in: {sentence}")
    left += [f"{place}: the comment about {number:g} excuses nothing" for number in reasons.keys() - used]
    return Reading(left, [f"{place}: {number:g}, {reasons[number]}" for number in sorted(used)])


def of_notebook(path: Path) -> Iterator[Reading]:
    """Judge a notebook's texts, captions and alternative texts against the notebook's cells."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells}
    not_run = {"exercise", "check", "solution"}
    run = [
        cell["id"]
        for cell in cells
        if cell["cell_type"] == "code" and not not_run & {*cell["metadata"].get("tags", [])}
    ]
    chapter = asserted(sources[name] for name in run)
    for cell in cells:
        here, name = chapter, cell["id"]
        if name.endswith("-task"):
            own = [sources.get(name.removesuffix("task") + part, "") for part in ("stub", "solution")]
            checked = re.search(r'check\("(\w+)\.', sources.get(name.removesuffix("task") + "check", ""))
            own += [(GRADERS / f"{checked[1]}.py").read_text(encoding="utf-8")] if checked else []
            here = chapter.and_also(number for code in own for number in literals(ast.parse(code)))
        shown = cell["metadata"].get("mystnb", {})
        captions = shown.get("figure", {}).get("caption", ""), shown.get("image", {}).get("alt", "")
        yield judge(
            f"{path.name}:{name}",
            sources[name] if cell["cell_type"] == "markdown" else "\n\n".join(captions),
            here,
        )


def of_page(path: Path) -> Reading:
    """Judge a page without cells against the page's own tests."""
    page = path.stem.lower()
    own = next((ROOT / "tests").rglob(f"test_{page}.py"), None)
    shared = ROOT / "tests" / "book" / "test_pages_numbers.py"
    tree = ast.parse((own or shared).read_text(encoding="utf-8"))
    tests = tree.body
    if own is None:
        tests = [node for node in tree.body if getattr(node, "name", "").startswith(f"test_{page}_")]
    found = {literal for node in tests for literal in literals(node)}
    return judge(path.name, path.read_text(encoding="utf-8"), Asserted(found, found, {}))


def main(names: list[str]) -> int:
    """Read the files and print the numbers that nothing asserts."""
    paths = [Path(name) for name in names]
    if not paths:
        paths = [
            *sorted((ROOT / "notebooks").glob("*.ipynb")),
            *sorted((ROOT / "book").glob("*.md")),
            ROOT / "README.md",
        ]
    readings = [
        one for path in paths for one in (of_notebook(path) if path.suffix == ".ipynb" else [of_page(path)])
    ]
    excused = [line for reading in readings for line in reading.excused]
    left = [line for reading in readings for line in reading.left]
    if excused:
        print(
            f"{len(excused)} numbers in the prose have a reason in place of an assert:", *excused, sep="\n  "
        )
    if left:
        print(f"{len(left)} numbers in the prose are asserted by nothing:", *left, sep="\n  ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
