"""The transfer of state from old owners to new ones: `ZeroRedundancyOptimizer.repartition`.

In `stairs/owners.py` owners never change; here they may, during training. `plan/moves.py` says which elements
go from which rank to which. Each rank packs the state that it sends, describes it to each receiver, and
allocates memory for the state that it receives. Tensors are sent only when all ranks have that memory.
Parameters are on every rank already and are not sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ref.comm.agreement import agreement
from zero_ref.comm.collectives import Collectives, ToPeer
from zero_ref.comm.objects import exchange_json
from zero_ref.optimizer.entries import (
    Entry,
    Packed,
    allocate,
    pack_slice,
    plain_state,
)
from zero_ref.plan.moves import Move, moves
from zero_ref.plan.partition import Partition
from zero_ref.shard import subclasses
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.owned import OwnedSlice

StateByKey = dict[str, Any]
"""The state of one slice."""
Entries = dict[Move, list[Entry]]
"""The descriptions of the state that each move transfers."""
Tensors = dict[Move, list[torch.Tensor]]
"""The elements that each move transfers: 1-D tensors to send, or to receive into."""


class Handover:
    """One rank's part in a repartition. The constructor plans and packs, without communication.

    Args:
        rank: this rank.
        old, new: the partitions, equal on all ranks.
        params: the parameters in registration order, if their elements are sent too, because only owners have
            them unrounded; otherwise empty.
        owned_before, owned: this rank's slices in `old` and in `new`.
        state: the state of the slices in `old`. It is not changed.
    Attributes:
        planned: the moves that begin or end here.
    Raises:
        TypeError: as `entries.pack`.
    """

    def __init__(
        self,
        rank: int,
        old: Partition,
        new: Partition,
        params: Sequence[torch.Tensor],
        owned_before: Sequence[OwnedSlice],
        owned: list[OwnedSlice],
        state: Mapping[Any, StateByKey],
    ) -> None:
        self.planned = moves_of_rank(rank, old, new)
        self.owned = owned
        self._params = params
        # The state of slices that are in both partitions is used again; that of others is packed, move by
        # move.
        self._kept = {own.piece: state[own.local] for own in owned_before if own.local in state}
        self._packed: dict[Move, list[Packed]] = {}
        for own, parts in _by_slice([move for move in self.planned if move.src == rank], owned_before):
            self._packed |= _pack_moves(own, parts, state)

    @torch.no_grad()
    def exchange(self, comm: Collectives) -> dict[torch.Tensor, StateByKey]:
        """Make the moves, and return the state of the slices that this rank owns from now on.

        Returns:
            The state by the local tensors of `owned`, as an optimizer keeps it. Slices that did not change
            have the same tensors as before. Slices that were never stepped have no state and are left out.
        Raises:
            ValueError: the parts of a parameter have not been stepped together, so their states cannot be
                joined. If one rank raises, all raise, and nothing has moved.
            RuntimeError: another rank stopped or failed. All raise then too.
        Collective: all ranks of the group.
        Cost: the state of each element that changes owner is sent once, from the old owner to the new one;
            between two ranks also the entries; two all-gathers of 32 bytes. During the call the old and the
            new state of slices that change are both in memory.
        """
        # 1. Each receiver learns what it will get.
        entries = self._exchange_entries(comm)

        # 2. Allocate all memory before the first tensor is sent: from then on, other ranks wait for this one.
        with agreement(comm, "make room for the optimizer state"):
            state, places = self._allocate(comm.rank, entries)
            tensors = {move: _with_elements(tensor for _, tensor in of) for move, of in self._packed.items()}
            # The elements of the parameters themselves are sent after the state of their move.
            for move in self.planned if self._params else []:
                if move.src != move.dst and move.piece.numel:
                    param, start, stop = move.piece
                    ends = tensors if move.src == comm.rank else places
                    ends[move].append(flat_view(self._params[param].detach())[start:stop])
            sends, recvs, received = self._plan_messages(comm, tensors, places)

        # 3. Send the tensors, and copy those that were received on the wire's device.
        comm.exchange(sends, recvs).wait()
        with agreement(comm, "take over the optimizer state"):
            for place, tensor in received:
                if tensor is not place:
                    place.copy_(tensor)

        # 4. Autograd does not see that parameters were received. Slices that did not change keep their state.
        torch.autograd.graph.increment_version(self._params)
        for own in self.owned:
            state.setdefault(own.local, self._kept.get(own.piece, {}))
        return {local: of_slice for local, of_slice in state.items() if of_slice}

    def _exchange_entries(self, comm: Collectives) -> Entries:
        """Give the entries of all moves from and to this rank. Entries for one peer are sent together."""
        entries = {move: [entry for entry, _ in packed] for move, packed in self._packed.items()}
        to_send: dict[int, list[list[Entry]]] = {}
        expected: dict[int, list[Move]] = {}
        for move in self.planned:
            if move.src != comm.rank:
                expected.setdefault(move.src, []).append(move)
            elif move.dst != comm.rank:
                to_send.setdefault(move.dst, []).append(entries[move])
        for of_peer, received in zip(expected.values(), exchange_json(comm, to_send, expected), strict=True):
            entries |= zip(of_peer, received, strict=True)
        return entries

    def _allocate(self, rank: int, entries: Entries) -> tuple[dict[torch.Tensor, StateByKey], Tensors]:
        """Allocate the state of each slice that changes; return it, and its views that each move fills."""
        state: dict[torch.Tensor, StateByKey] = {}
        places: Tensors = {}
        for own, parts in _by_slice([move for move in self.planned if move.dst == rank], self.owned):
            _check_stepped_together(rank, parts, entries)
            of_slice: StateByKey = {}
            for move in parts:
                places[move] = _with_elements(
                    allocate(of_slice, entry, own.local, own.piece.start) for entry in entries[move]
                )
            state[own.local] = subclasses.put_together(of_slice)
        return state, places

    def _plan_messages(
        self, comm: Collectives, tensors: Tensors, places: Tensors
    ) -> tuple[list[ToPeer], list[ToPeer], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The tensors to send, those to receive, and (place, tensor to copy there) for each one that arrives.

        Tensors to send and to receive are on the wire's device. A move from this rank to itself sends
        nothing: its tensors are only copied.
        """
        sends: list[ToPeer] = []
        recvs: list[ToPeer] = []
        received: list[tuple[torch.Tensor, torch.Tensor]] = []
        for move in self.planned:  # all ranks have this order, so messages of two ranks meet in order
            if move.dst != comm.rank:
                sends += [(move.dst, tensor.to(comm.wire_of(tensor.device))) for tensor in tensors[move]]
                continue
            arriving = (
                tensors[move]
                if move.src == comm.rank
                else [
                    place
                    if place.device == (wire := comm.wire_of(place.device))
                    else torch.empty_like(place, device=wire)
                    for place in places[move]
                ]
            )
            if move.src != comm.rank:
                recvs += [(move.src, tensor) for tensor in arriving]
            received += zip(places[move], arriving, strict=True)
        return sends, recvs, received


def moves_of_rank(rank: int, old: Partition, new: Partition) -> list[Move]:
    """The moves from and to `rank`, and from `rank` to itself for elements whose slice has other bounds.

    A slice that is the same in both partitions is left out: its state does not change.

    >>> from zero_ref.plan.partition import Slice
    >>> from zero_ref.plan.rules import from_lists
    >>> old = from_lists([9, 5], [[0, 1], []])
    >>> new = from_lists([9, 5], [[Slice(0, 0, 6), 1], [Slice(0, 6, 9)]])
    >>> for piece, src, dst in moves_of_rank(0, old, new):
    ...     print(f"{piece} from {src} to {dst}")
    Slice(param=0, start=0, stop=6) from 0 to 0
    Slice(param=0, start=6, stop=9) from 0 to 1
    """
    unchanged = set(old.slices_of_rank[rank]) & set(new.slices_of_rank[rank])
    return [
        move
        for move in moves(old, new, staying=True)
        if rank in (move.src, move.dst) and not (move.src == move.dst and move.piece in unchanged)
    ]


def _by_slice(
    of_moves: Iterable[Move], owned: Sequence[OwnedSlice]
) -> Iterator[tuple[OwnedSlice, list[Move]]]:
    """Group moves by the slice that they belong to; slices without moves are left out."""
    of_param: dict[int, list[Move]] = {}
    for move in of_moves:
        of_param.setdefault(move.piece.param, []).append(move)
    for own in owned:
        param, start, stop = own.piece
        moving = of_param.get(param, [])
        parts = [move for move in moving if start <= move.piece.start and move.piece.stop <= stop]
        if parts:
            yield own, parts


def _pack_moves(
    own: OwnedSlice, parts: Sequence[Move], state: Mapping[Any, StateByKey]
) -> dict[Move, list[Packed]]:
    """Pack a slice's state for each of its moves, as views of the state if its strides allow."""
    plain = plain_state(own, state)
    packed = pack_slice(own, plain)
    stays_whole = all(move.piece == own.piece for move in parts)
    subclasses.check_is_whole(plain, stays_whole, f"the state of parameter {own.piece.param}")
    for value, (entry, _) in zip(plain.values(), packed, strict=True):
        if isinstance(value, torch.Tensor):
            # Do not send the name of the parameter's device: an accelerator's index differs between ranks.
            entry["device"] = "parameter" if value.device == own.param.device else str(value.device)
    return {move: [_narrowed(entry, tensor, move, own) for entry, tensor in packed] for move in parts}


def _narrowed(entry: Entry, tensor: torch.Tensor | None, move: Move, own: OwnedSlice) -> Packed:
    """The part of a value that belongs to the move; a value without a place goes with every move."""
    if tensor is None or "start" not in entry:
        return entry, tensor
    _, start, stop = move.piece
    part = tensor[start - own.piece.start : stop - own.piece.start]
    return {**entry, "start": start, "stop": stop, "numel": stop - start}, part


def _with_elements(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None and tensor.numel() > 0]


def _check_stepped_together(rank: int, parts: Sequence[Move], entries: Entries) -> None:
    """Refuse moves that fill one slice if they bring different kinds of state."""

    def kinds(move: Move) -> set[str]:
        place = ("start", "stop", "numel")
        return {json.dumps({key: entry[key] for key in entry if key not in place}) for entry in entries[move]}

    first = parts[0]
    for other in parts[1:]:
        differing = kinds(first) ^ kinds(other)
        if differing:
            raise ValueError(
                f"rank {rank} is to own elements of parameter {first.piece.param} that ranks {first.src} and "
                f"{other.src} have, and only one of these has the state {min(differing)}. The parts of a "
                "parameter must be stepped together: give it a gradient on all ranks or on none."
            )
