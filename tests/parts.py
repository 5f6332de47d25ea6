"""Run all parts of the tests, one failed or not, and say at the end how each went: what `make test` does.

    python tests/parts.py make

Each part is a target of the Makefile. Its command is the argument, as make itself may be called otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from surroundings import settle

# Two sequences that run side by side, each of about half the work: tests on ranks wait much, for processes to
# start and for time-outs to pass, and so do notebooks. The first is shown as it goes, of the second each part
# when both it and what is being shown have ended.
SEQUENCES = [["unit", "ranks"], ["lint", "types", "imports", "notebooks", "book", "browser"]]
NEEDS = {"browser": "book"}


class Outcome(NamedTuple):
    """How a part went: "passed", "FAILED" or "not run", and the names of its tests that failed."""

    part: str
    status: str
    seconds: float = 0.0
    failed: Sequence[str] = ()

    @property
    def bad(self) -> bool:
        """It has failed, or was not run."""
        return self.status not in ("passed", "not checked")


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


def show(output: bytes) -> None:
    """As it came, colours and all."""
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


def run_all(make: str) -> list[Outcome]:
    """Run all that can be run."""
    outcomes: dict[str, Outcome] = {}
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # what has ended and is not shown yet

    def one(part: str, show: Callable[[bytes], object]) -> None:
        needed = outcomes.get(NEEDS.get(part, ""))
        if needed and needed.bad:
            outcomes[part] = Outcome(part, f"not run, as {needed.part} failed")
        else:
            outcomes[part] = run(make, part, show)

    def beside() -> None:
        for part in SEQUENCES[1]:
            pieces: list[bytes] = []
            one(part, pieces.append)
            waiting.put(b"".join(pieces))

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    try:
        for part in SEQUENCES[0]:
            one(part, show)
            while not waiting.empty():
                show(waiting.get())
        while thread.is_alive() or not waiting.empty():
            with contextlib.suppress(queue.Empty):
                show(waiting.get(timeout=0.1))
    except KeyboardInterrupt:  # the parts have got it too
        thread.join(10)
    return [outcomes.get(part, Outcome(part, "not run")) for part in itertools.chain(*SEQUENCES)]


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """How each part went, with the tests that failed below it.

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
            scratch  # notebooks that were checked, for the book: tests/executed.py
        )
        outcomes = run_all(sys.argv[1])
    print(table(outcomes, time.monotonic() - began), flush=True)
    return int(any(outcome.bad for outcome in outcomes))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    sys.exit(main())
