"""How stage 3 cuts parameters: each along its first dimension, into as many parts as ranks share it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.ledger import StateRule, itemsize_of
from zero_ref.simulator.stage_3 import Unit


class Cut(NamedTuple):
    """A parameter cut along its first dimension. Each rank has room for as many rows as the fullest.

    >>> Cut.of(ParamSpec(12, shape=(3, 4)), ranks=2)
    Cut(rows=3, chunk=2, width=4, padded=32)

    Args:
        rows: the size of the dimension.
        chunk: rows of the fullest rank.
        width: elements of a row.
        padded: bytes on each rank.
    """

    rows: int
    chunk: int
    width: int
    padded: int

    @classmethod
    def of(cls, param: ParamSpec, ranks: int) -> Cut:
        """Cut along the first dimension, as torch's `fully_shard` does."""
        rows = param.rows
        chunk, width = -(-rows // ranks), param.numel // max(rows, 1)
        return cls(rows, chunk, width, chunk * width * itemsize_of(param.dtype))

    def amounts(self) -> tuple[tuple[int, int], ...]:
        """(place, change of the elements from this place on): first full chunks, then the rest, then none.

        >>> Cut.of(ParamSpec(12, shape=(3, 4)), ranks=2).amounts()
        ((0, 8), (1, -4), (2, -4))
        """
        full_ranks, rest = divmod(self.rows, self.chunk) if self.chunk else (0, 0)
        full, part = self.chunk * self.width, rest * self.width
        return (0, full), (full_ranks, part - full), (full_ranks + 1, -part)


class CutParams:
    """The parameters of a model, each cut into as many parts as a group has ranks."""

    def __init__(self, params: Sequence[ParamSpec], ranks: int) -> None:
        self.params, self.ranks = params, ranks
        self.cuts = [Cut.of(param, ranks) for param in params]

    @property
    def parameter_bytes(self) -> int:
        """On each rank, padding included."""
        return sum(cut.padded for cut in self.cuts)

    @property
    def gradient_bytes(self) -> int:
        """The same of trained parameters."""
        return sum(cut.padded for param, cut in zip(self.params, self.cuts) if param.trainable)

    def unit(self, numbers: Sequence[int], kept: bool, reduced_itemsize: int | None) -> Unit:
        """These of the parameters, gathered together.

        Args:
            kept: as `Unit.kept`.
            reduced_itemsize: bytes of an element of gradients on their way; None for those of the gradients.
        """
        ranks, cuts = self.ranks, self.cuts
        trained = [number for number in numbers if self.params[number].trainable]
        own = ranks * sum(cuts[number].padded for number in trained)
        reduced = own
        if reduced_itemsize is not None:
            reduced = ranks * reduced_itemsize * sum(cuts[n].chunk * cuts[n].width for n in trained)
        return Unit(
            sum(self.params[number].numel for number in numbers),
            ranks * sum(cuts[number].padded for number in numbers),
            reduced,
            kept,
            len(numbers),
            own,
        )

    def held(self, rule: StateRule) -> tuple[list[int], list[int]]:
        """What each place of a group updates, in elements, and holds as state, in bytes."""
        ranks = self.ranks
        # The first have full chunks, one the rest, others nothing: note where that changes, then add up.
        shard_changes, state_changes = [0] * (ranks + 2), [0] * (ranks + 2)
        for param, cut in zip(self.params, self.cuts):
            its = rule.of(param)
            has_state = param.trainable or its.for_frozen
            for place, change in cut.amounts():
                shard_changes[place] += change * param.trainable
                if has_state:
                    state_changes[place] += its.nbytes(change, itemsize_of(param.dtype)) - its.scalar_bytes
            if has_state:
                state_changes[0] += its.scalar_bytes  # on every rank, also where it has no rows
        return list(accumulate(shard_changes))[:ranks], list(accumulate(state_changes))[:ranks]
