"""The packages as an answer's process gets them: a course that knows no answer, `zero_ref` without the task.

What an exercise asks for is not hidden in the copy, it is not there: a function's body is replaced before the
file is written. So there is nothing to find, whatever an answer reloads, reads, compiles or patches.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

import zero_ref
from zero_ref_course.apart import confine

GIVEN = {
    "_disk": ("Disk", "Killed", "load"),
    "checkpoint": ("Disk", "load"),
    "matrices": ("RowsAndColumns", "NormalizedRows", "WarmsUp", "ClipsTogether", "LAMB"),
    "scale": ("FIRST_GB", "SIX", "Design", "Job", "as_first_priced", "bill_of", "step_ms"),
    "which_stage": ("BRIEF", "Case", "Choice"),
}
"""What chapters give to their readers or pass to answers, by module of the course. Of each module there is
that and what it uses."""

WITHOUT_EFFECT = (
    "__init__",
    "predict",
    "rungs",
    "gallery/__init__",
    "gallery/right",
    "gallery/training",
)
"""Modules of the course whose functions do nothing in an answer's process: checks are made elsewhere."""

SILENT = """
def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return lambda *_, **__: None
"""

SENDERS = (
    "zero_ref.simulator.data_parallel.new_parameters",
    "zero_ref.simulator.data_parallel.broadcasts_of",
)

OTHER_FORMS: dict[str, tuple[str, ...]] = {
    "zero_ref.plan.rules.sorted_greedy": ("zero_ref.plan.rules._to_least_loaded",),
    "zero_ref.plan.rules.even": (
        "zero_ref.plan.rules._levelled",
        "zero_ref.plan.partition.SharedRange.of",
        "zero_ref.plan.partition.SharedRange.slices_of",
    ),
    "zero_ref.simulator.schedule.schedule": (
        "zero_ref.simulator.data_parallel.data_parallel",
        "zero_ref.simulator.data_parallel.new_parameters",
        "zero_ref.simulator.sharded.sharded_data_parallel",
    ),
    "zero_ref.simulator.schedule.calls_of_rank": ("zero_ref.simulator.data_parallel.data_parallel",),
    "zero_ref.simulator.schedule.broadcasts_of_slices": SENDERS,
    "zero_ref.simulator.schedule.broadcasts_of_buckets": SENDERS,
}
"""Of a function that an exercise forbids, where else in the package the same is done."""

OF_TORCH = ("torch.distributed.optim.zero_redundancy_optimizer",)
"""Modules of torch that answer what the book asks: they are neither imported nor readable."""

Function = ast.FunctionDef


# ------------------------------------------------------------------------------------------ what is there


def write_course(folder: Path) -> None:
    """A package `zero_ref_course` with `apart`, what chapters give, and checks that do nothing."""
    ours = Path(__file__).parent
    course = folder / ours.name
    shutil.copytree(ours / "apart", course / "apart", ignore=shutil.ignore_patterns("__pycache__"))
    (course / "gallery").mkdir()
    for name in WITHOUT_EFFECT:
        (course / f"{name}.py").write_text(SILENT, encoding="utf-8")
    for name, given in GIVEN.items():
        source = (ours / f"{name}.py").read_text(encoding="utf-8")
        (course / f"{name}.py").write_text(with_only(source, given), encoding="utf-8")


def write_package(folder: Path, forbids: Collection[str]) -> None:
    """A package `zero_ref` without these functions, their other forms, and the stairs, which answer much.

    Args:
        forbids: "zero_ref.plan.rules.sorted_greedy"; a method is "zero_ref.module.Class.method"; all of it is
            "zero_ref".
    Raises:
        ValueError: the package has no such function.
    """
    package = folder / "zero_ref"
    if "zero_ref" in forbids:
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from zero_ref_course.apart import refuse\nrefuse('zero_ref')\n")
        return
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(Path(zero_ref.__file__).parent, package, ignore=ignored)
    of_module: dict[Path, set[str]] = {path: set() for path in (package / "stairs").glob("*.py")}
    for full in [*forbids, *(other for name in forbids for other in OTHER_FORMS.get(name, ()))]:
        path, name = _place_of(full, folder)
        of_module.setdefault(path, set()).add(name)
    for path, names in of_module.items():
        source = path.read_text(encoding="utf-8")
        path.write_text(without(source, names or {*dict(_functions(ast.parse(source)))}), encoding="utf-8")


def _place_of(full: str, folder: Path) -> tuple[Path, str]:
    parts = full.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (path := folder.joinpath(*parts[:length]).with_suffix(".py")).is_file():
            return path, ".".join(parts[length:])
    raise ValueError(f"there is no module of {full}.")


def without(source: str, names: Collection[str]) -> str:
    """A module in which these functions refuse to be called, and so do helpers that only they have used.

    >>> print(without("def even(n): return 0\\ndef odd(n): return 1", ["even"]))
    def even(n):
        from zero_ref_course.apart import refuse
        refuse('even')
    <BLANKLINE>
    def odd(n):
        return 1

    Raises:
        ValueError: the module has no such function.
    """
    tree = ast.parse(source)
    functions = dict(_functions(tree))
    if missing := {*names} - {*functions}:
        raise ValueError(f"there is no function {', '.join(sorted(missing))}.")
    removed = {name: name.rpartition(".")[2] for name in names}
    while helpers := _used_only_by(removed, tree, functions):
        removed |= helpers
    for name, said in removed.items():
        functions[name].body = ast.parse(f"from zero_ref_course.apart import refuse\nrefuse({said!r})").body
    return ast.unparse(tree)


def _used_only_by(
    removed: Mapping[str, str], tree: ast.Module, functions: Mapping[str, Function]
) -> dict[str, str]:
    """Helpers that no other function of the module uses, each with what is said of its user."""
    found = {}
    statements = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for name in functions:
        users = [user for user in functions if user != name and name in _names_in(functions[user])]
        outside = any(name in _names_in(node) for node in statements)
        is_helper = name.startswith("_") and "." not in name and name not in removed
        if is_helper and users and not outside and all(user in removed for user in users):
            found[name] = removed[users[0]]
    return found


def with_only(source: str, names: Iterable[str]) -> str:
    """A module that has these names and what they use, and nothing else.

    >>> print(with_only("import a, b\\ndef f(): return g(a)\\ndef g(x): return x\\ndef h(): return b", ["f"]))
    import a
    <BLANKLINE>
    def f():
        return g(a)
    <BLANKLINE>
    def g(x):
        return x
    """
    tree = ast.parse(source)
    users = {name: _names_in(node) for node in tree.body for name in _defined_by(node)}
    needed, waiting = set[str](), [*names]
    while waiting:
        if (name := waiting.pop()) in users and name not in needed:
            needed.add(name)
            waiting += users[name]
    kept = list[ast.stmt]()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [one for one in node.names if (one.asname or one.name) in {*needed, "annotations"}]
            kept += [node] if node.names else []
        elif needed.intersection(_defined_by(node)):
            kept.append(node)
    tree.body = kept
    return ast.unparse(tree)


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions and methods by name: "function", "Class.method"."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def _defined_by(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [one.asname or one.name for one in node.names]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _names_in(node: ast.AST) -> set[str]:
    """The names that are read in a statement, and are not its own variables or arguments."""
    inside = [*ast.walk(node)]
    names = [one for one in inside if isinstance(one, ast.Name)]
    own = {one.id for one in names if isinstance(one.ctx, ast.Store)}
    own |= {one.arg for one in inside if isinstance(one, ast.arg)}
    return {one.id for one in names} - own


# ------------------------------------------------------------------------------------------ what can be read


def libraries() -> list[str]:
    """Where packages of others are imported from: where they are installed, and what PYTHONPATH names."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        path
        for path in sys.path
        if Path(path).name in ("site-packages", "dist-packages")
        or (path in named and not Path(path, "zero_ref").exists())
    ]


def originals() -> list[Path]:
    """What no answer may read: both packages wherever they can be imported from, the book, torch's answer."""
    beside = [Path(zero_ref.__file__).parents[1], Path(__file__).parents[1], *map(Path, sys.path)]
    names = ("zero_ref", "zero_ref_course", "notebooks", "tests", "book")
    found = [Path(folder, name) for folder in beside for name in names]
    for module in OF_TORCH:
        file = Path(torch.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
        found += [file, *(file.parent / "__pycache__").glob(f"{file.stem}.*")]
    return [*dict.fromkeys(path.resolve() for path in found if path.exists())]


def readable(stage: Path) -> list[tuple[str, int]]:
    """What an answer may read beside its package: Python, libraries, and the course that is written there."""
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, *libraries(), "/usr", "/lib", "/lib64"]
    roots = map(Path, [*dict.fromkeys(places), "/etc/ld.so.cache", "/etc/localtime", str(stage)])
    return confine.readable(roots, originals())
