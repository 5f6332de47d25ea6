"""The contents of a checkpoint in bytes: of the file, of each rank's part, and of messages that gather it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_ref.plan.parcels import parcels
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.simulator.ledger import (
    StateRule,
    check_fits,
    itemsize_of,
    nbytes_of,
    state_bytes_of_rank,
)


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint, and which rank owns which of them.

    >>> from zero_ref.plan.rules import even
    >>> from zero_ref.simulator.ledger import state_rule
    >>> saved = Saved((ParamSpec(1024), ParamSpec(24)), even([1024, 24], 2), state_rule("AdamW"))
    >>> saved.state_bytes, saved.own_state_bytes, saved.own_parameter_bytes
    (8392, (4612, 3784), (2304, 1888))

    Args:
        params: in registration order.
        partition: who owns what: when it is saved, or where it is loaded.
        rule: the optimizer's state, masters included.
        parameters: the file has the parameters too. Without them it is an optimizer's state dict.
    Raises:
        ValueError: the partition was made for other parameters, or the state is in 8 bits.
    """

    params: tuple[ParamSpec, ...]
    partition: Partition
    rule: StateRule
    parameters: bool = True

    def __post_init__(self) -> None:
        check_fits(self.partition, self.params)
        if self.rule.eight_bit:
            raise ValueError(
                "checkpoints of moments in 8 bits are not simulated: their scales are further tensors. Leave "
                "states_8 out, or the checkpoint."
            )

    @property
    def ranks(self) -> int:
        """Number of ranks that share the checkpoint."""
        return self.partition.world_size

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters; 0 if the file has none."""
        return sum(map(nbytes_of, self.params)) if self.parameters else 0

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the whole optimizer's state."""
        return sum(
            param.numel * one.tensors * one.itemsize + one.scalars
            for param, one in zip(self.params, self._each)
            if param.numel
        )

    @property
    def file_bytes(self) -> int:
        """Bytes of all tensors in one file."""
        return self.parameter_bytes + self.state_bytes

    @cached_property
    def own_parameter_bytes(self) -> tuple[int, ...]:
        """Bytes of the parameters that each rank owns; 0 if the file has none."""
        of_element = [itemsize_of(param.dtype) if self.parameters else 0 for param in self.params]
        return self.partition.totals(of_element)

    @cached_property
    def own_state_bytes(self) -> tuple[int, ...]:
        """Bytes of the state that each rank owns."""
        return state_bytes_of_rank(self.partition, self.params, self.rule)

    @cached_property
    def largest_whole_bytes(self) -> int:
        """Bytes of the largest tensor in the file."""
        return max((param.numel * one.largest for param, one in zip(self.params, self._each)), default=0)

    @cached_property
    def of_rank(self) -> tuple[OfRank, ...]:
        """The most that each rank handles at one time."""
        return tuple(map(self._of_rank, self.partition.slices_of_rank))

    def _of_rank(self, pieces: Sequence[Slice]) -> OfRank:
        largest = copied = 0
        sizes: list[tuple[str, int]] = []  # of each tensor of the state: its dtype, its bytes
        for param, start, stop in pieces:
            one, numel = self._each[param], stop - start
            nbytes = numel * one.itemsize
            largest = max(largest, numel * one.largest)
            copied += one.scalars + (nbytes * one.tensors if numel != self.params[param].numel else 0)
            sizes += [(one.dtype, nbytes)] * one.tensors
        together = [[sizes[number][1] for number in numbers] for numbers in parcels(sizes)]
        joined = max((sum(parcel) for parcel in together if len(parcel) > 1), default=0)
        return OfRank(largest, copied, max(map(sum, together), default=0), joined)

    @cached_property
    def _each(self) -> tuple[_Element, ...]:
        return tuple(_element(param, self.rule.of(param), self.parameters) for param in self.params)


class OfRank(NamedTuple):
    """Bytes of what a rank handles at one time.

    Args:
        largest: the largest tensor, or part of one, that it owns.
        copied: state that it copies though it need not: of cut parameters, and step counts.
        parcel: the largest message in which its state is gathered.
        joined: the largest such message that joins tensors.
    """

    largest: int
    copied: int
    parcel: int
    joined: int


class _Element(NamedTuple):
    """The state of an element of a parameter: tensors that have it, their dtype and its bytes in each.

    Beside them are `scalars`, the bytes that a part of the parameter has once. `largest` are the bytes of the
    element in the tensor of the file that has most of it.
    """

    tensors: int
    dtype: str
    itemsize: int
    scalars: int
    largest: int


def _element(param: ParamSpec, rule: StateRule, parameters: bool) -> _Element:
    in_param = itemsize_of(param.dtype) if parameters else 0
    if not (param.trainable or rule.for_frozen):
        return _Element(0, param.dtype, 0, 0, in_param)
    itemsize = rule.itemsize or itemsize_of(param.dtype)
    in_state = itemsize if rule.tensors else 0
    dtype = "of the rule" if rule.itemsize else param.dtype
    return _Element(rule.tensors, dtype, itemsize, rule.scalar_bytes, max(in_param, in_state))
