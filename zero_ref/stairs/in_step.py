"""Stage 2 in its shortest form: reduce-scatter, local step, all-gather, all in `step`. Before stair 4 of 6.

It needs no DDP and no hooks, and on NCCL it sends what stage 2 sends. But every rank holds all gradients when
backward ends, and only then are they sent. `shards.py` adds the hook, which averages a gradient as soon as it
is complete, while backward goes on, and releases what other ranks own of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.stairs.buckets import flatten, in_memory


class MinimalZero:
    """An optimizer whose state is sharded, and which averages each gradient for its owner alone.

    Args:
        params: the model's parameters, all trained, of one dtype and with equal values on all ranks.
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
        rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # The parameters end to end, (N * share,), with zeros at the end that make all shares equally long.
        numels = [param.numel() for param in self.params]
        self.numels = [*numels, -sum(numels) % self.world_size]
        self.flat = flatten([*self.params, self.params[0].new_zeros(self.numels[-1])])
        # This rank's share: the same memory, with a gradient of its own. Only it goes to the local optimizer.
        self.shard = torch.nn.Parameter(self.flat.chunk(self.world_size)[rank])
        self.local = optimizer_class([self.shard], **defaults)

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients in shares, update this rank's share, and gather the shares of all.

        Collective: all ranks, after backward. A parameter without a gradient has one of zeros.
        Cost: each rank sends the (N-1)/N of the gradients, and receives the (N-1)/N of the parameters, that
        it does not own.
        """
        # The gradients, end to end as the parameters are. What is copied is released.
        gradient, average = torch.zeros_like(self.flat), torch.empty_like(self.shard)
        for param, part in zip(self.params, gradient.split(self.numels)):
            if param.grad is not None:
                part.copy_(in_memory(param.grad)).div_(self.world_size)
                param.grad = None
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # until 2.12
        call(average, gradient, group=self.group)
        # The local step needs no communication, and writes into this rank's part of `flat`.
        self.shard.grad = average
        self.local.step()
        self.shard.grad = None
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
        call(self.flat, self.shard.clone(), group=self.group)
