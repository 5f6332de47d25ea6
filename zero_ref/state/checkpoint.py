"""Optimizer state between the sharded form and the whole one.

It adds to `state_dict` of `minimal.py` that parameters may be cut, that nothing is pickled, that each tensor
travels straight into its place, and the way back: loading, at any number of ranks.

One form everywhere: what `state_dict()` of the unsharded torch optimizer would be. `consolidate` brings
shards together into it, `shard_of` takes a rank's part out of it, so a checkpoint written under one world
size and partition loads under any other, and in plain torch.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch

from zero_ref.comm.agreement import agreement
from zero_ref.comm.collectives import Collectives, PendingCall, broadcast_json, exchange_json
from zero_ref.optimizer.buckets import flat_like, flat_view
from zero_ref.optimizer.checks import is_elementwise
from zero_ref.optimizer.groups import describe_options, dtype_name, options_of, params_of, specs_of
from zero_ref.optimizer.shard import OwnedSlice
from zero_ref.state import subclasses

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
    Raises:
        RuntimeError: something went wrong on another rank. If one raises, all raise; none is left waiting.
    Collective: all ranks, with the same `to`.
    Cost: as ZeroRedundancyOptimizer.consolidate_state_dict.
    """
    route = _ToAll(comm) if to == "all" else _ToOne(comm, to)
    tensors = [tensor for _, tensor in packed if tensor is not None]
    contents = route.contents([entry for entry, _ in packed])
    whole: State = {}
    places: dict[int, list[torch.Tensor]] = {}
    parcels: dict[int, list[list[torch.Tensor]]] = {}
    # All that takes memory comes first: what a rank then sends is waited for.
    with agreement(comm, "make room for the optimizer state"):
        if to in ("all", comm.rank):
            for owner, entries in contents.items():
                rooms = [make_room(whole.setdefault(e["param"], {}), e, params[e["param"]]) for e in entries]
                places[owner] = [place for place in rooms if place is not None]
        for owner, entries in contents.items():
            ends = tensors if owner == comm.rank else places[owner]  # where it starts from, or arrives
            parcels[owner] = [[ends[n] for n in parcel] for parcel in _parcels(entries) if owner != to]
        whole = {param: subclasses.put_together(whole[param]) for param in sorted(whole)}
        landing = _landing_for([parcel for of_owner in parcels.values() for parcel in of_owner], comm)
    failures: list[Exception] = []
    works: list[PendingCall] = []
    for owner in contents:
        if tensors and owner == comm.rank and owner in places:
            with _noted(failures):
                torch._foreach_copy_(places[owner], tensors)
        for parcel in parcels[owner]:
            works += _travel(route, parcel, owner, comm, landing, failures)
    for work in works:
        work.wait()
    with agreement(comm, "consolidate the optimizer state"):
        if failures:
            raise failures[0]
    return whole if places else None


def _travel(
    route: _ToOne | _ToAll,
    ends: list[torch.Tensor],
    owner: int,
    comm: Collectives,
    landing: torch.Tensor,
    failures: list[Exception],
) -> list[PendingCall]:
    """Send these tensors as one, or receive them, and give what is still under way.

    What goes wrong on this rank alone is noted. It takes part all the same, for others wait for that.
    """
    if _goes_as_it_is(ends, comm):
        return [route.start(ends[0], owner)]
    sending = owner == comm.rank
    travelling = landing[: sum(end.nbytes for end in ends)].view(ends[0].dtype)
    parts = list(travelling.split([end.numel() for end in ends]))
    with _noted(failures):
        if sending:
            torch._foreach_copy_(parts, ends)
    # One at a time: neither the wire's device nor a sender need have room for the state of all.
    route.start(travelling, owner).wait()
    with _noted(failures):
        if not sending:
            torch._foreach_copy_(ends, parts)
    return []


def _goes_as_it_is(ends: Sequence[torch.Tensor], comm: Collectives) -> bool:
    return len(ends) == 1 and ends[0].device == comm.wire_device


def _landing_for(parcels: Iterable[Sequence[torch.Tensor]], comm: Collectives) -> torch.Tensor:
    """Bytes on the wire's device for any of these parcels, if it does not go as it is."""
    staged = (sum(end.nbytes for end in ends) for ends in parcels if not _goes_as_it_is(ends, comm))
    return torch.empty(max(staged, default=0), dtype=torch.uint8, device=comm.wire_device)


@contextlib.contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.append(error)


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


def pack(owned: Sequence[OwnedSlice], state: Mapping[Any, Mapping[Any, Any]]) -> list[Line]:
    """A table of contents of this rank's state, each line with its tensor, if it travels as one.

    Raises:
        TypeError: the state holds something that is neither a tensor, a number, a text nor None, or something
            that belongs to no parameter.
    """
    check_belongs_to_parameters(state)
    return [line for own in owned for line in pack_slice(own, plain_state(own, state))]


def plain_state(own: OwnedSlice, state: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, Any]:
    """The state of one slice, its tensor subclasses taken apart; raises as `pack`."""
    return subclasses.take_apart(state.get(own.local, {}), own.piece.param, whole=own.is_whole)


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
    """The lines of one slice's plain state; raises as `pack`. Tensors are views where memory allows."""
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
            # What is within a subclass has an order of its own.
            follows_param = value.shape == local.shape and not subclasses.is_within(key)
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

    def contents(self, mine: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        comm = self.comm
        if comm.rank != self.to:
            exchange_json(comm, {self.to: mine}, [])
            return {comm.rank: mine}
        others = [rank for rank in range(comm.world_size) if rank != self.to]
        # Its own last: copied while that of the others arrives.
        return {**dict(zip(others, exchange_json(comm, {}, others), strict=True)), comm.rank: mine}

    def start(self, tensor: torch.Tensor, owner: int) -> PendingCall:
        return self.comm.send(tensor, self.to) if owner == self.comm.rank else self.comm.recv(tensor, owner)


class _ToAll:
    """Owners broadcast."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm

    def contents(self, mine: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        return {owner: broadcast_json(self.comm, mine, owner) for owner in range(self.comm.world_size)}

    def start(self, tensor: torch.Tensor, owner: int) -> PendingCall:
        return self.comm.broadcast(tensor, owner)


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
    state_dict: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    optimizer_class: type[torch.optim.Optimizer],
) -> list[str]:
    """Refuse a checkpoint of another model; return the facts that ranks compare before loading.

    Args:
        optimizer_class: of one of torch's elementwise ones the state has shapes that are known.
    Raises:
        ValueError: no such keys, other groups, options that the class refuses, or a state that it cannot
            have made; names the parameter.
    """
    _check_structure(state_dict, param_groups)
    saved_groups = state_dict["param_groups"]
    _check_options(saved_groups, param_groups, optimizer_class)
    elementwise = is_elementwise(optimizer_class)
    kinds: list[tuple[Any, ...]] = []
    ids = saved_ids(state_dict, param_groups)
    for number, (id_, param) in enumerate(zip(ids, params_of(param_groups), strict=True)):
        for key, value in state_dict["state"].get(id_, {}).items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            if elementwise and not _fits(key, value, param):
                what = f"is {value!r}" if shape is None or key in SCALARS else f"has shape {shape}"
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


def _check_structure(state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]]) -> None:
    """Groups and state are there, in the forms that torch gives them, and the groups are as large as ours."""
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


def _check_options(
    saved_groups: Sequence[Mapping[str, Any]],
    param_groups: Sequence[dict[str, Any]],
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    for index, (saved, ours) in enumerate(zip(saved_groups, param_groups, strict=True)):
        for option, value in options_of(ours).items():
            if not _alike(saved.get(option), value):
                raise ValueError(
                    f"the checkpoint's {option!r} of group {index} is {saved[option]!r}, this optimizer's is "
                    f"{value!r}. The checkpoint is damaged, or of another optimizer."
                )
        # torch checks options in its constructors. A class that refuses our own, too, cannot be asked so.
        refusal = _refusal(optimizer_class, {**ours, **saved})
        if refusal and not _refusal(optimizer_class, ours):
            raise ValueError(
                f"{optimizer_class.__name__} refuses the checkpoint's options of group {index}: {refusal}"
            )


def _alike(theirs: Any, ours: Any) -> bool:
    """Whether two values of an option are of one kind: numbers, texts, sequences. None may stand for any."""
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        as_long = isinstance(ours, list) or len(theirs) == len(ours)
        return as_long and all(map(_alike, theirs, ours))
    kinds = [(numbers.Number, torch.Tensor), (str,), (list, tuple)]
    found = [[isinstance(value, kind) for kind in kinds] for value in (theirs, ours)]
    return found[0] == found[1] or not any(found[0]) or not any(found[1])


def _refusal(optimizer_class: type[torch.optim.Optimizer], group: dict[str, Any]) -> str:
    """What the class's constructor says to a group's options, if it refuses them. It gets no parameters."""
    accepted = inspect.signature(optimizer_class.__init__).parameters
    options = {key: value for key, value in options_of(group).items() if key in accepted}
    try:
        optimizer_class([{"params": []}], **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fits(key: Any, value: Any, param: torch.Tensor) -> bool:
    shape = value.shape if isinstance(value, torch.Tensor) else None
    if key in SCALARS:
        if shape not in ((), (1,)) and not isinstance(value, (int, float)):
            return False
        number = float(value)
        return math.isfinite(number) and (key != "step" or (number >= 0 and number.is_integer()))
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

    def part(key: str, value: Any, own: OwnedSlice) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if not own.is_whole:
            subclasses.take_apart({key: value}, own.piece.param, whole=False)  # raises if it is one
            if value.shape == own.param.shape and value.ndim:
                return flat_like(value, own.param)[own.piece.start : own.piece.stop].clone()
        return subclasses.mapped(torch.clone, value)

    return {
        number: {key: part(key, value, own) for key, value in state[saved_ids[own.piece.param]].items()}
        for number, own in enumerate(owned)
        if saved_ids[own.piece.param] in state
    }
