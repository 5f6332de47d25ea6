"""What `save_sharded` wrote, as torch.distributed.checkpoint (DCP) reads it.

This module adds to `minimal.py` that a program without this package's optimizer, such as one with
`fully_shard`, goes on from a sharded save at any world size.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from zero_ref.optimizer import checkpoint
from zero_ref.plan.boxes import Box, boxes_in_memory
from zero_ref.shard import subclasses
from zero_ref.shard.owned import MASTER
from zero_ref.state.contents import Contents, name_of_param, name_of_state
from zero_ref.state.files import ShardReader, Stored, chunk
from zero_ref.state.saves import name_of
from zero_ref.state.sharded import Directory, newest_intact


class DCPReader(ShardReader):
    """Lets `dcp.load` read what `save_sharded` wrote, under the keys of a `fully_shard` program.

    >>> state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, adamw)}
    ...                                                                                    # doctest: +SKIP
    >>> dcp.load(state, storage_reader=DCPReader("run7/checkpoint"))                       # doctest: +SKIP

    The keys are "model.<name>", "optim.state.<name>.<key>" and "optim.param_groups.<number>.<option>". Where
    the optimizer kept masters, they are the model's values: in 32 bits, and rounded by a model in 16 bits.
    Buffers of the model are not in the save.

    Args:
        directory: what was passed to `save_sharded`.
        names: the names of the parameters in the order of their registration, if the optimizer was built
            without them or on a model with other ones. None for those in the save.
        save: as in `load_sharded`. None for the newest that is complete; nobody may be saving meanwhile.
    Raises:
        FileNotFoundError: there is no complete checkpoint, or not this one.
        ValueError: it is damaged, which names the file; or there is another number of names.
    """

    def __init__(
        self, directory: Directory, names: list[str] | None = None, *, save: int | str | None = None
    ) -> None:
        path = Path(directory).absolute()
        folder, tables, _ = newest_intact(path, name_of(save) if isinstance(save, int) else save, {})
        super().__init__(path / folder, tables)
        self._contents = Contents(ShardReader(path / folder, tables))
        self._pieces: dict[str, list[Stored]] = {}
        for index, stored in self._contents.metadata.storage_data.items():
            self._pieces.setdefault(index.fqn, []).append(stored)
        labels = self._contents.labels
        self.names = [checkpoint.plain_name(label) for label in labels] if names is None else names
        if len(self.names) != len(labels):
            raise ValueError(f"{len(self.names)} names, and the save has {len(labels)} parameters")

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the save has, by DCP's keys."""
        stored: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for path, value, flat_name in self._values():
            name = ".".join(map(str, path))
            paths[name] = path
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
        """Read what the plan asks for; what is in the tables is here already."""
        in_files = []
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if isinstance(place, Stored):
                in_files.append(item)
            elif item.type == LoadItemType.TENSOR:
                target = planner.resolve_tensor(item).detach().copy_(place)
                planner.commit_tensor(item, target)
            else:
                torch.save(place, as_bytes := io.BytesIO())
                as_bytes.seek(0)
                planner.load_bytes(item, as_bytes)
        return super().read_data(replace(plan, items=in_files), planner)

    def _values(self) -> Iterator[tuple[tuple[str | int, ...], Any, str]]:
        """DCP's path to each value, the value, and the name of its elements if it is on "meta"."""
        contents = self._contents
        for number, (name, label) in enumerate(zip(self.names, contents.labels, strict=True)):
            state = contents.state_dict["state"].get(number, {})
            for key, value in state.items():
                if not subclasses.is_within(key):
                    yield ("optim", "state", name, key), value, name_of_state(label, key)
            if MASTER in state:
                yield ("model", name), state[MASTER], name_of_state(label, MASTER)
            elif contents.has_values(number):
                yield ("model", name), contents.params[number], name_of_param(label)
        for index, group in enumerate(contents.state_dict["param_groups"]):
            for option, value in group.items():
                named = [self.names[number] for number in value] if option == "params" else value
                yield ("optim", "param_groups", index, option), named, ""

    def _boxes(self, value: torch.Tensor, flat_name: str) -> Iterator[tuple[Box, Any]]:
        """The boxes that a tensor is stored in, and where each is: in a file, or as the value itself."""
        if not value.is_meta:
            yield Box((0,) * value.ndim, tuple(value.shape), 0), value
            return
        for stored in self._pieces[flat_name]:
            piece = stored.piece
            for box in boxes_in_memory(piece.start, piece.start + piece.numel, value.shape, value.stride()):
                yield box, Stored(piece, box, value.stride())
