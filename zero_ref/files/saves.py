"""The folders of sharded saves: which were written here, which are complete, and which may be removed.

This module adds to `stairs/owners.py`, which saves nothing, that an interrupted save leaves the one before
intact:

    directory/
        owner.json               who saves here, while a save is under way (`save_owner.py`)
        save-00000007/           one folder for each save; nothing is ever written into an older one
            save.json            its mark, written first: the identity of the save, how many ranks
            shard-0-of-4.bin     rank 0's data: its tensors, end to end, as they lie in memory
            shard-0-of-4.json    rank 0's table: where each piece begins, its checksums, and its contents
            shard-1-of-4.bin     ...

A rank's table appears by one rename, when its data are synced to the disk, and a save is complete when the
tables of all its ranks are there. So no rank has to be told that a save is complete, an interrupted save
never looks complete, and the save before it is not touched.

Marks and tables are sealed JSON: they begin with the SHA-256 of the rest. Only folders with a mark are ever
counted or removed, and of their files only those that a save writes: a user's own folder may have any name.
An empty folder that has the name of an older save is removed too, since a crash just before the mark is
written leaves one. Standard library only.
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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_ref.files.durable import open_regular, read_regular, replacing, sync_folder

FORMAT = "zero_ref sharded checkpoint 2"
MARK = "save.json"
MARK_NBYTES = 2**16
"""The most bytes that a mark may have. A larger file is not read."""

TABLE = re.compile(r"shard-(0|[1-9]\d*)-of-([1-9]\d*)\.json")
_FOLDER = re.compile(r"save-(\d{8}|[1-9]\d{8,})")
# All files that a save writes, also half written. Only these are ever removed.
_WRITTEN = re.compile(r"(shard-\d+-of-\d+\.(json|bin)|save\.json)(\.part)?")


class DamagedError(ValueError):
    """A file does not contain what a save has written into it."""


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
    """Write JSON whose first entry is the SHA-256 of all that follows, so no bit can change unnoticed.

    >>> sealed({"number": 7}).splitlines()[1]
    b'"number": 7}'
    """
    # The seal has the brace that opens the object, and the first entry. The body is the rest.
    body = json.dumps(value)[1:].encode() + b"\n"
    return _seal_of(body) + body


def _seal_of(body: bytes) -> bytes:
    """The first line of a sealed file whose other lines are `body`."""
    return _SEAL + hashlib.sha256(body).hexdigest().encode() + b'",\n'


def begins_as_sealed(path: Path) -> bool:
    """Whether a file may be from `sealed`, perhaps cut short. Files of other programs begin otherwise."""
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
        id: identifies this save; all its tables repeat it.
        ranks: how many ranks write the save.
        began: the time at which the folder was made, in ISO 8601, UTC.
        owner: the job that saves, as in `save_owner.Owner`.
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
            OSError: the mark is missing, or cannot be read.
            DamagedError: the mark is damaged, or was written for another folder.
        """
        path = folder / MARK
        entries = read_sealed(path, MARK_NBYTES)
        with damage_in(path):
            if entries["format"] != FORMAT:
                raise ValueError(f"it is of the format {entries['format']!r}; this is {FORMAT!r}")
            mark = cls(*map(entries.__getitem__, cls._fields))
            # The seal shows that nothing has changed since. It does not show who wrote the file.
            if [*map(type, mark)] != [int, str, int, str, dict] or mark.ranks < 1:
                raise ValueError(f"it says {mark}")
            # Numbers order the saves, so a folder that was renamed would count as newer or older than it is.
            if folder.name != name_of(mark.number):
                raise ValueError(f"this folder was written as {name_of(mark.number)}: rename it back")
        return mark

    def write(self, folder: Path) -> None:
        """Write the mark into the folder."""
        with replacing(folder / MARK) as file:
            file.write(sealed({"format": FORMAT, **self._asdict()}))


def table_name(rank: int, ranks: int) -> str:
    """The name of a rank's table. The rank's data file has the same name with the suffix .bin."""
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
        mark: the folder's mark; None if it is missing or damaged, and then the folder is never removed.
        problem: what is wrong with the mark; empty if the mark is intact.
        names: the names of the files in the folder.
    """

    number: int
    path: Path
    mark: Mark | None
    problem: str
    names: frozenset[str]

    @property
    def is_complete(self) -> bool:
        """Whether the tables of all ranks are there."""
        return self.mark is not None and not self.lacks

    @property
    def lacks(self) -> str:
        """The tables that are missing, in words; empty if none is missing, or the mark is not valid."""
        ranks = self.mark.ranks if self.mark else 0
        tables = filter(None, map(TABLE.fullmatch, self.names))
        there = {int(table[1]) for table in tables if int(table[1]) < ranks == int(table[2])}
        if len(there) == ranks:
            return ""
        # A mark may claim any number of ranks, so the names are made one by one, and three are enough.
        missing = (table_name(rank, ranks) for rank in range(ranks) if rank not in there)
        more = ranks - len(there) - 3
        return ", ".join(itertools.islice(missing, 3)) + (f" and {more} more" if more > 0 else "")


def look_at(folder: Path) -> Save | None:
    """Describe a folder as a save; None unless it has the name of a save, and contains a mark or a table."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None or not folder.is_dir():
        return None
    names = frozenset(os.listdir(folder))
    if MARK not in names and not any(map(TABLE.fullmatch, names)):
        return None
    # A save whose mark is of no use is described all the same, so that the user learns of it.
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
    """Find all saves in a directory, complete or not; the newest is last."""
    folders = directory.iterdir() if directory.is_dir() else []
    # Saves compare by their first field, the number.
    return sorted(filter(None, map(look_at, folders)))


# ---------------------------------------------------------------------------------- to make and to remove


def new_save(directory: Path, ranks: int, owner: Mapping[str, Any]) -> tuple[Path, Mark]:
    """Make a new folder in the directory, which exists, and mark it. Called by one rank.

    Its number is the next after all saves that have a mark.
    """
    marked = (_FOLDER.fullmatch(mark.parent.name) for mark in directory.glob(f"*/{MARK}"))
    number = 1 + max((int(match[1]) for match in marked if match), default=0)
    while True:
        folder = directory / name_of(number)
        try:
            folder.mkdir()
            break
        except FileExistsError:
            number += 1  # The name is taken by a user's own folder, or by one that a crash left unmarked.
    # Until the mark is written, a crash leaves an empty folder, which a later save removes.
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    mark = Mark(number, secrets.token_hex(16), ranks, began, dict(owner))
    mark.write(folder)
    sync_folder(directory)
    return folder, mark


def remove_old(newest: Path, keep: int, damaged: Collection[Path] = ()) -> None:
    """Keep `keep` complete saves; remove older saves, and what interrupted saves and removals have left.

    Args:
        newest: the save under way, or just completed. Later saves stay, and do not count.
        damaged: folders that are known to be damaged; they do not count as complete.
    """
    last = int(newest.name.removeprefix("save-"))
    saves = [save for save in saves_in(newest.parent) if save.mark and save.number <= last]
    # Damaged and incomplete saves do not count, so that `keep` intact ones stay.
    intact = [save.number for save in saves if save.is_complete and save.path not in damaged]
    oldest_kept = intact[-keep:][0] if intact else 0
    # An incomplete save that is not the newest was interrupted: nobody will complete it.
    for save in saves:
        obsolete = save.number < oldest_kept or not save.is_complete
        if obsolete and save.path != newest:
            _remove(save)
    _remove_unmarked(newest.parent, last)


def _remove(save: Save) -> None:
    """Remove the files of a save, and the folder if nothing else is in it; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        # Tables first, so that an interrupted removal leaves no save that looks complete. The mark last, so
        # that a later save finds what this one could not remove.
        written = filter(_WRITTEN.fullmatch, save.names)
        for name in sorted(written, key=lambda name: (name == MARK, not TABLE.fullmatch(name))):
            (save.path / name).unlink(missing_ok=True)
        save.path.rmdir()


def _remove_unmarked(directory: Path, last: int) -> None:
    """Remove older folders that a crash left before their mark was written, or after it was removed."""
    for folder in directory.iterdir():
        match = _FOLDER.fullmatch(folder.name)
        # A folder with a higher number may be a save that another job has just begun.
        if match is None or int(match[1]) >= last or folder.is_symlink():
            continue
        # Such a folder is empty, or has a mark that is half written.
        part = folder / f"{MARK}.part"
        with contextlib.suppress(OSError):
            if os.listdir(folder) == [part.name] and begins_as_sealed(part):
                part.unlink()
            folder.rmdir()  # Fails if anything is in the folder, which stays then.
