"""The stairs as the book shows them: what each one changes in the one before, computed from the files.

Each file of `zero_ref/stairs/` imports functions of the files before it. A reader writes one file, so here a
stair is that one file: its class, and the functions that it needs.
"""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Sequence
from pathlib import Path

import zero_ref.stairs
from zero_ref.lab.source import without_docstrings
from zero_ref.stairs import BEFORE, STAIRS

CLASS = "MinimalZero"
"""The name of the class of every stair."""


def path_of(stair: str) -> Path:
    """The file of a stair.

    Raises:
        ValueError: there is no such stair.
    """
    if stair not in STAIRS:
        raise ValueError(f"there is no stair {stair!r}; there are {', '.join(STAIRS)}.")
    return Path(zero_ref.stairs.__file__).with_name(f"{stair}.py")


def in_one_file(stair: str) -> str:
    """A stair that stands alone: the functions of the stairs before are in it.

    >>> "def assign_owners(" in in_one_file("buckets"), "zero_ref" in in_one_file("buckets")
    (True, False)

    Raises:
        ValueError: there is no such stair.
    """
    path_of(stair)
    names = STAIRS[: STAIRS.index(stair) + 1]
    sources = [path_of(name).read_text(encoding="utf-8") for name in names]
    above, classes = zip(*(source.split(f"\n\nclass {CLASS}") for source in sources))
    begins = [re.search(r"^(def|class|@)", text, re.MULTILINE) for text in above]
    functions = [text[match.start() :] for text, match in zip(above, begins) if match]
    parts = [_imports(sources), *functions, f"class {CLASS}{classes[-1]}"]
    return "\n\n\n".join(part.strip() for part in parts) + "\n"


def _imports(sources: list[str]) -> str:
    """The first lines of the file."""
    plain, names_from = set(), dict[str, set[str]]()
    for line in "\n".join(sources).splitlines():
        if match := re.match(r"from (?!zero_ref|__future__)(\S+) import (.+)", line):
            names_from.setdefault(match[1], set()).update(match[2].split(", "))
        elif line.startswith("import "):
            plain.add(line)
    taken = [
        f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(names_from.items())
    ]
    return "\n".join(["from __future__ import annotations", "", *taken, "", *sorted(plain)])


class StairDiff:
    """The differences between a stair and the one that it changes, for a notebook and a terminal.

    A line that is taken out begins with `-`, a new one with `+`. A line with `@@` names the function or class
    of the first change below it. The first stair is compared with the rule that it begins with.

    >>> StairDiff("buckets").lines[0]
    '@@ in_memory'

    Args:
        stair: one of `STAIRS`.
        without: methods that are shown in neither.
        context: unchanged lines around each change.
    Raises:
        ValueError: there is no such stair.
    """

    def __init__(self, stair: str, without: Sequence[str] = (), context: int = 2) -> None:
        new = in_one_file(stair)
        old = in_one_file(BEFORE[stair]) if stair in BEFORE else new.partition(f"\n\nclass {CLASS}")[0]
        before, after = (_without_methods(without_docstrings(source), without) for source in (old, new))
        self.stair = stair
        self.lines = _changes(before.splitlines(), after.splitlines(), context)
        self.text = "\n".join(self.lines)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f'<pre class="stair-diff" style="{OF_PRE}">{"".join(map(_drawn, self.lines))}</pre>'


# The grounds let what is under them through, so that they are right on a light page and on a dark one.
GROUND = {
    "+": "background: rgb(0 158 115 / 0.17)",
    "-": "background: rgb(213 94 0 / 0.17)",
    "@": "opacity: 0.7; margin-top: 0.6em",
    " ": "background: none",
}
OF_PRE = (
    "margin: 0; padding: 0.3em 0; background: none; border: none; color: inherit; white-space: pre-wrap; "
    "overflow-wrap: anywhere; font-size: 0.8125rem; line-height: 1.5"
)


def _drawn(line: str) -> str:
    """A line as HTML. Where it is too long, it goes on below, a little further in than it began."""
    indent = len(line) - len(line[1:].lstrip()) + 4
    style = f"display: block; padding-left: {indent}ch; text-indent: -{indent}ch; {GROUND[line[0]]}"
    return f'<span style="{style}">{html.escape(line)}\n</span>'


def _without_methods(source: str, names: Sequence[str]) -> str:
    """A file without these methods.

    >>> _without_methods("class One:\\n    two = 2\\n\\n    def three(self):\\n        pass\\n", ["three"])
    'class One:\\n    two = 2'
    """
    for name in names:
        # With its decorator, up to the next method or the end.
        method = rf"(\n    @[^\n]*)?\n    def {name}\(.*?(?=\n\n    \S|\n*\Z)"
        source = re.sub(method, "", source, flags=re.DOTALL)
    return source.rstrip("\n")


def _changes(old: list[str], new: list[str], context: int) -> list[str]:
    """The lines of a difference, with `context` lines around each change."""
    found = []
    # Blank lines are alike everywhere: as anchors they would pair lines of different functions.
    matcher = difflib.SequenceMatcher(lambda line: not line, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(context):
        place = next(j1 if j2 > j1 else j1 - 1 for tag, _, _, j1, j2 in group if tag != "equal")
        found.append(f"@@ {_scope_of(new, place) or 'imports'}")
        lines = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f" {line}" for line in new[j1:j2]]
                continue
            lines += [f"-{line}" for line in old[i1:i2]] + [f"+{line}" for line in new[j1:j2]]
        while not lines[0].strip():
            del lines[0]
        while not lines[-1].strip():
            del lines[-1]
        found += lines
    return found


def _scope_of(lines: list[str], place: int) -> str:
    """The class and the function that a line is in, or that it begins.

    >>> _scope_of(["class One:", "    def two(self):", "        return 2"], 2)
    'One.two'
    """
    # A function begins with its decorator; a blank line belongs to what follows it.
    while place + 1 < len(lines) and re.match(r" *(@|$)", lines[place]):
        place += 1
    names: list[str] = []
    within = len(lines[place]) - len(lines[place].lstrip()) + 1
    for line in reversed(lines[: place + 1]):
        match = re.match(r"( *)(?:class|def) (\w+)", line)
        if match and len(match[1]) < within:
            within = len(match[1])
            names.insert(0, match[2])
    return ".".join(names)
