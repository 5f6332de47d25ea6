"""Parameters that are cut, and gradients in shards, which is ZeRO stage 2: stair 3 of 5.

In `buckets.py` a rank owns whole parameters, so the largest one decides the largest share, and every rank
keeps all gradients. Here the parameters lie in one flat tensor, cut into N equal buckets, and a rank owns the
piece of each parameter that lies in its bucket. As soon as backward has completed a gradient, a hook averages
each piece on its owner, and releases the gradient. So no DistributedDataParallel is needed.

The state is in pieces as well; `checkpoint.py` joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.stairs.buckets import flatten, in_memory


def cut_evenly(numels: Sequence[int], world_size: int) -> list[dict[int, slice]]:
    """The pieces of each parameter, by owner, where each rank owns 1/N of all elements.

    Every rank computes the same list without communicating.

    >>> cut_evenly([6, 5, 1], world_size=3)[0]  # a share is 4 elements
    {0: slice(0, 4, None), 1: slice(4, 6, None)}
    """
    share = -(-sum(numels) // world_size)  # rounded up: the last rank may own less
    pieces, place = [], 0
    for numel in numels:
        # The ends of the shares, counted from this parameter's first element.
        ends = [min(max(share * rank - place, 0), numel) for rank in range(world_size + 1)]
        pieces.append({rank: slice(*ends) for rank, ends in enumerate(pairwise(ends)) if ends[0] < ends[1]})
        place += numel
    return pieces


class MinimalZero:
    """An optimizer whose state and gradients are sharded over the ranks of a process group.

    Args:
        params: the model's parameters, of one dtype and with equal values on all ranks, or parameter groups.
        optimizer_class: a class that updates each element by itself, such as torch.optim.AdamW.
        group: the ranks; None is the default group.
        **defaults: passed to `optimizer_class`.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        optimizer_class: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        # torch's base class reads groups, which are dicts, or parameters, which become one group.
        self.groups, self.group = torch.optim.Optimizer(params, {}).param_groups, group
        self.params = [param for g in self.groups for param in g["params"]]
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # The plan: the pieces of each parameter that is trained, by owner. Frozen ones stay as they are.
        trained = [param for param in self.params if param.requires_grad]
        self.pieces = dict(zip(trained, cut_evenly([param.numel() for param in trained], self.world_size)))
        # The buckets, by owner: equal parts of one flat tensor, of which these parameters are views.
        flat = flatten(trained)
        self.buckets = dict(enumerate(flat.split(-(-flat.numel() // self.world_size))))
        # This rank's piece of each parameter, (elements,): the same memory with a gradient of its own.
        self.shards: dict[torch.Tensor, torch.Tensor] = {}
        for param, pieces in self.pieces.items():
            if self.rank in pieces:
                self.shards[param] = torch.nn.Parameter(in_memory(param.detach())[pieces[self.rank]])
        # Only the shards go to this rank's local optimizer, which makes state for nothing else.
        # It has every group, if need be without parameters, so that all ranks have all options.
        mine = self.shards
        owned = [{**g, "params": [mine[p] for p in g["params"] if p in mine]} for g in self.groups]
        self.local = optimizer_class(owned, **defaults)
        # A schedule changes the options of the groups here, alike on all ranks. Only shards keep gradients.
        self.param_groups, self.zero_grad = self.local.param_groups, self.local.zero_grad
        # Backward calls the hook as soon as the gradient of a parameter is complete.
        for param in trained:
            param.register_post_accumulate_grad_hook(self.reduce)

    @torch.no_grad()
    def reduce(self, param: torch.Tensor) -> None:
        """Average a complete gradient, each piece on its owner, and release it.

        Collective: all ranks, in the order of backward: they run the same model on the same parameters.
        Cost: for all parameters together each rank sends the (N-1)/N of its gradients that it does not own.
        """
        assert param.grad is not None
        gradient = in_memory(param.grad) / self.world_size
        # All ranks make all reductions, in the same order: the others send, the owner adds up.
        for owner, piece in self.pieces[param].items():
            dist.reduce(gradient[piece], group_dst=owner, group=self.group)
        # From here on a rank has the gradient of its own piece only: this is stage 2.
        param.grad = None
        if param in self.shards:
            # A copy, or it would keep the memory of the whole gradient.
            shard, own = self.shards[param], gradient[self.pieces[param][self.rank]].clone()
            shard.grad = own if shard.grad is None else shard.grad + own

    @torch.no_grad()
    def step(self) -> None:
        """Update what this rank owns, then send each bucket from its owner to all ranks.

        Collective: all ranks, after backward.
        Cost: each rank receives the (N-1)/N of the parameters that it does not own, in at most N messages.
        """
        # The local step needs no communication, and writes into this rank's own bucket.
        self.local.step()
        # All ranks make all broadcasts, in the same order: the owner sends, the others receive in place.
        for owner, bucket in self.buckets.items():
            dist.broadcast(bucket, group_src=owner, group=self.group)
