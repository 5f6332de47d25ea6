"""Optimizer state between the sharded form and the whole one.

One form everywhere: what `state_dict()` of the unsharded torch optimizer would be. `consolidate` brings
shards together into it, `shard_of` takes a rank's part out of it, so a checkpoint written under one world
size and partition loads under any other, and in plain torch.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from zero_ref.buckets import flat_like, flat_view
from zero_ref.collectives import Collectives, Work
from zero_ref.shards import OwnedSlice, describe_options, params_of, specs_of

State = dict[int, dict[str, Any]]
Line = tuple[dict[str, Any], torch.Tensor | None]
"""A line of a table of contents, and its tensor, 1-D, if it travels as one."""
Packed = tuple[list[dict[str, Any]], list[torch.Tensor | None]]
"""A table of contents and its tensors."""


# ------------------------------------------------------------------------------------------- shards to whole


@torch.no_grad()
def consolidate(
    comm: Collectives,
    to: int | Literal["all"],
    params: Sequence[torch.Tensor],
    packed: Packed,
) -> State | None:
    """Gather the state of all slices on rank `to`, or on all ranks.

    Each owner sends a table of contents (JSON, no pickle), then its tensors as they are; each is received
    straight into its place in the final tensor. Numbers and zero-dimensional tensors ride in the table.

    Args:
        to: a rank, or "all".
        params: in registration order.
        packed: this rank's state, from `pack`.
    Returns:
        On the receiving ranks, for each parameter number its whole state, on the CPU; elsewhere None.
    Collective: all ranks, with the same `to`.
    Cost: as ZeroRedundancyOptimizer.consolidate_state_dict.
    """
    route = _ToAll(comm) if to == "all" else _ToOne(comm, to)
    receiving = to in ("all", comm.rank)
    whole: State = {}
    works: list[Work] = []
    for owner in route.owners:
        mine = owner == comm.rank
        contents, tensors = packed if mine else ([], [])
        contents = route.contents(contents, owner)
        for index, entry in enumerate(contents):
            number = entry["param"]
            place = make_room(whole.setdefault(number, {}), entry, params[number]) if receiving else None
            tensor = tensors[index] if mine else None
            if place is not None and tensor is not None:
                place.copy_(tensor)
            works += route.start(tensor, place, owner, entry)
    for work in works:
        work.wait()
    return {param: whole[param] for param in sorted(whole)} if receiving else None


def pack(owned: Sequence[OwnedSlice], state: Mapping[Any, Mapping[Any, Any]]) -> Packed:
    """A table of contents of this rank's state, and for each line its tensor, if it travels as one.

    Raises:
        TypeError: the state holds something that is neither a tensor, a number, a text nor None, or something
            that belongs to no parameter.
    """
    check_belongs_to_parameters(state)
    lines = [line for own in owned for line in pack_slice(own, state.get(own.local, {}))]
    return [entry for entry, _ in lines], [tensor for _, tensor in lines]


def check_belongs_to_parameters(state: Mapping[Any, Any]) -> None:
    """Refuse state that no rank owns.

    Raises:
        TypeError: the state holds something that belongs to no parameter.
    """
    for stranger in [key for key in state if not isinstance(key, torch.Tensor)]:
        raise TypeError(
            f"the optimizer keeps the state {stranger!r} for no parameter in particular, so no rank owns it; "
            "it can be neither checkpointed nor moved."
        )


def pack_slice(own: OwnedSlice, of_slice: Mapping[Any, Any]) -> list[Line]:
    """The lines of one slice's state; raises as `pack`. Tensors are views where memory allows."""
    piece, _, local = own
    lines: list[Line] = []
    for key, value in of_slice.items():
        entry: dict[str, Any] = {"param": piece.param, "key": key}
        tensor = None
        if not isinstance(value, torch.Tensor):
            if not isinstance(key, str) or not isinstance(value, (int, float, str, bool, type(None))):
                raise TypeError(
                    f"the state {key!r} of parameter {piece.param} is a {type(value).__name__}; only "
                    "tensors, numbers, texts and None can be checkpointed or moved."
                )
            entry["value"] = value
        elif value.ndim == 0 and not value.is_complex():
            entry |= {"value": value.item(), "dtype": _name(value.dtype)}
        else:
            follows_param = value.shape == local.shape
            tensor = flat_like(value, local) if follows_param else value.contiguous().view(-1)
            entry |= {"dtype": _name(value.dtype), "numel": tensor.numel()}
            if follows_param:
                entry |= {"start": piece.start, "stop": piece.stop}
            else:
                entry["shape"] = list(value.shape)
        lines.append((entry, tensor))
    return lines


def make_room(
    of_param: dict[str, Any], entry: Mapping[str, Any], like: torch.Tensor, first: int = 0
) -> torch.Tensor | None:
    """Make room for a line in a state, and give the place of its elements; None if it is a value.

    Args:
        of_param: the state of a parameter, or of a slice of it, so far.
        entry: the line; what it makes lies on its "device", on the CPU if it has none.
        like: the parameter or slice; state that follows it gets its shape and strides.
        first: the number that the first element of `like` has in its parameter.
    """
    key = entry["key"]
    dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else None
    device = entry.get("device", "cpu")
    if "value" in entry:
        # The slices of one parameter step together, so the first one's count is that of all.
        of_param.setdefault(
            key, entry["value"] if dtype is None else torch.tensor(entry["value"], dtype=dtype, device=device)
        )
        return None
    if "shape" in entry:
        of_param[key] = torch.empty(entry["shape"], dtype=dtype, device=device)
        return flat_view(of_param[key])
    if key not in of_param:
        of_param[key] = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
    return flat_view(of_param[key])[entry["start"] - first : entry["stop"] - first]


class _ToOne:
    """Owners send point to point to one rank."""

    def __init__(self, comm: Collectives, to: int) -> None:
        self.comm, self.to = comm, to
        # Whose state passes through this rank. Its own last: copied while that of the others arrives.
        others = [rank for rank in range(comm.world_size) if rank != to] if comm.rank == to else []
        self.owners = [*others, comm.rank]

    def contents(self, mine: list[dict[str, Any]], owner: int) -> list[dict[str, Any]]:
        if owner == self.to:
            return mine
        if owner == self.comm.rank:
            text = encode(mine, self.comm)
            self.comm.send(torch.tensor([text.numel()], device=self.comm.wire_device), self.to).wait()
            self.comm.send(text, self.to).wait()
            return mine
        length = torch.empty(1, dtype=torch.int64, device=self.comm.wire_device)
        self.comm.recv(length, owner).wait()
        text = torch.empty(int(length.item()), dtype=torch.uint8, device=self.comm.wire_device)
        self.comm.recv(text, owner).wait()
        return decode(text)

    def start(
        self, tensor: torch.Tensor | None, place: torch.Tensor | None, owner: int, entry: Mapping[str, Any]
    ) -> list[Work]:
        if owner == self.to or "value" in entry:
            return []
        if tensor is not None:
            return [self.comm.send(tensor.to(self.comm.wire_device), self.to)]
        assert place is not None
        if place.device == self.comm.wire_device:
            return [self.comm.recv(place, owner)]
        staged = torch.empty_like(place, device=self.comm.wire_device)
        self.comm.recv(staged, owner).wait()
        place.copy_(staged)
        return []


class _ToAll:
    """Owners broadcast."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.owners = range(comm.world_size)

    def contents(self, mine: list[dict[str, Any]], owner: int) -> list[dict[str, Any]]:
        text = encode(mine, self.comm)
        length = torch.tensor([text.numel()], device=self.comm.wire_device)
        self.comm.broadcast(length, owner).wait()
        if owner != self.comm.rank:
            text = torch.empty(int(length.item()), dtype=torch.uint8, device=self.comm.wire_device)
        self.comm.broadcast(text, owner).wait()
        return decode(text)

    def start(
        self, tensor: torch.Tensor | None, place: torch.Tensor | None, owner: int, entry: Mapping[str, Any]
    ) -> list[Work]:
        if place is None:
            return []
        if place.device == self.comm.wire_device:
            return [self.comm.broadcast(place, owner)]
        staged = torch.empty_like(place, device=self.comm.wire_device)
        staged.copy_(place)
        self.comm.broadcast(staged, owner).wait()
        place.copy_(staged)
        return []


def encode(contents: Sequence[Any], comm: Collectives) -> torch.Tensor:
    """A table of contents as bytes that travel: JSON, in a tensor on the wire's device."""
    return torch.frombuffer(bytearray(json.dumps(contents).encode()), dtype=torch.uint8).to(comm.wire_device)


def decode(text: torch.Tensor) -> list[Any]:
    """The table of contents that `encode` made bytes of."""
    contents: list[Any] = json.loads(bytes(text.tolist()))
    return contents


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------- whole to shards

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's elementwise optimizers keep once for a parameter."""

SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg"}
    | {"grad_avg", "acc_delta", "ax", "prev", "step_size"}
)
"""What they keep for each element, in the parameter's shape."""


def packed_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as in a torch state dict: options, and parameters as running numbers."""
    packed = []
    first = 0
    for group in param_groups:
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        options = {key: value for key, value in group.items() if key != "params"}
        packed.append({**copy.deepcopy(options), "params": numbers})
    return packed


def saved_ids(state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]]) -> list[Any]:
    """For each of our parameters the id under which its state was saved: by name where both sides have names.

    Raises:
        ValueError: the names are not ours, or an id stands for two parameters.
    """
    ids: list[Any] = []
    for index, (saved, ours) in enumerate(zip(state_dict["param_groups"], param_groups, strict=True)):
        theirs, names = saved.get("param_names"), ours.get("param_names")
        if theirs is None or names is None:
            ids += saved["params"]
            continue
        if sorted(theirs) != sorted(names):
            odd = sorted(set(theirs) ^ set(names))
            raise ValueError(
                f"the checkpoint's group {index} has other parameters than this optimizer's: {odd[0]!r} is "
                f"in one of them only ({len(odd)} such names). Build the same model, then load again."
            )
        id_of_name = dict(zip(theirs, saved["params"], strict=True))
        ids += [id_of_name[name] for name in names]
    if len(set(ids)) != len(ids):
        raise ValueError("the checkpoint's parameter groups name the same parameter twice; it is damaged.")
    return ids


def check_fits(
    state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], elementwise: bool
) -> list[str]:
    """Refuse a checkpoint of another model; return the facts that ranks compare before loading.

    Args:
        elementwise: the optimizer is one of torch's elementwise ones, whose state has shapes that are known.
    Raises:
        ValueError: no such keys, other groups, or a state of another shape; names the parameter.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"an optimizer's state dict has the keys 'state' and 'param_groups'; this has {found}. "
            "Pass what optimizer.state_dict() returned, not the whole checkpoint."
        )
    saved_groups = state_dict["param_groups"]
    if (
        not isinstance(saved_groups, Sequence)
        or not all(isinstance(group, Mapping) and "params" in group for group in saved_groups)
        or not isinstance(state_dict["state"], Mapping)
        or not all(isinstance(of_param, Mapping) for of_param in state_dict["state"].values())
    ):
        raise ValueError(
            "the state dict's 'param_groups' must be a list of dicts with 'params', its 'state' a dict of "
            "dicts; this one is damaged, or of another program."
        )
    saved, ours = [len(g["params"]) for g in saved_groups], [len(g["params"]) for g in param_groups]
    if saved != ours:
        raise ValueError(
            f"the checkpoint has parameter groups of {saved} parameters and this optimizer has {ours}. "
            "Build the optimizer from the same parameter groups, in the same order, then load again."
        )
    digest = hashlib.sha256()
    ids = saved_ids(state_dict, param_groups)
    for number, (id_, param, spec) in enumerate(
        zip(ids, params_of(param_groups), specs_of(param_groups), strict=True)
    ):
        for key, value in state_dict["state"].get(id_, {}).items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            if key in SCALARS:
                fits = shape in ((), (1,)) or isinstance(value, (int, float))
            elif key in SHAPED:  # SGD without momentum saves a momentum_buffer of None
                fits = value is None or (shape == tuple(param.shape) and value.layout == torch.strided)
            else:
                fits = True
            if elementwise and not fits:
                what = f"has shape {shape}" if shape is not None else f"is {value!r}"
                raise ValueError(
                    f"the checkpoint's {key!r} for parameter {spec.name or number} {what}; the parameter has "
                    f"{tuple(param.shape)}. The checkpoint is of another model, or of the same parameters in "
                    "another order."
                )
            digest.update(repr((number, key, shape, value if shape is None else value.dtype)).encode())
    options = [
        f"group {index}: {option}"
        for index, group in enumerate(saved_groups)
        for option in describe_options(group)
    ]
    return [*options, f"state of shapes and kinds {digest.hexdigest()[:12]}"]


@torch.no_grad()
def shard_of(
    state: Mapping[Any, Mapping[str, Any]], saved_ids: Sequence[Any], owned: Sequence[OwnedSlice]
) -> State:
    """The part of a whole optimizer's state that belongs to the owned slices.

    Everything is copied: a local step must not write into the caller's checkpoint.

    Args:
        state: by saved id, as in a torch state dict.
        saved_ids: the id of each parameter, in registration order.
        owned: this rank's slices.
    Returns:
        By position in `owned`; slices without saved state are left out.
    """

    def part(value: Any, own: OwnedSlice) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if own.local is not own.param and value.shape == own.param.shape and value.ndim:
            return flat_like(value, own.param)[own.piece.start : own.piece.stop].clone()
        return value.clone()

    return {
        number: {key: part(value, own) for key, value in state[saved_ids[own.piece.param]].items()}
        for number, own in enumerate(owned)
        if saved_ids[own.piece.param] in state
    }
