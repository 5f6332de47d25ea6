"""What the commands share: how one ends with a message, how it imports an extra, and an argument's type."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

Subparsers = Any  # argparse's own type for it is private


class CommandError(Exception):
    """Ends a command with a message and no traceback."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def need(module: str, extra: str = "lab") -> Any:
    """Import what an extra of this package installs.

    Raises:
        CommandError: it is not installed; says which extra to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("zero_ref"):
            raise  # ours is broken, not missing
        raise CommandError(
            f'this needs the package {error.name}, which is not installed: pip install "zero_ref[{extra}]"',
            code=1,
        ) from None


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, got {number}")
    return number
