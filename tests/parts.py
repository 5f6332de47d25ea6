"""Run all parts of the tests, one failed or not, and say at the end how each went: what `make test` does.

    python tests/parts.py make

Each part is a target of the Makefile. Its command is the argument, as make itself may be called otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from surroundings import settle

PARTS = ["notebooks", "ranks", "types", "lint", "imports", "book", "browser", "unit"]
"""The longest chain begins first, beside what waits much, and short parts that tell of a mistake early."""
AFTER = {"book": "notebooks", "browser": "book", "unit": "notebooks"}
"""The book takes the outputs of notebooks that were checked, and the browser reads the book. Unit tests need
nothing of the notebooks: they keep both cores busy, so they fill what book and browser leave."""
NEEDS = {"browser": "book"}
AT_ONCE = 3
"""On two cores: tests on ranks and notebooks wait much, for processes to start and for time-outs to pass."""


class Outcome(NamedTuple):
    """The result of a part: "passed", "FAILED" or "not run", and the names of its tests that failed."""

    part: str
    status: str
    seconds: float = 0.0
    failed: Sequence[str] = ()

    @property
    def bad(self) -> bool:
        """It has failed, or was not run."""
        return self.status not in ("passed", "not checked")


class Screen:
    """Shows the output of one part as it comes, and that of another when both have ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shown: str | None = None
        self.kept: dict[str, bytes] = {}
        self.ended: list[str] = []

    def add(self, part: str, piece: bytes) -> None:
        """Take output of a part that runs."""
        with self.lock:
            self.kept[part] = self.kept.get(part, b"") + piece
            self.shown = self.shown or part
            self._show([self.shown])

    def end(self, part: str) -> None:
        """No more comes of this part."""
        with self.lock:
            self.ended.append(part)
            if self.shown in (part, None):
                self._show(self.ended)
                self.shown = None

    def _show(self, parts: Sequence[str]) -> None:
        sys.stdout.buffer.write(b"".join(self.kept.pop(part, b"") for part in parts))
        sys.stdout.buffer.flush()


def run(make: str, part: str, show: Callable[[bytes], object]) -> Outcome:
    """Run a part; its output goes to `show` as it comes."""
    began = time.monotonic()
    command = [make, "--no-print-directory", part]
    output = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        assert process.stdout is not None
        while piece := process.stdout.read(65536):
            output += piece
            show(piece)
    text = output.decode(errors="replace")
    status = "FAILED" if process.returncode else "not checked" if "were NOT checked" in text else "passed"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\[.*?\]|\S+?)(?: - .*)?$", text, re.MULTILINE)
    return Outcome(part, status, time.monotonic() - began, failed)


def run_all(make: str) -> list[Outcome]:
    """Run all that can be run, `AT_ONCE` parts at a time."""
    outcomes: dict[str, Outcome] = {}
    waiting, changed, screen = [*PARTS], threading.Condition(), Screen()

    def ready() -> list[str]:
        return [part for part in waiting if part not in AFTER or AFTER[part] in outcomes]

    def take_turns() -> None:
        while True:
            with changed:
                changed.wait_for(lambda: ready() or not waiting)
                if not waiting:
                    return
                part = ready()[0]
                waiting.remove(part)
            outcome = Outcome(part, "not run")
            try:
                needed = outcomes.get(NEEDS.get(part, ""))
                if needed and needed.bad:
                    outcome = Outcome(part, f"not run, as {needed.part} failed")
                else:
                    outcome = run(make, part, partial(screen.add, part))
            finally:
                screen.end(part)
                with changed:
                    outcomes[part] = outcome
                    changed.notify_all()

    threads = [threading.Thread(target=take_turns, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # the parts have got it too
        waiting.clear()
        for thread in threads:
            thread.join(10)
    return [outcomes.get(part, Outcome(part, "not run")) for part in PARTS]


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return a table of the parts' results, each with its failed tests below.

    >>> ranks = Outcome("ranks", "FAILED", 9, ["test_a.py::test_b"])
    >>> print(table([Outcome("unit", "passed", 61.7), ranks], 71))
    <BLANKLINE>
    part         s
    unit        62  passed
    ranks        9  FAILED: make ranks
                    test_a.py::test_b
    all         71  FAILED: ranks
    """
    lines = ["", f"{'part':<10}{'s':>4}"]
    for part, status, taken, names in outcomes:
        again = f": make {part}" if status == "FAILED" else ""
        lines.append(f"{part:<10}{f'{taken:.0f}' if taken else '-':>4}  {status}{again}")
        lines += [f"{'':16}{name}" for name in names]
    bad = [outcome.part for outcome in outcomes if outcome.bad]
    unchecked = [outcome.part for outcome in outcomes if outcome.status == "not checked"]
    word = f"FAILED: {', '.join(bad)}" if bad else "passed"
    if unchecked and not bad:
        word += f", but for {', '.join(unchecked)}, which could not be checked here"
    return "\n".join([*lines, f"{'all':<10}{seconds:>4.0f}  {word}"])


def main() -> int:
    """1 if a part failed."""
    settle()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zero_ref-test-") as scratch:
        os.environ["ZERO_REF_EXECUTED"] = (
            scratch  # notebooks that were checked, for the book: tests/library/executed.py
        )
        outcomes = run_all(sys.argv[1])
    print(table(outcomes, time.monotonic() - began), flush=True)
    return int(any(outcome.bad for outcome in outcomes))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    sys.exit(main())
