"""The files of a sharded checkpoint, and how torch.distributed.checkpoint (DCP) reads and writes them.

    directory/
        save-00000007/           one folder for each save; nothing is ever written into an older one
            shard-0-of-4.bin     rank 0's tensors, end to end, as they lie in memory
            shard-0-of-4.json    where each of its pieces begins, and all that is no tensor; written last
            shard-1-of-4.bin     ...

A rank's table appears by one rename, when its data are safely on the disk, and a save is complete when the
tables of all its ranks are there. So no rank has to be told that a save is complete, an interrupted save
never looks like one, and the one before it is not touched. Numbers and JSON are all that is stored: reading
executes nothing, whatever the files contain.

This module knows nothing of optimizers: it stores flat tensors by name, each in any number of pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zero_ref.checkpoint import dtype_of
from zero_ref.shards import dtype_name

FORMAT = "zero_ref sharded checkpoint 1"
SAVE = re.compile(r"save-\d{8}")
TABLE = re.compile(r"shard-(\d+)-of-(\d+)\.json")
Table = dict[str, Any]
"""What a rank's JSON file holds: "tensors", and the "contents" that it was given."""


class FlatSlices(torch.Tensor):
    """A flat tensor of which only some ranges are here: what DCP saves from, or loads into, on one rank.

    It has a size, a dtype and no values of its own. DCP's planners ask it for its ranges.

    >>> part = FlatSlices({4: torch.tensor([7.0, 8.0])}, numel=10)
    >>> part.size(), part
    (torch.Size([10]), FlatSlices([4, 6) of 10))

    Args:
        pieces: by the number of their first element, 1-D tensors of one dtype, at least one.
        numel: of the whole tensor.
    """

    pieces: dict[int, torch.Tensor]

    @staticmethod
    def __new__(cls, pieces: dict[int, torch.Tensor], numel: int) -> FlatSlices:
        one = next(iter(pieces.values()))
        slices: FlatSlices = torch.Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=one.dtype, device=one.device
        )
        slices.pieces = pieces
        return slices

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
        return [_chunk(start, piece.numel()) for start, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.pieces[index.offset[0]]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        ranges = ", ".join(f"[{start}, {start + piece.numel()})" for start, piece in self.pieces.items())
        return f"FlatSlices({ranges} of {self.numel()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} needs the whole tensor, of which only a part is here.")


class ShardWriter(FileSystemWriter):
    """DCP's way to the files of one rank: `write_data` writes its tensors, `finish` its table.

    Args:
        folder: of the save; it exists.
        contents: whatever JSON can express, to be stored with the tensors.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, contents: Any = None) -> None:
        super().__init__(folder)
        self.table_path = folder / f"shard-{rank}-of-{world_size}.json"
        self.contents = contents

    def save(self, tensors: Mapping[str, FlatSlices]) -> None:
        """What torch.distributed.checkpoint.save does on a rank between its calls to the others."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        [plan], metadata = planner.create_global_plan([planner.create_local_plan()])
        self.finish(metadata, [self.write_data(plan, planner).value()])

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with _writing(self.table_path.with_suffix(".bin")) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                tensor = tensor.detach().cpu().contiguous()
                results.append(WriteResult(item.index, tensor.nbytes, storage_data=file.tell()))
                file.write(_memory_of(tensor))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Any] = {}
        nbytes = 0
        for result in itertools.chain.from_iterable(results):
            stored = metadata.state_dict_metadata[result.index.fqn]
            assert isinstance(stored, TensorStorageMetadata)
            assert result.index.offset is not None
            dtype = stored.properties.dtype
            entry = tensors.setdefault(
                result.index.fqn, {"dtype": dtype_name(dtype), "numel": stored.size.numel(), "pieces": []}
            )
            numel = result.size_in_bytes // dtype.itemsize
            entry["pieces"].append([result.index.offset[0], numel, result.storage_data])
            nbytes += result.size_in_bytes
        table = {
            "format": FORMAT,
            "byteorder": sys.byteorder,
            "nbytes": nbytes,
            "tensors": tensors,
            "contents": self.contents,
        }
        unfinished = self.table_path.with_suffix(".tmp")
        with _writing(unfinished) as file:
            file.write(json.dumps(table).encode())
        unfinished.replace(self.table_path)
        _sync_folder(self.table_path.parent)


class _Stored(NamedTuple):
    """Where a piece lies."""

    path: Path
    offset: int
    dtype: torch.dtype


class ShardReader(FileSystemReader):
    """DCP's way from the files of all ranks. Reads exactly the bytes that are asked for.

    It serves torch.distributed.checkpoint.load too, for tensors by the names under which they are stored:

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

    def load(self, tensors: Mapping[str, FlatSlices], metadata: Metadata) -> None:
        """What torch.distributed.checkpoint.load does on a rank between its calls to the others."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), metadata)
        self.set_up_storage_reader(metadata, is_coordinator=True)
        self.read_data(planner.create_local_plan(), planner)

    def path_of_table(self, rank: int) -> Path:
        """The JSON file of a rank."""
        return self.folder / f"shard-{rank}-of-{len(self.tables)}.json"

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Put the tables of all ranks together.

        Raises:
            ValueError: they say what cannot be, or leave elements out.
        """
        stored: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _Stored] = {}
        for rank, table in enumerate(self.tables):
            data = self.path_of_table(rank).with_suffix(".bin")
            with damage_in(self.path_of_table(rank)):
                for name, tensor in table["tensors"].items():
                    dtype, size = dtype_of(tensor["dtype"]), torch.Size([tensor["numel"]])
                    known = stored.setdefault(
                        name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks=[])
                    )
                    if (known.properties.dtype, known.size) != (dtype, size):
                        raise ValueError(f"{name} is {dtype} of {size} here, and not so for another rank")
                    for start, numel, offset in tensor["pieces"]:
                        if min(start, numel, offset) < 0 or offset + numel * dtype.itemsize > table["nbytes"]:
                            raise ValueError(f"{name}: a piece lies outside of the data file")
                        # State that does not follow its parameter is stored by each owner of a part of it.
                        index = MetadataIndex(name, (start,))
                        if index not in places:
                            places[index] = _Stored(data, offset, dtype)
                            known.chunks.append(_chunk(start, numel))
        for name, tensor in stored.items():
            _check_is_whole(self.folder, name, tensor)
        return Metadata(dict(stored), storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests = sorted(
            ((self.storage_data[item.storage_index], item) for item in plan.items),
            key=lambda request: (request[0].path, request[0].offset),
        )
        for path, of_file in itertools.groupby(requests, key=lambda request: request[0].path):
            with open(path, "rb", buffering=0) as file:
                for (_, offset, dtype), item in of_file:
                    target = planner.resolve_tensor(item).detach()
                    direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
                    room = target if direct else torch.empty(target.shape, dtype=dtype)
                    _read(file, offset + item.storage_offsets[0] * dtype.itemsize, room)
                    if not direct:
                        target.copy_(room)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


# --------------------------------------------------------------------------------------------- the folders


def make_folder(directory: Path) -> Path:
    """Make a new folder for a save, and remove what interrupted saves have left. By one rank."""
    directory.mkdir(parents=True, exist_ok=True)
    saves = _saves(directory)
    number = 1 + int(saves[-1].name.removeprefix("save-")) if saves else 1
    folder = directory / f"save-{number:08d}"
    folder.mkdir()
    _sync_folder(directory)
    # Only now: with the newest gone, its number would be given twice.
    complete = [save for save in saves if not missing_tables(save)]
    remove_older(folder, keep=complete[-1:])
    return folder


def newest_complete(directory: Path) -> Path:
    """The folder of the newest complete save.

    Raises:
        FileNotFoundError: there is none; says what is missing.
    """
    saves = _saves(directory) if directory.is_dir() else []
    for save in reversed(saves):
        if not missing_tables(save):
            return save
    lacks = f"; the newest save lacks {', '.join(missing_tables(saves[-1]))}" if saves else ""
    raise FileNotFoundError(f"{directory} holds no complete sharded checkpoint{lacks}.")


def remove_older(than: Path, keep: Sequence[Path] = ()) -> None:
    """Remove the saves begun before this one, as far as that is possible. Newer ones are not its business."""
    for save in _saves(than.parent):
        if save.name < than.name and save not in keep:
            shutil.rmtree(save, ignore_errors=True)


def missing_tables(save: Path) -> list[str]:
    """The tables without which a save is not complete; empty for one that is."""
    there = {match[0]: int(match[2]) for name in os.listdir(save) if (match := TABLE.fullmatch(name))}
    if not there:
        return ["all of its tables"]  # of how many ranks, only a table's name says
    ranks = max(there.values())
    return [name for rank in range(ranks) if (name := f"shard-{rank}-of-{ranks}.json") not in there]


def _saves(directory: Path) -> list[Path]:
    """All saves, complete or not, the newest last."""
    return sorted(path for path in directory.iterdir() if SAVE.fullmatch(path.name) and path.is_dir())


def read_tables(folder: Path) -> list[Table]:
    """The tables of all ranks of a complete save, in rank order.

    Raises:
        ValueError: a file is missing, damaged, of another program or not of its size; names it.
    """
    tables = []
    if missing := missing_tables(folder):
        raise ValueError(f"{folder} lacks {', '.join(missing)}.")
    ranks = sum(TABLE.fullmatch(name) is not None for name in os.listdir(folder))
    for rank in range(ranks):
        path = folder / f"shard-{rank}-of-{ranks}.json"
        with damage_in(path):
            table = json.loads(path.read_bytes())
            if table["format"] != FORMAT or table["byteorder"] != sys.byteorder:
                raise ValueError(f"{table['format']!r}, {table['byteorder']}-endian")
            tables.append(table)
            expected = table["nbytes"]
        data = path.with_suffix(".bin")
        size = data.stat().st_size if data.exists() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{data} {found}; its table says {expected} bytes. The checkpoint is damaged.")
    return tables


@contextlib.contextmanager
def damage_in(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside is the fault of this file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is damaged, or of another program: {type(error).__name__}: {error}"
        ) from error


def _check_is_whole(folder: Path, name: str, tensor: TensorStorageMetadata) -> None:
    chunks = sorted(tensor.chunks, key=lambda chunk: chunk.offsets)
    starts = [*(chunk.offsets[0] for chunk in chunks), tensor.size[0]]
    stops = itertools.accumulate((chunk.sizes[0] for chunk in chunks), initial=0)
    for start, covered in zip(starts, stops, strict=True):
        if start != covered:
            raise ValueError(
                f"{folder}: {name} has {tensor.size[0]} elements; those from {covered} on are in no shard, "
                "or others are in two. The checkpoint is damaged."
            )


# ----------------------------------------------------------------------------------------------- the bytes


def _chunk(start: int, numel: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([numel]))


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, to read into and to write from. Without NumPy, torch has none."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read(file: IO[bytes], offset: int, into: torch.Tensor) -> None:
    memory = _memory_of(into)
    file.seek(offset)
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{file.name} ends at byte {offset + done}; the checkpoint is damaged.")
        done += count


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[IO[bytes]]:
    """A new file, on the disk and not only on its way there when the context ends."""
    try:
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # a full disk is reported without saying for which file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _sync_folder(folder: Path) -> None:
    """What stands in the folder survives a loss of power, where the system can be asked for that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
