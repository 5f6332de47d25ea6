"""Count the book's words, and estimate the hours that reading it takes.

    python book/words.py

An estimate, measured on no reader: so many words of text and so many lines of visible code a minute, and
nothing for predictions and exercises. Code that a page folds or leaves out is not counted.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORDS_A_MINUTE, LINES_A_MINUTE = 200, 20
FOLDED = {"hide-input", "hide-cell", "remove-cell", "remove-input", "exercise", "check", "solution"}
"""Tags of cells whose code a reader need not read."""


class Length(NamedTuple):
    """What a part of the book has to be read.

    Args:
        words: of text, headings and captions left in.
        lines: of code that is not folded.
    """

    words: int
    lines: int

    @property
    def hours(self) -> float:
        """The estimate."""
        return (self.words / WORDS_A_MINUTE + self.lines / LINES_A_MINUTE) / 60


def length_of(path: Path) -> Length:
    """The length of a notebook or a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return Length(len(text.split()), 0)
    words = lines = 0
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            words += len(source.split())
        elif not FOLDED & set(cell["metadata"].get("tags", ())):
            lines += len(source.splitlines())
    return Length(words, lines)


def total(paths: list[Path]) -> Length:
    """The length of several files."""
    return Length(*map(sum, zip(*map(length_of, paths), strict=True)))


def parts() -> dict[str, list[Path]]:
    """The files of each part of the table of contents, by its caption; of the API only the overview."""
    toc = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    found: dict[str, list[Path]] = {}
    for part in toc.split("- caption: ")[1:]:
        caption = part.splitlines()[0].strip('"')
        names = [name for name in re.findall(r"file: (\S+)", part) if not name.startswith("book/api/")]
        found[caption] = [
            next(path for path in (ROOT / f"{name}.ipynb", ROOT / f"{name}.md") if path.exists())
            for name in names
        ]
    return found


def main() -> int:
    """Print a row for each part, and one for the chapters together."""
    chapters = [path for paths in parts().values() for path in paths if path.suffix == ".ipynb"]
    rows = {**parts(), "the notebooks": chapters, "the pages": sorted((ROOT / "book").glob("*.md"))}
    print(f"{'':<26}{'words':>8}{'lines of code':>15}{'hours, estimated':>18}")
    for name, paths in rows.items():
        length = total(paths)
        print(f"{name:<26}{length.words:>8,}{length.lines:>15,}{length.hours:>18.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
