"""Grade solutions with one mistake: `python tests/mutants.py [--most 40] [EXERCISE ...]`.

Each solution is changed in one place: an operator, a comparison, a constant by one, two arguments or two
names exchanged, a statement or a `not` left out. Each mutant is graded in this process, as `check` does. It
passes, or raises in its own code, or gets a message about its mistake, or gets only the general advice at the
end of a grader's list of mistakes. `--table FILE` writes the counts, and each mutant that passes or gets only
that advice.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import io
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zero_ref_course
from zero_ref.lab import ranks
from zero_ref_course import ExerciseFailed, StillTheStub, exercises, grade, starts_ranks
from zero_ref_course.notebook import ExerciseCells, exercises_in

COURSE = Path(zero_ref_course.__file__).parent
NOTEBOOKS = sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb"))

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
NAMES = [
    ("rank", "world_size"),
    ("start", "stop"),
    ("src", "dst"),
    ("old", "new"),
    ("max", "min"),
    ("any", "all"),
]
OTHER_NAME = dict([*NAMES, *((second, first) for first, second in NAMES)])

LISTED = (
    r"Add up forward, backward, step and the end",
    r"Count the elements that were there before",
    r"They must be the rows of `ids`",
)
"""General advice that is not the last `return` of a function that names mistakes."""


def general_advice() -> re.Pattern[str]:
    """Return a pattern for the advice of graders that recognize no mistake: the last `return` of each."""
    found = list(LISTED)
    for path in sorted(COURSE.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and re.match("_(mistake|why|hint)", function.name):
                last = function.body[-1]
                if isinstance(last, ast.Return) and isinstance(last.value, ast.Constant) and last.value.value:
                    found.append(re.escape(str(last.value.value)))
    return re.compile("|".join(found))


class Mutant(NamedTuple):
    """A change, the line of the solution that it is in, and the changed source."""

    change: str
    line: int
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every change of one place.

    >>> [mutant.change for mutant in mutants("def f(n): return n + 1")]
    ['n + 1 -> n - 1', '1 -> 2', '1 -> 0']
    """
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        for variant in range(_variants(node)):
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[number]
            before = ast.unparse(node)
            after = _change(target, variant)
            if isinstance(node, ast.arg) or before == after:
                continue
            yield Mutant(
                f"{_short(before)} -> {_short(after)}", getattr(node, "lineno", 0), ast.unparse(changed)
            )


def _variants(node: ast.AST) -> int:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return int(type(node.op) in OPERATORS) + isinstance(node, ast.AugAssign)
    if isinstance(node, ast.Constant):
        return 2 if type(node.value) is int else int(type(node.value) is bool)
    if isinstance(node, ast.Call):
        return int(len(node.args) == 2 and ast.unparse(node.func) not in ("max", "min"))
    if isinstance(node, ast.Name):
        return int(node.id in OTHER_NAME and isinstance(node.ctx, ast.Load))
    if isinstance(node, ast.Attribute):
        return int(node.attr in OTHER_NAME)
    if isinstance(node, ast.UnaryOp):
        return int(isinstance(node.op, (ast.Not, ast.USub)))
    if isinstance(node, ast.Expr):
        return int(not isinstance(node.value, ast.Constant))
    return int(isinstance(node, (ast.Compare, ast.BoolOp, ast.IfExp, ast.Continue, ast.Break)))


def _change(node: ast.AST, variant: int) -> str:
    """Change the node in place; gives its new text."""
    if isinstance(node, ast.AugAssign) and variant == 1:
        value, target = node.value, node.target
        _become(node, ast.Assign(targets=[target], value=value, lineno=node.lineno))
    elif isinstance(node, (ast.BinOp, ast.AugAssign)):
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + (1, -1)[variant]
    elif isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.Call):
        node.args.reverse()
    elif isinstance(node, ast.Name):
        node.id = OTHER_NAME[node.id]
    elif isinstance(node, ast.Attribute):
        node.attr = OTHER_NAME[node.attr]
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    elif isinstance(node, ast.UnaryOp):
        _become(node, node.operand)
    else:
        _become(node, ast.Pass())
    return ast.unparse(node)


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__  # type: ignore[assignment]
    line = getattr(node, "lineno", 0)
    node.__dict__.clear()
    node.__dict__.update(other.__dict__)
    node.lineno, node.col_offset = line, 0  # type: ignore[attr-defined]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def judged(cells: ExerciseCells, mutant: Mutant, general: re.Pattern[str]) -> tuple[str, str]:
    """ "passes", "raises", "own" or "general", and the message."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return "passes", grade(cells.exercise, cells.define(mutant.source))
    except (ExerciseFailed, StillTheStub) as failure:
        message = str(failure)
    if re.search(r" raised \w+(Error|Exception|Iteration)|^its cell raises", message):
        return "raises", message
    return ("general" if general.search(message) else "own"), message


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exercises", nargs="*")
    parser.add_argument(
        "--most", type=int, default=40, help="mutants of each exercise, drawn (default: %(default)s)"
    )
    parser.add_argument("--most-on-ranks", type=int, default=4, help="where the grader starts ranks")
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    known = {cells.exercise: cells for path in NOTEBOOKS for cells in exercises_in(path)}
    rows, listed, every, general = [], [], exercises(), general_advice()
    for name in arguments.exercises or every:
        found = list(mutants(known[name].solution))
        most = arguments.most_on_ranks if starts_ranks(name) else arguments.most
        drawn = random.Random(name).sample(found, min(most, len(found)))
        counts: Counter[str] = Counter()
        for mutant in drawn:
            verdict, message = judged(known[name], mutant, general)
            counts[verdict] += 1
            print(
                f"{verdict:<8} {name} line {mutant.line}: {mutant.change}\n         {message[-300:]}",
                flush=True,
            )
            if verdict in ("passes", "general"):
                listed.append(
                    f"| {name} | {mutant.line} | `{mutant.change}` | {verdict} |".replace("|=", "\\|=")
                )
        columns = [str(counts[verdict]) for verdict in ("own", "raises", "general", "passes")]
        rows.append(f"| {name} | {len(found)} | {len(drawn)} | {' | '.join(columns)} |")
    if arguments.table:
        head = (
            "| exercise | mutants | graded | own message | raises | general | passes |\n" + "|---" * 7 + "|\n"
        )
        each = "| exercise | line | change | verdict |\n|---|--:|---|---|\n"
        arguments.table.write_text(head + "\n".join(rows) + "\n\n" + each + "\n".join(listed) + "\n")
    ranks.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
