"""ZeRO stage 1 on one page. Read this first: stair 1 of 6.

Under data parallelism every rank has all parameters and, after backward, the same averaged gradients. So each
parameter needs only one rank that keeps its optimizer state and updates it: its owner. The owner then sends
the new values to all others. Each rank keeps 1/N of the optimizer state.

The other stairs add one idea each: `buckets.py`, `overlap.py`, `shards.py`, `checkpoint.py`, `parameters.py`.
The rest of the package computes the same updates and adds what a training run needs: any partition (`plan/`),
groups that change (`optimizer/`), the same error on all ranks instead of a hang (`comm/`), and saves in parts
(`files/`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def assign_owners(numels: Sequence[int], world_size: int) -> list[int]:
    """The owner of each parameter: the largest first, each to the rank that has the fewest elements so far.

    Every rank computes the same list without communicating.

    >>> assign_owners([6, 5, 4, 1], world_size=2)
    [0, 1, 1, 0]
    """
    owners = [0] * len(numels)
    loads = [0] * world_size
    for number in sorted(range(len(numels)), key=lambda number: -numels[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += numels[number]
    return owners


class MinimalZero:
    """An optimizer whose state is sharded over the ranks of a process group.

    >>> optimizer = MinimalZero(model.parameters(), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP

    Args:
        params: the model's parameters, with equal values on all ranks.
        optimizer_class: a class that updates each parameter by itself, such as torch.optim.AdamW.
        group: the ranks; None is the default group.
        **defaults: passed to `optimizer_class`.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        optimizer_class: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self.params, self.group = list(params), group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # The plan: the owner of each parameter, and the numbers of those that this rank owns.
        self.owners = assign_owners([param.numel() for param in self.params], self.world_size)
        self.mine = [number for number, owner in enumerate(self.owners) if owner == self.rank]
        # Only what this rank owns goes to its local optimizer, which makes state for nothing else.
        # A rank may own nothing: torch's optimizers refuse an empty list of parameters, not an empty group.
        self.local = optimizer_class([{"params": [self.params[number] for number in self.mine]}], **defaults)

    @torch.no_grad()
    def step(self) -> None:
        """Update what this rank owns, then send each parameter from its owner to all ranks.

        Collective: all ranks, after their gradients were averaged.
        Cost: each rank receives the (N-1)/N of the parameters that it does not own.
        """
        # The local step needs no communication.
        self.local.step()
        # All ranks make all broadcasts, in the same order: the owner sends, the others receive in place.
        for param, owner in zip(self.params, self.owners):
            dist.broadcast(param, group_src=owner, group=self.group)

    def state_dict(self) -> dict[str, Any]:
        """The state that the unsharded optimizer would have, gathered on every rank.

        Collective: all ranks.
        Cost: each rank receives, pickled, the (N-1)/N of the state that it does not own.
        """
        # The local optimizer numbers its own parameters from 0; a checkpoint has the numbers in the model.
        packed = self.local.state_dict()
        mine = {self.mine[index]: state for index, state in packed["state"].items()}
        # Every parameter has one owner, so the ranks' parts together are the whole state.
        of_ranks: list[dict[int, Any]] = [{}] * self.world_size
        dist.all_gather_object(of_ranks, mine, self.group)
        state = {number: of_rank[number] for of_rank in of_ranks for number in of_rank}
        numbers = list(range(len(self.params)))
        return {
            "state": dict(sorted(state.items())),
            "param_groups": [{**packed["param_groups"][0], "params": numbers}],
        }
