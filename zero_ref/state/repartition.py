"""A live optimizer's state on its way to new owners: what `ZeroRedundancyOptimizer.repartition` is made of.

`moves.py` says which elements go from whom to whom. Each rank packs what leaves it, tells each rank that it
sends to what will come, and makes room for what comes to it; only when all ranks have room does anything
move. Parameters are on every rank already and stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ref.comm.agreement import agreement
from zero_ref.comm.collectives import Collectives, ToPeer, exchange_json
from zero_ref.optimizer.buckets import flat_view
from zero_ref.optimizer.shard import OwnedSlice
from zero_ref.plan.moves import Move, moves
from zero_ref.plan.partition import Partition
from zero_ref.state import checkpoint, subclasses
from zero_ref.state.checkpoint import Line

SliceState = dict[str, Any]
Contents = dict[Move, list[dict[str, Any]]]
"""For each move what it brings, as lines of a table of contents."""
Tensors = dict[Move, list[torch.Tensor]]
"""For each move the tensors with elements that it takes along, or the places where they go."""


class Handover:
    """One rank's part in a repartition: planned and packed when it is made, without communication.

    Args:
        rank: this one.
        old, new: the partitions, the same ones on all ranks.
        params: in registration order, where their elements travel too as only their owner has them in full;
            else none.
        leaving, owned: this rank's slices in `old` and in `new`.
        state: of the slices in `old`. It is not changed.
    Attributes:
        planned: the moves that begin or end here.
    Raises:
        TypeError: the state holds something that is neither a tensor, a number, a text nor None, or something
            that belongs to no parameter.
    """

    def __init__(
        self,
        rank: int,
        old: Partition,
        new: Partition,
        params: Sequence[torch.Tensor],
        leaving: Sequence[OwnedSlice],
        owned: list[OwnedSlice],
        state: Mapping[Any, SliceState],
    ) -> None:
        checkpoint.check_belongs_to_parameters(state)
        self.planned = moves_of_rank(rank, old, new)
        self.leaving = _pack(rank, self.planned, leaving, state)
        self.owned = owned
        self._params = params
        self._staying = {own.piece: state[own.local] for own in leaving if own.local in state}

    @torch.no_grad()
    def exchange(self, comm: Collectives) -> dict[torch.Tensor, SliceState]:
        """Make the moves, and give the state of the slices that this rank owns from now on.

        Returns:
            By the local tensors of `owned`, as an optimizer keeps it. Slices that did not change have their
            very tensors; slices without state, as they were never stepped, are left out.
        Raises:
            ValueError: the parts of a parameter have not been stepped together, so they make no whole. If one
                rank raises, all raise, and nothing has moved.
            RuntimeError: another rank stopped, or something went wrong there. All raise then too.
        Collective: all ranks of the group.
        Cost: each element that changes owner travels once, with all its state, from its old owner to the new
            one; between two ranks also a table of contents; two all-gathers of 32 bytes. While it lasts, the
            state of slices that change is held twice, as it was and as it becomes.
        """
        contents = _exchange_contents(comm, self.planned, self.leaving)
        # All that takes memory comes first: what a rank then sends is waited for.
        with agreement(comm, "make room for the optimizer state"):
            state, places = _make_room(comm.rank, self.planned, contents, self.owned)
            tensors = {
                move: _travelling(tensor for _, tensor in lines) for move, lines in self.leaving.items()
            }
            for move in self.planned if self._params else []:
                if move.src != move.dst and move.piece.numel:
                    param, start, stop = move.piece
                    ends = tensors if move.src == comm.rank else places
                    ends[move].append(flat_view(self._params[param].detach())[start:stop])
            sends, recvs, arriving = _routed(comm, self.planned, tensors, places)
        comm.exchange(sends, recvs).wait()
        with agreement(comm, "take over the optimizer state"):
            for place, landing in arriving:
                if landing is not place:
                    place.copy_(landing)
        torch.autograd.graph.increment_version(self._params)
        for own in self.owned:
            state.setdefault(own.local, self._staying.get(own.piece, {}))
        return {local: of_slice for local, of_slice in state.items() if of_slice}


def moves_of_rank(rank: int, old: Partition, new: Partition) -> list[Move]:
    """What `rank` hands over and what it gets, also from itself where a slice is cut otherwise.

    A slice that is the same in both partitions is left out: its state stays untouched.

    >>> from zero_ref.plan.partition import Slice, from_lists
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


# ------------------------------------------------------------------------------------------------- packing


def _pack(
    rank: int, planned: Sequence[Move], owned: Sequence[OwnedSlice], state: Mapping[Any, SliceState]
) -> dict[Move, list[Line]]:
    """For each move that begins here its lines; their tensors are views of the state where memory allows."""
    packed: dict[Move, list[Line]] = {}
    for own, parts in _by_slice([move for move in planned if move.src == rank], owned):
        of_slice = checkpoint.plain_state(own, state)
        lines = checkpoint.pack_slice(own, of_slice)
        stays_whole = all(move.piece == own.piece for move in parts)
        subclasses.check_is_whole(of_slice, stays_whole, f"the state of parameter {own.piece.param}")
        for value, (entry, _) in zip(of_slice.values(), lines, strict=True):
            if isinstance(value, torch.Tensor):
                # What is cuda:0 here may be cuda:1 there.
                with_param = value.device == own.param.device
                entry["device"] = "parameter" if with_param else str(value.device)
        packed |= {move: [_narrowed(line, move, own) for line in lines] for move in parts}
    return packed


def _by_slice(
    of_moves: Sequence[Move], owned: Sequence[OwnedSlice]
) -> Iterator[tuple[OwnedSlice, list[Move]]]:
    """The slices that take part in these moves, each with its own."""
    of_param: dict[int, list[Move]] = {}
    for move in of_moves:
        of_param.setdefault(move.piece.param, []).append(move)
    for own in owned:
        param, start, stop = own.piece
        moving = of_param.get(param, [])
        parts = [move for move in moving if start <= move.piece.start and move.piece.stop <= stop]
        if parts:
            yield own, parts


def _narrowed(line: Line, move: Move, own: OwnedSlice) -> Line:
    """The part of a line that belongs to the move; what a slice has only once goes with each part."""
    entry, tensor = line
    if tensor is None or "start" not in entry:
        return line
    _, start, stop = move.piece
    part = tensor[start - own.piece.start : stop - own.piece.start]
    return {**entry, "start": start, "stop": stop, "numel": stop - start}, part


# ---------------------------------------------------------------------------------------------- exchanging


def _exchange_contents(
    comm: Collectives, planned: Sequence[Move], leaving: Mapping[Move, Sequence[Line]]
) -> Contents:
    """What the moves that begin or end here bring: between each two ranks goes one table for all theirs."""
    contents = {move: [entry for entry, _ in lines] for move, lines in leaving.items()}
    tables: dict[int, list[list[dict[str, Any]]]] = {}
    coming: dict[int, list[Move]] = {}
    for move in planned:
        if move.src != comm.rank:
            coming.setdefault(move.src, []).append(move)
        elif move.dst != comm.rank:
            tables.setdefault(move.dst, []).append(contents[move])
    for of_peer, table in zip(coming.values(), exchange_json(comm, tables, coming), strict=True):
        contents |= zip(of_peer, table, strict=True)
    return contents


def _make_room(
    rank: int, planned: Sequence[Move], contents: Contents, owned: Sequence[OwnedSlice]
) -> tuple[dict[torch.Tensor, SliceState], Tensors]:
    """Room for the state of each slice that changes, by its local tensor, and where each move's part goes."""
    state: dict[torch.Tensor, SliceState] = {}
    places: Tensors = {}
    for own, parts in _by_slice([move for move in planned if move.dst == rank], owned):
        _check_stepped_together(rank, parts, contents)
        of_slice = state[own.local] = {}
        for move in parts:
            places[move] = _travelling(
                checkpoint.make_room(of_slice, entry, own.local, own.piece.start) for entry in contents[move]
            )
    return {local: subclasses.put_together(of_slice) for local, of_slice in state.items()}, places


def _travelling(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None and tensor.numel() > 0]


def _check_stepped_together(rank: int, parts: Sequence[Move], contents: Contents) -> None:
    def kinds(move: Move) -> set[str]:
        place = ("start", "stop", "numel")
        return {
            json.dumps({key: entry[key] for key in entry if key not in place}) for entry in contents[move]
        }

    first = parts[0]
    for other in parts[1:]:
        differing = kinds(first) ^ kinds(other)
        if differing:
            raise ValueError(
                f"rank {rank} is to own elements of parameter {first.piece.param} that ranks {first.src} and "
                f"{other.src} have, and only one of these has the state {min(differing)}. The parts of a "
                "parameter must be stepped together: give it a gradient on all ranks or on none."
            )


def _routed(
    comm: Collectives, planned: Sequence[Move], leaving: Tensors, places: Tensors
) -> tuple[list[ToPeer], list[ToPeer], list[tuple[torch.Tensor, torch.Tensor]]]:
    """What goes to whom and comes from whom, on the wire's device; each place and what arrives for it."""
    sends: list[ToPeer] = []
    recvs: list[ToPeer] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for move in planned:  # one order on all ranks: messages of a pair of ranks keep theirs
        if move.dst != comm.rank:
            sends += [(move.dst, tensor.to(comm.wire_device)) for tensor in leaving[move]]
        elif move.src == comm.rank:
            arriving += zip(places[move], leaving[move], strict=True)
        else:
            landings = [
                place
                if place.device == comm.wire_device
                else torch.empty_like(place, device=comm.wire_device)
                for place in places[move]
            ]
            recvs += [(move.src, landing) for landing in landings]
            arriving += zip(places[move], landings, strict=True)
    return sends, recvs, arriving
