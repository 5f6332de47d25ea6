"""What a rank writes into a sharded checkpoint, and where it goes when it is read. Nothing is sent here.

Tensors are stored flat, in the order of the parameter's memory: "parameters.<name>" and "state.<name>.<key>",
with a number in place of the name where the optimizer has no names. A rank owns ranges of them. All else is
JSON, in each rank's table:

    state           a line for each piece of this rank's state, as in `checkpoint.pack`: numbers stand in it
    parameters      of rank 0 only, as what follows: shape, strides and dtype, in registration order
    param_groups    as in a state dict
    notes           the user's

`slices_to_save` and `contents_of` make it, `Saved` understands it, `Room` takes what this rank wants of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zero_ref.optimizer.buckets import flat_like, flat_view
from zero_ref.optimizer.groups import dtype_name
from zero_ref.optimizer.shard import OwnedSlice
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.state import checkpoint, subclasses
from zero_ref.state.checkpoint import dtype_of
from zero_ref.state.files import FlatSlices, ShardReader
from zero_ref.state.saves import damage_in


def slices_to_save(
    optimizer: ZeroRedundancyOptimizer, parameters: bool, as_copies: bool
) -> tuple[dict[str, FlatSlices], list[dict[str, Any]]]:
    """This rank's ranges of the stored tensors, and its lines of state.

    Args:
        parameters: the owned slices of the parameters too.
        as_copies: in CPU memory, so that training may go on.
    Raises:
        TypeError: as `checkpoint.pack`.
    """
    lines = checkpoint.pack(optimizer.shard.owned, optimizer.shard.state)
    labels = _labels_of(optimizer.param_groups)
    tensors: dict[str, FlatSlices] = {}

    def add(name: str, numel: int, start: int, flat: torch.Tensor) -> None:
        _add(tensors, name, numel, start, flat.to("cpu", copy=True) if as_copies else flat)

    for line, flat in lines:
        if flat is not None:
            follows_param = "shape" not in line  # the rest, such as the factors of Adafactor, is stored whole
            numel = optimizer.partition.numels[line["param"]] if follows_param else flat.numel()
            add(_name_of_state(labels, line["param"], line["key"]), numel, line.get("start", 0), flat)
    if parameters:
        for own in optimizer.shard.owned:
            numel, start = own.param.numel(), own.piece.start
            add(_name_of_param(labels, own.piece.param), numel, start, flat_view(own.window))
    return tensors, [line for line, _ in lines]


def _add(to: dict[str, FlatSlices], name: str, numel: int, start: int, flat: torch.Tensor) -> None:
    """One more piece of the tensor of that name, which has `numel` elements."""
    to.setdefault(name, FlatSlices({start: flat}, numel)).pieces[start] = flat


def contents_of(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """What all ranks know, in a form that JSON can express.

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


def _name_of_param(labels: Sequence[str], number: int) -> str:
    return f"parameters.{labels[number]}"


def _name_of_state(labels: Sequence[str], number: int, key: str) -> str:
    return f"state.{labels[number]}.{key}"


class Saved(NamedTuple):
    """What a checkpoint holds, as a state dict. Its tensors are "meta": they have no values yet."""

    metadata: Metadata
    params: list[torch.Tensor]
    labels: list[str]
    state_dict: dict[str, Any]
    notes: dict[str, Any]

    @classmethod
    def of(cls, reader: ShardReader) -> Saved:
        """Understand the tables.

        Raises:
            DamagedError: they contradict themselves, or are of another program; names the file.
        """
        metadata = reader.read_metadata()
        contents = [table["contents"] for table in reader.tables]
        with damage_in(reader.path_of_table(0)):
            params = [
                torch.empty_strided(p["shape"], p["strides"], dtype=dtype_of(p["dtype"]), device="meta")
                for p in contents[0]["parameters"]
            ]
            groups = [
                {key: _from_json(value) for key, value in group.items()}
                for group in contents[0]["param_groups"]
            ]
            numbers = [number for group in groups for number in group["params"]]
            if numbers != list(range(len(params))):
                raise ValueError(f"there are {len(params)} parameters, but groups of {numbers}")
            labels = _labels_of(groups)
            for number, param in enumerate(params):
                flat_view(param)  # raises if there are gaps between the elements
                if _name_of_param(labels, number) in metadata.state_dict_metadata:
                    _check_stored(metadata, _name_of_param(labels, number), param)
            notes = dict(contents[0]["notes"])
        state: dict[int, dict[str, Any]] = {}
        counts: dict[tuple[int, str], Any] = {}
        for rank, of_rank in enumerate(contents):
            with damage_in(reader.path_of_table(rank)):
                for line in of_rank["state"]:
                    _check_line(line, labels, counts)
                    number, key = line["param"], line["key"]
                    of_param = state.setdefault(number, {})
                    if "value" not in line:
                        line = {**line, "device": "meta"}
                    if checkpoint.allocate(of_param, line, params[number]) is not None:
                        _check_stored(metadata, _name_of_state(labels, number, key), of_param[key])
        return cls(metadata, params, labels, {"state": state, "param_groups": groups}, notes)


def _check_line(line: Mapping[str, Any], labels: Sequence[str], counts: dict[tuple[int, str], Any]) -> None:
    """What a table says of one state: of a parameter that there is, and if a count, that of all its slices.

    Args:
        labels: of all parameters.
        counts: of the lines before, and then of this one too.
    """
    number, key = line["param"], line["key"]
    if type(number) is not int or not 0 <= number < len(labels):
        raise ValueError(f"a state of parameter {number!r}; there are {len(labels)}")
    if not isinstance(line.get("value"), (int, float, str, type(None))):
        raise TypeError(f"{key!r} of parameter {labels[number]} is {line['value']!r}")
    if key in checkpoint.SCALARS and "value" in line:
        count = counts.setdefault((number, key), line["value"])
        if repr(count) != repr(line["value"]):
            raise ValueError(
                f"{key!r} of parameter {labels[number]} is {line['value']} here and {count} for another "
                "slice, but the slices of a parameter step together"
            )


def _check_stored(metadata: Metadata, name: str, tensor: torch.Tensor) -> None:
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    if (stored.size.numel(), stored.properties.dtype) != (tensor.numel(), tensor.dtype):
        raise ValueError(
            f"{name} is stored as {stored.size.numel()} elements of {stored.properties.dtype}, and described "
            f"as {tensor.numel()} of {tensor.dtype}"
        )


def facts_for_loading(saved: Saved, optimizer: ZeroRedundancyOptimizer, parameters: bool) -> list[str]:
    """Refuse a checkpoint of another model; return the facts that ranks compare before loading.

    Raises:
        ValueError: other groups, names or shapes, or no values where `parameters` are wanted; names the
            parameter.
    """
    facts = checkpoint.check_fits(saved.state_dict, optimizer.param_groups, type(optimizer.optim))
    ids = checkpoint.saved_ids(saved.state_dict, optimizer.param_groups)
    for number, (id_, ours) in enumerate(zip(ids, optimizer.built.params, strict=True)):
        theirs = saved.params[id_]
        if theirs.shape != ours.shape:
            raise ValueError(
                f"the checkpoint's parameter {saved.labels[id_]} has shape {tuple(theirs.shape)}; this "
                f"optimizer's parameter {optimizer.built.name(number)} has {tuple(ours.shape)}. The "
                "checkpoint is of another model, or of the same parameters in another order."
            )
        if parameters and _name_of_param(saved.labels, id_) not in saved.metadata.state_dict_metadata:
            raise ValueError(
                f"the checkpoint has no values of parameter {saved.labels[id_]}: it was saved with "
                "parameters=False. Load it with parameters=False."
            )
    return facts


class Room:
    """Room in CPU memory for what this rank owns of a checkpoint, from which it goes to its place.

    Attributes:
        parameters: for each owned slice the values to write into it; empty if parameters are not wanted.
    """

    def __init__(self, saved: Saved, optimizer: ZeroRedundancyOptimizer, parameters: bool) -> None:
        self.saved_groups = saved.state_dict["param_groups"]
        self.tensors: dict[str, FlatSlices] = {}
        self.wholes: dict[str, torch.Tensor] = {}
        self.in_other_order: list[tuple[torch.Tensor, torch.Tensor, OwnedSlice]] = []
        self.state: checkpoint.State = {}
        self.parameters: list[tuple[OwnedSlice, torch.Tensor]] = []
        ids = checkpoint.saved_ids(saved.state_dict, optimizer.param_groups)
        for number, own in enumerate(optimizer.shard.owned):
            id_ = ids[own.piece.param]
            if id_ in saved.state_dict["state"]:
                plain = {
                    key: self._room(
                        _name_of_state(saved.labels, id_, key), key, value, saved.params[id_], own
                    )
                    for key, value in saved.state_dict["state"][id_].items()
                }
                what = f"the checkpoint's state of parameter {saved.labels[id_]}"
                subclasses.check_is_whole(plain, own.is_whole, what)
                self.state[number] = subclasses.put_together(plain)
            if parameters:
                name = _name_of_param(saved.labels, id_)
                self.parameters.append((own, self._room_for_slice(name, saved.params[id_], own)))

    def _room(self, name: str, key: str, value: Any, saved_param: torch.Tensor, own: OwnedSlice) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_meta:
            return value.clone()  # each slice counts its own steps
        if value.shape == saved_param.shape and not subclasses.is_within(key):
            return self._room_for_slice(name, value, own)
        whole = torch.empty(value.shape, dtype=value.dtype)
        _add(self.tensors, name, whole.numel(), 0, flat_view(whole))
        return whole

    def _room_for_slice(self, name: str, saved: torch.Tensor, own: OwnedSlice) -> torch.Tensor:
        room = torch.empty_like(own.local, dtype=saved.dtype, device="cpu", requires_grad=False)
        if saved.stride() == own.param.stride():
            _add(self.tensors, name, saved.numel(), own.piece.start, flat_view(room))
            return room
        # It lay in memory in another order, as with channels_last: what is a range here is scattered there.
        if name not in self.wholes:
            self.wholes[name] = torch.empty_strided(saved.shape, saved.stride(), dtype=saved.dtype)
            _add(self.tensors, name, saved.numel(), 0, flat_view(self.wholes[name]))
        self.in_other_order.append((flat_view(room), self.wholes[name], own))
        return room

    def read(self, reader: ShardReader, saved: Saved) -> None:
        """Fill it from the files."""
        reader.load(self.tensors, saved.metadata)
        for flat, whole, own in self.in_other_order:
            flat.copy_(flat_like(whole, own.param)[own.piece.start : own.piece.stop])


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
