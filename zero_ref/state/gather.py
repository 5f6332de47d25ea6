"""The gathering of state from all ranks, as `state_dict` of `stairs/owners.py` does, without pickle.

Parameters may be cut here. Each owner sends its entries (`entries.py`), then its tensors. A large tensor is
received directly into its place in the final tensor; small tensors are sent together. All memory is allocated
before the first tensor is sent.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from zero_ref.comm.agreement import Agreement
from zero_ref.comm.collectives import Collectives, PendingCall
from zero_ref.comm.devices import CPU
from zero_ref.comm.objects import broadcast_json, exchange_json
from zero_ref.plan.parcels import PARCEL_NBYTES, parcels
from zero_ref.shard import subclasses
from zero_ref.state.entries import Entry, Packed, State, allocate, dtype_of


@torch.no_grad()
def consolidate(
    comm: Collectives, to: int | Literal["all"], params: Sequence[torch.Tensor], packed: Sequence[Packed]
) -> State | None:
    """Gather the state of all slices on rank `to`, or on all ranks.

    Args:
        to: a rank, or "all".
        params: in registration order.
        packed: this rank's state, from `pack`.
    Returns:
        On the receiving ranks the whole state by parameter number, on the CPU; on other ranks None.
    Raises:
        RuntimeError: another rank failed. If one rank raises, all raise, and none is left waiting.
    Collective: all ranks, with the same `to`.
    Cost: as ZeroRedundancyOptimizer.consolidate_state_dict.
    """
    tensors = [tensor for _, tensor in packed if tensor is not None]

    # 1. Owners send their entries to the ranks that receive.
    entries_of_owner = _gather_entries(comm, to, packed)

    # 2. Allocate all memory before the first tensor is sent: from then on, other ranks wait for this one.
    whole: State = {}
    places: dict[int, list[torch.Tensor]] = {}  # by owner: where its tensors go, as 1-D views of `whole`
    with Agreement(comm).preparing("make room for the optimizer state"):
        if to in ("all", comm.rank):
            places = {
                owner: _allocate(whole, of_owner, params) for owner, of_owner in entries_of_owner.items()
            }
            _check_stepped_together(comm.rank, itertools.chain(*entries_of_owner.values()), params)
            whole = {param: subclasses.put_together(whole[param]) for param in sorted(whole)}
        messages = _plan_messages(to, entries_of_owner, {**places, comm.rank: tensors})
        staging = _staging_for([ends for _, ends in messages], comm)

    # 3. Send the tensors. If this rank alone fails, it keeps the error and goes on, since other ranks wait
    # for its calls. Phase 4 raises the error.
    failures: list[Exception] = []
    works: list[PendingCall] = []
    for owner, ends in messages:
        works += _transfer_parcel(comm, to, owner, ends, staging, failures)
    if tensors and places:  # copy this rank's own state while the last tensors of other owners arrive
        with _keeping_errors(failures):
            torch._foreach_copy_(places[comm.rank], tensors)
    for work in works:
        work.wait()

    # 4. All calls are complete: ranks learn whether every rank has its tensors.
    with Agreement(comm).preparing("consolidate the optimizer state"):
        if failures:
            raise failures[0]
    return whole if places else None


def _allocate(whole: State, entries: Iterable[Entry], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocate an owner's state in `whole`; return for each tensor the 1-D view to receive into."""
    allocated = [
        allocate(whole.setdefault(entry["param"], {}), entry, params[entry["param"]]) for entry in entries
    ]
    return [place for place in allocated if place is not None]


def _plan_messages(
    to: int | Literal["all"],
    entries_of_owner: Mapping[int, list[Entry]],
    ends: Mapping[int, list[torch.Tensor]],
) -> list[tuple[int, list[torch.Tensor]]]:
    """Join tensors into messages, in the same order on all ranks: for each its owner and its tensors.

    Args:
        ends: by owner, the tensors at this rank's end: those to send, or those to receive into.
    """
    return [
        (owner, [ends[owner][number] for number in parcel])
        for owner, entries in entries_of_owner.items()
        if owner != to
        for parcel in parcels(map(_kind_of, (entry for entry in entries if "numel" in entry)), PARCEL_NBYTES)
    ]


def _kind_of(entry: Entry) -> tuple[str, int]:
    """The dtype and the bytes of an entry's tensor."""
    return entry["dtype"], entry["numel"] * dtype_of(entry["dtype"]).itemsize


def _check_stepped_together(rank: int, entries: Iterable[Entry], params: Sequence[torch.Tensor]) -> None:
    """Refuse a state that only some owners of a parameter have: the rest would be uninitialized memory."""
    numels: dict[tuple[int, Any], int] = {}  # by (parameter number, key), the elements that owners have
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


def _gather_entries(
    comm: Collectives, to: int | Literal["all"], packed: Sequence[Packed]
) -> dict[int, list[Entry]]:
    """Gather the entries by owner; a rank that receives no state has only its own. Collective."""
    mine = [entry for entry, _ in packed]
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
    # An exchange, since for `send` NCCL would make one more communicator for each pair of ranks.
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
    """Send or receive tensors as one message; return the calls that are not complete yet.

    An error of this rank alone goes into `failures`: the rank still makes the calls, as other ranks wait for
    it.

    Args:
        ends: the tensors at this rank's end: on the owner those to send, on a receiver those to fill.
        staging: (nbytes,), uint8 on the wire's device, large enough for a parcel that has to be copied.
    """
    if _needs_no_copy(ends, comm):
        return [_transfer(comm, to, owner, ends[0])]
    parcel = staging[: sum(end.nbytes for end in ends)].view(ends[0].dtype)
    parts = list(parcel.split([end.numel() for end in ends]))
    with _keeping_errors(failures):
        if owner == comm.rank:
            torch._foreach_copy_(parts, ends)
    # Wait for each parcel before the next one, so that one buffer on the wire's device is enough.
    _transfer(comm, to, owner, parcel).wait()
    with _keeping_errors(failures):
        if owner != comm.rank:
            torch._foreach_copy_(ends, parts)
    return []


def _staging_for(messages: Iterable[Sequence[torch.Tensor]], comm: Collectives) -> torch.Tensor:
    """Allocate one buffer for all parcels that have to be copied, as large as the largest of them."""
    nbytes = [sum(end.nbytes for end in ends) for ends in messages if not _needs_no_copy(ends, comm)]
    return torch.empty(max(nbytes, default=0), dtype=torch.uint8, device=comm.wire_of(CPU))


def _needs_no_copy(ends: Sequence[torch.Tensor], comm: Collectives) -> bool:
    """Return whether the network takes the tensors directly: one tensor, on the device of the wire."""
    return len(ends) == 1 and ends[0].device == comm.wire_of(CPU)  # the gathered state is on the CPU


@contextlib.contextmanager
def _keeping_errors(failures: list[Exception]) -> Iterator[None]:
    """Append an exception to `failures` instead of raising it."""
    try:
        yield
    except Exception as error:
        failures.append(error)
