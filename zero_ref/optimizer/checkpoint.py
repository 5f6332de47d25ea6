"""Optimizer state in two forms: sharded, and whole as in the unsharded torch optimizer's `state_dict()`.

This module adds to `state_dict` of `minimal.py` that parameters may be cut, that nothing is pickled, that
large tensors are received straight into their final place, and that a state dict can be loaded.

`consolidate` gathers the shards into the whole form, and `shard_of` takes one rank's part out of it. So a
checkpoint written at one world size and under one partition loads at any other, and in plain torch.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import itertools
import math
import numbers
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch

from zero_ref.comm.agreement import agreement
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.comm.devices import CPU
from zero_ref.comm.objects import broadcast_json, exchange_json
from zero_ref.plan.partition import Slice
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.checks import is_elementwise
from zero_ref.shard.coupling import stepped_in_trial
from zero_ref.shard.groups import (
    OPTIMIZER_CLASS,
    describe_options,
    dtype_name,
    options_of,
    params_of,
    specs_of,
)
from zero_ref.shard.owned import OwnedSlice
from zero_ref.shard.several import check_nothing_beside_state, class_of

State = dict[int, dict[str, Any]]
"""The state of parameters, or of slices, by number."""

Entry = dict[str, Any]
"""One value of a slice's state, described: "param", "key", and either its "value" or the "dtype", "numel"
and place of its elements. The place is "start" and "stop" in the parameter, or a "shape" of its own, with
"strides" if the elements are not in the usual order."""

Packed = tuple[Entry, torch.Tensor | None]
"""An entry, and its elements as a 1-D tensor; None if the entry has the value."""

PARCEL_NBYTES = 2**18
"""Tensors are joined into messages of up to this size: copying takes less time than a message for each."""


# ------------------------------------------------------------------------------------------- shards to whole


@torch.no_grad()
def consolidate(
    comm: Collectives, to: int | Literal["all"], params: Sequence[torch.Tensor], packed: Sequence[Packed]
) -> State | None:
    """Gather the state of all slices on rank `to`, or on all ranks.

    Each owner sends its entries as JSON, without pickle, then its tensors. A large tensor is received
    straight into its place in the final tensor; small tensors travel together.

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
    tensors = [tensor for _, tensor in packed if tensor is not None]
    entries_of_owner = _gather_entries(comm, to, [entry for entry, _ in packed])
    whole: State = {}
    places: dict[int, list[torch.Tensor]] = {}
    parcels: list[tuple[int, list[torch.Tensor]]] = []
    # Allocate all memory before the first tensor is sent: from then on, other ranks wait for this one.
    with agreement(comm, "make room for the optimizer state"):
        for owner, entries in entries_of_owner.items():
            if to in ("all", comm.rank):
                allocated = [
                    allocate(whole.setdefault(e["param"], {}), e, params[e["param"]]) for e in entries
                ]
                places[owner] = [place for place in allocated if place is not None]
            ends = tensors if owner == comm.rank else places[owner]
            if owner != to:
                parcels += [(owner, [ends[n] for n in parcel]) for parcel in _parcels(entries)]
        if to in ("all", comm.rank):
            _check_stepped_together(comm.rank, itertools.chain(*entries_of_owner.values()), params)
        whole = {param: subclasses.put_together(whole[param]) for param in sorted(whole)}
        staged = [sum(end.nbytes for end in ends) for _, ends in parcels if not _goes_as_it_is(ends, comm)]
        staging = torch.empty(max(staged, default=0), dtype=torch.uint8, device=comm.wire_of(CPU))
    failures: list[Exception] = []
    works: list[PendingCall] = []
    for owner, ends in parcels:
        works += _transfer_parcel(comm, to, owner, ends, staging, failures)
    if tensors and places:  # while the last tensors of other owners arrive
        with _noted(failures):
            torch._foreach_copy_(places[comm.rank], tensors)
    for work in works:
        work.wait()
    with agreement(comm, "consolidate the optimizer state"):
        if failures:
            raise failures[0]
    return whole if places else None


def _check_stepped_together(rank: int, entries: Iterable[Entry], params: Sequence[torch.Tensor]) -> None:
    """Refuse a state that only some owners of a parameter have: the rest would be unwritten memory."""
    numels: dict[tuple[int, Any], int] = {}
    for entry in entries:
        if "start" in entry:
            key = (entry["param"], entry["key"])
            numels[key] = numels.get(key, 0) + entry["stop"] - entry["start"]
    for (param, name), numel in numels.items():
        if numel != params[param].numel():
            raise ValueError(
                f"rank {rank}: {numel} of {params[param].numel()} elements of parameter {param} have the "
                f"state {name!r}. The parts of a parameter must be stepped together: give it a gradient on "
                "all ranks or on none."
            )


def _gather_entries(comm: Collectives, to: int | Literal["all"], mine: list[Entry]) -> dict[int, list[Entry]]:
    """Each owner's entries by its rank; a rank that receives no state gets only its own. Collective."""
    if to == "all":
        return {owner: broadcast_json(comm, mine, owner) for owner in range(comm.world_size)}
    if comm.rank != to:
        exchange_json(comm, {to: mine}, [])
        return {comm.rank: mine}
    others = [rank for rank in range(comm.world_size) if rank != to]
    return {**dict(zip(others, exchange_json(comm, {}, others), strict=True)), to: mine}


def _transfer(comm: Collectives, to: int | Literal["all"], owner: int, tensor: torch.Tensor) -> PendingCall:
    if to == "all":
        return comm.broadcast(tensor, owner)
    # As an exchange: for a send by itself, NCCL would make one more communicator for each pair of ranks.
    if owner == comm.rank:
        return comm.exchange([(to, tensor)], [])
    return comm.exchange([], [(owner, tensor)])


def _transfer_parcel(
    comm: Collectives,
    to: int | Literal["all"],
    owner: int,
    ends: list[torch.Tensor],
    staging: torch.Tensor,
    failures: list[Exception],
) -> list[PendingCall]:
    """Send or receive tensors as one message, and return what is still under way.

    An error of this rank alone is noted. The rank takes part all the same, because others wait for it.

    Args:
        ends: where the elements come from on the owner, and where they go on a receiver.
        staging: (nbytes,), uint8 on the wire's device, large enough for a parcel that has to be copied.
    """
    if _goes_as_it_is(ends, comm):
        return [_transfer(comm, to, owner, ends[0])]
    parcel = staging[: sum(end.nbytes for end in ends)].view(ends[0].dtype)
    parts = list(parcel.split([end.numel() for end in ends]))
    with _noted(failures):
        if owner == comm.rank:
            torch._foreach_copy_(parts, ends)
    # One parcel at a time, so that neither end needs memory on the wire's device for the state of all.
    _transfer(comm, to, owner, parcel).wait()
    with _noted(failures):
        if owner != comm.rank:
            torch._foreach_copy_(ends, parts)
    return []


def _goes_as_it_is(ends: Sequence[torch.Tensor], comm: Collectives) -> bool:
    return len(ends) == 1 and ends[0].device == comm.wire_of(CPU)  # where all of it will lie


@contextlib.contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.append(error)


def _parcels(entries: Iterable[Entry]) -> list[list[int]]:
    """The numbers of the tensors that travel as one message: small tensors of one dtype are joined.

    Large ones come last: parcels of small ones are waited for one by one, and would wait behind them.

    >>> entries = [{"dtype": "float32", "numel": numel} for numel in (10, 10**6, 20, 10**6, 5)]
    >>> _parcels(entries)
    [[0, 2, 4], [1], [3]]
    """
    large: list[list[int]] = []
    small: dict[str, list[list[int]]] = {}
    left: dict[str, int] = {}  # bytes that the last parcel of a dtype still has room for
    for number, entry in enumerate(entry for entry in entries if "numel" in entry):
        dtype, nbytes = entry["dtype"], entry["numel"] * dtype_of(entry["dtype"]).itemsize
        if nbytes > PARCEL_NBYTES:
            large.append([number])
            continue
        if nbytes > left.get(dtype, -1):
            small.setdefault(dtype, []).append([])
            left[dtype] = PARCEL_NBYTES
        small[dtype][-1].append(number)
        left[dtype] -= nbytes
    return [*itertools.chain.from_iterable(small.values()), *large]


def pack(owned: Sequence[OwnedSlice], state: Mapping[Any, Mapping[Any, Any]]) -> list[Packed]:
    """This rank's state as entries and 1-D tensors, which are views of the state where memory allows.

    Raises:
        TypeError: the state holds something that is neither a tensor, a number, a text nor None, nor a list,
            tuple or dict of these in the state of a whole parameter; or something that belongs to no
            parameter.
    """
    check_belongs_to_parameters(state)
    return [packed for own in owned for packed in pack_slice(own, plain_state(own, state))]


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


def warn_if_not_saved(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Warn of a class that is not torch's if a trial shows that its state can be neither saved nor moved.

    Args: as `stepped_in_trial`.
    """
    if optimizer_class.__module__.startswith("torch.optim."):
        return
    optim = stepped_in_trial(optimizer_class, options, defaults)
    try:
        if optim is not None:
            check_nothing_beside_state(optim)
            (param,) = params_of(optim.param_groups)
            pack([OwnedSlice(Slice(0, 0, param.numel()), param, param)], optim.state)
    except TypeError as error:
        warnings.warn(
            f"{optimizer_class.__name__} can be trained, but not saved or repartitioned: "
            f"consolidate_state_dict, save_sharded and repartition will raise, as after a trial: {error}",
            stacklevel=5,
        )


def plain_state(own: OwnedSlice, state: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, Any]:
    """The state of one slice, its tensor subclasses and lists taken apart; raises as `pack`."""
    return subclasses.take_apart(state.get(own.local, {}), own.piece.param, whole=own.is_whole)


def pack_slice(own: OwnedSlice, plain: Mapping[Any, Any]) -> list[Packed]:
    """The `plain_state` of one slice as entries and tensors; raises as `pack`."""
    piece, local = own.piece, own.local
    packed: list[Packed] = []
    for key, value in plain.items():
        entry: Entry = {"param": piece.param, "key": key}
        tensor = None
        if not isinstance(value, torch.Tensor):
            if not isinstance(key, str) or not isinstance(value, (int, float, str, bool, type(None))):
                raise TypeError(
                    f"the state {key!r} of parameter {piece.param} is a {type(value).__name__}; only "
                    "tensors, numbers, texts and None, and lists, tuples and dicts of these, can be "
                    "checkpointed or moved."
                )
            entry["value"] = value
        elif value.ndim == 0 and not value.is_complex():
            entry |= {"value": value.item(), "dtype": dtype_name(value.dtype)}
        else:
            # A part of a subclass may have the slice's shape by chance; its elements are in another order.
            follows_param = value.shape == local.shape and not subclasses.is_within(key)
            if follows_param:
                tensor = flat_like(value, local)
                entry |= {"start": piece.start, "stop": piece.stop}
            else:
                dense = torch.ops.aten.is_non_overlapping_and_dense(value)
                value = value if dense else value.contiguous()
                tensor = flat_view(value)
                entry |= {"shape": [*value.shape]}
                if not value.is_contiguous():  # a product of matrices rounds otherwise in another order
                    entry["strides"] = [*value.stride()]
            entry |= {"dtype": dtype_name(value.dtype), "numel": tensor.numel()}
        packed.append((entry, tensor))
    return packed


def allocate(
    of_param: dict[str, Any], entry: Entry, like: torch.Tensor, first: int = 0
) -> torch.Tensor | None:
    """Add an entry's key to a state, its elements still empty, and return the 1-D view where they go.

    Args:
        of_param: the state of a parameter or slice so far. An entry with a value adds it, and returns None.
        entry: its "device" is a name, "parameter" for the device of `like`, or missing for the CPU.
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
        if "strides" in entry:
            of_param[key] = of_param[key].as_strided(entry["shape"], entry["strides"])
        return flat_view(of_param[key])
    if key not in of_param:
        of_param[key] = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
    flat = flat_view(of_param[key])
    # Most entries are of the whole tensor, and slicing would take as long as the rest of this function.
    return flat if flat.numel() == entry["numel"] else flat[entry["start"] - first : entry["stop"] - first]


@cache
def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype


# ------------------------------------------------------------------------------------------- whole to shards

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""The state that torch's elementwise optimizers keep once for a parameter."""

SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg"}
    | {"grad_avg", "acc_delta", "ax", "prev", "step_size"}
)
"""The state that they keep for each element, in the parameter's shape."""


def packed_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as in a torch state dict: options, and parameters as running numbers.

    A class is given by its name, since a state dict without other objects loads with `weights_only=True`.
    """
    running = itertools.count()

    def packed(group: dict[str, Any]) -> dict[str, Any]:
        kept = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        named = {OPTIMIZER_CLASS: group[OPTIMIZER_CLASS].__name__} if OPTIMIZER_CLASS in group else {}
        return {**kept, **named, "params": [next(running) for _ in group["params"]]}

    return list(map(packed, param_groups))


def arranged(state_dict: Mapping[str, Any], param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state dict with its groups, and the parameters in them, in the order of `param_groups`.

    Parameters are found by name where both sides have names: a saved group has "param_names", or names for
    ids, as FSDP and torch.distributed.checkpoint write them. What wrappers add to a name does not count.

    Raises:
        ValueError: the dict is not of torch's form, or a group's names are not those of any of our groups.
    """
    _check_form(state_dict)
    saved_groups = state_dict["param_groups"]
    theirs = [_names_in(group["params"], group.get("param_names")) for group in saved_groups]
    ours = [_names_in((), g.get("param_names", None if g["params"] else ())) for g in param_groups]
    sizes = [sorted(len(group["params"]) for group in groups) for groups in (saved_groups, param_groups)]
    if sizes[0] != sizes[1] or None in theirs or None in ours:
        return dict(state_dict)

    place: dict[str, tuple[int, Any]] = {}  # of each name its group, and the id under which it was saved
    for index, (names, group) in enumerate(zip(theirs, saved_groups, strict=True)):
        place |= {name: (index, id_) for name, id_ in zip(names or (), group["params"], strict=True)}
    without = iter([group for group in saved_groups if not group["params"]])
    groups: list[Any] = []
    for index, names in enumerate(ours):
        if not names:
            groups.append(next(without))
            continue
        source = next((place[name][0] for name in names if name in place), index)
        if odd := sorted({*names} ^ {*(theirs[source] or ())}):
            raise ValueError(
                f"the checkpoint's group {source} has other parameters than this optimizer's: {odd[0]!r} is "
                f"in one of them only ({len(odd)} such names). Build the same model, then load again."
            )
        groups.append({**saved_groups[source], "params": [place[name][1] for name in names]})
    return {**state_dict, "param_groups": groups}


WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""What DDP, torch.compile, activation checkpointing and FSDP put into the names of parameters."""


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it.

    >>> plain_name("module._orig_mod.up.weight")
    'up.weight'
    """
    return WRAPPERS.sub("", name)


def _names_in(ids: Sequence[Any], names: Sequence[str] | None) -> list[str] | None:
    """The names of a group's parameters without those of wrappers: its ids, if these are names; else None."""
    found = ids if ids and all(isinstance(id_, str) for id_ in ids) else names
    if found is None:
        return None
    plain = [*map(plain_name, found)]
    return plain if len({*plain}) == len(plain) else list(found)


def saved_ids(state_dict: Mapping[str, Any]) -> list[Any]:
    """The id under which the state of each parameter was saved, in the order of the dict's groups.

    Raises:
        ValueError: an id stands for two parameters.
    """
    ids = [id_ for group in state_dict["param_groups"] for id_ in group["params"]]
    if len(set(ids)) != len(ids):
        raise ValueError("the checkpoint's parameter groups name the same parameter twice; it is damaged.")
    return ids


def check_fits(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    optim: torch.optim.Optimizer,
) -> list[str]:
    """Refuse a checkpoint of another model; return the facts that ranks compare before loading.

    Args:
        state_dict: as from `arranged`.
        optim: the local optimizer. If the class of a group is elementwise, its state's shapes are checked.
    Raises:
        ValueError: missing keys, other groups or classes, options that a class refuses, or a state that it
            cannot have made; names the parameter.
    """
    saved_groups = state_dict["param_groups"]
    _check_sizes(saved_groups, param_groups)
    classes = [class_of(group, optim) for group in param_groups]
    _check_options(saved_groups, param_groups, classes)
    elementwise = [is_elementwise(of_class) for of_class in classes]
    specs = specs_of(param_groups)
    kinds: list[tuple[Any, ...]] = []
    ids = saved_ids(state_dict)
    for number, (id_, param) in enumerate(zip(ids, params_of(param_groups), strict=True)):
        for key, value in state_dict["state"].get(id_, {}).items():
            if elementwise[specs[number].group] and not _fits(key, value, param):
                raise ValueError(_misfit_error(specs[number].name or str(number), key, value, param))
            is_tensor = isinstance(value, torch.Tensor)
            kinds.append((number, key, *((tuple(value.shape), value.dtype) if is_tensor else (None, value))))
    described = enumerate(map(describe_options, saved_groups))
    options = [f"group {index}: {option}" for index, of_group in described for option in of_group]
    return [*options, f"state of shapes and kinds {hashlib.sha256(repr(kinds).encode()).hexdigest()[:12]}"]


def _misfit_error(name: str, key: Any, value: Any, param: torch.Tensor) -> str:
    has_shape = isinstance(value, torch.Tensor) and key not in SCALARS
    what = f"has shape {tuple(value.shape)}" if has_shape else f"is {value!r}"
    return (
        f"the checkpoint's {key!r} for parameter {name} {what}; the parameter has {tuple(param.shape)}. The "
        "checkpoint is of another model, or of the same parameters in another order."
    )


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Refuse what lacks groups or state in torch's forms."""
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


def _check_sizes(saved_groups: Sequence[Any], param_groups: Sequence[dict[str, Any]]) -> None:
    saved, ours = [len(g["params"]) for g in saved_groups], [len(g["params"]) for g in param_groups]
    if saved != ours:
        raise ValueError(
            f"the checkpoint has parameter groups of {saved} parameters and this optimizer has {ours}. "
            "Build the optimizer from the same parameter groups, in the same order, then load again."
        )


def _check_options(
    saved_groups: Sequence[Mapping[str, Any]],
    param_groups: Sequence[dict[str, Any]],
    classes: Sequence[type[torch.optim.Optimizer]],
) -> None:
    for index, (saved, ours, of_class) in enumerate(zip(saved_groups, param_groups, classes, strict=True)):
        if saved.get(OPTIMIZER_CLASS, of_class.__name__) != of_class.__name__:
            raise ValueError(
                f"the checkpoint's group {index} is of {saved[OPTIMIZER_CLASS]}, this optimizer's is of "
                f"{of_class.__name__}. Give the group the same optimizer_class, then load again."
            )
        for option, value in options_of(ours).items():
            if not _alike(saved.get(option), value):
                raise ValueError(
                    f"the checkpoint's {option!r} of group {index} is {saved[option]!r}, this optimizer's is "
                    f"{value!r}. The checkpoint is damaged, or of another optimizer."
                )
        # torch checks options in its constructors. A class that refuses our own options says nothing by it.
        refusal = _refusal(of_class, {**ours, **saved})
        if refusal and not _refusal(of_class, ours):
            raise ValueError(
                f"{of_class.__name__} refuses the checkpoint's options of group {index}: {refusal}"
            )


def _alike(theirs: Any, ours: Any) -> bool:
    """Two values of an option are of one kind: numbers, texts or sequences. None may stand for any kind."""
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        as_long = isinstance(ours, list) or len(theirs) == len(ours)
        return as_long and all(map(_alike, theirs, ours))
    kinds = [(numbers.Number, torch.Tensor), (str,), (list, tuple)]
    found = [[isinstance(value, kind) for kind in kinds] for value in (theirs, ours)]
    return found[0] == found[1] or not any(found[0]) or not any(found[1])


def _refusal(optimizer_class: type[torch.optim.Optimizer], group: dict[str, Any]) -> str:
    """The error of the class's constructor for a group's options, without parameters; "" if it has none."""
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
        if not own.is_whole:
            subclasses.take_apart({key: value}, own.piece.param, whole=False)  # raises for what cannot be cut
            if isinstance(value, torch.Tensor) and value.shape == own.param.shape and value.ndim:
                return flat_like(value, own.param)[own.piece.start : own.piece.stop].clone()
        return subclasses.cloned(value)

    return {
        number: {key: part(key, value, own) for key, value in state[saved_ids[own.piece.param]].items()}
        for number, own in enumerate(owned)
        if saved_ids[own.piece.param] in state
    }
