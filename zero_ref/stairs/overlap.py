"""The update during backward, while other gradients are still being computed: stair 3 of 6.

In `buckets.py` backward has ended, and all gradients are averaged, before a rank updates anything. Here
backward calls a hook with each complete gradient, and the hook starts to average it over the ranks. When
backward calls it with the next gradient, the owner updates the parameter before, and starts to send it. So
messages travel while backward computes, and `step` waits for the last ones only. The hook stands in place of
DistributedDataParallel. Each backward makes an update, so the gradients of several do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.stairs.buckets import flatten, in_memory
from zero_ref.stairs.owners import assign_owners


class MinimalZero:
    """An optimizer whose state is sharded over the ranks of a process group, and which steps in backward.

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
        # Parameters still lie in buckets. But a bucket is complete only when backward has passed all of it,
        # so what travels here is a parameter's part of its bucket.
        for owner in sorted(set(self.owners)):
            flatten([p for p, its in zip(self.params, self.owners) if its == owner])
        # Only what this rank owns goes to its local optimizer, which makes state for nothing else.
        # A rank may own nothing: torch's optimizers refuse an empty list of parameters, not an empty group.
        self.local = optimizer_class([{"params": [self.params[number] for number in self.mine]}], **defaults)
        # What is under way: a parameter, its gradient and the call that averages it; calls that send values.
        self.reducing: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self.sending: list[Any] = []
        # Backward calls the hook as soon as the gradient of a parameter is complete. Frozen ones have none.
        self.owner_of = {p: owner for p, owner in zip(self.params, self.owners) if p.requires_grad}
        for param in self.owner_of:
            param.register_post_accumulate_grad_hook(self.reduce)

    @torch.no_grad()
    def reduce(self, param: torch.Tensor) -> None:
        """Start to average a complete gradient, then update the parameter whose gradient came before.

        Collective: all ranks, in the order of backward: they run the same model on the same parameters.
        Cost: for all parameters together each rank sends 2(N-1)/N of the bytes of all gradients.
        """
        assert param.grad is not None
        gradient, param.grad = in_memory(param.grad) / self.world_size, None
        # All ranks make all reductions, in the same order, and all of them get the average.
        call = dist.all_reduce(gradient, group=self.group, async_op=True)
        # Meanwhile finish the one before, which backward needs no more; this one stays under way.
        self.finish()
        self.reducing = [(param, gradient, call)]

    def finish(self) -> None:
        """Wait for the reduction under way, update its parameter, and start to send the new values."""
        for param, gradient, call in self.reducing:
            call.wait()
            owner, flat = self.owner_of[param], in_memory(param.detach())
            if owner == self.rank:
                # The local optimizer passes over parameters without a gradient, which are all the others.
                param.grad = gradient.as_strided(param.shape, param.stride())
                self.local.step()
                param.grad = None
            self.sending.append(dist.broadcast(flat, group_src=owner, group=self.group, async_op=True))
        self.reducing = []

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameter whose gradient came last, and wait until all new values are here.

        Collective: all ranks, after each backward.
        Cost: each rank receives the (N-1)/N of the parameters that it does not own, mostly during backward.
        """
        self.finish()
        while self.sending:
            self.sending.pop(0).wait()

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
