"""The state in the form of torch.distributed.checkpoint (DCP): by the model's names, in boxes of tensors.

This module adds to `state_dict` of `stairs/owners.py` that a program with `fully_shard` and a plain optimizer
reads what is saved here, and the other way round, while no rank has the whole state. Pass a
`StatefulOptimizer` to `dcp.save` and `dcp.load`, and an `OptimizerToLoad` to torch's
`set_optimizer_state_dict`.

DCP itself sends pickled plans between ranks, and pickles its `.metadata` file and all values but tensors.
This module pickles nothing. Only load DCP checkpoints that you trust.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm.agreement import Fact
from zero_ref.files.flat_slices import FlatSlices, read_slices
from zero_ref.files.sharded import Directory
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like
from zero_ref.shard.owned import MASTER, OwnedSlice
from zero_ref.state import checkpoint
from zero_ref.state.entries import State, plain_state

# DCP's flat keys of an optimizer begin so: "state.<parameter>.<key>", "param_groups.<number>.<option>".
STATE, GROUPS = "state.", "param_groups."

_ADDED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
"""The parts of names that torch.compile and activation checkpointing add, and DCP removes."""


class StatefulOptimizer:
    """An optimizer's state on this rank, to be saved or loaded by torch.distributed.checkpoint.

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

    Masters of 16-bit parameters are saved as "master_weight" beside the moments, and a plain optimizer does
    not ask for them. If a plain optimizer saved the checkpoint, its parameters become the masters, if they
    are in the masters' dtype, as with a `MixedPrecisionPolicy` of `fully_shard`. Otherwise the masters begin
    with the values that the parameters have here, so load the parameters first.

    Args:
        model: has the optimizer's parameters; it may be wrapped by DistributedDataParallel or
            ShardedDataParallel.
        optimizer: built on the parameters of `model`.
        checkpoint: None to save; to load, the path or the storage reader that is passed to `dcp.load`.
        key, model_key: to load, the keys of the optimizer's and of the model's state in the checkpoint.
        flatten: save options as `StateDictOptions(flatten_optimizer_state_dict=True)` does, for a program
            that loads with this option. Both forms can be loaded.
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
        model_key: str = "model",
        flatten: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.reader: StorageReader | None = (
            FileSystemReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
        )
        self.key, self.model_key, self.flatten = key, model_key, flatten
        self.names = names_of(model, optimizer)
        self._part: _PartToLoad | None = None

    def state_dict(self) -> dict[str, Any]:
        """Give DCP this rank's part of each tensor, to write it or to fill it.

        Raises:
            TypeError: the state has a tensor subclass, which DCP would pickle, or a list, tuple or dict.
            ValueError: the checkpoint has no optimizer under `key`.
            If one rank raises, all raise.
        Collective: all ranks of the optimizer's group.
        Cost: an all-gather of 32 bytes. To load, memory for this rank's part of the state, on the CPU.
        """
        self.optimizer.current()
        with self.optimizer.accord.preparing("give the optimizer state to DCP") as facts:
            if self.reader is None:
                facts += self.optimizer.standing_facts()
                return {"state": self._state(), **self._groups()}
            self._part = _PartToLoad(self.optimizer, self.names, self.reader, self.key, self.model_key)
            facts.append(
                Fact(f"save {self._part.save_id}", "Give the reader of one checkpoint on every rank.")
            )
            return self._part.places

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the values that DCP has read into the tensors of `state_dict()`.

        Raises:
            ValueError: the checkpoint is of other parameters or another optimizer; names the first
                difference. If one rank raises, all raise and the optimizer is unchanged.
        Collective: all ranks of the optimizer's group.
        Cost: an all-gather of 32 bytes.
        """
        optimizer, part = self.optimizer, self._part
        with optimizer.whole.loading("load the state that DCP has read") as facts:
            if part is None:
                raise ValueError(
                    "StatefulOptimizer(model, optimizer) is to save. To load, make one with the checkpoint: "
                    "StatefulOptimizer(model, optimizer, path)."
                )
            # 1. Give both sides the model's names, so that names decide which parameters belong together.
            names_of_group = _names_of_group(self.names, optimizer)
            ours = [
                {**group, "param_names": names}
                for group, names in zip(optimizer.param_groups, names_of_group)
            ]
            groups = part.groups(state_dict, names_of_group)
            saved: dict[str, Any] = {"state": part.described, "param_groups": groups}
            # 2. Check that the checkpoint fits, and load. If a rank raises, `loading` restores the optimizer.
            checkpoint.check_form(saved)
            saved = checkpoint.arranged(saved, ours)
            ids = checkpoint.check_fits(saved, ours, optimizer.shard.optim)
            facts += checkpoint.facts_of(saved, ids)
            optimizer.shard.load(part.state(state_dict), saved["param_groups"])

    def _state(self) -> dict[str, dict[str, Any]]:
        """Give this rank's state by the parameters' names. Slices of a tensor become one `FlatSlices`."""
        local_state, state = self.optimizer.shard.state, dict[str, dict[str, Any]]()
        for own in self.optimizer.shard.owned:
            plain = plain_state(own, local_state)
            if any(map(subclasses.is_within, plain)):
                raise TypeError(
                    f"the state of {self.names[own.piece.param]} has a tensor subclass, which DCP would "
                    "pickle, or a list. Use save_sharded."
                )
            of_param = state.setdefault(self.names[own.piece.param], {}) if plain else {}
            for key, value in plain.items():
                # Of a divided parameter's moment, this rank saves its part. Other values are saved whole.
                if own.is_whole or not _follows(value, own.local):
                    of_param[key] = value
                else:
                    _add_slice(of_param, key, own, flat_like(value, own.local))
        return state

    def _groups(self) -> dict[str, Any]:
        """Give the groups with the parameters' names; flat, give each parameter the options of its group."""
        packed = checkpoint.packed_groups(self.optimizer.param_groups)
        names_of_group = _names_of_group(self.names, self.optimizer)
        groups = [{**group, "params": names} for group, names in zip(packed, names_of_group, strict=True)]
        if not self.flatten:
            return {"param_groups": groups}
        return {
            f"{GROUPS}{name}.{option}": value
            for group in groups
            for name in group["params"]
            for option, value in group.items()
            if option != "params"
        }


class _PartToLoad:
    """The part of a DCP checkpoint that this rank loads.

    Attributes:
        places: by flat key, empty tensors for DCP to read into, and None for each value that is no tensor.
        save_id: a name that DCP gives each save; None if the checkpoint has none.
        described: by parameter name and key, the state's tensors on "meta", of all parameters.
    Raises:
        ValueError: there is no optimizer under `key`.
    """

    def __init__(
        self,
        optimizer: ZeroRedundancyOptimizer,
        names: list[str],
        reader: StorageReader,
        key: str,
        model_key: str,
    ) -> None:
        self.owned = [(own, names[own.piece.param]) for own in optimizer.shard.owned]
        self.model_key = model_key
        metadata = reader.read_metadata()
        # Two saves of one run have the same keys and shapes.
        self.save_id = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
        saved = _saved_under(key, metadata)

        # 1. Describe the state of all parameters, which every rank checks before it loads.
        self._keys: dict[str, list[str]] = {}  # parameter name -> the keys of its state
        self.described: dict[str, dict[str, Any]] = {}
        self._describe({name: stored for name, stored in saved.items() if name.startswith(STATE)})

        # 2. Make places for all options, and for the state that this rank will own. DCP will fill them.
        self.places = {name: _empty(stored) for name, stored in saved.items() if name.startswith(GROUPS)}
        for own, fqn in self.owned:
            self._add_places(own, fqn, saved)

        # 3. Read now the masters that the checkpoint has as values of the model: they have no key among the
        # places, which are the optimizer's.
        self._masters: dict[str, FlatSlices] = {}
        for own, fqn in self.owned:
            self._add_master(own, fqn, metadata)
        if self._masters:
            read_slices(reader, self._masters, metadata)

    def _describe(self, saved: Mapping[str, Any]) -> None:
        """Note the keys of each parameter's state, and its tensors on "meta"."""
        for name, stored in saved.items():
            fqn, _, key = name.removeprefix(STATE).rpartition(".")
            self._keys.setdefault(fqn, []).append(key)
            of_param = self.described.setdefault(fqn, {})
            # Step counts are left out: only their owners read them, and have not done so yet.
            if isinstance(stored, TensorStorageMetadata) and key not in checkpoint.SCALARS:
                of_param[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")

    def _add_places(self, own: OwnedSlice, fqn: str, saved: Mapping[str, Any]) -> None:
        """Make places for the state of one slice: for its part of each moment, and for all other values."""
        for key in self._keys.get(fqn, ()):
            name = f"{STATE}{fqn}.{key}"
            described = self.described[fqn].get(key)
            if described is not None and not own.is_whole and _follows(described, own.param):
                _add_slice(self.places, name, own, torch.empty(own.piece.numel, dtype=described.dtype))
            elif name not in self.places:
                self.places[name] = _empty(saved[name], own.param)

    def _add_master(self, own: OwnedSlice, fqn: str, metadata: Metadata) -> None:
        """Make a place for a master whose values are the model's in the checkpoint."""
        # A parameter without state was never stepped, unless the optimizer keeps none.
        stepped = fqn in self._keys or not self._keys
        if not own.is_master or not stepped or MASTER in self._keys.get(fqn, ()):
            return
        stored = metadata.state_dict_metadata.get(name := f"{self.model_key}.{fqn}")
        if isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == own.local.dtype:
            _add_slice(self._masters, name, own, torch.empty(own.piece.numel, dtype=own.local.dtype))

    def state(self, read: Mapping[str, Any]) -> State:
        """Give the state of each slice by its position, as `checkpoint.shard_of` does.

        Args:
            read: `places`, as DCP has filled them.
        """
        state: State = {}
        for position, (own, fqn) in enumerate(self.owned):
            for key in self._keys.get(fqn, ()):
                value = read[f"{STATE}{fqn}.{key}"]
                if isinstance(value, FlatSlices):
                    value = value.pieces[own.piece.start]
                elif isinstance(value, torch.Tensor):
                    # Each slice counts its own steps, so slices of a parameter share no tensor.
                    value = value.clone()
                state.setdefault(position, {})[key] = value
            masters = self._masters.get(f"{self.model_key}.{fqn}")
            if masters is not None and own.is_master:
                flat = masters.pieces[own.piece.start]
                state.setdefault(position, {})[MASTER] = flat.as_strided(own.local.size(), own.local.stride())
        return state

    def groups(self, read: Mapping[str, Any], names_of_group: list[list[str]]) -> list[dict[str, Any]]:
        """Give the saved groups.

        Args:
            read: `places`, as DCP has filled them.
            names_of_group: the names of the parameters in each of the optimizer's groups.
        Raises:
            ValueError: the checkpoint is flat, and has other groups.
        """
        # 1. Collect the options by the group's number, or in a flat checkpoint by the parameter's name.
        options: dict[str, dict[str, Any]] = {}
        for name, value in read.items():
            if name.startswith(GROUPS):
                group_or_param, _, option = name.removeprefix(GROUPS).rpartition(".")
                options.setdefault(group_or_param, {})[option] = value
        if f"{GROUPS}0.params" in read:
            return [options[number] for number in sorted(options, key=int)]
        # 2. A flat checkpoint does not say which groups there were. All parameters of one of this optimizer's
        # groups must have the same options.
        groups = []
        for index, names in enumerate(names_of_group):
            found = [options[name] for name in names if name in options]
            if len({repr(sorted(of_param.items())) for of_param in found}) > 1:
                raise ValueError(
                    f"the parameters of group {index} had different options when they were saved, so they "
                    "were in several groups. Build the optimizer from the same groups, then load again."
                )
            # A group lacks parameters that were not saved, so that `load_state_dict` refuses the checkpoint.
            groups.append({**(found[0] if found else {}), "params": [n for n in names if n in options]})
        return groups


def _saved_under(key: str, metadata: Metadata) -> dict[str, Any]:
    """Select what is saved under a key, by the rest of the flat keys; refuse a key that has no optimizer."""
    stored, prefix = metadata.state_dict_metadata, f"{key}."
    saved = {name[len(prefix) :]: stored[name] for name in stored if name.startswith(prefix)}
    if not any(name.startswith(GROUPS) for name in saved):
        keys = sorted({name.partition(".")[0] for name in stored})
        raise ValueError(
            f"the checkpoint has no optimizer under the key {key!r}; its keys are {keys}. Give key= the "
            "one under which it was saved."
        )
    return saved


def _names_of_group(names: list[str], optimizer: ZeroRedundancyOptimizer) -> list[list[str]]:
    """Divide the names of all parameters among the groups."""
    names_in_order = iter(names)
    return [[next(names_in_order) for _ in group["params"]] for group in optimizer.param_groups]


class OptimizerToLoad(Optimizer):
    """Stands in for the optimizer in torch's `set_optimizer_state_dict`, which looks at the state first.

    With `full_state_dict`, `broadcast_from_rank0` or `flatten_optimizer_state_dict`, that function asks an
    optimizer for the keys of its state. No rank has the state of all parameters, so this object gives their
    keys.

    >>> options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)        # doctest: +SKIP
    >>> set_optimizer_state_dict(model, OptimizerToLoad(optimizer), state, options=options)
    ...                                                                                    # doctest: +SKIP

    Collective: all ranks call `set_optimizer_state_dict`; it loads as `load_state_dict` does.
    Cost: with `broadcast_from_rank0`, torch sends the whole state to all ranks, and each has it in memory
        until its part is loaded. With a `StatefulOptimizer`, or with `torch.load(path, mmap=True)` on each
        rank and without this option, each rank reads only its part.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        keys_of_param = zip(optimizer.built.params, optimizer.whole.keys(), strict=True)
        self.state = defaultdict(dict, {param: dict.fromkeys(keys, _UNSET) for param, keys in keys_of_param})

    def state_dict(self) -> dict[str, Any]:
        """Give a state dict that has all keys, without values."""
        of_params = {number: self.state[param] for number, param in enumerate(self.optimizer.built.params)}
        state = {number: dict(of_param) for number, of_param in of_params.items() if of_param}
        return {"state": state, "param_groups": checkpoint.packed_groups(self.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the entries that have a value."""
        # torch leaves the stand-in, or an empty dict, where the state to load has no value for a key.
        state = {
            id_: {key: value for key, value in of_param.items() if value is not _UNSET and value != {}}
            for id_, of_param in state_dict["state"].items()
        }
        state = {id_: of_param for id_, of_param in state.items() if of_param}
        self.optimizer.load_state_dict({**state_dict, "state": state})


_UNSET = torch.empty(0)
"""Stands for a value that the state to load may have. It is a tensor since torch asks for its device."""


def names_of(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """Find the names that the optimizer's parameters have in the model, without the names of wrappers.

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
    """Whether a value of the state has an element for each element of its parameter, as moments have."""
    return isinstance(value, torch.Tensor) and value.shape == like.shape and like.ndim > 0


def _add_slice(to: dict[str, Any], name: str, own: OwnedSlice, flat: torch.Tensor) -> None:
    """Add the values of one slice to the `FlatSlices` of that name, which all slices of a parameter share."""
    to.setdefault(name, FlatSlices({own.piece.start: flat}, own.param.numel(), like=own.param))
    to[name].pieces[own.piece.start] = flat


def _empty(stored: Any, like: torch.Tensor | None = None) -> torch.Tensor | None:
    """Make a tensor to read into, with the strides of `like` if it has its shape; None for other values."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if like is not None and like.shape == stored.size:
        return torch.empty_like(like, dtype=stored.properties.dtype, device="cpu", requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)
