"""Parameters that are cut, and gradients in shards, which is ZeRO stage 2: stair 4 of 6.

In `overlap.py` every rank gets every average, and each backward makes an update, so that no second one can
add to its gradients. And a rank owns whole parameters, so the largest one decides the largest share. Here the
parameters lie in one flat tensor, which is cut into N equal buckets, and a rank owns the piece of each
parameter that lies in its bucket. The hook averages each piece of a gradient on its owner alone, which keeps
the average until `step`. A rank keeps nothing else of the gradients, so it holds 1/N of them.

The state is in pieces as well; `checkpoint.py` joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        params: the model's parameters, of one dtype and with equal values on all ranks.
        optimizer_class: a class that updates each element by itself, such as torch.optim.AdamW.
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
        # Only what this rank owns goes to its local optimizer, which makes state for nothing else.
        # A rank may own nothing: torch's optimizers refuse an empty list of parameters, not an empty group.
        self.local = optimizer_class([{"params": list(self.shards.values())}], **defaults)
        self.zero_grad = self.local.zero_grad  # only shards keep gradients
        # What is under way: a parameter, its gradient and the calls that average its pieces.
        self.reducing: list[tuple[torch.Tensor, torch.Tensor, list[Any]]] = []
        # Backward calls the hook as soon as the gradient of a parameter is complete.
        for param in trained:
            param.register_post_accumulate_grad_hook(self.reduce)

    @torch.no_grad()
    def reduce(self, param: torch.Tensor) -> None:
        """Start to average a complete gradient, then keep the shard of the gradient that came before.

        Collective: all ranks, in the order of backward: they run the same model on the same parameters.
        Cost: for all parameters together each rank sends the (N-1)/N of its gradients that it does not own.
        """
        assert param.grad is not None
        gradient, param.grad = in_memory(param.grad) / self.world_size, None
        # All ranks make all reductions, in the same order: the others send, the owner adds up.
        calls = []
        for owner, piece in self.pieces[param].items():
            calls.append(dist.reduce(gradient[piece], group_dst=owner, group=self.group, async_op=True))
        # Meanwhile finish the one before, which backward needs no more; this one stays under way.
        self.finish()
        self.reducing = [(param, gradient, calls)]

    def finish(self) -> None:
        """Wait for the reduction under way, and add what it gave to the gradient of this rank's shard."""
        for param, gradient, calls in self.reducing:
            for call in calls:
                call.wait()
            if param in self.shards:
                shard, own = self.shards[param], self.pieces[param][self.rank]
                # A copy, or it would keep the memory of the whole gradient. Several backwards add up.
                kept = gradient[own].clone()
                shard.grad = kept if shard.grad is None else shard.grad + kept
        self.reducing = []

    @torch.no_grad()
    def step(self) -> None:
        """Update what this rank owns, then send each bucket from its owner to all ranks.

        Collective: all ranks, after backward.
        Cost: each rank receives the (N-1)/N of the parameters that it does not own, in at most N messages.
        """
        self.finish()
        # The local step needs no communication, and writes into this rank's own bucket.
        self.local.step()
        # All ranks make all broadcasts, in the same order: the owner sends, the others receive in place.
        for owner, bucket in self.buckets.items():
            dist.broadcast(bucket, group_src=owner, group=self.group)
