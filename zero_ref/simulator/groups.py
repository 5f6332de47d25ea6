"""Groups of consecutive ranks that share what is sharded, each with a replica of the same."""

from __future__ import annotations

from typing import NamedTuple

from zero_ref.simulator.operations import Operation


class Groups(NamedTuple):
    """Groups into which all ranks are divided, each of which shares what is sharded.

    >>> Groups(world_size=8, ranks=4).replicas
    2

    Args:
        ranks: of one group.
    """

    world_size: int
    ranks: int

    @property
    def replicas(self) -> int:
        """The number of groups, each of which has a copy of the same."""
        return self.world_size // self.ranks

    def within(self, call: Operation) -> Operation:
        """The call, made by each group for itself."""
        return call._replace(ranks=None if self.ranks == self.world_size else self.ranks)

    def between(self, call: Operation) -> Operation:
        """The call, made by the ranks that have the same place in their groups."""
        return call._replace(ranks=self.replicas, stride=self.ranks)
