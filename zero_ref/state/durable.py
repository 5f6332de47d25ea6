"""Files that survive a loss of power, and reading that cannot hang. Standard library only.

This module adds to `minimal.py`, which writes no files, what a file needs to be found after a crash: the file
must be synced, then the folder that lists it, then the folder above that. `make_directory` and `replacing`
sync all of them.
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
    """Make a directory and those above it that are missing, and sync the one above each."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), [path, *path.parents]))
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


@contextlib.contextmanager
def writing(path: Path, mode: str = "xb") -> Iterator[IO[bytes]]:
    """A new file, synced when the context ends.

    Raises:
        OSError: such as for a full disk; always names the file.
    """
    try:
        with open(path, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # as of a full disk
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that replaces another one of the same name by one rename, when it is complete and synced.

    An interruption leaves at most a file of that name with `.part` added.
    """
    part = path.with_name(path.name + ".part")
    with writing(part, "wb") as file:
        yield file
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its files are found after a loss of power. Does nothing on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it, unbuffered; opening a pipe or a device might wait for ever.

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
