"""Chapter 10's directories of saves, on the real disk: small ones, some of them damaged.

A simple form of what `state/saves.py` and `state/files.py` write: no mark, and one checksum for each data
file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Table(NamedTuple):
    """What a rank's table says. A rank writes it when its data are on the disk.

    Args:
        rank, ranks: whose it is, and how many ranks wrote the save.
        data: the path of the rank's data file.
        nbytes, sha256: of what the rank wrote there; the checksum in hexadecimal.
    """

    rank: int
    ranks: int
    data: Path
    nbytes: int
    sha256: str


def tables_in(folder: Path) -> list[Table]:
    """The tables that lie in a folder, in rank order; an empty list if there are none."""
    tables = [json.loads(path.read_text()) for path in folder.glob("shard-*-of-*.json")]
    return sorted(Table(**{**table, "data": folder / table["data"]}) for table in tables)


# ------------------------------------------------------------------------------------------ for the grader

INTACT = "intact"


class Fate(NamedTuple):
    """What befell a save.

    Args:
        befall: does it to the folder, and to the rank whose files end in .bin and .json.
        mistake: of an answer that takes the save; {name}, {rank} and {ranks} are filled in.
    """

    befall: Callable[[Path, Path], object]
    mistake: str


def _unfinish(data: Path, table: Path) -> None:
    table.rename(table.with_suffix(".json.part"))


def _begin(data: Path, table: Path) -> None:
    for path in table.parent.glob("*.json"):
        path.unlink()


def _change_a_bit(data: Path, table: Path) -> None:
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 1
    data.write_bytes(contents)


FATES: Mapping[str, Fate] = {
    "still being written": Fate(
        _unfinish,
        "{name} lacks the table of rank {rank} of {ranks}: that rank still writes, or was killed. A save is "
        "complete when the tables of all its ranks are there.",
    ),
    "just begun": Fate(
        _begin,
        "{name} has no table at all, since no rank is done. Nothing can be wrong with tables that are not "
        "there: ask first whether there is one for each rank.",
    ),
    "a file is missing": Fate(
        lambda data, table: data.unlink(), "The data file of rank {rank} of {ranks} in {name} is missing."
    ),
    "a file is cut short": Fate(
        lambda data, table: os.truncate(data, data.stat().st_size // 2),
        "The data file of rank {rank} of {ranks} in {name} is cut short. Its table is there, so the save is "
        "complete, but it is not intact.",
    ),
    "a bit has changed": Fate(
        _change_a_bit,
        "A bit of the data of rank {rank} of {ranks} in {name} has changed. The file has its right length: "
        "only the checksum tells.",
    ),
    "a copy": Fate(
        lambda data, table: None,
        "{name} is a folder that somebody has made, with whatever in it. The name of a save is 'save-' and a "
        "number, and nothing else.",
    ),
}
"""By the word for it."""


def make_directory_of_saves(directory: Path, fates: Mapping[str, str]) -> None:
    """Write the saves of these names, the later in the mapping the later changed."""
    for second, (name, fate) in enumerate(fates.items()):
        rank, ranks = rank_befallen(name)
        folder = directory / name
        folder.mkdir()
        for writer in range(ranks):
            _write(folder / f"shard-{writer}-of-{ranks}.bin", writer, ranks)
        if fate != INTACT:
            data = folder / f"shard-{rank}-of-{ranks}.bin"
            FATES[fate].befall(data, data.with_suffix(".json"))
        for path in (*folder.iterdir(), folder):
            os.utime(path, (1e9 + second, 1e9 + second))


def rank_befallen(name: str) -> tuple[int, int]:
    """The rank whose files a save's fate concerns, and the number of its ranks."""
    number = int("".join(filter(str.isdigit, name)) or 0)
    ranks = 2 + number % 3
    return number % ranks, ranks


def _write(data: Path, rank: int, ranks: int) -> None:
    contents = f"what rank {rank} owns in {data.parent.name}".encode() * 3
    data.write_bytes(contents)
    table = Table(rank, ranks, data, len(contents), hashlib.sha256(contents).hexdigest())
    data.with_suffix(".json").write_text(json.dumps({**table._asdict(), "data": data.name}))
