"""The folders of sharded saves: which of them are ours, which are complete, and which may be removed.

This module adds to `minimal.py`, which saves nothing, that an interrupted save leaves the one before intact:

    directory/
        owner.json               the job that saves here (`save_owner.py`)
        save-00000007/           one folder for each save; nothing is ever written into an older one
            save.json            its mark, written first: the identity of the save, how many ranks
            shard-0-of-4.bin     rank 0's data: its tensors, end to end, as they lie in memory
            shard-0-of-4.json    rank 0's table: where each piece begins, its checksums, and its contents
            shard-1-of-4.bin     ...

A rank's table appears by one rename, when its data are synced to the disk, and a save is complete when the
tables of all its ranks are there. So no rank has to be told that a save is complete, an interrupted save
never looks complete, and the one before it is not touched.

Marks and tables are sealed JSON: they begin with the SHA-256 of the rest. Only folders with a mark are ever
counted or removed, and in these only the files that a save writes: a user's own folder may have any name. An
older empty folder of such a name is removed too, as a crash just before the mark is there leaves one.
Standard library only.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_ref.state.durable import make_directory, open_regular, read_regular, replacing, sync_folder

FORMAT = "zero_ref sharded checkpoint 2"
MARK = "save.json"
MARK_NBYTES = 2**16
"""A larger file is no mark, and is not read."""

TABLE = re.compile(r"shard-(0|[1-9]\d*)-of-([1-9]\d*)\.json")
_FOLDER = re.compile(r"save-(\d{8}|[1-9]\d{8,})")
_OURS = re.compile(r"(shard-\d+-of-\d+\.(json|bin)|save\.json)(\.part)?")


class DamagedError(ValueError):
    """The files do not hold what a save has written there."""


@contextlib.contextmanager
def damage_in(path: Path) -> Iterator[None]:
    """Turn any error inside, except an OSError, into a DamagedError of this file."""
    try:
        yield
    except (OSError, DamagedError):
        raise
    except Exception as error:
        raise DamagedError(
            f"{path} is damaged, or of another program: {type(error).__name__}: {error}"
        ) from error


# ------------------------------------------------------------------------------------------- sealed JSON

_SEAL = b'{"sha256": "'


def sealed(value: Mapping[str, Any]) -> bytes:
    """JSON whose first entry is the SHA-256 of all that follows it, so no bit of it can change unnoticed.

    >>> sealed({"number": 7}).splitlines()[1]
    b'"number": 7}'
    """
    body = json.dumps(value)[1:].encode() + b"\n"
    return _seal_of(body) + body


def _seal_of(body: bytes) -> bytes:
    return _SEAL + hashlib.sha256(body).hexdigest().encode() + b'",\n'


def begins_as_sealed(path: Path) -> bool:
    """The file may be from `sealed`, perhaps cut short. Files of other programs begin otherwise."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        return _SEAL.startswith(file.read(len(_SEAL)))
    return False


def read_sealed(path: Path, limit: int) -> dict[str, Any]:
    """Read a file of at most `limit` bytes from `sealed`.

    Raises:
        OSError: the file cannot be read.
        DamagedError: the file is something else, or a bit of it has changed.
    """
    with damage_in(path):
        data = read_regular(path, limit)
        seal, newline, body = data.partition(b"\n")
        if seal + newline != _seal_of(body):
            raise ValueError("its contents do not have the SHA-256 that it begins with")
        value: dict[str, Any] = json.loads(data)
        return value


# ------------------------------------------------------------------------------------------------- marks


class Mark(NamedTuple):
    """The mark of a save's folder.

    Args:
        id: of this save and no other; all its tables have it too.
        began: ISO 8601, UTC.
        owner: the job, as in `save_owner.Owner`.
    """

    number: int
    id: str
    ranks: int
    began: str
    owner: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Mark:
        """Read the mark of a folder.

        Raises:
            OSError: there is none, or it cannot be read.
            DamagedError: it is damaged, or of another folder.
        """
        path = folder / MARK
        entries = read_sealed(path, MARK_NBYTES)
        with damage_in(path):
            if entries["format"] != FORMAT:
                raise ValueError(f"it is of the format {entries['format']!r}; this is {FORMAT!r}")
            mark = cls(*map(entries.__getitem__, cls._fields))
            if [*map(type, mark)] != [int, str, int, str, dict] or mark.ranks < 1:
                raise ValueError(f"it says {mark}")
            if folder.name != name_of(mark.number):
                raise ValueError(f"this folder was written as {name_of(mark.number)}: rename it back")
        return mark

    def write(self, folder: Path) -> None:
        """Mark the folder."""
        with replacing(folder / MARK) as file:
            file.write(sealed({"format": FORMAT, **self._asdict()}))


def table_name(rank: int, ranks: int) -> str:
    """The name of a rank's table. That of its data file ends in .bin."""
    return f"shard-{rank}-of-{ranks}.json"


def name_of(number: int) -> str:
    """The name of a save's folder.

    >>> name_of(7), name_of(123456789)
    ('save-00000007', 'save-123456789')
    """
    return f"save-{number:08d}"


# ----------------------------------------------------------------------------------------- what is there


class Save(NamedTuple):
    """A folder that looks like a save.

    Args:
        number: the number in the folder's name.
        path: the folder.
        mark: None if it is missing or damaged; then the folder is never removed.
        problem: what is wrong with the mark; empty if nothing is.
        names: of the files in the folder.
    """

    number: int
    path: Path
    mark: Mark | None
    problem: str
    names: frozenset[str]

    @property
    def is_complete(self) -> bool:
        """The tables of all ranks are there."""
        return self.mark is not None and not self.lacks

    @property
    def lacks(self) -> str:
        """In words, the tables that are missing; empty where none is, or there is no valid mark."""
        ranks = self.mark.ranks if self.mark else 0
        # No list of all that are missing: a mark may claim any number of ranks.
        missing = (name for rank in range(ranks) if (name := table_name(rank, ranks)) not in self.names)
        if not (first := list(itertools.islice(missing, 3))):
            return ""
        tables = [match for match in map(TABLE.fullmatch, self.names) if match]
        there = [match for match in tables if int(match[1]) < ranks == int(match[2])]
        more = ranks - len(there) - len(first)
        return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def look_at(folder: Path) -> Save | None:
    """The folder as a save; None unless it has the name of a save, and a mark or a table in it."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None or not folder.is_dir():
        return None
    names = frozenset(os.listdir(folder))
    if MARK not in names and not any(map(TABLE.fullmatch, names)):
        return None
    mark, problem = None, ""
    try:
        mark = Mark.read(folder)
    except FileNotFoundError:
        problem = (
            f"{folder} has no {MARK}: its mark was removed, or an earlier version of this package wrote it, "
            "without checksums. It can be loaded only with that version."
        )
    except (DamagedError, OSError) as error:
        problem = str(error)
    return Save(int(match[1]), folder, mark, problem, names)


def saves_in(directory: Path) -> list[Save]:
    """All saves, complete or not, the newest last."""
    folders = directory.iterdir() if directory.is_dir() else []
    return sorted(filter(None, map(look_at, folders)))


def nothing_in(directory: Path, saves: list[Save]) -> FileNotFoundError:
    """The error where no save is complete."""
    lacks = f"; the newest save lacks {saves[-1].lacks}" if saves else ""
    return FileNotFoundError(f"{directory} holds no complete sharded checkpoint{lacks}.")


# ------------------------------------------------------------------------------------ what comes and goes


def new_save(directory: Path, ranks: int, owner: Mapping[str, Any]) -> tuple[Path, Mark]:
    """Make and mark a new folder, with the number after those that have a mark. Called by one rank."""
    make_directory(directory)
    number = 1 + max([save.number for save in saves_in(directory) if save.mark], default=0)
    while True:
        folder = directory / name_of(number)
        try:
            folder.mkdir()
            break
        except FileExistsError:  # a folder of the user's own, or a save whose mark is damaged
            number += 1
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    mark = Mark(number, secrets.token_hex(16), ranks, began, dict(owner))
    mark.write(folder)
    sync_folder(directory)
    return folder, mark


def remove_old(
    newest: Path, keep: int, may_remove: Callable[[Mark], bool], damaged: Collection[str] = ()
) -> None:
    """Keep `keep` complete saves; remove older ones, and what interrupted saves and removals left before.

    Args:
        newest: the save under way, or just completed. Saves after it stay, and do not count.
        may_remove: whether a save with that mark may be removed.
        damaged: names of folders that are known to be damaged; they do not count as complete.
    """
    last = int(newest.name.removeprefix("save-"))
    saves = [save for save in saves_in(newest.parent) if save.mark and save.number <= last]
    intact = [save.number for save in saves if save.is_complete and save.path.name not in damaged]
    oldest = intact[-keep:][0] if intact else 0
    for save in saves:
        assert save.mark is not None
        old = save.number < oldest or not save.is_complete
        if old and save.path != newest and may_remove(save.mark):
            _remove(save)
    for folder in newest.parent.iterdir():
        match = _FOLDER.fullmatch(folder.name)
        if match and int(match[1]) < last and not folder.is_symlink():
            _remove_unmarked(folder)


def _remove(save: Save) -> None:
    """Remove what a save writes, and the folder if nothing else is in it; what cannot be removed stays."""
    # Tables first, so that an interrupted removal leaves no save that looks complete; the mark last.
    with contextlib.suppress(OSError):
        ours = filter(_OURS.fullmatch, save.names)
        for name in sorted(ours, key=lambda name: (name == MARK, not TABLE.fullmatch(name))):
            (save.path / name).unlink(missing_ok=True)
        save.path.rmdir()


def _remove_unmarked(folder: Path) -> None:
    """Remove what a crash leaves before a folder has its mark, or when its mark is gone: nothing is in it."""
    part = folder / f"{MARK}.part"
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [part.name] and begins_as_sealed(part):
            part.unlink()
        folder.rmdir()  # only if it is empty
