"""The saves in a directory, as tests look for them, and what is read of a file."""

from __future__ import annotations

from pathlib import Path

from zero_ref.files.saves import Save, saves_in


def newest_complete(directory: Path) -> Save:
    """The newest save of which all tables are there."""
    complete = [save for save in saves_in(directory) if save.is_complete]
    if not complete:
        raise FileNotFoundError(directory)
    return complete[-1]


class CountingFile:
    """Stands in for a file opened to be read, and counts its bytes in `log`."""

    def __init__(self, path: Path, log: dict[str, int]) -> None:
        self.file, self.log, self.name = path.open("rb"), log, path.name
        log.setdefault(self.name, 0)

    def __enter__(self) -> CountingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, offset: int) -> None:
        self.file.seek(offset)

    def readinto(self, memory: memoryview) -> int:
        count = self.file.readinto(memory)
        self.log[self.name] += count
        return count
