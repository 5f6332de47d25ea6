"""Chapter 10's disk in memory: a save on it can be killed at any change, and `load` reads what is left."""

from __future__ import annotations

import re
from collections.abc import Mapping


class Killed(BaseException):
    """The process ends here. Not an Exception: a program that is killed handles nothing."""


class Disk:
    """A disk in memory, for a process that is killed at its k-th change of it.

    Killed in `write`, it leaves half of the file; killed in `rename` or `remove`, it leaves everything as it
    was. There is no state between: a file system does either of these at once or not at all.

    >>> disk = Disk({"a": b"old"})
    >>> disk.write("b", b"new")
    >>> disk.rename("b", "a")
    >>> disk.names(), disk.read("a")
    (['a'], b'new')

    Args:
        files: contents by name. Copied.
        killed_at: the number of the change that is not completed, from 1; None for a long life.
    """

    def __init__(self, files: Mapping[str, bytes], killed_at: int | None = None) -> None:
        self.files = dict(files)
        self.killed_at = killed_at
        self.changes: list[str] = []

    def names(self) -> list[str]:
        """The names of all files, sorted."""
        return sorted(self.files)

    def read(self, name: str) -> bytes:
        """The contents of a file."""
        return self.files[self._there(name)]

    def write(self, name: str, contents: bytes) -> None:
        """Write a file, over what may be there."""
        if not isinstance(contents, bytes):
            raise TypeError(f"write({name!r}, ...) takes bytes, not {type(contents).__name__}")
        alive = self._change(f"write({name!r}, ...)")
        self.files[name] = contents if alive else contents[: len(contents) // 2]
        self._go_on(alive)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in one moment; a file that had that name is gone."""
        alive = self._change(f"rename({old!r}, {new!r})")
        self._there(old)
        if alive:
            self.files[new] = self.files.pop(old)
        self._go_on(alive)

    def remove(self, name: str) -> None:
        """Remove a file."""
        alive = self._change(f"remove({name!r})")
        self._there(name)
        if alive:
            del self.files[name]
        self._go_on(alive)

    def _there(self, name: str) -> str:
        if name not in self.files:
            raise FileNotFoundError(f"there is no file {name!r}; there are {self.names()}")
        return name

    def _change(self, what: str) -> bool:
        if self.killed_at is not None and len(self.changes) >= self.killed_at:
            raise Killed  # whoever catches it the first time can still do nothing
        self.changes.append(what)
        return self.killed_at is None or len(self.changes) < self.killed_at

    def _go_on(self, alive: bool) -> None:
        if not alive:
            raise Killed


def load(disk: Disk) -> list[bytes]:
    """The shards of the newest save that has all of its files.

    Raises:
        FileNotFoundError: there is none.
    """
    found: dict[tuple[int, int], set[int]] = {}
    for name in disk.names():
        if match := re.fullmatch(r"save-(\d+)/shard-(\d+)-of-(\d+)", name):
            number, rank, size = map(int, match.groups())
            found.setdefault((number, size), set()).add(rank)
    complete = [save for save, ranks in found.items() if ranks == {*range(save[1])}]
    if not complete:
        raise FileNotFoundError(f"no complete save among {disk.names()}")
    number, size = max(complete)
    names = [f"save-{number}/shard-{rank}-of-{size}" for rank in range(size)]
    return [disk.read(name) for name in names]
