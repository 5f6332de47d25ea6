"""The two files of each rank of a sharded checkpoint: flat tensors by name, each in any number of pieces.

This module adds to `minimal.py`, which writes no files, that any range of a tensor can be read again, at any
world size, and that damage is found. A rank's data file is its tensors, end to end. Its table says where each
piece lies, and has the SHA-256 of each MiB of it, so that reading a range checks the blocks that it touches.
A table also names its save and its rank, so that no file can be taken for another one. Only numbers and JSON
are stored: reading executes nothing, whatever the files contain, and nothing that a table claims is believed
before it fits the files' sizes. `saves.py` shows the folder, `contents.py` gives the tensors their meaning.

torch.distributed.checkpoint (DCP) plans the reading, and can read these files by `ShardReader`.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zero_ref.optimizer.checkpoint import dtype_of
from zero_ref.plan.boxes import Box, boxes_in_memory
from zero_ref.shard.groups import dtype_name
from zero_ref.state.durable import open_regular, replacing, writing
from zero_ref.state.saves import (
    FORMAT,
    DamagedError,
    Mark,
    damage_in,
    look_at,
    read_sealed,
    sealed,
    table_name,
)

BLOCK_NBYTES = 2**20
"""A checksum covers a block of so many bytes of a piece; the last block of a piece may be smaller."""

TABLE_NBYTES = 2**26
"""A table is no larger than this, or than the data it describes. A larger file is not read."""

Table = dict[str, Any]
"""A rank's JSON file: the pieces of its "tensors", and the "contents" that `ShardWriter` was given."""


class FlatSlices(torch.Tensor):
    """A tensor of which this rank has only some ranges of its memory, to be saved, or to be loaded into.

    It has a size, a dtype and no values of its own. DCP's planners ask for its ranges by the dunder methods,
    as boxes: a flat tensor's ranges, or those boxes of a shaped one that the ranges consist of.

    >>> part = FlatSlices({4: torch.tensor([7.0, 8.0])}, numel=10)
    >>> part.size(), part
    (torch.Size([10]), FlatSlices([4, 6) of 10))
    >>> FlatSlices(part.pieces, numel=10, like=torch.empty(2, 5)).__create_chunk_list__()
    [ChunkStorageMetadata(offsets=torch.Size([0, 4]), sizes=torch.Size([1, 1])),
     ChunkStorageMetadata(offsets=torch.Size([1, 0]), sizes=torch.Size([1, 1]))]

    Args:
        pieces: by the number of their first element, 1-D tensors of one dtype, at least one.
        numel: of the whole tensor.
        like: has the shape and the strides of the whole tensor; None for a flat one.
    """

    pieces: dict[int, torch.Tensor]

    @staticmethod
    def __new__(
        cls, pieces: dict[int, torch.Tensor], numel: int, like: torch.Tensor | None = None
    ) -> FlatSlices:
        one = next(iter(pieces.values()))
        size, strides = ((numel,), (1,)) if like is None else (like.size(), like.stride())
        slices: FlatSlices = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, dtype=one.dtype, device=one.device
        )
        slices.pieces = pieces
        return slices

    def _boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes that are here, and their elements as views of the pieces."""
        for start, piece in self.pieces.items():
            for box in boxes_in_memory(start, start + piece.numel(), self.size(), self.stride()):
                place = piece.storage_offset() + box.start - start
                yield box, piece.as_strided(box.sizes, self.stride(), place)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(box) for box, _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(elements for box, elements in self._boxes() if box.offsets == index.offset)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        ranges = ", ".join(f"[{start}, {start + piece.numel()})" for start, piece in self.pieces.items())
        return f"FlatSlices({ranges} of {self.numel()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), __: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.new_empty.default:
            # dcp.async_save makes a new one of the same size, and then gives it copies of the attributes.
            return FlatSlices(args[0].pieces, args[0].numel(), like=args[0])
        raise NotImplementedError(f"{func} needs the whole tensor, of which only a part is here.")


class ShardWriter:
    """Writes the two files of one rank: `write_data` its tensors, then `finish` its table.

    Args:
        folder: of the save; it exists.
        contents: whatever JSON can express, to be stored in the table.
        save: the identity of the save, from its mark.
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, contents: Any = None, save: str = ""
    ) -> None:
        self.table_path = folder / table_name(rank, world_size)
        self.head = {"format": FORMAT, "save": save, "rank": rank, "ranks": world_size}
        self.contents = contents

    def save(self, tensors: Mapping[str, FlatSlices]) -> None:
        """Write both files. Raises OSError, such as for a full disk, and ValueError as `finish`."""
        self.finish(*self.write_data(tensors))

    def write_data(self, tensors: Mapping[str, FlatSlices]) -> tuple[dict[str, Any], int]:
        """Write the pieces of the tensors end to end; return what the table says of them, and their bytes."""
        described = {}
        with writing(self.table_path.with_suffix(".bin")) as file:
            for name, slices in tensors.items():
                pieces: list[tuple[int, int, int, str]] = []
                for start, piece in slices.pieces.items():
                    tensor = piece.detach().cpu().contiguous()
                    memory = _memory_of(tensor)
                    pieces.append((start, tensor.numel(), file.tell(), _digests_of(memory)))
                    file.write(memory)
                dtype = dtype_name(slices.dtype)
                described[name] = {"dtype": dtype, "numel": slices.numel(), "pieces": pieces}
            return described, file.tell()

    def finish(self, described: Mapping[str, Any], nbytes: int) -> None:
        """Write the table, which says that this rank's data are complete.

        Raises:
            ValueError: the table is too large to be read again.
        """
        table = {**self.head, "byteorder": sys.byteorder, "nbytes": nbytes, "tensors": described}
        text = sealed({**table, "contents": self.contents})
        if len(text) > max(TABLE_NBYTES, nbytes):
            raise ValueError(
                f"{self.table_path} would have {len(text)} bytes, most of them notes: nobody would read it. "
                f"Keep notes and options below {TABLE_NBYTES} bytes."
            )
        with replacing(self.table_path) as file:
            file.write(text)


class Piece(NamedTuple):
    """A piece of a tensor in a data file, as its table says.

    Args:
        path: of the data file.
        name, dtype: of the tensor.
        start, numel: its elements in the tensor.
        offset: of its first byte in the file.
        digests: the SHA-256 of its blocks one after the other, in hexadecimal.
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


class Stored(NamedTuple):
    """A box of a tensor, and the piece in which its elements lie.

    Args:
        strides: of the tensor, whose element at `index` has the number sum(index * strides).
    """

    piece: Piece
    box: Box
    strides: tuple[int, ...]


class ShardReader(FileSystemReader):
    """Reads ranges of tensors from the files of all ranks, and checks each block that a range touches.

    torch.distributed.checkpoint.load can use it too, for tensors by the names under which they are stored:

    >>> weight = torch.empty(12)
    >>> dcp.load({"parameters.up.weight": weight}, storage_reader=ShardReader(folder))  # doctest: +SKIP

    Args:
        folder: of one save.
        tables: from `read_tables`, if they have been read.
    """

    def __init__(self, folder: Path, tables: Sequence[Table] | None = None) -> None:
        super().__init__(folder)
        self.folder = folder
        self.tables = read_tables(folder) if tables is None else tables

    def path_of_table(self, rank: int) -> Path:
        """The JSON file of a rank."""
        return self.folder / table_name(rank, len(self.tables))

    def pieces_of_rank(self, rank: int) -> Iterator[Piece]:
        """The pieces in a rank's data file. They must fill it, so a table claims nothing that is not there.

        Raises:
            DamagedError: the table says what cannot be.
        """
        path, table, end = self.path_of_table(rank), self.tables[rank], 0
        with damage_in(path):
            pieces = [
                Piece(path.with_suffix(".bin"), name, dtype_of(tensor["dtype"]), *piece)
                for name, tensor in table["tensors"].items()
                for piece in tensor["pieces"]
            ]
            for piece in sorted(pieces, key=lambda piece: (piece.offset, piece.numel)):
                numbers = (piece.start, piece.numel, piece.offset)
                if any(type(number) is not int or number < 0 for number in numbers) or piece.offset != end:
                    raise ValueError(
                        f"{piece.name}: a piece lies outside of the data file, or on another one"
                    )
                end += piece.nbytes
                if len(piece.digests) != _DIGEST * -(-piece.nbytes // BLOCK_NBYTES):
                    raise ValueError(f"{piece.name}: a piece of {piece.nbytes} bytes has other checksums")
                yield piece
            if end != table["nbytes"]:
                raise ValueError(f"{end} bytes are in pieces, of {table['nbytes']}")

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The tensors of all ranks' tables together.

        Raises:
            DamagedError: the tables say what cannot be, or leave elements out.
        """
        stored: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, Stored] = {}
        for rank, table in enumerate(self.tables):
            with damage_in(self.path_of_table(rank)):
                for piece in self.pieces_of_rank(rank):
                    name, dtype = piece.name, piece.dtype
                    size = torch.Size([table["tensors"][name]["numel"]])
                    known = stored.setdefault(
                        name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks=[])
                    )
                    if (known.properties.dtype, known.size) != (dtype, size):
                        raise ValueError(f"{name} is {dtype} of {size} here, and not so for another rank")
                    # State with a shape of its own is stored by each owner of a part of the parameter.
                    index = MetadataIndex(name, (piece.start,))
                    if index not in places:
                        box = Box((piece.start,), (piece.numel,), piece.start)
                        places[index] = Stored(piece, box, (1,))
                        known.chunks.append(chunk(box))
        for name, tensor in stored.items():
            _check_is_whole(self.folder, name, tensor)
        return Metadata(dict(stored), storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests: list[tuple[Stored, ReadItem]] = sorted(
            ((self.storage_data[item.storage_index], item) for item in plan.items),
            key=lambda request: (request[0].piece.path, request[0].piece.offset),
        )
        for path, of_file in itertools.groupby(requests, key=lambda request: request[0].piece.path):
            with _opened(path) as file:
                for stored, item in of_file:
                    target = planner.resolve_tensor(item).detach()
                    _read_part(file, stored, item, target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def read_slices(reader: StorageReader, tensors: Mapping[str, FlatSlices], metadata: Metadata) -> None:
    """What torch.distributed.checkpoint.load does on a rank between its calls to the others."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


def read_tables(folder: Path) -> list[Table]:
    """The tables of all ranks of a complete save, in rank order.

    Raises:
        DamagedError: a file is missing, damaged, of another save or program, or not of its size; names it.
    """
    save = look_at(folder)
    if save is None or save.mark is None:
        raise DamagedError(save.problem if save else f"{folder} is no folder of a save.")
    if save.lacks:
        raise DamagedError(f"{folder} lacks {save.lacks}.")
    return [_read_table(folder, rank, save.mark) for rank in range(save.mark.ranks)]


def _read_table(folder: Path, rank: int, mark: Mark) -> Table:
    path = folder / table_name(rank, mark.ranks)
    data = path.with_suffix(".bin")
    size = data.stat().st_size if data.exists() else None
    table = read_sealed(path, max(TABLE_NBYTES, size or 0))
    with damage_in(path):
        if table["format"] != FORMAT or table["byteorder"] != sys.byteorder:
            raise ValueError(f"{table['format']!r}, {table['byteorder']}-endian")
        if [table["save"], table["rank"], table["ranks"]] != [mark.id, rank, mark.ranks]:
            raise ValueError(
                f"it was written by rank {table['rank']} of {table['ranks']} for the save {table['save']}; "
                f"this is {folder.name}, {mark.id}"
            )
        expected = table["nbytes"]
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes"
        raise DamagedError(f"{data} {found}; its table says {expected} bytes. The checkpoint is damaged.")
    return table


def verify(folder: Path) -> list[str]:
    """Read every byte of a complete save, on one process; return a line for each damaged block."""
    try:
        reader = ShardReader(folder)
        reader.read_metadata()
    except DamagedError as error:
        return [str(error)]
    problems = []
    for rank in range(len(reader.tables)):
        with _opened(reader.path_of_table(rank).with_suffix(".bin")) as file:
            for piece in reader.pieces_of_rank(rank):
                buffer = memoryview(bytearray(min(piece.nbytes, BLOCK_NBYTES)))
                for first in range(0, piece.nbytes, BLOCK_NBYTES):
                    try:
                        _read_checked(file, piece, first, buffer[: piece.nbytes - first])
                    except DamagedError as error:
                        problems.append(str(error))
    return problems


def _check_is_whole(folder: Path, name: str, tensor: TensorStorageMetadata) -> None:
    chunks = sorted(tensor.chunks, key=lambda chunk: chunk.offsets)
    starts = [*(chunk.offsets[0] for chunk in chunks), tensor.size[0]]
    stops = itertools.accumulate((chunk.sizes[0] for chunk in chunks), initial=0)
    for start, covered in zip(starts, stops, strict=True):
        if start != covered:
            raise DamagedError(
                f"{folder}: {name} has {tensor.size[0]} elements; those from {covered} on are in no shard, "
                "or others are in two. The checkpoint is damaged."
            )


# ----------------------------------------------------------------------------------------------- the bytes

_DIGEST = len(hashlib.sha256().hexdigest())


def chunk(box: Box) -> ChunkStorageMetadata:
    """The box in DCP's form."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _read_part(file: IO[bytes], stored: Stored, item: ReadItem, target: torch.Tensor) -> None:
    """Read a part of a box into `target`; of a part whose elements are scattered, also what lies between."""
    piece, box, strides = stored
    index = [begin + within for begin, within in zip(box.offsets, item.storage_offsets)]
    first = sum(at * stride for at, stride in zip(index, strides)) - piece.start
    numel = 1 + sum((length - 1) * stride for length, stride in zip(item.lengths, strides))
    in_file = torch.empty(numel, dtype=piece.dtype, device="meta").as_strided(item.lengths, strides)
    direct = target.device.type == "cpu" and target.dtype == piece.dtype and target.is_contiguous()
    buffer = target if direct and in_file.is_contiguous() else torch.empty(numel, dtype=piece.dtype)
    _read_checked(file, piece, first * piece.dtype.itemsize, _memory_of(buffer))
    if buffer is not target:
        target.copy_(buffer.as_strided(item.lengths, strides))


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, to read into and to write from, without NumPy."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _digests_of(memory: memoryview) -> str:
    """The checksums of the blocks of `memory`, one after the other."""
    starts = range(0, len(memory), BLOCK_NBYTES)
    return "".join(hashlib.sha256(memory[start : start + BLOCK_NBYTES]).hexdigest() for start in starts)


def _opened(path: Path) -> IO[bytes]:
    with damage_in(path):
        return open_regular(path)


def _read_checked(file: IO[bytes], piece: Piece, first: int, into: memoryview) -> None:
    """Read the bytes of a piece from `first` on, and check the blocks in which they lie.

    Raises:
        OSError: the file cannot be read.
        DamagedError: a block is not what was written.
    """
    end = first + len(into)
    for number in range(first // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
        start = number * BLOCK_NBYTES
        stop = min(start + BLOCK_NBYTES, piece.nbytes)
        wanted = slice(max(start, first), min(stop, end))
        here = into[wanted.start - first : wanted.stop - first]
        block = here if len(here) == stop - start else memoryview(bytearray(stop - start))
        _read(file, piece.offset + start, block)
        expected = piece.digests[number * _DIGEST : (number + 1) * _DIGEST]
        if hashlib.sha256(block).hexdigest() != expected:
            elements = [piece.start + place // piece.dtype.itemsize for place in (start, stop)]
            raise DamagedError(
                f"{piece.path} is damaged: {piece.name}, elements [{elements[0]}, {elements[1]}), is not "
                f"what rank {piece.path.name.split('-')[1]} wrote there: its SHA-256 is another."
            )
        if block is not here:
            here[:] = block[wanted.start - start : wanted.stop - start]


def _read(file: IO[bytes], offset: int, memory: memoryview) -> None:
    file.seek(offset)
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise DamagedError(f"{file.name} ends at byte {offset + done}; the checkpoint is damaged.")
        done += count
