"""State gathered from all ranks: `state_dict` of `minimal.py`, for parameters that are cut, without pickle.

Each owner sends its entries (`entries.py`), then its tensors. A large tensor is received straight into its
place in the final tensor; small tensors travel together. All memory is allocated before the first tensor is
sent.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from zero_ref.comm.agreement import agreement
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.comm.devices import CPU
from zero_ref.comm.objects import broadcast_json, exchange_json
from zero_ref.optimizer.entries import Entry, Packed, State, allocate, dtype_of
from zero_ref.shard import subclasses

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

    # 1. Owners say what they have.
    entries_of_owner = _gather_entries(comm, to, [entry for entry, _ in packed])

    # 2. Allocate all memory before the first tensor is sent: from then on, other ranks wait for this one.
    whole: State = {}
    places: dict[int, list[torch.Tensor]] = {}
    with agreement(comm, "make room for the optimizer state"):
        if to in ("all", comm.rank):
            places = {owner: _room(whole, of_owner, params) for owner, of_owner in entries_of_owner.items()}
            _check_stepped_together(comm.rank, itertools.chain(*entries_of_owner.values()), params)
            whole = {param: subclasses.put_together(whole[param]) for param in sorted(whole)}
        parcels: list[tuple[int, list[torch.Tensor]]] = []
        for owner, entries in entries_of_owner.items():
            ends = tensors if owner == comm.rank else places[owner]
            if owner != to:
                parcels += [(owner, [ends[n] for n in parcel]) for parcel in _parcels(entries)]
        staged = [sum(end.nbytes for end in ends) for _, ends in parcels if not _goes_as_it_is(ends, comm)]
        staging = torch.empty(max(staged, default=0), dtype=torch.uint8, device=comm.wire_of(CPU))

    # 3. Send the tensors. An error of this rank alone is noted, and raised when no rank waits for it any
    # more.
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


def _room(whole: State, entries: Iterable[Entry], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory in `whole` for what an owner has: for each of its tensors the 1-D view to receive into."""
    allocated = [
        allocate(whole.setdefault(entry["param"], {}), entry, params[entry["param"]]) for entry in entries
    ]
    return [place for place in allocated if place is not None]


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
