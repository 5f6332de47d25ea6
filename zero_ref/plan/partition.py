"""The owner of every element, as a value.

Beyond `assign_owners` of `stairs/owners.py`, a parameter may be cut, and parameters may lie in ranges of
which each rank owns an equal share. `rules.py` makes Partitions.

Everything here is arithmetic on integers. No tensor is touched and nothing is sent, so every rank computes
the same partition by itself, and a laptop can compute a partition for 4,096 ranks. The optimizer, the
simulator and the plots all take the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Amount = TypeVar("Amount", int, float)

ALIGNMENT = 64
"""Slices and shares begin at multiples of this many elements.

Some CPU kernels (those of `fused=True`) compute a tensor's last elements one by one and round some of them
differently. A slice that begins at such a multiple is computed as the same elements of the whole tensor.
"""


class Slice(NamedTuple):
    """Elements `start` to `stop` (exclusive) of one parameter, counted in memory order.

    A whole parameter is the slice `[0, numel)`.

    >>> Slice(param=3, start=0, stop=10).numel
    10
    """

    param: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class ParamSpec(NamedTuple):
    """A parameter as a plan knows it: its size, its shape and a few labels, but not its values.

    Args:
        numel: elements.
        dtype, device: as torch prints them, without the `torch.` ("bfloat16", "cpu").
        group: the index of the parameter's group.
        trainable: the parameter's `requires_grad`.
        name: the parameter's name in errors; if empty, errors use its index.
        shape: the dimensions; empty for a scalar, and in a plan that is made from sizes alone.
        whole: the parameter must not be cut, since its optimizer uses its shape, as Muon does.
    """

    numel: int
    dtype: str = "float32"
    device: str = "cpu"
    group: int = 0
    trainable: bool = True
    name: str = ""
    shape: tuple[int, ...] = ()
    whole: bool = False

    @property
    def rows(self) -> int:
        """The first dimension, along which stage 3 cuts; without a shape, the number of elements."""
        return self.shape[0] if self.shape else self.numel


class SharedRange(NamedTuple):
    """Parameters that lie in one flat tensor, of which each of N ranks owns an equal share.

    Each parameter begins at a multiple of 64 elements, and so does each share. So each element is computed
    with the same vector instructions as in the whole parameter; see `rules.even`.

    >>> both = SharedRange.of([3, 4], [100, 50], world_size=2)
    >>> both.starts, both.numel
    ((0, 128), 256)
    >>> [(piece, start) for piece, start in both.slices_of(1, [0, 0, 0, 100, 50], 2)]
    [(Slice(param=4, start=0, stop=50), 0)]

    Args:
        params: the numbers of the parameters, in the order of their offsets.
        starts: the offset of each parameter's first element in the flat tensor.
        numel: elements of the flat tensor, N times those of a share. Elements of no parameter are zero.
    """

    params: tuple[int, ...]
    starts: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, params: Sequence[int], numels: Sequence[int], world_size: int) -> SharedRange:
        """Lay parameters in a range, in this order.

        Args:
            params: the numbers of the parameters.
            numels: the elements of each of them.
        """
        starts, end = [], 0
        for numel in numels:
            starts.append(end)
            end += round_up(numel, ALIGNMENT)
        return cls(tuple(params), tuple(starts), round_up(end, world_size * ALIGNMENT))

    def slices_of(self, rank: int, numels: Sequence[int], world_size: int) -> Iterator[tuple[Slice, int]]:
        """Yield the slices in a rank's share, each with the offset of its first element in the share.

        Args:
            numels: elements of every parameter of the model.
        """
        # The share has elements [rank * share, (rank + 1) * share) of the range.
        share = self.numel // world_size
        for param, begin in zip(self.params, self.starts):
            start = max(rank * share - begin, 0)
            stop = min((rank + 1) * share - begin, numels[param])
            if start < stop:
                yield Slice(param, start, stop), begin + start - rank * share

    def amounts_of(self, numels: Sequence[int], world_size: int) -> Iterator[tuple[int, range, int]]:
        """Count the elements that ranks own of each parameter: (parameter, ranks, elements of each of these).

        Consecutive ranks with equal amounts are counted together.

        >>> list(SharedRange.of([0], [300], world_size=4).amounts_of([300], 4))
        [(0, range(0, 1), 128), (0, range(1, 2), 128), (0, range(2, 3), 44)]
        """
        share = self.numel // world_size
        for param, begin in zip(self.params, self.starts):
            end = begin + numels[param]
            # All ranks between the first and the last own a whole share of the parameter.
            first, last = begin // share, (end - 1) // share
            yield param, range(first, first + 1), min(end, (first + 1) * share) - begin
            if last > first + 1:
                yield param, range(first + 1, last), share
            if last > first:
                yield param, range(last, last + 1), end - last * share


class OfEachRank(Sequence[T]):
    """A sequence with a value for each rank, computed when it is read; equal to the tuple of these values.

    A thousand ranks that each own a part of every parameter own millions of slices: too many to store.

    >>> squares = OfEachRank(lambda rank: rank**2, world_size=4)
    >>> squares[-1], squares[1:3], squares == (0, 1, 4, 9)
    (9, (1, 4), True)
    """

    def __init__(self, value_of: Callable[[int], T], world_size: int) -> None:
        self._value_of, self._ranks = value_of, range(world_size)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(map(self._value_of, self._ranks[rank]))
        return self._value_of(self._ranks[rank])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class Partition:
    """An assignment of every element of every parameter to exactly one rank.

    >>> p = Partition(numels=(6, 4), slices_of_rank=((Slice(0, 0, 6),), (Slice(1, 0, 4),)))
    >>> p.world_size, p.loads, p.is_whole
    (2, (6, 4), True)

    Args:
        numels: elements per parameter, in registration order.
        slices_of_rank: for each rank the slices that it owns; stored sorted by parameter and start. With
            `ranges`, pass only the slices of parameters that are in no range; the others are added.
        ranges: the ranges. Each rank owns the slices in its share of a range.

    Attributes:
        slices_outside_ranges: for each rank its slices of parameters that are in no range.
    Raises:
        ValueError: an element has no owner or two, or a slice reaches outside its parameter.
    """

    numels: tuple[int, ...]
    slices_of_rank: Sequence[tuple[Slice, ...]]
    ranges: tuple[SharedRange, ...] = ()
    slices_outside_ranges: tuple[tuple[Slice, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # 1. Sort. Groups, state and messages use this order, so it must not depend on who made the partition.
        check_world_size(len(self.slices_of_rank))
        ordered = tuple([tuple(sorted(slices)) for slices in self.slices_of_rank])
        # 2. Check that each element has one owner: by its rank's slice, or by its rank's share of a range.
        in_ranges = {param for one in self.ranges for param in one.params}
        by_param = self._by_param(ordered)
        for param, pieces in enumerate(by_param):
            if param not in in_ranges:
                _check_coverage(param, self.numels[param], pieces)
            elif pieces:
                piece, rank = pieces[0]
                raise ValueError(
                    f"rank {rank} is given elements [{piece.start}, {piece.stop}) of parameter {param}, "
                    "which is in a range: its share of the range is what a rank owns of it."
                )
        # 3. Set the attributes. The class is frozen, so not by assignment.
        object.__setattr__(self, "slices_outside_ranges", ordered)
        with_ranges = OfEachRank(self._slices_of, len(ordered))
        object.__setattr__(self, "slices_of_rank", with_ranges if self.ranges else ordered)
        if not self.ranges:
            # The check has made this property's value already, for thousands of parameters.
            object.__setattr__(self, "pieces_of_param", by_param)

    def _slices_of(self, rank: int) -> tuple[Slice, ...]:
        """List all slices of a rank, also those in its shares of ranges."""
        owned = [*self.slices_outside_ranges[rank]]
        for one in self.ranges:
            owned += (piece for piece, _ in one.slices_of(rank, self.numels, self.world_size))
        return tuple(sorted(owned))

    @property
    def world_size(self) -> int:
        return len(self.slices_outside_ranges)

    @cached_property
    def pieces_of_param(self) -> tuple[tuple[tuple[Slice, int], ...], ...]:
        """(slice, owner) of all slices of each parameter, from the first element to the last."""
        return self._by_param(self.slices_of_rank)

    def _by_param(
        self, slices_of_rank: Sequence[Sequence[Slice]]
    ) -> tuple[tuple[tuple[Slice, int], ...], ...]:
        """Sort slices by their parameter.

        Raises:
            ValueError: there is no such parameter.
        """
        pieces: list[list[tuple[Slice, int]]] = [[] for _ in self.numels]
        for rank, slices in enumerate(slices_of_rank):
            for piece in slices:
                if not 0 <= piece.param < len(self.numels):
                    raise ValueError(
                        f"rank {rank} is given parameter {piece.param}, but there are {len(self.numels)} "
                        f"parameters, numbered from 0."
                    )
                pieces[piece.param].append((piece, rank))
        return tuple([tuple(sorted(one) if len(one) > 1 else one) for one in pieces])

    def totals(
        self, of_element: Sequence[Amount], of_slice: Sequence[Amount] | None = None
    ) -> tuple[Amount, ...]:
        """Sum an amount, such as bytes, over each rank's slices: so much an element, and so much a slice.

        >>> Partition((6, 4), ((Slice(0, 0, 6),), (Slice(1, 0, 4),))).totals([4, 2], of_slice=[1, 1])
        (25, 9)

        Args:
            of_element: the amount for each element of a parameter, by parameter.
            of_slice: the amount for each slice of a parameter, by parameter; None for nothing.
        Cost: in ranges it grows with the parameters and the ranks, not with their product.
        """
        # 1. Outside ranges: slice by slice.
        each: Sequence[Amount] = of_slice or [0] * len(self.numels)
        outside = [
            sum([of_element[param] * (stop - start) + each[param] for param, start, stop in slices])
            for slices in self.slices_outside_ranges
        ]
        # 2. In ranges: an amount for ranks 3 to 7 is added at rank 3 and subtracted at rank 8, so that the
        # running sum of these changes is the amount of each rank.
        changes: list[Amount] = [0] * (self.world_size + 1)
        for one in self.ranges:
            for param, ranks, numel in one.amounts_of(self.numels, self.world_size):
                amount = of_element[param] * numel + each[param]
                changes[ranks.start] += amount
                changes[ranks.stop] -= amount
        return tuple([own + shared for own, shared in zip(outside, accumulate(changes))])

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """The number of elements that each rank owns."""
        return self.totals([1] * len(self.numels))

    @cached_property
    def is_whole(self) -> bool:
        """Return whether no parameter is split between ranks."""
        # `pieces_of_param` would list the slices in ranges, which may be millions: look at the amounts first.
        if any(
            len(ranks) > 1 or numel < self.numels[param]
            for one in self.ranges
            for param, ranks, numel in one.amounts_of(self.numels, self.world_size)
        ):
            return False
        return all(len(pieces) == 1 for pieces in self.pieces_of_param)

    @cached_property
    def owner_of_param(self) -> tuple[int, ...]:
        """The rank that owns each parameter.

        Raises:
            ValueError: a parameter is split between ranks; read `pieces_of_param` instead.
        """
        if not self.is_whole:
            split = next(i for i, pieces in enumerate(self.pieces_of_param) if len(pieces) > 1)
            raise ValueError(f"parameter {split} has several owners: read `pieces_of_param` instead.")
        return tuple(pieces[0][1] for pieces in self.pieces_of_param)

    def joined(self, later: Partition) -> Partition:
        """Append `later`, the partition of parameters that are registered after these.

        Raises:
            ValueError: the partitions are for different numbers of ranks.
        """
        if later.world_size != self.world_size:
            raise ValueError(f"cannot join partitions over {self.world_size} and {later.world_size} ranks.")
        shift = len(self.numels)
        return Partition(
            self.numels + later.numels,
            tuple(
                mine + tuple(piece._replace(param=piece.param + shift) for piece in added)
                for mine, added in zip(self.slices_outside_ranges, later.slices_outside_ranges, strict=True)
            ),
            self.ranges
            + tuple(one._replace(params=tuple(n + shift for n in one.params)) for one in later.ranges),
        )


def check_world_size(world_size: int) -> None:
    """Refuse fewer ranks than one.

    Raises:
        ValueError: `world_size` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1 rank, got {world_size}.")


def _check_coverage(param: int, numel: int, pieces: Sequence[tuple[Slice, int]]) -> None:
    """Check that the slices of a parameter cover each of its elements once.

    Args:
        pieces: (slice, owner), sorted.
    Raises:
        ValueError: an element has no owner or two, or a slice reaches outside the parameter.
    """
    covered = 0  # elements [0, covered) have an owner
    # An empty slice is valid only as the single slice of a parameter without elements.
    least = 1 if numel > 0 or len(pieces) > 1 else 0
    for piece, rank in pieces:
        _, start, stop = piece
        if start != covered or not start + least <= stop <= numel:
            raise ValueError(_coverage_error(param, numel, covered, piece, rank))
        covered = stop
    if covered != numel or not pieces:
        raise ValueError(
            f"parameter {param}: elements [{covered}, {numel}) have no owner. "
            "A partition gives every element to exactly one rank."
        )


def _coverage_error(param: int, numel: int, covered: int, piece: Slice, rank: int) -> str:
    """Write the error for the first slice that does not continue what the slices before it cover."""
    if piece.start < 0 or piece.stop > numel or piece.stop < piece.start:
        return (
            f"parameter {param} has {numel} elements, but rank {rank} is given [{piece.start}, {piece.stop})."
        )
    if piece.start > covered:
        return f"parameter {param}: elements [{covered}, {piece.start}) have no owner."
    if piece.start == piece.stop:
        return (
            f"parameter {param} has {numel} elements, and rank {rank} is given none of them, "
            f"[{piece.start}, {piece.stop}). Leave out slices without elements; a parameter without any "
            "belongs, whole, to one rank."
        )
    return (
        f"parameter {param}: elements [{piece.start}, {min(covered, piece.stop)}) have two owners, "
        f"one of them rank {rank}. A partition gives every element to exactly one rank."
    )


def round_up(numel: int, multiple: int) -> int:
    """Round a number up to a multiple of another one.

    >>> round_up(65, 64)
    128
    """
    return -(-numel // multiple) * multiple
