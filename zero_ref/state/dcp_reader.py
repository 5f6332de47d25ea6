"""The storage reader with which torch.distributed.checkpoint (DCP) reads what `save_sharded` wrote.

This module adds to `stairs/owners.py` that a program without this package's optimizer, such as a program with
`fully_shard`, continues from a sharded save at any world size.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zero_ref.optimizer import checkpoint
from zero_ref.plan.boxes import Box, boxes_in_memory
from zero_ref.shard import subclasses
from zero_ref.shard.owned import MASTER
from zero_ref.state.contents import Contents, name_of_param, name_of_state
from zero_ref.state.files import Piece, ShardReader, memory_of, newest_intact, opened, read_checked
from zero_ref.state.flat_slices import chunk
from zero_ref.state.sharded import Directory


class StoredBox(NamedTuple):
    """A box of a tensor, and the piece in which its elements lie.

    Args:
        strides: the tensor's strides. Its element at `index` has the number sum(index * strides).
    """

    piece: Piece
    box: Box
    strides: tuple[int, ...]


class DCPReader(FileSystemReader):
    """Lets `dcp.load` read what `save_sharded` wrote, under the keys of a `fully_shard` program.

    >>> state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, adamw)}
    ...                                                                                    # doctest: +SKIP
    >>> dcp.load(state, storage_reader=DCPReader("run7/checkpoint"))                       # doctest: +SKIP

    The keys are "model.<name>", "optim.state.<name>.<key>" and "optim.param_groups.<number>.<option>". If the
    optimizer kept masters, these are the model's values, in 32 bits; a model in 16 bits rounds them. Buffers
    of the model are not in the save.

    Args:
        directory: the directory that was passed to `save_sharded`.
        names: the names of the parameters in the order of their registration, if the optimizer was built
            without names or on a model with other names; None to use the names in the save.
        save: as in `load_sharded`; None for the newest complete save. No job may be saving meanwhile.
    Raises:
        FileNotFoundError: there is no complete checkpoint, or not the one that `save` names.
        ValueError: the checkpoint is damaged, and the file is named; or it has another number of parameters
            than there are names.
    """

    def __init__(
        self, directory: Directory, names: list[str] | None = None, *, save: int | str | None = None
    ) -> None:
        path = Path(directory).absolute()
        folder, tables, _ = newest_intact(path, save, {})
        super().__init__(path / folder)
        self._contents = Contents(ShardReader(path / folder, tables))
        labels = self._contents.labels
        self.names = [checkpoint.plain_name(label) for label in labels] if names is None else names
        if len(self.names) != len(labels):
            raise ValueError(
                f"{len(self.names)} names, and the save has {len(labels)} parameters. Pass one name for each "
                "parameter, in the order of registration."
            )

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Describe the tensors and values of the save, by DCP's keys."""
        stored: dict[str, Any] = {}
        # Where DCP finds each chunk: a `StoredBox`, or the value itself if it was in a table.
        places: dict[MetadataIndex, Any] = {}
        # From DCP's flat keys back to the keys of nested dicts.
        paths: dict[str, tuple[str | int, ...]] = {}
        for path, value, flat_name in self._values():
            name = ".".join(map(str, path))
            paths[name] = path
            # DCP keeps all else than tensors as bytes, which `read_data` makes when they are asked for.
            if not isinstance(value, torch.Tensor):
                stored[name], places[MetadataIndex(name)] = BytesStorageMetadata(), value
                continue
            chunks = []
            for box, place in self._boxes(value, flat_name):
                chunks.append(chunk(box))
                places[MetadataIndex(name, chunks[-1].offsets)] = place
            stored[name] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), chunks)
        return Metadata(stored, planner_data=paths, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for from the files, and give it the values that were in the tables."""
        # 1. Values that were in the tables. DCP wants all else than tensors as bytes.
        in_files: list[tuple[StoredBox, ReadItem]] = []
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if isinstance(place, StoredBox):
                in_files.append((place, item))
            elif item.type == LoadItemType.TENSOR:
                target = planner.resolve_tensor(item).detach().copy_(place)
                planner.commit_tensor(item, target)
            else:
                torch.save(place, as_bytes := io.BytesIO())
                as_bytes.seek(0)
                planner.load_bytes(item, as_bytes)
        # 2. Tensors in the files. Each file is opened once, and read from front to back.
        in_files.sort(key=lambda request: (request[0].piece.path, request[0].piece.offset))
        for path, of_file in itertools.groupby(in_files, key=lambda request: request[0].piece.path):
            with opened(path) as file:
                for stored, item in of_file:
                    target = planner.resolve_tensor(item).detach()
                    _read_part(file, stored, item, target)
                    planner.commit_tensor(item, target)
        # DCP waits for a future. Here everything has been read already.
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _values(self) -> Iterator[tuple[tuple[str | int, ...], Any, str]]:
        """Give DCP's path to each value, the value, and the name of its elements in the files.

        A tensor is on "meta" if its elements are in the files. The name of other values is empty or not used.
        """
        contents = self._contents
        for number, (name, label) in enumerate(zip(self.names, contents.labels, strict=True)):
            # 1. The state, without the parts of tensor subclasses, which no plain optimizer would ask for.
            state = contents.state_dict["state"].get(number, {})
            for key, value in state.items():
                if not subclasses.is_within(key):
                    yield ("optim", "state", name, key), value, name_of_state(label, key)
            # 2. The parameter's value. The master is more accurate than the rounded parameter.
            if MASTER in state:
                yield ("model", name), state[MASTER], name_of_state(label, MASTER)
            elif contents.has_values(number):
                yield ("model", name), contents.params[number], name_of_param(label)
        # 3. The options. DCP lists the parameters of a group by their names.
        for index, group in enumerate(contents.state_dict["param_groups"]):
            for option, value in group.items():
                named = [self.names[number] for number in value] if option == "params" else value
                yield ("optim", "param_groups", index, option), named, ""

    def _boxes(self, value: torch.Tensor, flat_name: str) -> Iterator[tuple[Box, Any]]:
        """Give the boxes in which a tensor is stored, each with a `StoredBox`, or with the value itself."""
        if not value.is_meta:
            yield Box((0,) * value.ndim, tuple(value.shape), 0), value
            return
        for piece in self._contents.reader.tensors[flat_name].pieces.values():
            for box in boxes_in_memory(piece.start, piece.start + piece.numel, value.shape, value.stride()):
                yield box, StoredBox(piece, box, value.stride())


def _read_part(file: IO[bytes], stored: StoredBox, item: ReadItem, target: torch.Tensor) -> None:
    """Read a part of a box into `target`. If its elements are scattered, read those between them, too."""
    # 1. Find the part's first element in the piece, and how many elements lie from there to its last.
    piece, box, strides = stored
    index = [begin + within for begin, within in zip(box.offsets, item.storage_offsets)]
    first = sum(at * stride for at, stride in zip(index, strides)) - piece.start
    numel = 1 + sum((length - 1) * stride for length, stride in zip(item.lengths, strides))
    # 2. Read straight into the target if it has the part's elements in the same order, else into a buffer.
    in_file = torch.empty(numel, dtype=piece.dtype, device="meta").as_strided(item.lengths, strides)
    direct = target.device.type == "cpu" and target.dtype == piece.dtype and target.is_contiguous()
    buffer = target if direct and in_file.is_contiguous() else torch.empty(numel, dtype=piece.dtype)
    read_checked(file, piece, first * piece.dtype.itemsize, memory_of(buffer))
    if buffer is not target:
        target.copy_(buffer.as_strided(item.lengths, strides))
