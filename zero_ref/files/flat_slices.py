"""Parts of tensors in the form in which torch.distributed.checkpoint (DCP) writes and reads them.

This module adds to `stairs/owners.py`, which saves nothing, that DCP saves and loads a tensor of which each
rank has only some ranges. `save_sharded` and `load_sharded` use neither DCP nor this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader

from zero_ref.plan.boxes import Box, boxes_in_memory


class FlatSlices(torch.Tensor):
    """A tensor of which this rank has only some ranges of its memory, to be saved, or to be loaded into.

    It has a size, a dtype and no values of its own. DCP's planners ask for its ranges by the dunder methods,
    as boxes. A range of a flat tensor is one box; a range of a tensor with a shape consists of several.

    >>> part = FlatSlices({4: torch.tensor([7.0, 8.0])}, numel=10)
    >>> part.size(), part
    (torch.Size([10]), FlatSlices([4, 6) of 10))
    >>> FlatSlices(part.pieces, numel=10, like=torch.empty(2, 5)).__create_chunk_list__()
    [ChunkStorageMetadata(offsets=torch.Size([0, 4]), sizes=torch.Size([1, 1])),
     ChunkStorageMetadata(offsets=torch.Size([1, 0]), sizes=torch.Size([1, 1]))]

    Args:
        pieces: one or more 1-D tensors of one dtype, by the number of their first element.
        numel: elements of the whole tensor.
        like: has the shape and the strides of the whole tensor; None if the whole tensor is flat.
    """

    pieces: dict[int, torch.Tensor]

    @staticmethod
    def __new__(
        cls, pieces: dict[int, torch.Tensor], numel: int, like: torch.Tensor | None = None
    ) -> FlatSlices:
        one = next(iter(pieces.values()))
        size, strides = ((numel,), (1,)) if like is None else (like.size(), like.stride())
        # A wrapper subclass has a size and no memory.
        slices: FlatSlices = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, dtype=one.dtype, device=one.device
        )
        slices.pieces = pieces
        return slices

    def _boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Give the boxes that this rank has, and their elements as views of the pieces."""
        for start, piece in self.pieces.items():
            for box in boxes_in_memory(start, start + piece.numel(), self.size(), self.stride()):
                # `box.start` counts in the whole tensor, and the piece begins at its element `start`.
                place = piece.storage_offset() + box.start - start
                yield box, piece.as_strided(box.sizes, self.stride(), place)

    # DCP's planners call the next three methods: to write, to read, and for the elements of a box.

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
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box, _ in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(elements for box, elements in self._boxes() if box.offsets == index.offset)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        ranges = ", ".join(f"[{start}, {start + piece.numel()})" for start, piece in self.pieces.items())
        return f"FlatSlices({ranges} of {self.numel()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), __: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.new_empty.default:
            # dcp.async_save makes a new tensor of the same size, and then gives it copies of the attributes.
            return FlatSlices(args[0].pieces, args[0].numel(), like=args[0])
        raise NotImplementedError(f"{func} needs the whole tensor, of which only a part is here.")


def read_slices(reader: StorageReader, tensors: Mapping[str, FlatSlices], metadata: Metadata) -> None:
    """Fill ranges of tensors without communication, by the local part of `dcp.load`."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
