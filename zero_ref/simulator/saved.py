"""The contents of a checkpoint in bytes: of the file, of each rank's part, and of messages that gather it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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
        ValueError: the partition was made for other parameters.
    """

    params: tuple[ParamSpec, ...]
    partition: Partition
    rule: StateRule
    parameters: bool = True

    def __post_init__(self) -> None:
        check_fits(self.partition, self.params)

    @property
    def ranks(self) -> int:
        """How many ranks share the checkpoint."""
        return self.partition.world_size

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters; 0 if the file has none."""
        return sum(map(nbytes_of, self.params)) if self.parameters else 0

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the whole optimizer's state."""
        return sum(self._state_of(number, param.numel) for number, param in enumerate(self.params))

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

    @property
    def largest_whole_bytes(self) -> int:
        """Bytes of the largest tensor in the file."""
        wholes = (Slice(number, 0, param.numel) for number, param in enumerate(self.params))
        return max(map(self._largest_tensor, wholes), default=0)

    def largest_bytes(self, rank: int) -> int:
        """Bytes of the largest tensor, or part of one, that a rank owns."""
        return max(map(self._largest_tensor, self.partition.slices_of_rank[rank]), default=0)

    def copied_bytes(self, rank: int) -> int:
        """Bytes of the state that a rank copies though it need not: of cut parameters, and step counts."""
        return sum(
            self._state_of(piece.param, piece.numel)
            - (0 if self._is_cut(piece) else self._tensor_bytes(piece) * self._rule(piece.param).tensors)
            for piece in self.partition.slices_of_rank[rank]
        )

    def parcel_bytes(self, owner: int) -> Iterator[tuple[int, bool]]:
        """The bytes of each message in which an owner's state is gathered, and whether it joins tensors."""
        sizes = [
            (self._dtype(piece.param), self._tensor_bytes(piece))
            for piece in self.partition.slices_of_rank[owner]
            if self._has_state(piece.param)
            for _ in range(self._rule(piece.param).tensors)
        ]
        for numbers in parcels(sizes):
            yield sum(sizes[number][1] for number in numbers), len(numbers) > 1

    def _rule(self, param: int) -> StateRule:
        return self.rule.of(self.params[param])

    def _has_state(self, param: int) -> bool:
        return self.params[param].trainable or self._rule(param).for_frozen

    def _state_of(self, param: int, numel: int) -> int:
        rule = self._rule(param)
        return (
            rule.nbytes(numel, itemsize_of(self.params[param].dtype))
            if numel and self._has_state(param)
            else 0
        )

    def _dtype(self, param: int) -> str:
        return "32 bits" if self._rule(param).itemsize else self.params[param].dtype

    def _tensor_bytes(self, piece: Slice) -> int:
        """Of one tensor of a slice's state."""
        return piece.numel * (self._rule(piece.param).itemsize or itemsize_of(self.params[piece.param].dtype))

    def _largest_tensor(self, piece: Slice) -> int:
        of_param = piece.numel * itemsize_of(self.params[piece.param].dtype) if self.parameters else 0
        has_tensors = self._has_state(piece.param) and self._rule(piece.param).tensors
        return max(of_param, self._tensor_bytes(piece) if has_tensors else 0)

    def _is_cut(self, piece: Slice) -> bool:
        return piece.numel != self.params[piece.param].numel
