"""How far a step goes through the package, and who reaches into an optimizer: counted from the sources.

python bench/seams.py [FOLDER]     # of the repository; another checkout may be counted with this script
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from zero_ref import ZeroRedundancyOptimizer  # noqa: E402
from zero_ref.lab import virtual  # noqa: E402

PACKAGE = ROOT / "zero_ref"
APPARATUS = {PACKAGE / name for name in ("bench", "cli", "course", "lab", "live", "simulator")}
CORE = sorted(path for path in PACKAGE.rglob("*.py") if not APPARATUS.intersection(path.parents))
HOLDERS = ("zero", "optimizer")


def code_lines(node: Any, text: str) -> int:
    """Lines of a function or class without docstrings, comments and empty lines."""
    numbers = set(range(node.lineno, node.end_lineno + 1))
    for part in ast.walk(node):
        first = part.body[0] if isinstance(part, (ast.FunctionDef, ast.ClassDef)) else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            numbers -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = text.splitlines()
    return sum(lines[number - 1].lstrip()[:1] not in ("", "#") for number in numbers)


def uses(path: Path) -> int:
    """Underscore names that a module reads of an optimizer."""
    if path.parent.name == "optimizer" or path in (PACKAGE / "optimizer.py", PACKAGE / "oss.py"):
        return 0
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and getattr(node.value, "id", getattr(node.value, "attr", "")) in HOLDERS
        for node in ast.walk(ast.parse(path.read_text()))
    )


def passed_through(comm: Any) -> set[str]:
    """The functions of the core that one ordinary step of buckets goes through on this rank."""
    params = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(4)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, comm, True)
    seen: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path in CORE and "<" not in code.co_qualname.split(".")[-1]:
            seen.add(f"{path.stem}.{code.co_qualname}")

    for step in range(7):  # the fifth to seventh compare nothing
        for param in params:
            param.grad = torch.ones_like(param)
        sys.setprofile(note if step == 6 else None)
        zero.step()
        sys.setprofile(None)
    return seen


def main() -> None:
    """Count, and print."""
    functions = virtual.run(passed_through, 2)[0]
    classes = {name.rpartition(".")[0] for name in functions if name.count(".") > 1 and "<" not in name}
    print(f"functions of one ordinary step {len(functions)}, classes {len(classes)}")
    text = Path(inspect.getfile(ZeroRedundancyOptimizer)).read_text()
    (of_class,) = [n for n in ast.parse(text).body if getattr(n, "name", "") == "ZeroRedundancyOptimizer"]
    attributes = {
        node.attr
        for node in ast.walk(of_class)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if getattr(node.value, "id", "") == "self"
    }
    print(f"optimizer class: {code_lines(of_class, text)} lines of code, {len(attributes)} attributes")
    longest, name = max(
        (code_lines(node, path.read_text()), f"{path.stem}.{node.name}")
        for path in CORE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    print(f"longest function of the core: {longest} lines of code, {name}")
    package, tests = (sorted((ROOT / folder).rglob("*.py")) for folder in ("zero_ref", "tests"))
    print("underscore names of an optimizer in other modules:", sum(map(uses, package)))
    for what, paths in (("core", CORE), ("package", package), ("tests", tests)):
        print(f"lines, {what}: {sum(len(path.read_text().splitlines()) for path in paths)}")


if __name__ == "__main__":
    main()
