"""Files that survive a loss of power, and reading that cannot hang. Standard library only.

This module adds to `stairs/owners.py`, which writes no files, what a file needs to be found after a crash:
the file must be synced, then the folder that lists it, then the folder above that. `make_directory` and
`replacing` sync all of them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO


def make_directory(path: Path) -> None:
    """Make a directory and all missing ones above it, and sync the folder above each new one."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    # The entry of a new folder is in the folder above it, so that one is synced.
    for folder in missing:
        sync_folder(folder.parent)


@contextlib.contextmanager
def writing(path: Path, mode: str = "xb") -> Iterator[IO[bytes]]:
    """Open a new file to write to it, and sync the file when the context ends.

    Raises:
        FileExistsError: the file exists, and `mode` is "xb".
        OSError: the file cannot be written, such as for a full disk; always names the file.
    """
    try:
        with open(path, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # Python names the file when it cannot be opened, but not when the disk is full.
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name by one rename when it is complete and synced; it may replace another.

    An interruption leaves at most a file of that name with `.part` added.
    """
    part = path.with_name(path.name + ".part")
    with writing(part, "wb") as file:
        yield file
    # The content is on the disk before the name is: otherwise a loss of power could leave an empty file.
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its files are found after a loss of power. Does nothing on Windows."""
    # Windows cannot open a folder.
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read it; opening a pipe or a device might wait for ever.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is a pipe, a device or a folder.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no regular file")
    return open(path, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """Read the whole of a regular file of at most `limit` bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger, or a pipe, a device or a folder.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size} bytes; at most {limit} were expected")
        return file.read()
