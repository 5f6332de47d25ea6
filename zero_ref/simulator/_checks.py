"""Checks of arguments that several modules share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable


def check_name(what: str, name: str, known: Collection[str], otherwise: str = "") -> None:
    """Raise a ValueError for a name that is not known. `otherwise` says what else the caller may do."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; choose one of {', '.join(known)}{otherwise}.")


def check_number(what: str, value: float, *, above: bool = False) -> None:
    """Raise a ValueError for a number that is not finite, or is negative, or with `above` is 0."""
    if not (math.isfinite(value) and (value > 0 if above else value >= 0)):
        raise ValueError(f"{what} must be {'above 0' if above else '0 or more'}, got {value:g}.")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that somebody meant who mistyped it; None if none is like it.

    >>> nearest("bacth", ["batch", "ranks"])
    'batch'
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1)), None)
