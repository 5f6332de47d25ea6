"""Helpers of all commands: end with a message, import an extra, read and write a file."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
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


def need(module: str, extra: str = "lab", code: int = 1) -> Any:
    """Import a module that an extra of this package installs.

    Args:
        code: the command's exit code if a package is missing.
    Raises:
        CommandError: a package is not installed; the message says which extra installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("zero_ref"):
            raise  # a module of this package is broken
        raise CommandError(
            f'this needs the package {error.name}, which is not installed: pip install "zero_ref[{extra}]"',
            code=code,
        ) from None


def reason(error: OSError | ValueError) -> str:
    """The message of an error, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def read_input(option: str, path: str, read: Callable[[str], Any] = read_json) -> Any:
    """The values in a JSON file that the user named; with `read_text`, the text in a file.

    Raises:
        CommandError: the file cannot be read.
    """
    try:
        return read(path)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise CommandError(f"{option} {path} cannot be read: {said}.") from None


def write_text(option: str, path: str, text: str) -> None:
    """Write a file whose path was checked before the work.

    Raises:
        CommandError: the disk is full, or the folder is gone.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {path} could not be written: {error.strerror or error}.", 1) from None


MANY_RANKS = 100_000
"""To plan more ranks than these takes from some seconds to minutes."""


@contextlib.contextmanager
def planning(ranks: int = 0) -> Iterator[None]:
    """Pause garbage collection, which would visit the millions of small tuples of a plan again and again.

    If there are more than MANY_RANKS, say on standard error that it will take a while.
    """
    if ranks > MANY_RANKS:
        said = f"zero-ref: each of {ranks:,} ranks is planned, which may take a minute or more"
        print(said, file=sys.stderr, flush=True)
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
