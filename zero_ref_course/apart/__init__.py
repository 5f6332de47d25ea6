"""What runs in an answer's process: the only part of the course that is there, and it knows no answer.

    answers.py    the processes: a nursery, rooms, answers
    wire.py       what the grader and an answer say to each other
    confine.py    what the operating system forbids an answer

It imports torch and the standard library, and neither the rest of the course nor `zero_ref`.
"""

from __future__ import annotations

from typing import NoReturn

ASKED_FOR = "which this exercise asks you to write"


class Forbidden(BaseException):
    """The answer calls what its task asks for. Not an Exception, for the sake of `except Exception`."""


def refuse(name: str) -> NoReturn:
    """Take the place of a function that an exercise asks for."""
    raise Forbidden(name)
