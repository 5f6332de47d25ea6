"""A recipe, a model and ranks together: the base of the classes that list what a strategy does and holds.

Each strategy is one subclass: `DDP`, `ZeroWithDDP` and `ZeroToOwners` in data_parallel.py, `ZeroWithoutDDP`
in sharded.py, `ZeroStage3` and `ZeroStage3Flat` in stage_3.py and `LocalSGD` in local_sgd.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zero_ref.plan.choice import plan_partition
from zero_ref.plan.layout import lay_out
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.plan.rules import newton_schulz_operations
from zero_ref.simulator.groups import Groups
from zero_ref.simulator.ledger import itemsize_of, nbytes_of, state_bytes_of_rank, state_rule
from zero_ref.simulator.offload import gradients_leave, with_offload
from zero_ref.simulator.operations import Operation
from zero_ref.simulator.recipe import Recipe


@dataclass(eq=False)
class Strategy(ABC):
    """A strategy for a model on some ranks. Every rank holds everything, unless a subclass says otherwise.

    Args:
        how: the recipe of the strategy.
        params, world_size, blocks, activation_bytes, steps, side_stream: as in `schedule`.
        buckets: the parameters of each of DDP's gradient buckets, in the order of their reductions.
    """

    how: Recipe
    params: Sequence[ParamSpec]
    world_size: int
    buckets: Sequence[Sequence[int]]
    blocks: Sequence[Sequence[int]] | None = None
    activation_bytes: int = 0
    steps: range | None = None
    side_stream: bool = False

    def __post_init__(self) -> None:
        self._listed: list[Operation] = []

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Computing and calls, in the order of the program.

        Raises:
            ValueError: the recipe does not fit the model or the ranks.
        """
        self._list_operations()
        if not gradients_leave(self.how.offload):
            return tuple(self._listed)
        listed = with_offload(
            self._listed,
            self.how.offload or "",
            self.how.offload_fraction,
            max(self.gradient_bytes, default=0),
        )
        return tuple(listed)

    @abstractmethod
    def _list_operations(self) -> None:
        """Append all operations."""

    def _append(self, operation: Operation) -> int:
        """Append an operation; return its position."""
        self._listed.append(operation)
        return len(self._listed) - 1

    @property
    def iterations(self) -> int:
        """The number of iterations that `operations` are."""
        return 1

    @cached_property
    def partition(self) -> Partition:
        """The owner of each element within a group; a rank that shares nothing is a group of its own."""
        if self.how.partition is None:
            return plan_partition("sorted_greedy", self.params, 1)
        return plan_partition(self.how.partition, self.params, self.how.group_of(self.world_size))

    @cached_property
    def groups(self) -> Groups:
        """The ranks, in groups that share what is sharded."""
        return Groups(self.world_size, self.partition.world_size)

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters on each rank, and of the padding of flat tensors."""
        nbytes = sum(map(nbytes_of, self.params))
        if self.how.flat:
            nbytes += sum(flat.padding * flat.itemsize for flat in lay_out(self.partition, self.params).flats)
        return (nbytes,) * self.world_size

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of the gradients that each rank needs for its update."""
        return (sum(nbytes_of(param) for param in self.params if param.trainable),) * self.world_size

    @property
    def left_to_owners(self) -> tuple[int, ...] | None:
        """Bytes of the gradients that stay on each rank after the update, if owners alone need them."""
        return None

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of optimizer state on each rank."""
        return state_bytes_of_rank(self.partition, self.params, self.how.optimizer) * self.groups.replicas

    @property
    def _reduced_itemsize(self) -> int | None:
        """Bytes of an element in the reductions; None for those of the gradients."""
        return None if self.how.reduce_dtype is None else itemsize_of(self.how.reduce_dtype)

    @cached_property
    def _step_flops(self) -> Sequence[int]:
        """The operations of Muon's step of each parameter, which it orthogonalizes if it sees it whole."""
        muon = state_rule(self.how.optimizer).of_whole is not None
        return [
            newton_schulz_operations(param) if muon and param.whole and param.trainable else 0
            for param in self.params
        ]

    def _owned_bytes(self) -> tuple[int, ...]:
        """Bytes of the trainable parameters that each rank owns, and so of the gradients that it needs."""
        itemsizes = [itemsize_of(param.dtype) if param.trainable else 0 for param in self.params]
        return self.partition.totals(itemsizes) * self.groups.replicas
