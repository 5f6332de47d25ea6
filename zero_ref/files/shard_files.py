"""The two files of each rank of a sharded checkpoint: flat tensors by name, each in any number of pieces.

This module adds to `stairs/owners.py`, which writes no files, that any range of a tensor can be read again,
at any world size, and that damage is found. A rank's data file contains its tensors, end to end. The rank's
table says where each piece lies, and has the SHA-256 of each MiB of the piece, so that reading a range checks
the blocks that the range touches. A table also names its save and its rank, so that no file can be taken for
another one. Only numbers and JSON are stored: reading executes nothing, whatever the files contain, and
nothing that a table claims is believed before it fits the files' sizes. `saves.py` shows the folder, and
`contents.py` gives the tensors their meaning.

The library safetensors stores tensors in the same way, without checksums, and is not used. Measured with its
version 0.8.0: it has no complex128. It copies tensors of an accelerator to the CPU all at once, which takes
430 MB for a state of 500 MB (here 72 MB, one tensor at a time). An error for a full disk is no OSError and
does not name the file. It reads through mmap: a file that becomes shorter ends the process by SIGBUS, where
here all ranks raise. And the checksums would need to read the same bytes once more.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import operator
import sys
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ref.files.durable import open_regular, replacing, writing
from zero_ref.files.saves import (
    FORMAT,
    DamagedError,
    Save,
    damage_in,
    name_of,
    read_sealed,
    saves_in,
    sealed,
    table_name,
)
from zero_ref.shard.groups import dtype_name
from zero_ref.state.entries import dtype_of

BLOCK_NBYTES = 2**20
"""The bytes of a piece that one checksum covers; the last block of a piece may be smaller."""

TABLE_NBYTES = 2**26
"""The most bytes that a table may have, unless its data file has more. A larger table is not read."""

Table = dict[str, Any]
"""The JSON in a rank's table: the pieces of its "tensors", and the "contents" given to `ShardWriter`."""


class Ranges(NamedTuple):
    """The ranges of a flat tensor that this rank writes, or fills.

    Args:
        pieces: one or more 1-D tensors of one dtype, by the number of their first element.
        numel: elements of the whole tensor.
    """

    pieces: dict[int, torch.Tensor]
    numel: int


class ShardWriter:
    """Writes the two files of one rank: first `write_data` the tensors, then `finish` the table.

    Args:
        folder: the save's folder, which exists.
        contents: whatever JSON can express, to be stored in the table.
        save: the `id` in the save's mark.
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, contents: Any = None, save: str = ""
    ) -> None:
        self.table_path = folder / table_name(rank, world_size)
        self.head = {"format": FORMAT, "save": save, "rank": rank, "ranks": world_size}
        self.contents = contents

    def write_data(self, tensors: Mapping[str, Ranges]) -> tuple[dict[str, Any], int]:
        """Write the pieces of the tensors end to end.

        Returns:
            The "tensors" of the table, and the bytes of the data file.
        Raises:
            OSError: the file cannot be written, such as for a full disk; names the file.
        """
        described = {}
        with writing(self.table_path.with_suffix(".bin")) as file:
            for name, (pieces, numel) in tensors.items():
                rows = []  # the fields of `Piece` from `start` on
                for start, piece in pieces.items():
                    # Copy one piece at a time from an accelerator, since CPU memory may be too small for all.
                    tensor = piece.detach().cpu().contiguous()
                    memory = memory_of(tensor)
                    blocks = range(0, len(memory), BLOCK_NBYTES)
                    digests = [hashlib.sha256(memory[at : at + BLOCK_NBYTES]).hexdigest() for at in blocks]
                    rows.append((start, tensor.numel(), file.tell(), "".join(digests)))
                    file.write(memory)
                described[name] = {"dtype": dtype_name(piece.dtype), "numel": numel, "pieces": rows}
            return described, file.tell()

    def finish(self, described: Mapping[str, Any], nbytes: int) -> None:
        """Write the table, which says that this rank's data are complete.

        Raises:
            OSError: as `write_data`.
            ValueError: the table is too large to be read again.
        """
        table = {**self.head, "byteorder": sys.byteorder, "nbytes": nbytes, "tensors": described}
        text = sealed({**table, "contents": self.contents})
        if len(text) > max(TABLE_NBYTES, nbytes):
            raise ValueError(
                f"{self.table_path} would have {len(text)} bytes, most of them notes: nobody would read it. "
                f"Keep notes and options below {TABLE_NBYTES} bytes."
            )
        # The data are on the disk already. The table gets its name when it is on the disk, too.
        with replacing(self.table_path) as file:
            file.write(text)


class Piece(NamedTuple):
    """A piece of a tensor in a data file, as a table describes it.

    Args:
        path: the data file.
        name, dtype: the tensor's name and dtype.
        start, numel: the piece has the tensor's elements [start, start + numel).
        offset: the place of the piece's first byte in the file.
        digests: the SHA-256 of each block of the piece, in hexadecimal, one after the other.
    """

    path: Path
    name: str
    dtype: torch.dtype
    start: int
    numel: int
    offset: int
    digests: str

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StoredTensor(NamedTuple):
    """A flat tensor in the files of a save. Its pieces are listed by the number of their first element."""

    dtype: torch.dtype
    numel: int
    pieces: dict[int, Piece]


class ShardReader:
    """Reads ranges of the tensors in the files of all ranks, and checks each block that a range touches.

    Args:
        folder: the folder of a save.
        tables: from `read_tables`.
    Attributes:
        tensors: the tensors by name.
        pieces_of_rank: the pieces in each rank's data file, in the order in which they lie there.
    Raises:
        DamagedError: tables contradict themselves or each other, or leave elements out.
    """

    def __init__(self, folder: Path, tables: Sequence[Table]) -> None:
        self.folder, self.tables = folder, tables
        self.tensors: dict[str, StoredTensor] = {}
        self.pieces_of_rank: list[list[Piece]] = []
        # 1. Put the tables together, and believe none that contradicts another one.
        for rank, table in enumerate(tables):
            with damage_in(self.path_of_table(rank)):
                self.pieces_of_rank.append(self._pieces_in(rank, table))
                for piece in self.pieces_of_rank[rank]:
                    name, numel = piece.name, table["tensors"][piece.name]["numel"]
                    known = self.tensors.setdefault(name, StoredTensor(piece.dtype, numel, {}))
                    if (known.dtype, known.numel) != (piece.dtype, numel):
                        raise ValueError(f"{name} is {numel} of {piece.dtype}, and not so for another rank")
                    # Each owner of a part of a parameter stores the state that has a shape of its own: one is
                    # enough.
                    known.pieces.setdefault(piece.start, piece)
        # 2. Every element must be in exactly one piece: each piece, and then the end of the tensor, must be
        # where the piece before ends.
        for name, tensor in self.tensors.items():
            end = 0
            for start in (*sorted(tensor.pieces), tensor.numel):
                if start != end:
                    raise DamagedError(
                        f"{folder}: {name} has {tensor.numel} elements; those from {end} on are in no shard, "
                        "or others are in two. The checkpoint is damaged."
                    )
                end += tensor.pieces[start].numel if start in tensor.pieces else 0

    def path_of_table(self, rank: int) -> Path:
        """The path of a rank's table."""
        return self.folder / table_name(rank, len(self.tables))

    def _pieces_in(self, rank: int, table: Table) -> list[Piece]:
        """List the pieces that a rank's table describes, in the order in which they lie in the data file.

        Raises:
            Exception: any, if the table is damaged: the pieces overlap, or do not fill the file exactly.
        """
        path = self.path_of_table(rank).with_suffix(".bin")
        pieces = [
            Piece(path, name, dtype_of(tensor["dtype"]), *piece)
            for name, tensor in table["tensors"].items()
            for piece in tensor["pieces"]
        ]
        # Empty pieces come first of those at one place.
        pieces.sort(key=operator.attrgetter("offset", "numel"))
        end = 0  # the bytes in the pieces so far
        for piece in pieces:
            numbers = (piece.start, piece.numel, piece.offset, table["tensors"][piece.name]["numel"])
            if {*map(type, numbers)} != {int} or min(numbers) < 0 or piece.offset != end:
                raise ValueError(f"{piece.name}: a piece lies outside of the data file, or on another one")
            if len(piece.digests) != _DIGEST * -(-piece.nbytes // BLOCK_NBYTES):
                raise ValueError(f"{piece.name}: a piece of {piece.nbytes} bytes has other checksums")
            end += piece.nbytes
        if end != table["nbytes"]:
            raise ValueError(f"{end} bytes are in pieces, of {table['nbytes']}")
        return pieces

    def parts_of(self, tensors: Mapping[str, Ranges]) -> list[tuple[Piece, int, torch.Tensor]]:
        """Plan which parts of which pieces to read, in the order of the files.

        Returns:
            Triples (piece, first element in the piece, the 1-D tensor to read into).
        """
        parts = []
        for name, ranges in tensors.items():
            for piece in self.tensors[name].pieces.values():
                for start, flat in ranges.pieces.items():
                    first = max(start, piece.start)
                    stop = min(start + flat.numel(), piece.start + piece.numel)
                    if first < stop:
                        parts.append((piece, first - piece.start, flat[first - start : stop - start]))
        return sorted(parts, key=lambda part: (part[0].path, part[0].offset, part[1]))

    def read(self, tensors: Mapping[str, Ranges]) -> None:
        """Fill ranges of stored tensors, which are on the CPU and have the stored dtype.

        Raises:
            OSError: a file cannot be read.
            DamagedError: a block is not what was written.
        """
        # Each file is opened once, and read from front to back.
        for path, parts in itertools.groupby(self.parts_of(tensors), key=lambda part: part[0].path):
            with damage_in(path), open_regular(path) as file:
                for piece, element, flat in parts:
                    read_checked(file, piece, element * piece.dtype.itemsize, memory_of(flat))


def read_tables(save: Save) -> list[Table]:
    """Read the tables of all ranks of a complete save, in rank order.

    Raises:
        DamagedError: a file is missing, damaged, from another save or program, or has another size; names it.
    """
    folder, mark = save.path, save.mark
    if mark is None:
        raise DamagedError(save.problem)
    if save.lacks:
        raise DamagedError(f"{folder} lacks {save.lacks}.")
    tables = []
    for rank in range(mark.ranks):
        path = folder / table_name(rank, mark.ranks)
        data = path.with_suffix(".bin")
        size = data.stat().st_size if data.exists() else None
        table = read_sealed(path, max(TABLE_NBYTES, size or 0))
        with damage_in(path):
            if table["format"] != FORMAT or table["byteorder"] != sys.byteorder:
                raise ValueError(f"{table['format']!r}, {table['byteorder']}-endian")
            # The table is intact. It may still be a copy from another folder.
            if [table["save"], table["rank"], table["ranks"]] != [mark.id, rank, mark.ranks]:
                raise ValueError(
                    f"it was written by rank {table['rank']} of {table['ranks']} for the save "
                    f"{table['save']}; this is {folder.name}, {mark.id}"
                )
            expected = table["nbytes"]
        # A data file that was cut short is found now, though none of its blocks has been read.
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            raise DamagedError(f"{data} {found}; its table says {expected} bytes. The checkpoint is damaged.")
        tables.append(table)
    return tables


def newest_intact(
    directory: Path, save: int | str | None, skipped: Mapping[str, str]
) -> tuple[str, list[Table], dict[str, str]]:
    """Find the newest complete save whose tables are intact, or a certain save.

    Args:
        save: the number of the only save to consider, or the name of its folder; None for all saves.
        skipped: by folder name, the saves that are known to be damaged, and why.
    Returns:
        The name of the folder, the tables, and `skipped` with the damaged saves that were found.
    Raises:
        FileNotFoundError: there is no complete save, or none of that name.
        DamagedError: all complete saves are damaged.
    """
    name = name_of(save) if isinstance(save, int) else save
    saves = [found for found in saves_in(directory) if name in (None, found.path.name)]
    if name is not None and not saves:
        raise FileNotFoundError(f"{directory} has no save {name!r}.")
    problems = dict(skipped)
    for found in reversed(saves):
        # A save that lacks tables was interrupted: that is no damage.
        if found.path.name in problems or found.lacks:
            continue
        try:
            return found.path.name, read_tables(found), problems
        except DamagedError as error:
            problems[found.path.name] = str(error)
    if problems:
        raise DamagedError("; ".join(problems.values()))
    lacks = f"; the newest save lacks {saves[-1].lacks}" if saves else ""
    raise FileNotFoundError(f"{directory} holds no complete sharded checkpoint{lacks}.")


def verify(save: Save) -> list[str]:
    """Read every byte of a complete save, in one process; return a line for each damaged block."""
    # Without sound tables nobody knows which blocks there are.
    try:
        reader = ShardReader(save.path, read_tables(save))
    except DamagedError as error:
        return [str(error)]
    problems = []
    for rank, pieces in enumerate(reader.pieces_of_rank):
        path = reader.path_of_table(rank).with_suffix(".bin")
        with damage_in(path), open_regular(path) as file:
            for piece in pieces:
                for first in range(0, piece.nbytes, BLOCK_NBYTES):
                    block = memoryview(bytearray(min(piece.nbytes - first, BLOCK_NBYTES)))
                    try:
                        read_checked(file, piece, first, block)
                    except DamagedError as error:
                        problems.append(str(error))
    return problems


# ----------------------------------------------------------------------------------------------- the bytes

_DIGEST = len(hashlib.sha256().hexdigest())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor, to read into and to write from, without NumPy."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def read_checked(file: BufferedReader, piece: Piece, first: int, into: memoryview) -> None:
    """Read the bytes of a piece from `first` on, and check all blocks in which they lie.

    Args:
        first: the place in the piece, in bytes.
        into: as many bytes as are to be read.
    Raises:
        OSError: the file cannot be read.
        DamagedError: a block is not what was written.
    """
    end = first + len(into)
    for number in range(first // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
        start = number * BLOCK_NBYTES
        stop = min(start + BLOCK_NBYTES, piece.nbytes)
        wanted = slice(max(start, first), min(stop, end))
        # A checksum covers a whole block. Read straight into the target if it takes the whole block, else
        # through a buffer.
        here = into[wanted.start - first : wanted.stop - first]
        block = here if len(here) == stop - start else memoryview(bytearray(stop - start))
        file.seek(piece.offset + start)
        if (count := file.readinto(block)) < len(block):
            ends = piece.offset + start + count
            raise DamagedError(f"{piece.path} ends at byte {ends}; the checkpoint is damaged.")
        expected = piece.digests[number * _DIGEST : (number + 1) * _DIGEST]
        if hashlib.sha256(block).hexdigest() != expected:
            elements = [piece.start + place // piece.dtype.itemsize for place in (start, stop)]
            raise DamagedError(
                f"{piece.path} is damaged: {piece.name}, elements [{elements[0]}, {elements[1]}), is not "
                f"what rank {piece.path.name.split('-')[1]} wrote there: its SHA-256 is another."
            )
        if block is not here:
            here[:] = block[wanted.start - start : wanted.stop - start]
