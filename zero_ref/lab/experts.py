"""A mixture of experts: a router sends each token to a few networks, and these may be on several ranks.

On one rank `Mixture` is an ordinary module. Under expert parallelism `Experts.keep_own` leaves each rank some
whole experts. In forward the rows of tokens then travel to the ranks of their experts (dispatch) and the
results back (combine), both by an all-to-all. Backward makes the same two, with gradients.

No expert has a capacity, so no token is dropped, and how many rows a rank receives depends on the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zero_ref.comm.collectives import Collectives
from zero_ref.lab.config import GPTConfig
from zero_ref.plan.calls import Call


class Mixture(nn.Module):
    """In place of a block's two-layer network: each token goes through `active_experts` of `experts`.

    The router gives each expert a score. A token's result is the sum of the results of the experts with the
    highest scores, each times its share of these scores. Input and output: (batch, positions, width).

    >>> mixture = Mixture(GPTConfig(heads=1, width=2, experts=4, active_experts=2))
    >>> [(name, tuple(param.shape)) for name, param in mixture.named_parameters()]
    [('router.weight', (4, 2)), ('experts.expand', (4, 8, 2)), ('experts.contract', (4, 2, 8))]
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.active = config.active_experts
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        # In 16 bits, many scores would be equal.
        dtype = torch.promote_types(x.dtype, torch.float32)
        weights, chosen = self.router(rows).softmax(-1, dtype=dtype).topk(self.active)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        results = self.experts(rows, chosen)
        out: torch.Tensor = (weights.unsqueeze(-1) * results).sum(1)
        return out.view_as(x)


class Experts(nn.Module):
    """Two-layer networks without biases, their weights stacked: all experts of a block, or this rank's.

    Attributes:
        experts: how many there are on all ranks together.
        comm: the ranks that share the experts; None if all are here.
        rows: how many rows went through the experts of this rank in the last forward.
    """

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.experts, self.rows = experts, 0
        self.comm: Collectives | None = None
        self.expand = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.contract = nn.Parameter(torch.empty(experts, width, 4 * width))

    def keep_own(self, comm: Collectives) -> None:
        """Keep the experts of this rank, as many on each rank, and forget the rest.

        Args:
            comm: the ranks that share the experts. All experts were equal on all of them.
        Raises:
            ValueError: the experts cannot be divided among so many ranks.
        """
        if self.experts % comm.world_size:
            raise ValueError(
                f"{self.experts} experts cannot be divided among {comm.world_size} ranks, each with as many "
                "whole experts as the others: choose a number of experts that is a multiple of the ranks."
            )
        own, self.comm = self.experts // comm.world_size, comm
        for name, param in list(self.named_parameters()):
            kept = param.detach()[comm.rank * own : (comm.rank + 1) * own].clone()
            setattr(self, name, nn.Parameter(kept))

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Each row through each of its experts.

        Args:
            rows: (tokens, width).
            chosen: (tokens, k), int64: the experts of each.
        Returns:
            (tokens, k, width).
        Collective: all ranks of `comm`, in forward and in backward.
        Cost: an all-to-all of 8 bytes an expert; two of k rows a token, and two more in backward.
        """
        copies = rows.unsqueeze(1).expand(-1, chosen.shape[1], -1).flatten(0, 1)
        # By expert, and of one expert in the order of the tokens: a sum is then always made in one order.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.experts)
        results = self._results(copies[order], counts)
        return results[order.argsort().view_as(chosen)]

    def _results(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The experts' results, row by row, of rows that are sorted by expert.

        Args:
            rows: (rows, width).
            counts: (experts,), int64: how many rows are for each.
        """
        comm = self.comm
        if comm is None:
            return self._own_results(rows, counts)
        # 1. Each rank hears how many rows every rank has for each of its experts: (ranks, own experts).
        of_rank = counts.view(comm.world_size, -1)
        arriving = all_to_all(counts, [of_rank.shape[1]] * comm.world_size, None, comm).view_as(of_rank)
        sends, receives = of_rank.sum(1).tolist(), arriving.sum(1).tolist()
        # 2. Dispatch. Rows arrive by rank, and of each rank by expert. Sort them by expert.
        arrived = _exchanged(rows, sends, receives, len(rows), comm)
        expert_of_row = torch.arange(arriving.shape[1], device=rows.device).repeat(comm.world_size)
        order = expert_of_row.repeat_interleave(arriving.flatten()).argsort(stable=True)
        # 3. Compute, and combine: the results go back as the rows have come.
        results = self._own_results(arrived[order], arriving.sum(0))[order.argsort()]
        return _exchanged(results, receives, sends, len(rows), comm)

    def _own_results(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        self.rows = len(rows)
        # The gradient of an expert adds up the tokens of all ranks of `comm`, and each rank's loss is a mean
        # over its own. Divided by the ranks, such gradients can then be averaged as others are.
        sharing = 1 if self.comm is None else self.comm.world_size
        expand, contract = (_divided(param, sharing) for param in (self.expand, self.contract))
        # An expert without a row takes part too, so that its gradient is zero, and not missing.
        parts = zip(rows.split(counts.tolist()), expand.unbind(), contract.unbind(), strict=True)
        return torch.cat(
            [
                functional.linear(functional.gelu(functional.linear(part, first)), second)
                for part, first, second in parts
            ]
        )


class _Divided(torch.autograd.Function):
    """The same values, and a gradient that is divided."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad / ctx.divisor, None


_divided: Callable[..., torch.Tensor] = _Divided.apply


class _Exchanged(torch.autograd.Function):
    """An all-to-all of rows, whose backward sends their gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
        own: int,
        comm: Collectives,
    ) -> torch.Tensor:
        ctx.sends, ctx.receives, ctx.own, ctx.comm = sends, receives, own, comm
        return all_to_all(rows, sends, receives, comm, own)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        back = all_to_all(grad.contiguous(), ctx.receives, ctx.sends, ctx.comm, ctx.own)
        return back, None, None, None, None


_exchanged: Callable[..., torch.Tensor] = _Exchanged.apply


def all_to_all(
    rows: torch.Tensor,
    sends: Sequence[int],
    receives: Sequence[int] | None,
    comm: Collectives,
    own: int | None = None,
) -> torch.Tensor:
    """Send each rank its rows, and receive from each what it has for this one.

    Messages go between pairs of ranks, as NCCL's all-to-all is made, and a rank's own rows are copied.

    >>> from zero_ref.lab import virtual
    >>> def on_rank(comm):                                     # rank 0 has one row for each, rank 1 none
    ...     sends, receives = ([1, 1], [1, 0]) if comm.rank == 0 else ([0, 0], [1, 0])
    ...     return all_to_all(torch.arange(sum(sends)), sends, receives, comm).tolist()
    >>> virtual.run(on_rank, 2)
    [[0], [1]]

    Args:
        rows: (rows, ...), contiguous; first those for rank 0, then those for rank 1, and so on.
        sends: how many rows are for each rank.
        receives: how many rows each rank has for this one; None for as many as this rank sends it.
        own: how many rows observers hear of; None for all that are sent. Rows go to experts and come back,
            and only of its own tokens a rank knows beforehand how many these are. So the payload is those
            that it sends to experts, or gets back from them. Over all ranks the sum is the same either way.
    Returns:
        (rows, ...): what rank 0 has sent first, then what rank 1 has, and so on.
    Collective: all ranks of `comm`.
    Cost: rows to and from other ranks travel, (N-1)/N of them if each rank gets as many.
    """
    receives = sends if receives is None else receives
    wire = comm.wire_of(rows.device)
    parts = rows.detach().to(wire).split(list(sends))
    arrived = parts[0].new_empty(sum(receives), *rows.shape[1:])
    places = arrived.split(list(receives))
    places[comm.rank].copy_(parts[comm.rank])
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    row_bytes = rows.shape[1:].numel() * rows.element_size()
    comm.exchange(
        [(rank, parts[rank]) for rank in others if sends[rank]],
        [(rank, places[rank]) for rank in others if receives[rank]],
        Call("all_to_all", (len(rows) if own is None else own) * row_bytes),
    ).wait()
    return arrived.to(rows.device)
