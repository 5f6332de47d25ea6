"""The state in the form of torch.distributed.checkpoint (DCP): by the model's names, in boxes of tensors.

This module adds to `state_dict` of `minimal.py` that a program with `fully_shard` and a plain optimizer reads
what is saved here, and the other way round, while no rank has the whole state. `StatefulOptimizer` is what
`dcp.save` and `dcp.load` take; `DCPReader` lets `dcp.load` read what `save_sharded` has written.

DCP itself sends pickled plans between ranks, and pickles its `.metadata` file and all that is no tensor. This
module pickles nothing. Only load DCP checkpoints that you trust.
"""

from __future__ import annotations

import io
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm.agreement import agreement
from zero_ref.optimizer.buckets import flat_like
from zero_ref.optimizer.shard import MASTER, OwnedSlice
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.boxes import Box, boxes_in_memory
from zero_ref.state import checkpoint, subclasses
from zero_ref.state.contents import Contents, name_of_param, name_of_state
from zero_ref.state.files import FlatSlices, ShardReader, Stored, chunk
from zero_ref.state.saves import name_of
from zero_ref.state.sharded import Directory, newest_intact

STATE, GROUPS = "state.", "param_groups."

_ADDED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
"""What torch.compile and activation checkpointing add to names, and DCP takes away."""


class StatefulOptimizer:
    """This rank's shard of an optimizer's state, to be saved or loaded by torch.distributed.checkpoint.

    Keys, shapes and dtypes are those that `get_optimizer_state_dict(model, plain_optimizer)` of torch gives a
    program that trains with `fully_shard` and the plain optimizer, so that either loads what the other saved,
    at any world size. Each rank writes what it owns and reads what it will own.

    >>> state = {"model": get_model_state_dict(model)}                                     # doctest: +SKIP
    >>> dcp.save({**state, "optim": StatefulOptimizer(model, optimizer)}, checkpoint_id=path)
    ...                                                                                    # doctest: +SKIP
    >>> dcp.load({**state, "optim": StatefulOptimizer(model, optimizer, path)}, checkpoint_id=path)
    ...                                                                                    # doctest: +SKIP

    `dcp.async_save` works too. It communicates in the background, so give it a process group of its own:
    `process_group=dist.new_group(backend="gloo")`. `save_sharded_async` needs none.

    Masters of 16-bit parameters are saved as "master_weight" beside the moments. A plain optimizer does not
    ask for it. Where it is not there, since a plain optimizer saved, masters begin with the values of the
    parameters.

    Args:
        model: has the optimizer's parameters; it may be wrapped by DistributedDataParallel or
            ShardedDataParallel.
        optimizer: built on the parameters of `model`.
        checkpoint: None to save; to load, the path or the storage reader that `dcp.load` gets.
        key: to load, the key under which the state is in the checkpoint.
        flatten: save options as `StateDictOptions(flatten_optimizer_state_dict=True)` does, for a program
            that loads with it. Either form is loaded.
    Raises:
        ValueError: a parameter of the optimizer is not one of `model`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ZeroRedundancyOptimizer,
        checkpoint: Directory | StorageReader | None = None,
        *,
        key: str = "optim",
        flatten: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.reader: StorageReader | None = (
            FileSystemReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
        )
        self.prefix, self.flatten = f"{key}.", flatten
        self.names = names_of(model, optimizer)
        self._shard: list[tuple[int, str, str]] = []

    def state_dict(self) -> dict[str, Any]:
        """What DCP writes, or fills: this rank's part of each tensor.

        Raises:
            TypeError: the state has a tensor subclass, which DCP would pickle.
            ValueError: the checkpoint has no optimizer under `key`.
            If one rank raises, all raise.
        Collective: all ranks of the optimizer's group.
        Cost: an all-gather of 32 bytes. To load, memory for this rank's part of the state, on the CPU.
        """
        self.optimizer.current()
        with agreement(self.optimizer.collectives, "give the optimizer state to DCP") as facts:
            if self.reader is not None:
                return self._to_load(self.reader.read_metadata())
            facts += self.optimizer.standing_facts()
            return {"state": self._to_save(), **self._groups_to_save()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what DCP has read into the tensors of `state_dict()`.

        Raises:
            ValueError: the checkpoint is of other parameters or another optimizer; names the first. If one
                rank raises, all raise and the optimizer is unchanged.
        Collective: all ranks of the optimizer's group.
        Cost: an all-gather of 32 bytes.
        """
        if self.reader is None:
            raise ValueError(
                "StatefulOptimizer(model, optimizer) saves. To load, give it the checkpoint too."
            )
        optimizer = self.optimizer
        with optimizer.loading("load the state that DCP has read") as facts:
            saved: dict[str, Any] = {
                "state": self._described,
                "param_groups": self._loaded_groups(state_dict),
            }
            named = [
                {**group, "param_names": names}
                for group, names in zip(optimizer.param_groups, self._names_of_groups(), strict=True)
            ]
            saved = checkpoint.arranged(saved, named)
            facts += checkpoint.check_fits(saved, optimizer.param_groups, optimizer.optim)
            optimizer.shard.load(self._loaded_state(state_dict), saved["param_groups"])

    # -------------------------------------------------------------------------------------------- to save

    def _to_save(self) -> dict[str, dict[str, Any]]:
        optimizer = self.optimizer
        local_state, state = optimizer.shard.state, dict[str, dict[str, Any]]()
        checkpoint.check_belongs_to_parameters(local_state)
        for own in optimizer.shard.owned:
            plain = checkpoint.plain_state(own, local_state)
            if any(map(subclasses.is_within, plain)):
                raise TypeError(
                    f"the state of {self.names[own.piece.param]} has a tensor subclass, which DCP would "
                    "pickle. Use save_sharded."
                )
            of_param = state.setdefault(self.names[own.piece.param], {}) if plain else {}
            for key, value in plain.items():
                if own.is_whole or not _follows(value, own.local):
                    of_param[key] = value
                else:
                    _add_slice(of_param, key, own, flat_like(value, own.local))
        return state

    def _groups_to_save(self) -> dict[str, Any]:
        groups = checkpoint.packed_groups(self.optimizer.param_groups)
        groups = [{**g, "params": names} for g, names in zip(groups, self._names_of_groups(), strict=True)]
        if not self.flatten:
            return {"param_groups": groups}
        return {
            f"{GROUPS}{name}.{option}": value
            for group in groups
            for name in group["params"]
            for option, value in group.items()
            if option != "params"
        }

    def _names_of_groups(self) -> list[list[str]]:
        names = iter(self.names)
        return [[next(names) for _ in group["params"]] for group in self.optimizer.param_groups]

    # -------------------------------------------------------------------------------------------- to load

    def _to_load(self, metadata: Metadata) -> dict[str, Any]:
        """Empty tensors, by flat keys, for what the checkpoint has of this rank's parameters."""
        saved = {
            name.removeprefix(self.prefix): stored
            for name, stored in metadata.state_dict_metadata.items()
            if name.startswith(self.prefix)
        }
        if not any(name.startswith(GROUPS) for name in saved):
            keys = sorted({name.partition(".")[0] for name in metadata.state_dict_metadata})
            raise ValueError(
                f"the checkpoint has no optimizer under the key {self.prefix[:-1]!r}; its keys are {keys}. "
                "Give key= the one under which it was saved."
            )
        places = {name: _empty(stored) for name, stored in saved.items() if name.startswith(GROUPS)}
        keys_of: dict[str, list[str]] = {}
        self._described: dict[str, dict[str, Any]] = {}
        for name, stored in saved.items():
            fqn, _, key = name.removeprefix(STATE).rpartition(".")
            if not name.startswith(STATE):
                continue
            keys_of.setdefault(fqn, []).append(key)
            of_param = self._described.setdefault(fqn, {})
            if isinstance(stored, TensorStorageMetadata) and key not in checkpoint.SCALARS:
                of_param[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for own in self.optimizer.shard.owned:
            fqn = self.names[own.piece.param]
            for key in keys_of.get(fqn, ()):
                name = f"{STATE}{fqn}.{key}"
                stored = saved[name]
                described: Any = self._described[fqn].get(key)
                if not own.is_whole and _follows(described, own.param):
                    _add_slice(places, name, own, torch.empty(own.piece.numel, dtype=described.dtype))
                elif name not in places:
                    places[name] = _empty(stored, own.param)
        self._keys_of = keys_of
        return places

    def _loaded_state(self, read: Mapping[str, Any]) -> checkpoint.State:
        """By position in the owned slices, as from `checkpoint.shard_of`."""
        state: checkpoint.State = {}
        for position, own in enumerate(self.optimizer.shard.owned):
            fqn = self.names[own.piece.param]
            for key in self._keys_of.get(fqn, ()):
                value = read[f"{STATE}{fqn}.{key}"]
                if isinstance(value, FlatSlices):
                    value = value.pieces[own.piece.start]
                elif isinstance(value, torch.Tensor):
                    value = value.clone()  # each slice counts its own steps
                state.setdefault(position, {})[key] = value
        return state

    def _loaded_groups(self, read: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The saved groups, from options by number of the group, or by name of the parameter."""
        options: dict[str, dict[str, Any]] = {}
        for name, value in read.items():
            if name.startswith(GROUPS):
                owner, _, option = name.removeprefix(GROUPS).rpartition(".")
                options.setdefault(owner, {})[option] = value
        if f"{GROUPS}0.params" in read:
            return [options[number] for number in sorted(options, key=int)]
        groups = []
        for index, names in enumerate(self._names_of_groups()):
            found = [options[name] for name in names if name in options]
            if len({repr(sorted(of_param.items())) for of_param in found}) > 1:
                raise ValueError(
                    f"the parameters of group {index} had different options when they were saved, so they "
                    "were in several groups. Build the optimizer from the same groups, then load again."
                )
            first = found[0] if found else {}
            groups.append({**first, "params": [name for name in names if name in options]})
        return groups


class OptimizerToLoad(Optimizer):
    """What torch's `set_optimizer_state_dict` takes, if its options make it look at the state first.

    With `full_state_dict`, `broadcast_from_rank0` or `flatten_optimizer_state_dict` that function asks an
    optimizer for the keys of its state before it loads. Here no rank has them all, so this object gives them.

    >>> options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)        # doctest: +SKIP
    >>> set_optimizer_state_dict(model, OptimizerToLoad(optimizer), whole, options=options)    # doctest: +SKIP

    Collective: all ranks call `set_optimizer_state_dict`; it loads as `load_state_dict` does.
    Cost: with `broadcast_from_rank0`, torch sends the whole state to all ranks, and each has it in memory
        until its part is loaded. A `StatefulOptimizer`, or `torch.load(path, mmap=True)` on each rank without
        this option, reads a part only.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        keys = zip(optimizer.built.params, optimizer.keys_of_state(), strict=True)
        self.state = defaultdict(dict, {param: dict.fromkeys(of, _UNSET) for param, of in keys})

    def state_dict(self) -> dict[str, Any]:
        """The keys, without values."""
        state = {number: self.state[param] for number, param in enumerate(self.optimizer.built.params)}
        groups = checkpoint.packed_groups(self.param_groups)
        return {"state": {number: dict(of) for number, of in state.items() if of}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what has a value."""
        state = {
            id_: {key: value for key, value in of.items() if value is not _UNSET and value != {}}
            for id_, of in state_dict["state"].items()
        }
        state = {id_: of for id_, of in state.items() if of}
        self.optimizer.load_state_dict({**state_dict, "state": state})


_UNSET = torch.empty(0)
"""In place of a value that the loaded state may have; torch asks for its device."""


def names_of(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """The names that the optimizer's parameters have in the model, without those of wrappers.

    Raises:
        ValueError: a parameter is not one of `model`.
    """
    while isinstance(model, DistributedDataParallel | ShardedDataParallel):
        model = model.module
    names: dict[torch.Tensor, str] = {param: _ADDED.sub("", name) for name, param in model.named_parameters()}
    missing = [number for number, param in enumerate(optimizer.built.params) if param not in names]
    if missing:
        raise ValueError(
            f"rank {optimizer.rank}: parameters {missing} of the optimizer are none of this model. Pass the "
            "model whose parameters the optimizer was built on."
        )
    return [names[param] for param in optimizer.built.params]


def _follows(value: Any, like: torch.Tensor) -> bool:
    """Whether the value has a number for each element."""
    return isinstance(value, torch.Tensor) and value.shape == like.shape and like.ndim > 0


def _add_slice(to: dict[str, Any], name: str, own: OwnedSlice, flat: torch.Tensor) -> None:
    to.setdefault(name, FlatSlices({own.piece.start: flat}, own.param.numel(), like=own.param))
    to[name].pieces[own.piece.start] = flat


def _empty(stored: Any, like: torch.Tensor | None = None) -> torch.Tensor | None:
    """A tensor to read into, with the strides of `like` if it has its shape; None for what is no tensor."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if like is not None and like.shape == stored.size:
        return torch.empty_like(like, dtype=stored.properties.dtype, device="cpu", requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


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
