"""The folders of sharded saves: which of them are ours, which are complete, and which may go.

    directory/
        owner.json               the job that saves here (`save_owner.py`)
        save-00000007/           one folder for each save; nothing is ever written into an older one
            save.json            its mark, written first: the identity of the save, how many ranks
            shard-0-of-4.bin     rank 0's tensors, end to end, as they lie in memory
            shard-0-of-4.json    its table: where each piece begins, its checksums, and all that is no tensor
            shard-1-of-4.bin     ...

A rank's table appears by one rename, when its data are safely on the disk, and a save is complete when the
tables of all its ranks are there. So no rank has to be told that a save is complete, an interrupted save
never looks like one, and the one before it is not touched.

Marks and tables are JSON, sealed: they begin with the SHA-256 of the rest. Only what carries a mark is ever
counted or removed, and of that only the files that a save writes: a folder of the user's own may have any
name. Standard library only.
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
"""A mark is smaller: what is larger is not read."""

TABLE = re.compile(r"shard-(\d+)-of-(\d+)\.json")
_FOLDER = re.compile(r"save-(\d{8,})")
_OURS = re.compile(r"(shard-\d+-of-\d+\.(json|bin)|save\.json)(\.part)?")


class DamagedError(ValueError):
    """What lies in the files is not what a save has written there."""


@contextlib.contextmanager
def damage_in(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong inside, but what the system reports, into a DamagedError of this file."""
    try:
        yield
    except (OSError, DamagedError):
        raise
    except Exception as error:
        raise DamagedError(
            f"{path} is damaged, or of another program: {type(error).__name__}: {error}"
        ) from error


# ------------------------------------------------------------------------------------------- sealed JSON


def sealed(value: Mapping[str, Any]) -> bytes:
    """As JSON, in which each bit is covered: the first entry is the SHA-256 of what follows it.

    >>> sealed({"number": 7}).splitlines()[1]
    b'"number": 7}'
    """
    body = json.dumps(value)[1:].encode() + b"\n"
    return _seal_of(body) + body


def begins_as_sealed(path: Path) -> bool:
    """It may be what `sealed` has made, perhaps cut short: a file of somebody else's begins otherwise."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        return _SEAL.startswith(file.read(len(_SEAL)))
    return False


_SEAL = b'{"sha256": "'


def _seal_of(body: bytes) -> bytes:
    return _SEAL + hashlib.sha256(body).hexdigest().encode() + b'",\n'


def read_sealed(path: Path, limit: int) -> dict[str, Any]:
    """What `sealed` has made, from a file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is something else, or a bit of it has changed.
    """
    with damage_in(path):
        data = read_regular(path, limit)
        start = len(_seal_of(b""))
        if data[:start] != _seal_of(data[start:]):
            raise ValueError("its contents do not have the SHA-256 that it begins with")
        value: dict[str, Any] = json.loads(data)
        return value


# ------------------------------------------------------------------------------------------------- marks


class Mark(NamedTuple):
    """What the mark of a folder says.

    Args:
        id: of this save and no other. It stands in all its tables.
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
            mark = cls(*(entries[name] for name in cls._fields))
            kinds = [type(value) for value in mark]
            if kinds != [int, str, int, str, dict] or mark.ranks < 1:
                raise ValueError(f"it says {mark}")
            if folder.name != name_of(mark.number):
                raise ValueError(f"this folder was written as {name_of(mark.number)}: rename it back")
        return mark

    def write(self, folder: Path) -> None:
        """Mark the folder."""
        with replacing(folder / MARK) as file:
            file.write(sealed({"format": FORMAT, **self._asdict()}))


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
        mark: None where it carries none that is valid; then it is never removed.
        problem: what is wrong with the mark, if there is none.
        names: of the files in it.
    """

    path: Path
    number: int
    mark: Mark | None
    problem: str
    names: frozenset[str]

    @property
    def is_complete(self) -> bool:
        """The tables of all ranks are there."""
        return next(self._missing(), None) is None and self.mark is not None

    @property
    def lacks(self) -> str:
        """In words, the tables that are missing; empty where there are all."""
        first = list(itertools.islice(self._missing(), 3))
        if not first or self.mark is None:
            return ""
        matches = (TABLE.fullmatch(name) for name in self.names)
        there = {int(match[1]) for match in matches if match and int(match[2]) == self.mark.ranks}
        more = self.mark.ranks - sum(rank < self.mark.ranks for rank in there) - len(first)
        return ", ".join(first) + (f" and {more} more" if more else "")

    def _missing(self) -> Iterator[str]:
        ranks = self.mark.ranks if self.mark else 0
        names = (f"shard-{rank}-of-{ranks}.json" for rank in range(ranks))
        return (name for name in names if name not in self.names)


def look_at(folder: Path) -> Save | None:
    """A folder as a save; None where it is none, which takes a number in its name and a mark or a table."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None or folder.name != name_of(int(match[1])) or not folder.is_dir():
        return None
    names = frozenset(os.listdir(folder))
    if MARK not in names and not any(TABLE.fullmatch(name) for name in names):
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
    return Save(folder, int(match[1]), mark, problem, names)


def saves_in(directory: Path) -> list[Save]:
    """All saves, complete or not, the newest last."""
    if not directory.is_dir():
        return []
    looked = (look_at(path) for path in directory.iterdir())
    return sorted((save for save in looked if save), key=lambda save: save.number)


def newest_complete(directory: Path) -> Save:
    """The newest save of which all tables are there; whether they are intact is another question.

    Raises:
        FileNotFoundError: there is none; says what is missing.
    """
    saves = saves_in(directory)
    for save in reversed(saves):
        if save.is_complete:
            return save
    raise nothing_in(directory, saves)


def nothing_in(directory: Path, saves: list[Save]) -> FileNotFoundError:
    """The error where no save is complete."""
    lacks = f"; the newest save lacks {saves[-1].lacks}" if saves else ""
    return FileNotFoundError(f"{directory} holds no complete sharded checkpoint{lacks}.")


# ------------------------------------------------------------------------------------ what comes and goes


def new_save(directory: Path, ranks: int, owner: Mapping[str, Any]) -> tuple[Path, Mark]:
    """Make and mark a new folder, numbered on from what carries our mark. By one rank."""
    make_directory(directory)
    number = 1 + max((save.number for save in saves_in(directory) if save.mark), default=0)
    while True:
        folder = directory / name_of(number)
        try:
            folder.mkdir()
            break
        except FileExistsError:  # the user's own, or a save whose mark is damaged
            number += 1
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    mark = Mark(number, secrets.token_hex(16), ranks, began, dict(owner))
    mark.write(folder)
    sync_folder(directory)
    return folder, mark


def remove_old(
    newest: Path, keep: int, may_remove: Callable[[Mark], bool], damaged: Collection[str] = ()
) -> None:
    """Keep `keep` complete saves; of those before `newest` remove older ones and what came to no end.

    Args:
        newest: the save under way, or just completed. What is newer than it is not its business.
        may_remove: whether a save of that mark may go.
        damaged: names of folders that are known to be damaged; they do not count as complete.
    """
    saves = [save for save in saves_in(newest.parent) if save.mark]
    saves = [save for save in saves if save.number <= int(newest.name.removeprefix("save-"))]
    intact = [save for save in saves if save.is_complete and save.path.name not in damaged]
    oldest = min((save.number for save in intact[-keep:]), default=0)
    for save in saves:
        assert save.mark is not None
        old = save.number < oldest or not save.is_complete
        if old and save.path != newest and may_remove(save.mark):
            _remove(save)


def _remove(save: Save) -> None:
    """Remove what a save writes, and the folder if nothing else is in it; what cannot be removed stays."""

    def place(name: str) -> int:
        """Tables first, or what is left of an interrupted removal would look complete; the mark last."""
        return 0 if TABLE.fullmatch(name) else 2 if name == MARK else 1

    with contextlib.suppress(OSError):
        for name in sorted(filter(_OURS.fullmatch, save.names), key=place):
            (save.path / name).unlink(missing_ok=True)
        save.path.rmdir()
