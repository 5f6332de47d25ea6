"""The pieces of the pages about running, and of other pages, that are run or read by tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

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


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service and the Job."""
    (text,) = blocks("yaml")
    service, job = yaml.safe_load_all(text)
    return service, job


def pod_script() -> str:
    """Return the script that bash runs in the Job's container."""
    (container,) = manifest()[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    return str(script)


def commands(program: str) -> list[list[str]]:
    """The words of each command on these pages that starts this program, without the program's name."""
    found = []
    for block in [*blocks("bash"), pod_script()]:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if program in words[:2]:  # behind `srun` or `exec`
                found.append(words[words.index(program) + 1 :])
    return found
