"""Parameters in shares as well, gathered block by block, which is ZeRO stage 3: stair 6 of 6.

In `shards.py` every rank has all parameters. Here it keeps 1/N of each block. A block is gathered before its
forward and again before its backward, and freed after each. Its gradients are reduced to shares.

All stages are one program, which keeps each of three things whole on every rank, or cut:

|                       | parameters | gradients | state |
|-----------------------|------------|-----------|-------|
| data parallel         | whole      | whole     | whole |
| stage 1, `overlap.py` | whole      | whole     | cut   |
| stage 2, `shards.py`  | whole      | cut       | cut   |
| stage 3, here         | cut        | cut       | cut   |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.stairs.buckets import flatten, in_memory
from zero_ref.stairs.shards import cut_evenly


class Block:
    """Parameters that are gathered and freed together, and this rank's share of them, which stays."""

    def __init__(self, module: torch.nn.Module, params: list[torch.Tensor], group: Any, dtype: Any) -> None:
        self.params, self.group, self.in_backward = params, group, False
        rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # The parameters end to end, (N * share,), with zeros at the end that make all shares equally long.
        numels = [param.numel() for param in params]
        self.numels = [*numels, -sum(numels) % self.world_size]
        self.whole = flatten([*params, params[0].new_zeros(self.numels[-1])])
        # Parameters are views of it. Its memory can be freed, and when it comes back all views have it.
        self.views = [param.data for param in params]
        self.share = self.whole.chunk(self.world_size)[rank].to(dtype or self.whole.dtype, copy=True)
        # This rank's piece of each parameter, (elements,): a part of the share with a gradient of its own.
        pieces = [of_ranks.get(rank, slice(0, 0)) for of_ranks in cut_evenly(self.numels, self.world_size)]
        self.lengths = [piece.stop - piece.start for piece in pieces]
        self.shards = [torch.nn.Parameter(part) for part in self.share.split(self.lengths)]
        self.free()
        module.register_forward_pre_hook(self.before_computing)
        module.register_forward_hook(self.after_forward)
        for param in params:
            param.register_post_accumulate_grad_hook(self.after_gradient)

    def before_computing(self, *_: Any) -> None:
        """Gather for forward and for backward, for which autograd has kept views of the parameters."""
        if self.in_backward and torch._C._current_graph_task_id() < 0:  # waiting since an earlier backward
            self.reduce()
        self.in_backward = torch._C._current_graph_task_id() >= 0
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Give the parameters their values, unless they have them.

        Collective: all ranks. Cost: each receives the (N-1)/N of the block that it does not own.
        """
        if not self.whole.untyped_storage().nbytes():  # freed
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
            call(self.whole, self.share.to(self.whole.dtype), group=self.group)  # masters are rounded
            for param, view in zip(self.params, self.views):
                param.data = view

    def free(self) -> None:
        """Free the memory of the parameters, which are empty until they are gathered."""
        self.whole.untyped_storage().resize_(0)
        for param in self.params:
            param.data = self.whole[:0]  # torch refuses to compute with it, where it would read freed memory

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Free the parameters until backward comes to this block: then an output of it gets a gradient."""
        if not self.in_backward:  # or this is a forward that checkpointing repeats for backward
            self.free()
            for tensor in torch.utils._pytree.tree_leaves(output):  # in a tuple or a dict, too
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.before_computing)

    def after_gradient(self, param: torch.Tensor) -> None:
        """Reduce when all gradients are complete: if a parameter is used twice, after both uses."""
        if all(param.grad is not None for param in self.params):
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Free the parameters, average their gradients in shares, and add those to what the pieces have.

        Collective: all ranks. Cost: each sends the (N-1)/N of the block's gradients that it does not own.
        """
        self.in_backward = False
        self.free()
        # The gradients lie as the parameters did, and travel in the dtype of the share.
        gradient, averaged = self.share.new_zeros(len(self.whole)), torch.empty_like(self.share)
        places = zip(self.params, self.shards, gradient.split(self.numels), averaged.split(self.lengths))
        kept = {}  # the averages, but none of a parameter that backward did not use
        for param, shard, part, own in places:
            if param.grad is not None:
                part.copy_(in_memory(param.grad)).div_(self.world_size)
                param.grad, kept[shard] = None, own
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # until 2.12
        call(averaged, gradient, group=self.group)
        for shard, own in kept.items():
            shard.grad = own if shard.grad is None else shard.grad + own  # several backwards add up


class MinimalZero:
    """An optimizer whose state, gradients and parameters are sharded over the ranks of a process group.

    Args:
        model: its parameters are of one dtype, with equal values on all ranks. Frozen ones stay as they are.
        optimizer_class: a class that updates each element by itself, such as torch.optim.AdamW.
        group: the ranks; None is the default group.
        blocks: modules of the model that are gathered one by one; what is left is gathered with the model.
        master_dtype: of the shares, such as torch.float32 for 16-bit parameters; None is the parameters' own.
        **defaults: passed to `optimizer_class`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        blocks: Sequence[torch.nn.Module] = (),
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        # The plan: a block has the parameters that no other block has, and the model what is left.
        params_of: dict[torch.nn.Module, list[torch.Tensor]] = {}
        for param in filter(lambda param: param.requires_grad, model.parameters()):
            users = [block for block in blocks if any(param is own for own in block.parameters())]
            params_of.setdefault(users[0] if len(users) == 1 else model, []).append(param)
        self.blocks = [Block(*each, group, master_dtype) for each in params_of.items()]
        owned = [shard for block in self.blocks for shard in block.shards if len(shard)]
        self.local = optimizer_class([{"params": owned}], **defaults)  # makes state for nothing else
        self.param_groups, self.zero_grad = self.local.param_groups, self.local.zero_grad

    def step(self) -> None:
        """Update the shards, and send nothing: a block gathers the new values when it needs them.

        Collective: all ranks, after backward. Cost: none, unless a parameter of a block had no gradient.
        """
        for block in filter(lambda block: block.in_backward, self.blocks):
            block.reduce()  # it waits for a gradient that will not come
        self.local.step()
