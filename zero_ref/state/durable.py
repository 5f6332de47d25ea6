"""Files that survive a loss of power, and files that are what they seem to be. Standard library only.

A file is on the disk when it has been synced, and found there again when the folder that lists it has been
synced too; that folder, when the one above it has been. `make_directory` and `replacing` see to all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, each listed durably in the one above it."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), [path, *path.parents]))
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


@contextlib.contextmanager
def writing(path: Path, mode: str = "xb") -> Iterator[IO[bytes]]:
    """A new file, on the disk and not only on its way there when the context ends.

    Raises:
        OSError: such as for a full disk; always names the file.
    """
    try:
        with open(path, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # a full disk is reported without saying for which file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name complete and at once; until then the one before it stays.

    An interruption leaves at most a file of that name with `.part` behind it.
    """
    part = path.with_name(path.name + ".part")
    with writing(part, "wb") as file:
        yield file
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what the folder lists survive a loss of power, where the system can be asked for that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read it, unbuffered, if it is one: opening a pipe or a device may wait for ever.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no regular file")
    return open(path, "rb", buffering=0, opener=_without_waiting)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def read_regular(path: Path, limit: int) -> bytes:
    """The contents of a regular file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size} bytes; at most {limit} were expected")
        data = b""
        while len(data) <= size and (part := file.read(size + 1 - len(data))):
            data += part
        return data
