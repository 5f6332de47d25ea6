"""Optimizer state between the sharded form and the whole one.

One form everywhere: what `state_dict()` of the unsharded torch optimizer would be. `consolidate` brings
shards together into it, `shard_of` takes a rank's part out of it, so a checkpoint written under one world
size and partition loads under any other, and in plain torch.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch

from zero_ref.buckets import flat_like, flat_view
from zero_ref.collectives import Collectives, Work, broadcast_json, exchange_json
from zero_ref.shards import OwnedSlice, describe_options, dtype_name, params_of, specs_of

State = dict[int, dict[str, Any]]
Line = tuple[dict[str, Any], torch.Tensor | None]
"""A line of a table of contents, and its tensor, 1-D, if it travels as one."""

PARCEL_NBYTES = 2**18
"""Up to here tensors are joined into one message: copying them takes less time than messages of their own."""


# ------------------------------------------------------------------------------------------- shards to whole


@torch.no_grad()
def consolidate(
    comm: Collectives,
    to: int | Literal["all"],
    params: Sequence[torch.Tensor],
    packed: Sequence[Line],
) -> State | None:
    """Gather the state of all slices on rank `to`, or on all ranks.

    Each owner sends a table of contents (JSON, no pickle), then its tensors as they are; each is received
    straight into its place in the final tensor. Numbers and zero-dimensional tensors ride in the table, small
    tensors together.

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
        mine = packed if owner == comm.rank else []
        contents = route.contents([entry for entry, _ in mine], owner)
        tensors = [tensor for _, tensor in mine if tensor is not None]
        rooms = [
            make_room(whole.setdefault(entry["param"], {}), entry, params[entry["param"]])
            for entry in (contents if receiving else [])
        ]
        places = [place for place in rooms if place is not None]
        if tensors and places:
            torch._foreach_copy_(places, tensors)
        for parcel in _parcels(contents) if owner != to else []:
            ends = [(tensors or places)[number] for number in parcel]  # where it starts from, or arrives
            works += _travel(route, ends, owner, comm)
    for work in works:
        work.wait()
    return {param: whole[param] for param in sorted(whole)} if receiving else None


def _travel(route: _ToOne | _ToAll, ends: list[torch.Tensor], owner: int, comm: Collectives) -> list[Work]:
    """Send these tensors as one, or receive them, and give what is still under way."""
    sending = owner == comm.rank
    travelling = (_joined if sending else landing_for)(ends, comm)
    work = route.start(travelling, owner)
    if travelling is ends[0]:
        return [work]
    # One at a time: neither the wire's device nor a sender need have room for the state of all.
    work.wait()
    if not sending:
        torch._foreach_copy_(ends, travelling.split([place.numel() for place in ends]))
    return []


def _parcels(contents: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Which of the tensors in a table of contents travel as one, by their numbers: small ones of a dtype.

    Large ones come last. Nobody waits for one of them, and what is small would have to wait behind them.

    >>> lines = [{"dtype": "float32", "numel": numel} for numel in (10, 10**6, 20, 10**6, 5)]
    >>> _parcels(lines)
    [[0, 2, 4], [1], [3]]
    """
    large: list[list[int]] = []
    small: dict[str, list[list[int]]] = {}
    left: dict[str, int] = {}  # bytes, in the last parcel of each dtype
    for number, entry in enumerate(entry for entry in contents if "numel" in entry):
        dtype, nbytes = entry["dtype"], entry["numel"] * dtype_of(entry["dtype"]).itemsize
        if nbytes > PARCEL_NBYTES:
            large.append([number])
            continue
        if nbytes > left.get(dtype, -1):
            small.setdefault(dtype, []).append([])
            left[dtype] = PARCEL_NBYTES
        small[dtype][-1].append(number)
        left[dtype] -= nbytes
    return [*(parcel for of_dtype in small.values() for parcel in of_dtype), *large]


def _joined(tensors: list[torch.Tensor], comm: Collectives) -> torch.Tensor:
    """The tensors end to end on the wire's device: the tensor itself, if it is one and lies there."""
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(comm.wire_device)


def pack(owned: Sequence[OwnedSlice], state: Mapping[Any, Mapping[Any, Any]]) -> list[Line]:
    """A table of contents of this rank's state, each line with its tensor, if it travels as one.

    Raises:
        TypeError: the state holds something that is neither a tensor, a number, a text nor None, or something
            that belongs to no parameter.
    """
    check_belongs_to_parameters(state)
    return [line for own in owned for line in pack_slice(own, state.get(own.local, {}))]


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
            entry |= {"value": value.item(), "dtype": dtype_name(value.dtype)}
        else:
            follows_param = value.shape == local.shape
            tensor = flat_like(value, local) if follows_param else value.contiguous().view(-1)
            place = {"start": piece.start, "stop": piece.stop} if follows_param else {"shape": [*value.shape]}
            entry |= {"dtype": dtype_name(value.dtype), "numel": tensor.numel(), **place}
        lines.append((entry, tensor))
    return lines


def make_room(
    of_param: dict[str, Any], entry: Mapping[str, Any], like: torch.Tensor, first: int = 0
) -> torch.Tensor | None:
    """Make room for a line in a state, and give the place of its elements; None if it is a value.

    Args:
        of_param: the state of a parameter, or of a slice of it, so far.
        entry: the line; what it makes lies on its "device", on that of `like` if this is "parameter", on the
            CPU if it has none.
        like: the parameter or slice; state that follows it gets its shape and strides.
        first: the number that the first element of `like` has in its parameter.
    """
    key = entry["key"]
    dtype = dtype_of(entry["dtype"]) if "dtype" in entry else None
    device = like.device if entry.get("device") == "parameter" else entry.get("device", "cpu")
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
    room = flat_view(of_param[key])
    # Most have it all, and a slice takes as long as the rest.
    return room if room.numel() == entry["numel"] else room[entry["start"] - first : entry["stop"] - first]


class _ToOne:
    """Owners send point to point to one rank."""

    def __init__(self, comm: Collectives, to: int) -> None:
        self.comm, self.to = comm, to
        # Whose state passes through this rank. Its own last: copied while that of the others arrives.
        others = [rank for rank in range(comm.world_size) if rank != to] if comm.rank == to else []
        self.owners = [*others, comm.rank]

    def contents(self, mine: list[dict[str, Any]], owner: int) -> list[dict[str, Any]]:
        if owner != self.comm.rank:
            [mine] = exchange_json(self.comm, {}, [owner])
        elif owner != self.to:
            exchange_json(self.comm, {self.to: mine}, [])
        return mine

    def start(self, tensor: torch.Tensor, owner: int) -> Work:
        return self.comm.send(tensor, self.to) if owner == self.comm.rank else self.comm.recv(tensor, owner)


class _ToAll:
    """Owners broadcast."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.owners = range(comm.world_size)

    def contents(self, mine: list[dict[str, Any]], owner: int) -> list[dict[str, Any]]:
        return broadcast_json(self.comm, mine, owner)

    def start(self, tensor: torch.Tensor, owner: int) -> Work:
        return self.comm.broadcast(tensor, owner)


def landing_for(places: Sequence[torch.Tensor], comm: Collectives) -> torch.Tensor:
    """Room on the wire's device for what is to go to `places`: the place itself, if it is one and lies there.

    Args:
        places: one or more, of one dtype.
    """
    if len(places) == 1 and places[0].device == comm.wire_device:
        return places[0]
    numel = sum(place.numel() for place in places)
    return torch.empty(numel, dtype=places[0].dtype, device=comm.wire_device)


@cache
def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype


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
    kinds: list[tuple[Any, ...]] = []
    ids = saved_ids(state_dict, param_groups)
    for number, (id_, param) in enumerate(zip(ids, params_of(param_groups), strict=True)):
        for key, value in state_dict["state"].get(id_, {}).items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            if elementwise and not _fits(key, value, param):
                what = f"has shape {shape}" if shape is not None else f"is {value!r}"
                raise ValueError(
                    f"the checkpoint's {key!r} for parameter {specs_of(param_groups)[number].name or number} "
                    f"{what}; the parameter has {tuple(param.shape)}. The checkpoint is of another model, or "
                    "of the same parameters in another order."
                )
            kinds.append((number, key, shape, value if shape is None else value.dtype))
    options = [
        f"group {index}: {option}"
        for index, group in enumerate(saved_groups)
        for option in describe_options(group)
    ]
    return [*options, f"state of shapes and kinds {hashlib.sha256(repr(kinds).encode()).hexdigest()[:12]}"]


def _fits(key: Any, value: Any, param: torch.Tensor) -> bool:
    shape = value.shape if isinstance(value, torch.Tensor) else None
    if key in SCALARS:
        return shape in ((), (1,)) or isinstance(value, (int, float))
    # SGD without momentum saves a momentum_buffer of None.
    return key not in SHAPED or value is None or (shape == param.shape and value.layout == torch.strided)


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
