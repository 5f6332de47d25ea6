"""The state in the form of torch.distributed.checkpoint (DCP): by the model's names, in boxes of tensors.

This module adds to `state_dict` of `minimal.py` that a program with `fully_shard` and a plain optimizer reads
what is saved here, and the other way round, while no rank has the whole state. `StatefulOptimizer` is what
`dcp.save` and `dcp.load` take, `OptimizerToLoad` what torch's `set_optimizer_state_dict` takes.

DCP itself sends pickled plans between ranks, and pickles its `.metadata` file and all that is no tensor. This
module pickles nothing. Only load DCP checkpoints that you trust.
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
from zero_ref.comm.agreement import agreement
from zero_ref.optimizer import checkpoint
from zero_ref.optimizer.entries import State, check_belongs_to_parameters, plain_state
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like
from zero_ref.shard.owned import MASTER, OwnedSlice
from zero_ref.state.flat_slices import FlatSlices, read_slices
from zero_ref.state.sharded import Directory

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

    Masters of 16-bit parameters are saved as "master_weight" beside the moments, and a plain optimizer does
    not ask for it. Where a plain optimizer saved, the masters are the checkpoint's parameters, if these are
    in the masters' dtype, as with a `MixedPrecisionPolicy` of `fully_shard`; else they begin with the values
    that the parameters have here, so load those first.

    Args:
        model: has the optimizer's parameters; it may be wrapped by DistributedDataParallel or
            ShardedDataParallel.
        optimizer: built on the parameters of `model`.
        checkpoint: None to save; to load, the path or the storage reader that `dcp.load` gets.
        key, model_key: to load, the keys of the optimizer's and of the model's state in the checkpoint.
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
        model_key: str = "model",
        flatten: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.reader: StorageReader | None = (
            FileSystemReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
        )
        self.key, self.model_key, self.flatten = key, model_key, flatten
        self.names = names_of(model, optimizer)
        self._loading: _Loading | None = None

    def state_dict(self) -> dict[str, Any]:
        """What DCP writes, or fills: this rank's part of each tensor.

        Raises:
            TypeError: the state has a tensor subclass, which DCP would pickle, or a list, tuple or dict.
            ValueError: the checkpoint has no optimizer under `key`.
            If one rank raises, all raise.
        Collective: all ranks of the optimizer's group.
        Cost: an all-gather of 32 bytes. To load, memory for this rank's part of the state, on the CPU.
        """
        self.optimizer.current()
        with agreement(self.optimizer.collectives, "give the optimizer state to DCP") as facts:
            if self.reader is None:
                facts += self.optimizer.standing_facts()
                return {"state": self._state(), **self._groups()}
            self._loading = _Loading(self.optimizer, self.names, self.reader, self.key, self.model_key)
            return self._loading.places

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what DCP has read into the tensors of `state_dict()`.

        Raises:
            ValueError: the checkpoint is of other parameters or another optimizer; names the first. If one
                rank raises, all raise and the optimizer is unchanged.
        Collective: all ranks of the optimizer's group.
        Cost: an all-gather of 32 bytes.
        """
        optimizer, loading = self.optimizer, self._loading
        with optimizer.whole.loading("load the state that DCP has read") as facts:
            if loading is None:
                raise ValueError(
                    "StatefulOptimizer(model, optimizer) is to save. To load, make one with the checkpoint: "
                    "StatefulOptimizer(model, optimizer, path)."
                )
            by_name = _by_group(self.names, optimizer)
            ours = [{**group, "param_names": n} for group, n in zip(optimizer.param_groups, by_name)]
            groups = loading.groups(state_dict, by_name)
            saved: dict[str, Any] = {"state": loading.described, "param_groups": groups}
            saved = checkpoint.arranged(saved, ours)
            facts += checkpoint.check_fits(saved, ours, optimizer.optim)
            optimizer.shard.load(loading.state(state_dict), saved["param_groups"])

    def _state(self) -> dict[str, dict[str, Any]]:
        local_state, state = self.optimizer.shard.state, dict[str, dict[str, Any]]()
        check_belongs_to_parameters(local_state)
        for own in self.optimizer.shard.owned:
            plain = plain_state(own, local_state)
            if any(map(subclasses.is_within, plain)):
                raise TypeError(
                    f"the state of {self.names[own.piece.param]} has a tensor subclass, which DCP would "
                    "pickle, or a list. Use save_sharded."
                )
            of_param = state.setdefault(self.names[own.piece.param], {}) if plain else {}
            for key, value in plain.items():
                if own.is_whole or not _follows(value, own.local):
                    of_param[key] = value
                else:
                    _add_slice(of_param, key, own, flat_like(value, own.local))
        return state

    def _groups(self) -> dict[str, Any]:
        packed = checkpoint.packed_groups(self.optimizer.param_groups)
        by_name = _by_group(self.names, self.optimizer)
        groups = [{**group, "params": names} for group, names in zip(packed, by_name, strict=True)]
        if not self.flatten:
            return {"param_groups": groups}
        return {
            f"{GROUPS}{name}.{option}": value
            for group in groups
            for name in group["params"]
            for option, value in group.items()
            if option != "params"
        }


class _Loading:
    """What a checkpoint has for this rank.

    Attributes:
        places: by flat keys, empty tensors to read into, and None for what is no tensor.
        described: by name, the tensors of the state of all parameters, on "meta".
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
        all_saved = metadata.state_dict_metadata
        prefix = f"{key}."
        saved = {name[len(prefix) :]: all_saved[name] for name in all_saved if name.startswith(prefix)}
        if not any(name.startswith(GROUPS) for name in saved):
            keys = sorted({name.partition(".")[0] for name in all_saved})
            raise ValueError(
                f"the checkpoint has no optimizer under the key {key!r}; its keys are {keys}. Give key= the "
                "one under which it was saved."
            )
        self._keys: dict[str, list[str]] = {}
        self.described: dict[str, dict[str, Any]] = {}
        self._describe({name: stored for name, stored in saved.items() if name.startswith(STATE)})
        self.places = {name: _empty(stored) for name, stored in saved.items() if name.startswith(GROUPS)}
        for own, fqn in self.owned:
            for of_state in self._keys.get(fqn, ()):
                name = f"{STATE}{fqn}.{of_state}"
                described = self.described[fqn].get(of_state)
                if described is not None and not own.is_whole and _follows(described, own.param):
                    _add_slice(self.places, name, own, torch.empty(own.piece.numel, dtype=described.dtype))
                elif name not in self.places:
                    self.places[name] = _empty(saved[name], own.param)
        self._masters: dict[str, FlatSlices] = {}
        for own, fqn in self.owned:
            self._add_master(own, fqn, metadata)
        if self._masters:
            read_slices(reader, self._masters, metadata)

    def _describe(self, saved: Mapping[str, Any]) -> None:
        for name, stored in saved.items():
            fqn, _, key = name.removeprefix(STATE).rpartition(".")
            self._keys.setdefault(fqn, []).append(key)
            of_param = self.described.setdefault(fqn, {})
            # The counts are not read yet, and only by owners.
            if isinstance(stored, TensorStorageMetadata) and key not in checkpoint.SCALARS:
                of_param[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")

    def _add_master(self, own: OwnedSlice, fqn: str, metadata: Metadata) -> None:
        """A place for the values of a master that are the model's in the checkpoint."""
        # A parameter without state was never stepped, unless the optimizer keeps none.
        stepped = fqn in self._keys or not self._keys
        if not own.is_master or not stepped or MASTER in self._keys.get(fqn, ()):
            return
        stored = metadata.state_dict_metadata.get(name := f"{self.model_key}.{fqn}")
        if isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == own.local.dtype:
            _add_slice(self._masters, name, own, torch.empty(own.piece.numel, dtype=own.local.dtype))

    def state(self, read: Mapping[str, Any]) -> State:
        """By position in the owned slices, as from `checkpoint.shard_of`."""
        state: State = {}
        for position, (own, fqn) in enumerate(self.owned):
            for key in self._keys.get(fqn, ()):
                value = read[f"{STATE}{fqn}.{key}"]
                if isinstance(value, FlatSlices):
                    value = value.pieces[own.piece.start]
                elif isinstance(value, torch.Tensor):
                    value = value.clone()  # each slice counts its own steps
                state.setdefault(position, {})[key] = value
            masters = self._masters.get(f"{self.model_key}.{fqn}")
            if masters is not None and own.is_master:
                flat = masters.pieces[own.piece.start]
                state.setdefault(position, {})[MASTER] = flat.as_strided(own.local.size(), own.local.stride())
        return state

    def groups(self, read: Mapping[str, Any], by_name: list[list[str]]) -> list[dict[str, Any]]:
        """The saved groups, from options by the group's number, or flat, by the name of each parameter."""
        options: dict[str, dict[str, Any]] = {}
        for name, value in read.items():
            if name.startswith(GROUPS):
                owner, _, option = name.removeprefix(GROUPS).rpartition(".")
                options.setdefault(owner, {})[option] = value
        if f"{GROUPS}0.params" in read:
            return [options[number] for number in sorted(options, key=int)]
        groups = []
        for index, names in enumerate(by_name):
            found = [options[name] for name in names if name in options]
            if len({repr(sorted(of_param.items())) for of_param in found}) > 1:
                raise ValueError(
                    f"the parameters of group {index} had different options when they were saved, so they "
                    "were in several groups. Build the optimizer from the same groups, then load again."
                )
            groups.append({**(found[0] if found else {}), "params": [n for n in names if n in options]})
        return groups


def _by_group(names: list[str], optimizer: ZeroRedundancyOptimizer) -> list[list[str]]:
    running = iter(names)
    return [[next(running) for _ in group["params"]] for group in optimizer.param_groups]


class OptimizerToLoad(Optimizer):
    """What torch's `set_optimizer_state_dict` takes, if its options make it look at the state first.

    With `full_state_dict`, `broadcast_from_rank0` or `flatten_optimizer_state_dict` that function asks an
    optimizer for the keys of its state before it loads. Here no rank has them all, so this object gives them.

    >>> options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)        # doctest: +SKIP
    >>> set_optimizer_state_dict(model, OptimizerToLoad(optimizer), state, options=options)
    ...                                                                                    # doctest: +SKIP

    Collective: all ranks call `set_optimizer_state_dict`; it loads as `load_state_dict` does.
    Cost: with `broadcast_from_rank0`, torch sends the whole state to all ranks, and each has it in memory
        until its part is loaded. A `StatefulOptimizer`, or `torch.load(path, mmap=True)` on each rank without
        this option, reads a part only.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        keys = zip(optimizer.built.params, optimizer.whole.keys(), strict=True)
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
