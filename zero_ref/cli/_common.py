"""What the commands share: how one ends with a message, imports an extra, reads and writes a file."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_ref.simulator._records import read_json

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


def reason(error: OSError | ValueError) -> str:
    """What an error says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def read_input(option: str, path: str) -> Any:
    """What a JSON file holds that the user named.

    Raises:
        CommandError: it cannot be read.
    """
    try:
        return read_json(path)
    except OSError as error:
        raise CommandError(f"{option} {path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise CommandError(f"{option} {path} cannot be read: {error}.") from None


def write_text(option: str, path: str, text: str) -> None:
    """Write a file whose place was found to be good before the work.

    Raises:
        CommandError: the disk is full, or somebody has taken the place away.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {path} could not be written: {error.strerror or error}.", 1) from None


@contextlib.contextmanager
def no_collecting() -> Iterator[None]:
    """Look for no garbage: that would go through the millions of small tuples of a plan again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
