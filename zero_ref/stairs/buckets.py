"""One message for each owner: stair 2 of 6.

`owners.py` sends a message for each parameter, and a small message takes about as long as one of many
kilobytes. Here the parameters of an owner lie end to end in one flat tensor, its bucket, and each parameter
is a view of its part. So an owner updates its parameters where they are, and sends its bucket as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.stairs.owners import assign_owners


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A view of shape (numel,): the elements as they lie in memory, a transposed matrix column by column."""
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.no_grad()
def flatten(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the parameters into a flat tensor, (numel of all,), and make each of them a view of its part."""
    flat = torch.cat([in_memory(param) for param in params])
    for param, part in zip(params, flat.split([param.numel() for param in params])):
        param.data = part.as_strided(param.shape, param.stride())
    return flat


class MinimalZero:
    """An optimizer whose state is sharded over the ranks of a process group.

    Args:
        params: the model's parameters, of one dtype and with equal values on all ranks.
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
        # The buckets, by owner. A rank that owns nothing has none.
        self.buckets: dict[int, torch.Tensor] = {}
        for owner in sorted(set(self.owners)):
            self.buckets[owner] = flatten([p for p, its in zip(self.params, self.owners) if its == owner])
        # Only what this rank owns goes to its local optimizer, which makes state for nothing else.
        # A rank may own nothing: torch's optimizers refuse an empty list of parameters, not an empty group.
        self.local = optimizer_class([{"params": [self.params[number] for number in self.mine]}], **defaults)

    @torch.no_grad()
    def step(self) -> None:
        """Update what this rank owns, then send each bucket from its owner to all ranks.

        Collective: all ranks, after their gradients were averaged.
        Cost: each rank receives the (N-1)/N of the parameters that it does not own, in at most N messages.
        """
        # The local step needs no communication, and writes into this rank's own bucket.
        self.local.step()
        # All ranks make all broadcasts, in the same order: the owner sends, the others receive in place.
        for owner, bucket in self.buckets.items():
            dist.broadcast(bucket, group_src=owner, group=self.group)

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
