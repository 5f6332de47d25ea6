"""The error of a call on several ranks: by itself, so that naming it imports no torch."""

from __future__ import annotations


class RankError(RuntimeError):
    """A call that did not give a value on every rank.

    The message has the traceback of the rank that failed first, then a line on each other rank.
    `__cause__` is what that rank raised, if it can be pickled.

    Attributes:
        rank: the rank that failed first; of those still running at a time-out, the lowest.
        summary: what happened on it: "ValueError: boom", "was killed by signal 9 (SIGKILL)", "timed out".
        others: rank to a line on what became of it.
    """

    def __init__(self, message: str, rank: int, summary: str, others: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.summary = summary
        self.others = others or {}
