"""The pieces of the pages about running, and of other pages, that are run or read by tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

BOOK = Path(__file__).resolve().parents[2] / "book"
PAGES = [BOOK / name for name in ("your_loop.md", "before_you_rent.md", "running.md")]


def blocks(language: str, *pages: Path) -> list[str]:
    """The pages' blocks of code in a language; those of PAGES if none is named."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages or PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def slurm_script() -> str:
    """The one block that is a script."""
    (script,) = [block for block in blocks("bash") if block.startswith("#!")]
    return script


def commands(program: str) -> list[list[str]]:
    """The words of each command on these pages that starts this program, without the program's name."""
    found = []
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if program in words[:2]:  # behind `srun`
                found.append(words[words.index(program) + 1 :])
    return found
