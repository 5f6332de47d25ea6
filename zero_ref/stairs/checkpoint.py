"""A state that any number of ranks can load, parameter groups, and 32-bit masters: stair 5 of 6.

In `shards.py` the state is in pieces. Here `state_dict` joins the pieces of all ranks, and `load_state_dict`
cuts the state again, perhaps for another number of ranks. Parameters may come in groups with options of their
own. A shard may be a 32-bit copy of 16-bit values, a master, which keeps updates that rounding would lose.
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
        master_dtype: of the shards, such as torch.float32 for 16-bit parameters; None is the parameters' own.
        **defaults: passed to `optimizer_class`.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        optimizer_class: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        master_dtype: torch.dtype | None = None,
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
        # This rank's piece of each parameter, (elements,): the same memory, or in another dtype a copy.
        self.shards: dict[torch.Tensor, torch.Tensor] = {}
        for param, pieces in self.pieces.items():
            if self.rank in pieces:
                own = in_memory(param.detach())[pieces[self.rank]].to(master_dtype or param.dtype)
                self.shards[param] = torch.nn.Parameter(own)
        # Only the shards go to the local optimizer, in groups that may be empty: every rank has all options.
        mine = self.shards
        owned = [{**g, "params": [mine[p] for p in g["params"] if p in mine]} for g in self.groups]
        self.local = optimizer_class(owned, **defaults)
        # A schedule changes the options of the groups here, alike on all ranks. Only shards keep gradients.
        self.param_groups, self.zero_grad = self.local.param_groups, self.local.zero_grad
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
                kept = gradient[own].to(shard.dtype, copy=True)
                shard.grad = kept if shard.grad is None else shard.grad + kept
        self.reducing = []

    @torch.no_grad()
    def step(self) -> None:
        """Update what this rank owns, then send each bucket from its owner to all ranks.

        Collective: all ranks, after backward.
        Cost: each rank receives the (N-1)/N of the parameters that it does not own, in at most N messages.
        """
        self.finish()
        # The local step needs no communication. What it makes goes into this rank's own bucket.
        self.local.step()
        for param, shard in self.shards.items():
            in_memory(param)[self.pieces[param][self.rank]] = shard  # a master is rounded to the nearest
        # All ranks make all broadcasts, in the same order: the owner sends, the others receive in place.
        for owner, bucket in self.buckets.items():
            dist.broadcast(bucket, group_src=owner, group=self.group)

    def state_dict(self) -> dict[str, Any]:
        """The state that the unsharded optimizer would have, and the masters, gathered on every rank.

        Collective: all ranks, after step. Cost: each receives, pickled, the (N-1)/N that it does not own.
        """
        # This rank's pieces, by the numbers of their parameters in the model.
        mine: dict[int, Any] = {}
        for number, param in enumerate(self.params):
            if (shard := self.shards.get(param)) is not None:
                masters = {} if shard.dtype == param.dtype else {"master_weight": shard.detach()}
                mine[number] = {**self.local.state.get(shard, {}), **masters}
        of_ranks: list[dict[int, Any]] = [{}] * self.world_size
        dist.all_gather_object(of_ranks, mine, self.group)
        # Pieces are joined in the order of the ranks. A count of steps has no dimension and is alike in all.
        state: dict[int, Any] = {}
        for number, param in enumerate(self.params):
            pieces = [of_rank[number] for of_rank in of_ranks if number in of_rank]
            for key in pieces[0] if pieces else ():
                cuts = [piece[key] for piece in pieces]
                whole = torch.cat(cuts).as_strided(param.shape, param.stride()) if cuts[0].dim() else cuts[0]
                state.setdefault(number, {})[key] = whole
        numbers, groups = iter(range(len(self.params))), zip(self.param_groups, self.groups)
        options = [{**ours, "params": [next(numbers) for _ in of["params"]]} for ours, of in groups]
        return {"state": state, "param_groups": options}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's pieces of what `state_dict` gave at any number of ranks. Load the model first."""
        for ours, saved in zip(self.param_groups, state_dict["param_groups"]):
            ours.update({**saved, "params": ours["params"]})
        for number, param in enumerate(self.params):
            if (shard := self.shards.get(param)) is not None:
                state, own = {}, self.pieces[param][self.rank]
                for key, value in state_dict["state"].get(number, {}).items():
                    if value.shape == param.shape:  # laid out as the parameter is
                        value = in_memory(torch.empty_like(param, dtype=value.dtype).copy_(value))[own]
                    state[key] = value.clone()  # the local optimizer will change it
                # Without a saved master, the new one has the value of the parameter.
                shard.copy_(state.pop("master_weight", in_memory(param)[own]))
                self.local.state[shard] = state
