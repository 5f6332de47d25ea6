"""The message of a failed call on several ranks: the cause first, then a line on each other rank.

A rank that raised sends a `Failure`; the pool makes one for a rank that ended; `failed` and `timed_out` make
the `RankError` that the caller sees.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
import traceback
from dataclasses import dataclass
from traceback import StackSummary

import cloudpickle
import torch

from zero_ref.lab._rank_error import RankError

# What a rank reports because another one went away: that other one is the cause.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset) by peer|broken pipe|remote process exited|EOF: end of file"
    r"|the local optimizer of rank \d+ raised",
    re.I,
)


@dataclass(frozen=True)
class Failure:
    """Why a rank gave no value.

    Args:
        summary: as in `RankError`.
        sentence: the same with a verb, to follow "rank 1".
        seconds: when, on time.monotonic(), a clock that the processes of one machine share.
        traceback: as Python prints it, from the called function on.
        place: where in the caller's code, such as "cell.py, line 3, in step: loss.backward()".
        exception: what was raised, pickled; empty where that cannot be.
    """

    summary: str
    sentence: str
    seconds: float
    traceback: str = ""
    place: str = ""
    exception: bytes = b""

    @property
    def is_consequence(self) -> bool:
        """Whether the failure is a consequence of another rank's end."""
        return bool(_CONSEQUENCE.search(self.summary))

    @classmethod
    def of_exception(cls, error: BaseException, skip_file: str) -> Failure:
        """Make the failure of a rank that raised, without the traceback's leading frames in `skip_file`."""
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == skip_file:
            frames = frames.tb_next
        text = str(traceback.TracebackException(type(error), error, None))  # survives a __str__ that raises
        summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
        try:
            exception = cloudpickle.dumps(error)
        except Exception:
            exception = b""
        # Without frames it was raised here in place of the function, and its summary is all there is to say.
        lines = traceback.format_exception(type(error), error, frames) if frames else []
        place = place_in(traceback.extract_tb(frames))
        return cls(summary, f"raised {summary}", time.monotonic(), "".join(lines).rstrip(), place, exception)

    @classmethod
    def of_exit(cls, exit_code: int | None) -> Failure:
        """For a rank whose process ended without a report."""
        if exit_code is None:
            summary = "closed its pipe"
        elif exit_code >= 0:
            summary = f"ended with exit code {exit_code}"
        else:
            names = {number.value: number.name for number in signal.Signals}
            summary = f"was killed by signal {-exit_code} ({names.get(-exit_code, 'unknown')})"
        hint = " (the system does that when memory runs out)" if summary.endswith("(SIGKILL)") else ""
        return cls(summary, f"{summary} before it returned{hint}", time.monotonic())


def failed(failures: dict[int, Failure], running: dict[int, StackSummary], world_size: int) -> RankError:
    """The error for a call in which ranks raised or ended; `running` says where the others stand."""

    def order(failure: Failure) -> tuple[bool, float]:
        return failure.is_consequence, failure.seconds

    earliest = min(failures.values(), key=order)
    # When all raise alike, name the lowest rank, not the one that happened to be quickest.
    first = min(rank for rank, failure in failures.items() if failure.summary == earliest.summary)
    cause = failures[first]
    others = {}
    for rank in sorted(set(range(world_size)) - {first}):
        if rank in failures:
            others[rank] = _shorten(failures[rank].sentence) + _at(failures[rank].place)
        elif rank in running:
            others[rank] = "was still running, and was stopped" + _at(place_in(running[rank]))
        else:
            others[rank] = "had returned"
    message = _paragraphs(f"rank {first} {cause.sentence}", cause.traceback, others)
    error = RankError(message, first, cause.summary, others)
    try:
        error.__cause__ = pickle.loads(cause.exception) if cause.exception else None
    except Exception:  # an exception whose __init__ wants more than its args: its text has to do
        error.__cause__ = None
    return error


def timed_out(running: dict[int, StackSummary], world_size: int, timeout: float) -> RankError:
    """The error for a call that took too long: where each rank stands that had not returned."""
    ranks = ", ".join(f"rank {rank}" for rank in running)
    stacks = [
        f"rank {rank} stood here:\n{''.join(stack.format()).rstrip() or '  (it did not say)'}"
        for rank, stack in running.items()
    ]
    others = {rank: "had returned" for rank in range(world_size) if rank not in running}
    headline = f"timed out after {timeout:g} s; still running: {ranks}"
    advice = "A rank in a collective waits until all ranks call it. If all is well, give a longer timeout."
    message = _paragraphs(headline, "\n\n".join(stacks), others, advice)
    return RankError(message, min(running), "timed out", others)


def stack_in(dump: str, inside: str, skip_file: str) -> StackSummary:
    """Return the calls inside the function `inside` from faulthandler's `dump`, outermost first."""
    for thread in dump.split("\n\n"):
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', thread)  # innermost first
        if inside in [function for _, _, function in frames]:
            called = frames[: [function for _, _, function in frames].index(inside)]
            kept = [(file, int(line), function, None) for file, line, function in called if file != skip_file]
            return StackSummary.from_list(kept[::-1])
    return StackSummary()


def place_in(stack: StackSummary) -> str:
    """The innermost frame that is not torch's own: where the reader's code stands."""
    torch_folder = os.path.dirname(torch.__file__)
    for frame in reversed(stack):
        if not frame.filename.startswith(torch_folder):
            source = f": {frame.line}" if frame.line else ""
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}{source}"
    return ""


def _shorten(text: str, length: int = 160) -> str:
    line = re.sub(r"\[/\S+:\d+\] ", "", text.split("\n")[0])  # Gloo begins with its own source file and line
    return line if len(line) <= length else line[: length - 3] + "..."


def _at(place: str) -> str:
    return f", at {place}" if place else ""


def _paragraphs(headline: str, detail: str, others: dict[int, str], advice: str = "") -> str:
    lines = ["other ranks:", *(f"  rank {rank} {line}" for rank, line in others.items())] if others else []
    return "\n\n".join(filter(None, [headline, detail, "\n".join(lines), advice]))
