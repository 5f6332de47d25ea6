"""The contents of a sharded checkpoint: named flat tensors, and JSON. Nothing here communicates.

This module adds to `state_dict` of `stairs/owners.py` a form of which each rank writes and reads only its own
part. Tensors are stored flat, in the order of the parameter's memory: "parameters.<name>" and
"state.<name>.<key>", with a number in place of the name if the optimizer has no names. A rank stores the
ranges that it owns. All else is JSON, the "contents" in each rank's table:

    state           an `entries.Entry` for each value of this rank's state

and in the table of rank 0 also

    parameters      shape, strides and dtype of each parameter, in registration order
    param_groups    as in a state dict
    notes           what the user passed to `save_sharded`

`ranges_to_save` and `contents_of` make the tensors and the JSON, `Contents` checks the JSON of all ranks, and
`LoadedShard` reads the ranges that this rank will own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero_ref.files.saves import damage_in
from zero_ref.files.shard_files import Ranges, ShardReader
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.groups import dtype_name
from zero_ref.shard.owned import MASTER, OwnedSlice
from zero_ref.state import checkpoint
from zero_ref.state.entries import Entry, State, allocate, dtype_of, pack_slice, plain_state


def ranges_to_save(
    optimizer: ZeroRedundancyOptimizer, parameters: bool, as_copies: bool
) -> tuple[dict[str, Ranges], list[Entry]]:
    """Collect this rank's ranges of the stored tensors, and the entries of its state.

    Args:
        parameters: collect the owned slices of the parameters too.
        as_copies: copy the ranges to CPU memory, so that training may go on.
    Returns:
        The ranges by the name of their tensor, and the entries.
    Raises:
        TypeError: as `entries.pack`.
    """
    state, labels = optimizer.shard.state, _labels_of(optimizer.param_groups)
    ranges: dict[str, Ranges] = {}
    entries = []
    for own in optimizer.shard.owned:
        label = labels[own.piece.param]
        # 1. The state. Numbers are in the entry itself; only a tensor has a flat range.
        for entry, flat in pack_slice(own, plain_state(own, state)):
            entries.append(entry)
            if flat is not None:
                # State with a shape of its own, such as the factors of Adafactor, is stored whole.
                numel = flat.numel() if "shape" in entry else own.param.numel()
                name = name_of_state(label, entry["key"])
                _add_range(ranges, name, numel, entry.get("start", 0), flat, as_copies)
        # 2. The parameter. Frozen ones have owners, too.
        if parameters:
            name, numel = name_of_param(label), own.param.numel()
            _add_range(ranges, name, numel, own.piece.start, flat_view(own.window), as_copies)
    return ranges, entries


def _add_range(
    to: dict[str, Ranges], name: str, numel: int, start: int, flat: torch.Tensor, as_copy: bool = False
) -> None:
    """Add a range, whose first element is number `start` of the `numel` elements of the tensor `name`."""
    flat = flat.to("cpu", copy=True) if as_copy else flat
    to.setdefault(name, Ranges({}, numel)).pieces[start] = flat


def contents_of(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Describe as JSON what all ranks know alike, so that rank 0 alone stores it.

    Raises:
        TypeError: an option of a parameter group cannot be expressed in JSON.
    """
    return {
        "parameters": [
            {"shape": list(param.shape), "strides": list(param.stride()), "dtype": dtype_name(param.dtype)}
            for param in optimizer.built.params
        ],
        "param_groups": [
            {key: _to_json(value, key) for key, value in group.items()}
            for group in checkpoint.packed_groups(optimizer.param_groups)
        ],
    }


def _labels_of(param_groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Give each parameter its name in the files: its own, or its number if names do not tell all apart."""
    names: list[str] = []
    count = 0
    for group in param_groups:
        names += group.get("param_names", ())
        count += len(group["params"])
    if len(set(names)) == count:
        return names
    return [*map(str, range(count))]


def name_of_param(label: str) -> str:
    """The name under which a parameter's values are stored."""
    return f"parameters.{label}"


def name_of_state(label: str, key: str) -> str:
    """The name under which a tensor of a parameter's state is stored."""
    return f"state.{label}.{key}"


class Contents:
    """The optimizer that all ranks' tables together describe, with tensors on "meta": no value is read.

    Attributes:
        reader: reads the tensors in the files.
        params: the parameters, in registration order.
        labels: the parameters' names in the files.
        state_dict: the state dict that the optimizer without shards would have.
        notes: what the user passed to `save_sharded`.
    Raises:
        DamagedError: the tables contradict themselves, or were written by another program; names the file.
    """

    def __init__(self, reader: ShardReader) -> None:
        self.reader = reader
        contents_of_rank = [table["contents"] for table in reader.tables]
        # 1. Parameters, groups and notes are in rank 0's table.
        with damage_in(reader.path_of_table(0)):
            self._read_common(contents_of_rank[0])
        # 2. The state of a rank's slices is in the rank's own table. (parameter, key) -> the step count there
        counts: dict[tuple[int, str], Any] = {}
        for rank, contents in enumerate(contents_of_rank):
            with damage_in(reader.path_of_table(rank)):
                for entry in contents["state"]:
                    self._add_entry(entry, counts)

    def _read_common(self, contents: Mapping[str, Any]) -> None:
        """Read and check what rank 0 has stored for all: parameters, groups and notes."""
        self.params = [
            torch.empty_strided(p["shape"], p["strides"], dtype=dtype_of(p["dtype"]), device="meta")
            for p in contents["parameters"]
        ]
        groups = [
            {key: _from_json(value) for key, value in group.items()} for group in contents["param_groups"]
        ]
        # A state dict numbers the parameters through its groups: they must list each number once, in order.
        numbers = [number for group in groups for number in group["params"]]
        if numbers != list(range(len(self.params))):
            raise ValueError(f"there are {len(self.params)} parameters, but groups of {numbers}")
        self.labels = _labels_of(groups)
        for number, param in enumerate(self.params):
            flat_view(param)  # raises if there are gaps between the elements
            if self.has_values(number):
                self._check_stored(name_of_param(self.labels[number]), param)
        self.notes = dict(contents["notes"])
        self.state_dict: dict[str, Any] = {"state": {}, "param_groups": groups}

    def _add_entry(self, entry: Entry, counts: dict[tuple[int, str], Any]) -> None:
        """Check one value of the state, and add it to the state dict.

        Args:
            entry: describes the value; a tensor's elements are in the data file.
            counts: the step counts of earlier entries, by parameter and key; this entry's count is added.
        """
        # 1. The entry must describe a value of a parameter that there is.
        number, key = entry["param"], entry["key"]
        if type(number) is not int or not 0 <= number < len(self.params):
            raise ValueError(f"a state of parameter {number!r}; there are {len(self.params)}")
        if not isinstance(entry.get("value"), (int, float, str, type(None))):
            raise TypeError(f"{key!r} of parameter {self.labels[number]} is {entry['value']!r}")
        # 2. Each slice of a parameter has a step count of its own, and all of them must be equal.
        if key in checkpoint.SCALARS and "value" in entry:
            count = counts.setdefault((number, key), entry["value"])
            if repr(count) != repr(entry["value"]):
                raise ValueError(
                    f"{key!r} of parameter {self.labels[number]} is {entry['value']} here and {count} for "
                    "another slice, but the slices of a parameter step together"
                )
        # 3. Add the value, or a tensor on "meta", which must be in the files.
        of_param = self.state_dict["state"].setdefault(number, {})
        if "value" not in entry:
            entry = {**entry, "device": "meta"}
        if allocate(of_param, entry, self.params[number]) is not None:
            self._check_stored(name_of_state(self.labels[number], key), of_param[key])

    def has_values(self, number: int) -> bool:
        """Whether the elements of a parameter were saved, not only its state."""
        return name_of_param(self.labels[number]) in self.reader.tensors

    def _check_stored(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor that its table and the files describe differently."""
        stored = self.reader.tensors[name]
        if (stored.numel, stored.dtype) != (tensor.numel(), tensor.dtype):
            raise ValueError(
                f"{name} is stored as {stored.numel} elements of {stored.dtype}, and described as "
                f"{tensor.numel()} of {tensor.dtype}"
            )

    def numbers_for(self, optimizer: ZeroRedundancyOptimizer, parameters: bool) -> list[int]:
        """Refuse a checkpoint of another model; return its numbers of the optimizer's parameters.

        Afterwards the groups of `state_dict` are in the order of the optimizer's groups.

        Raises:
            ValueError: groups, names or shapes differ, or `parameters` are wanted and their values were not
                saved; names the parameter.
        """
        # 1. Check the groups and their options, as for any state dict.
        self.state_dict = checkpoint.arranged(self.state_dict, optimizer.param_groups)
        numbers = checkpoint.check_fits(self.state_dict, optimizer.param_groups, optimizer.shard.optim)
        # 2. Check each parameter.
        for number, (theirs, ours) in enumerate(zip(numbers, optimizer.built.params, strict=True)):
            shape = self.params[theirs].shape
            if shape != ours.shape:
                raise ValueError(
                    f"the checkpoint's parameter {self.labels[theirs]} has shape {tuple(shape)}; this "
                    f"optimizer's parameter {optimizer.built.name(number)} has {tuple(ours.shape)}. The "
                    "checkpoint is of another model, or of the same parameters in another order."
                )
            if parameters and not self.has_values(theirs):
                raise ValueError(
                    f"the checkpoint has no values of parameter {self.labels[theirs]}: it was saved with "
                    "parameters=False. Load it with parameters=False."
                )
        return numbers


class LoadedShard:
    """The part of a checkpoint that this rank will own, read into CPU memory.

    Args:
        contents: the checkpoint, of which the model is checked first.
        parameters: read the parameters too.
    Attributes:
        state: the state of each slice, by its position in the optimizer's owned slices, as
            `checkpoint.shard_of` returns it.
        parameters: each owned slice with the values to write into it; empty if parameters are not wanted.
    Raises:
        OSError: a file cannot be read.
        DamagedError: a block that this rank needs is not what was written.
        ValueError: the checkpoint is of another model.
    """

    def __init__(self, contents: Contents, optimizer: ZeroRedundancyOptimizer, parameters: bool) -> None:
        numbers = contents.numbers_for(optimizer, parameters)
        self.contents = contents
        self.state: State = {}
        self.parameters: list[tuple[OwnedSlice, torch.Tensor]] = []
        # The ranges to read, by the name of their tensor, with memory for them.
        self._ranges: dict[str, Ranges] = {}
        # Tensors that are read whole because they were saved with other strides, by name.
        self._wholes: dict[str, torch.Tensor] = {}
        # (values to fill, the whole tensor, the slice that the values are of)
        self._reordered: list[tuple[torch.Tensor, torch.Tensor, OwnedSlice]] = []

        # 1. Allocate all that this rank will own, and note which ranges of the files it needs.
        saved_state = contents.state_dict["state"]
        for position, own in enumerate(optimizer.shard.owned):
            number = numbers[own.piece.param]
            if number in saved_state:
                plain = {
                    key: self._allocate(own, number, key, value) for key, value in saved_state[number].items()
                }
                what = f"the checkpoint's state of parameter {contents.labels[number]}"
                subclasses.check_is_whole(plain, own.is_whole, what)
                self.state[position] = subclasses.put_together(plain)
            if parameters:
                name = name_of_param(contents.labels[number])
                self.parameters.append((own, self._allocate_slice(own, name, contents.params[number])))
        # 2. Read the files once, in their order.
        contents.reader.read(self._ranges)
        # 3. Take the slices out of the tensors that had to be read whole.
        for flat, whole, own in self._reordered:
            flat.copy_(flat_like(whole, own.param)[own.piece.start : own.piece.stop])
        # 4. A checkpoint may have been saved with masters and loaded without, or the other way round.
        self._keep_wider_values(stateless=not saved_state)

    def _keep_wider_values(self, stateless: bool) -> None:
        """Use parameters saved in the masters' dtype as masters, or saved masters as such parameters.

        A parameter without state was never stepped, unless the optimizer is `stateless`. Its master begins
        with the parameter's value, as at construction: see `Shard.state`.
        """
        for position, (own, values) in enumerate(self.parameters):
            saved = self.state.get(position, {})
            # This optimizer keeps a master. The checkpoint has none, but the parameter in the master's dtype.
            if own.is_master and MASTER not in saved and values.dtype == own.local.dtype:
                if saved or stateless:
                    self.state[position] = {**saved, MASTER: values}
                    values = values.to(own.param.dtype)
            # The other way round: the saved parameter was only the rounded master.
            elif not own.is_master and MASTER in saved and saved[MASTER].dtype == own.param.dtype:
                values = saved[MASTER]
            self.parameters[position] = own, values

    def _allocate(self, own: OwnedSlice, number: int, key: str, value: Any) -> Any:
        """Make a value of this slice's state; the elements of a tensor are still to be read."""
        if not isinstance(value, torch.Tensor):
            return value
        # A step count was in the table. Each slice counts its own steps, so slices share no tensor.
        if not value.is_meta:
            return value.clone()
        # A moment has the parameter's shape, so this rank needs its slice. Other tensors it needs whole.
        name = name_of_state(self.contents.labels[number], key)
        if value.shape == self.contents.params[number].shape and not subclasses.is_within(key):
            return self._allocate_slice(own, name, value)
        whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        _add_range(self._ranges, name, whole.numel(), 0, flat_view(whole))
        return whole

    def _allocate_slice(self, own: OwnedSlice, name: str, saved: torch.Tensor) -> torch.Tensor:
        """Allocate this slice of a tensor that was saved with the shape of its parameter."""
        values = torch.empty_like(own.local, dtype=saved.dtype, device="cpu", requires_grad=False)
        if saved.stride() == own.param.stride():
            _add_range(self._ranges, name, saved.numel(), own.piece.start, flat_view(values))
            return values
        # The tensor was saved with other strides, as with channels_last, so the elements of the slice are
        # scattered over the file: read the whole tensor, once for all slices of the parameter.
        if name not in self._wholes:
            self._wholes[name] = torch.empty_strided(saved.shape, saved.stride(), dtype=saved.dtype)
            _add_range(self._ranges, name, saved.numel(), 0, flat_view(self._wholes[name]))
        self._reordered.append((flat_view(values), self._wholes[name], own))
        return values


def _to_json(value: Any, option: str) -> Any:
    """Express an option's value in JSON, which has no tensors and no tuples: both become dicts."""
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, (tuple, list)):
        items = [_to_json(item, option) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"the option {option!r} of a parameter group holds a {type(value).__name__}; only tensors, numbers, "
        "texts, None, and lists and tuples of them can be saved."
    )


def _from_json(value: Any) -> Any:
    """Make the value from which `_to_json` made this one."""
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_json(item) for item in value["tuple"])
    return torch.tensor(value["tensor"], dtype=dtype_of(value["dtype"]))
