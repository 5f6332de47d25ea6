"""The update during backward, while other gradients are still being computed: stair 4 of 5.

In `shards.py` every rank waits for each reduction, and in the end for each broadcast. Here the hook starts to
reduce a gradient and returns. When backward calls it with the next gradient, it updates the parameter before,
and starts to send it. So messages travel while backward computes, and `step` waits for the last ones only.
Each backward makes an update, so the gradients of several do not add up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zero_ref.stairs.buckets import flatten, in_memory
from zero_ref.stairs.shards import cut_evenly


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
        flatten(trained)  # they become views of one flat tensor
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
        # What is under way: a parameter, its gradient and the calls that reduce it; calls that send values.
        self.reducing: tuple[torch.Tensor, torch.Tensor, list[Any]] | None = None
        self.sending: list[Any] = []
        # Backward calls the hook as soon as the gradient of a parameter is complete.
        for param in trained:
            param.register_post_accumulate_grad_hook(self.reduce)

    @torch.no_grad()
    def reduce(self, param: torch.Tensor) -> None:
        """Start to average a complete gradient, then update the parameter whose gradient came before.

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
        self.update()
        self.reducing = param, gradient, calls

    def update(self) -> None:
        """Wait for the reduction under way, update its parameter, and start to send the new values."""
        if self.reducing is None:
            return
        (param, gradient, calls), self.reducing = self.reducing, None
        for call in calls:
            call.wait()
        if param in self.shards:
            # The local optimizer passes over shards without a gradient, which are all the others.
            shard = self.shards[param]
            shard.grad = gradient[self.pieces[param][self.rank]]
            self.local.step()
            shard.grad = None
        flat = in_memory(param.detach())
        for owner, piece in self.pieces[param].items():
            self.sending.append(dist.broadcast(flat[piece], group_src=owner, group=self.group, async_op=True))

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameter whose gradient came last, and wait until all new values are here.

        Collective: all ranks, after each backward.
        Cost: each rank receives the (N-1)/N of the parameters that it does not own, mostly during backward.
        """
        self.update()
        while self.sending:
            self.sending.pop(0).wait()
