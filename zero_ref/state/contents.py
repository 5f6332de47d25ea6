"""The contents of a sharded checkpoint: named flat tensors, and JSON. Nothing is sent here.

This module adds to `state_dict` of `minimal.py` a form of which each rank makes and takes only its own part.
Tensors are stored flat, in the order of the parameter's memory: "parameters.<name>" and "state.<name>.<key>",
with a number in place of the name where the optimizer has no names. A rank stores the ranges that it owns.
All else is JSON, the "contents" in each rank's table:

    state           a `entries.Entry` for each value of this rank's state
    parameters      of rank 0 only, as what follows: shape, strides and dtype, in registration order
    param_groups    as in a state dict
    notes           the user's

`ranges_to_save` and `contents_of` make the tensors and the JSON, `Contents` checks the JSON of all ranks,
`LoadedShard` reads the ranges that this rank will own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero_ref.optimizer import checkpoint
from zero_ref.optimizer.entries import Entry, State, allocate, dtype_of, pack
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.groups import dtype_name
from zero_ref.shard.owned import MASTER, OwnedSlice
from zero_ref.shard.rounding import Masters
from zero_ref.state.files import Ranges, ShardReader
from zero_ref.state.saves import damage_in


def ranges_to_save(
    optimizer: ZeroRedundancyOptimizer, parameters: bool, as_copies: bool
) -> tuple[dict[str, Ranges], list[Entry]]:
    """This rank's ranges of the stored tensors, and the entries of its state.

    Args:
        parameters: the owned slices of the parameters too.
        as_copies: in CPU memory, so that training may go on.
    Raises:
        TypeError: as `entries.pack`.
    """
    packed = pack(optimizer.shard.owned, optimizer.shard.state)
    labels = _labels_of(optimizer.param_groups)
    ranges: dict[str, Ranges] = {}
    entries = []
    for entry, flat in packed:
        entries.append(entry)
        if flat is not None:
            # State with a shape of its own, such as the factors of Adafactor, is stored whole.
            numel = flat.numel() if "shape" in entry else optimizer.partition.numels[entry["param"]]
            name = name_of_state(labels[entry["param"]], entry["key"])
            _add_range(ranges, name, numel, entry.get("start", 0), flat, as_copies)
    for own in optimizer.shard.owned if parameters else ():
        name = name_of_param(labels[own.piece.param])
        _add_range(ranges, name, own.param.numel(), own.piece.start, flat_view(own.window), as_copies)
    return ranges, entries


def _add_range(
    to: dict[str, Ranges], name: str, numel: int, start: int, flat: torch.Tensor, as_copy: bool = False
) -> None:
    """Add a range of the tensor of that name, which has `numel` elements."""
    flat = flat.to("cpu", copy=True) if as_copy else flat
    to.setdefault(name, Ranges({}, numel)).pieces[start] = flat


def contents_of(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The contents that all ranks know, as JSON.

    Raises:
        TypeError: an option of a parameter group cannot be expressed.
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
    """What parameters are called in the files: their names, or numbers where names do not tell them apart."""
    numbers = [str(number) for number in range(sum(len(group["params"]) for group in param_groups))]
    names = [name for group in param_groups for name in group.get("param_names", ())]
    return names if len(set(names)) == len(numbers) else numbers


def name_of_param(label: str) -> str:
    """The name under which a parameter's values are stored."""
    return f"parameters.{label}"


def name_of_state(label: str, key: str) -> str:
    """The name under which a tensor of its state is stored."""
    return f"state.{label}.{key}"


class Contents:
    """What all ranks' tables together say of an optimizer. Tensors are on "meta": their values are not read.

    Attributes:
        stored: by name, the tensors in the files.
        params, labels: the parameters, and their names in the files.
        state_dict: as of the unsharded optimizer.
        notes: the user's.
    Raises:
        DamagedError: the tables contradict themselves, or are of another program; names the file.
    """

    def __init__(self, reader: ShardReader) -> None:
        self.stored = reader.tensors
        contents_of_rank = [table["contents"] for table in reader.tables]
        with damage_in(reader.path_of_table(0)):
            self._take_common(contents_of_rank[0])
        counts: dict[tuple[int, str], Any] = {}
        for rank, contents in enumerate(contents_of_rank):
            with damage_in(reader.path_of_table(rank)):
                for entry in contents["state"]:
                    self._take_entry(entry, counts)

    def _take_common(self, contents: Mapping[str, Any]) -> None:
        self.params = [
            torch.empty_strided(p["shape"], p["strides"], dtype=dtype_of(p["dtype"]), device="meta")
            for p in contents["parameters"]
        ]
        groups = [
            {key: _from_json(value) for key, value in group.items()} for group in contents["param_groups"]
        ]
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

    def _take_entry(self, entry: Entry, counts: dict[tuple[int, str], Any]) -> None:
        """Add one value of the state: of a parameter that there is; a count is that of all its slices.

        Args:
            counts: of the entries before, and then of this one too.
        """
        number, key = entry["param"], entry["key"]
        if type(number) is not int or not 0 <= number < len(self.params):
            raise ValueError(f"a state of parameter {number!r}; there are {len(self.params)}")
        if not isinstance(entry.get("value"), (int, float, str, type(None))):
            raise TypeError(f"{key!r} of parameter {self.labels[number]} is {entry['value']!r}")
        if key in checkpoint.SCALARS and "value" in entry:
            count = counts.setdefault((number, key), entry["value"])
            if repr(count) != repr(entry["value"]):
                raise ValueError(
                    f"{key!r} of parameter {self.labels[number]} is {entry['value']} here and {count} for "
                    "another slice, but the slices of a parameter step together"
                )
        of_param = self.state_dict["state"].setdefault(number, {})
        if "value" not in entry:
            entry = {**entry, "device": "meta"}
        if allocate(of_param, entry, self.params[number]) is not None:
            self._check_stored(name_of_state(self.labels[number], key), of_param[key])

    def has_values(self, number: int) -> bool:
        """Whether the elements of a parameter were saved, not only its state."""
        return name_of_param(self.labels[number]) in self.stored

    def _check_stored(self, name: str, tensor: torch.Tensor) -> None:
        stored = self.stored[name]
        if (stored.numel, stored.dtype) != (tensor.numel(), tensor.dtype):
            raise ValueError(
                f"{name} is stored as {stored.numel} elements of {stored.dtype}, and described as "
                f"{tensor.numel()} of {tensor.dtype}"
            )

    def check_fits(self, optimizer: ZeroRedundancyOptimizer, parameters: bool) -> list[str]:
        """Refuse a checkpoint of another model; return the facts that ranks compare before loading.

        Its groups are then in the order of the optimizer's.

        Raises:
            ValueError: other groups, names or shapes, or no values where `parameters` are wanted; names the
                parameter.
        """
        self.state_dict = checkpoint.arranged(self.state_dict, optimizer.param_groups)
        facts = checkpoint.check_fits(self.state_dict, optimizer.param_groups, optimizer.optim)
        ids = checkpoint.saved_ids(self.state_dict)
        for number, (id_, ours) in enumerate(zip(ids, optimizer.built.params, strict=True)):
            theirs = self.params[id_]
            if theirs.shape != ours.shape:
                raise ValueError(
                    f"the checkpoint's parameter {self.labels[id_]} has shape {tuple(theirs.shape)}; this "
                    f"optimizer's parameter {optimizer.built.name(number)} has {tuple(ours.shape)}. The "
                    "checkpoint is of another model, or of the same parameters in another order."
                )
            if parameters and not self.has_values(id_):
                raise ValueError(
                    f"the checkpoint has no values of parameter {self.labels[id_]}: it was saved with "
                    "parameters=False. Load it with parameters=False."
                )
        return facts


class LoadedShard:
    """The part of a checkpoint that this rank will own, read into CPU memory.

    Attributes:
        state: by position in the optimizer's owned slices, as from `checkpoint.shard_of`.
        parameters: each owned slice with the values to write into it; empty if parameters are not wanted.
    """

    def __init__(
        self, reader: ShardReader, contents: Contents, optimizer: ZeroRedundancyOptimizer, parameters: bool
    ) -> None:
        self.state: State = {}
        self.parameters: list[tuple[OwnedSlice, torch.Tensor]] = []
        self._contents = contents
        self._ranges: dict[str, Ranges] = {}
        self._wholes: dict[str, torch.Tensor] = {}
        self._reordered: list[tuple[torch.Tensor, torch.Tensor, OwnedSlice]] = []
        saved_state = contents.state_dict["state"]
        ids = checkpoint.saved_ids(contents.state_dict)
        for position, own in enumerate(optimizer.shard.owned):
            number = ids[own.piece.param]
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
        reader.read(self._ranges)
        for flat, whole, own in self._reordered:
            flat.copy_(flat_like(whole, own.param)[own.piece.start : own.piece.stop])
        self._keep_wider_values(optimizer.shard.masters, stateless=not saved_state)

    def _keep_wider_values(self, masters: Masters | None, stateless: bool) -> None:
        """Make masters of parameters that were saved in the masters' dtype, and parameters of such masters.

        A parameter without state was never stepped, unless the optimizer is `stateless`. Its master begins
        with the parameter's value, as at construction: see `Shard.state`.
        """
        for position, (own, values) in enumerate(self.parameters):
            saved = self.state.get(position, {})
            if own.is_master and MASTER not in saved and values.dtype == own.local.dtype:
                assert masters is not None
                if saved or stateless:
                    self.state[position] = {**saved, MASTER: values}
                    values = masters.rounded(values, own.param.dtype, own.piece.start)
            elif not own.is_master and MASTER in saved and saved[MASTER].dtype == own.param.dtype:
                values = saved[MASTER]
            self.parameters[position] = own, values

    def _allocate(self, own: OwnedSlice, number: int, key: str, value: Any) -> Any:
        """A value of the state, as saved, for this slice; a tensor's elements are still to be read."""
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_meta:
            return value.clone()  # each slice counts its own steps
        name = name_of_state(self._contents.labels[number], key)
        if value.shape == self._contents.params[number].shape and not subclasses.is_within(key):
            return self._allocate_slice(own, name, value)
        whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        _add_range(self._ranges, name, whole.numel(), 0, flat_view(whole))
        return whole

    def _allocate_slice(self, own: OwnedSlice, name: str, saved: torch.Tensor) -> torch.Tensor:
        values = torch.empty_like(own.local, dtype=saved.dtype, device="cpu", requires_grad=False)
        if saved.stride() == own.param.stride():
            _add_range(self._ranges, name, saved.numel(), own.piece.start, flat_view(values))
            return values
        # It was saved with other strides, as with channels_last, so the slice is scattered over the file.
        if name not in self._wholes:
            self._wholes[name] = torch.empty_strided(saved.shape, saved.stride(), dtype=saved.dtype)
            _add_range(self._ranges, name, saved.numel(), 0, flat_view(self._wholes[name]))
        self._reordered.append((flat_view(values), self._wholes[name], own))
        return values


def _to_json(value: Any, option: str) -> Any:
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
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_json(item) for item in value["tuple"])
    return torch.tensor(value["tensor"], dtype=dtype_of(value["dtype"]))
