"""The contenders, the models that they train, and the machine's limits: computing and communicating alone.

Contenders are this package's optimizer in its forms, and its peers from their released packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.results import SuiteResult, Taken
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT, passages
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.rules import equal_shares

ADAMW_BYTES = 28
"""For each fp32 element, AdamW reads gradient, parameter and two moments, and writes all but the gradient."""

Make = Callable[[Sequence[torch.Tensor]], Optimizer]

DEFAULT, ONE_BY_ONE = "zero_ref", "zero_ref, one by one"
OURS, EVEN, TO_OWNERS = "zero_ref, best", "zero_ref, best, even", "zero_ref, to owners"
EQUAL = "zero_ref, best, equal shares"
TORCH, TORCH_BEST = "torch", "torch, best"
PLAIN, REFERENCE = "ddp", "ddp, fused"
MASTERS = "zero_ref, masters"
OWN_HOOKS = "zero_ref, ShardedDataParallel"
FAIRSCALE, FAIRSCALE_BEST = "fairscale", "fairscale, fused"
SHARES = f"{OWN_HOOKS}, equal shares"
OWN_HOOKS_BEST = f"{OWN_HOOKS}, best"

OURS_IN = {
    "step": OURS,
    "masters": MASTERS,
    "sync": OWN_HOOKS_BEST,
    "iteration": OWN_HOOKS_BEST,
    "consolidate": "zero_ref: consolidate",
    "load": f"{OURS}: load",
    "construction": OURS,
    "state": EVEN,
    "memory": OURS,
}
"""Which of our forms stands beside the peers, for each thing that is measured: named before, never picked."""

DEFAULT_IN = dict.fromkeys(("step", "sync", "iteration", "construction"), DEFAULT) | {
    "consolidate": f"{DEFAULT}: consolidate",
    "load": f"{DEFAULT}: load",
}
"""Our form as it comes, for what it costs to change the import alone."""

FORMS = {
    REFERENCE: "parameters, gradients and state fit on every rank",
    OURS: "the state is to be shared out, and DDP stays as it is",
    TO_OWNERS: "so, and less is to be sent: DDP takes a communication hook",
    f"{TO_OWNERS}, interleaved": "so, and the network is slow: buckets are updated while backward goes on",
    OWN_HOOKS_BEST: "DDP may go, and the model has few, large tensors",
    TORCH_BEST: "PyTorch's own sharded optimizer is enough",
    FAIRSCALE_BEST: "FairScale is there already",
    "fsdp2": "the parameters do not fit on a rank either",
}
"""The forms of a whole iteration, ours and others', and when to choose which."""

ADDED = {
    "`broadcast_buffer_size=0`": ("step", DEFAULT, ONE_BY_ONE),
    "`fused=True`": ("step", DEFAULT, "zero_ref, fused"),
    "`parameters_as_bucket_view=True`": ("step", "zero_ref, fused", OURS),
    '`partition="even"`': ("step", OURS, EVEN),
    "`reduce_to_owners`": ("sync", OURS, TO_OWNERS),
    "`hook_with_zero_step`": ("sync", TO_OWNERS, f"{TO_OWNERS}, overlapped"),
    "`hook_with_zero_step_interleaved`": ("sync", TO_OWNERS, f"{TO_OWNERS}, interleaved"),
    "`ShardedDataParallel`": ("sync", OURS, OWN_HOOKS),
    'there `partition="equal_shares"`': ("sync", OWN_HOOKS, SHARES),
}
"""Additions to our optimizer, each with the suite that times it, and the forms without it and with it."""

BEST: dict[str, Any] = {"parameters_as_bucket_view": True, "fused": True}


def sharded() -> dict[str, Make]:
    """Optimizers that shard their state over the ranks, by name: ours, torch's and FairScale's.

    FairScale takes part where it is installed: pip install --no-deps fairscale==0.4.13.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

    def of(optimizer: Any, **options: Any) -> Make:
        return lambda params: optimizer(params, AdamW, **options)

    made = {
        DEFAULT: of(ZeroRedundancyOptimizer),
        ONE_BY_ONE: of(ZeroRedundancyOptimizer, broadcast_buffer_size=0),
        "zero_ref, fused": of(ZeroRedundancyOptimizer, fused=True),
        OURS: of(ZeroRedundancyOptimizer, **BEST),
        EVEN: of(ZeroRedundancyOptimizer, partition="even", **BEST),
        EQUAL: of(ZeroRedundancyOptimizer, partition=equal_shares, **BEST),
        TORCH: of(TorchOptimizer),
        TORCH_BEST: of(TorchOptimizer, **BEST),
    }
    oss = fairscale_optimizer()
    return made | ({} if oss is None else {FAIRSCALE: of(oss), FAIRSCALE_BEST: of(oss, fused=True)})


def whole() -> dict[str, Make]:
    """Optimizers that keep all state on every rank, for plain data parallelism."""
    return {PLAIN: lambda params: AdamW(params), REFERENCE: lambda params: AdamW(params, fused=True)}


def fairscale_optimizer() -> Any | None:
    """FairScale's OSS, or None where it is not installed."""
    try:
        from fairscale.optim import OSS
    except ImportError:
        return None
    return OSS


# ------------------------------------------------------------------------------------------------- models

GPT_SIZE = GPTConfig(layers=12, heads=8, width=464, context=256)


class Set(NamedTuple):
    """A model and its data.

    Args:
        make: a new model, the same on every rank.
        batches: that many inputs for one rank, different from rank to rank: what the model is called with.
        loss: of what the model returned, a tensor without dimensions.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[int, int], list[tuple[torch.Tensor, ...]]]
    loss: Callable[[torch.Tensor], torch.Tensor]


def chain(widths: Sequence[int]) -> nn.Module:
    """Linear layers one after the other.

    Two tensors a layer, so that their number and their size can be chosen one without the other.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))


def _passages(rank: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    return [passages(GPT_SIZE, 1, seed=0, step=step, rank=rank) for step in range(count)]


def _noise(rank: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(16, 64, generator=generator).to(ranks.device()),) for _ in range(count)]


SETS: dict[str, Set] = {
    "gpt": Set(lambda: GPT(GPT_SIZE).to(ranks.device()), _passages, lambda loss: loss),
    "tiny": Set(lambda: chain([64] * 1001).to(ranks.device()), _noise, lambda out: out.square().mean()),
}
"""gpt: 148 tensors, 31.3 million parameters, one passage of 256 bytes a rank. tiny: 2,000 and 4.2 million."""


def give_gradients(params: Sequence[torch.Tensor], seed: int = 0) -> None:
    """Set `.grad` of each parameter to noise: the same on all ranks if `seed` is."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def result(suite: str, set_name: str, taken: dict[str, Taken]) -> SuiteResult:
    """Return the measurements as the result of a suite, with the size of the model."""
    numels = [param.numel() for param in SETS[set_name].make().parameters()]
    return SuiteResult(suite, set_name, dist.get_world_size(), len(numels), sum(numels), taken)


# ------------------------------------------------------------------------------------------------- limits

ALIGNMENT = 64


def share(parameters: int, world_size: int) -> int:
    """Elements that each rank owns of an even split."""
    return -(-parameters // (world_size * ALIGNMENT)) * ALIGNMENT


def fused_update(numel: int) -> Callable[[], object]:
    """AdamW's fused step on one flat tensor of `numel` elements: 28 bytes of memory traffic an element."""
    flat = torch.zeros(numel, requires_grad=True, device=ranks.device())
    flat.grad = torch.randn_like(flat)
    return AdamW([flat], fused=True).step


def cast_update(params: Sequence[torch.Tensor], *, new_memory: bool = False) -> Callable[[], object]:
    """AdamW's fused step on float32 copies of tensors with gradients, and one cast each way.

    Args:
        new_memory: free the casts of the gradients after each step, in place of keeping their memory.
    """
    rounded = [param.detach().clone() for param in params]
    gradients = [param.grad for param in params if param.grad is not None]
    copies = [param.detach().float().requires_grad_() for param in params]
    adamw = AdamW(copies, fused=True)

    @torch.no_grad()
    def run() -> None:
        for one in copies:
            one.grad = torch.empty_like(one, requires_grad=False) if one.grad is None else one.grad
        torch._foreach_copy_([one.grad for one in copies if one.grad is not None], gradients)
        adamw.step()
        torch._foreach_copy_(rounded, copies)
        if new_memory:
            adamw.zero_grad()

    return run


def copy(nbytes: int) -> Callable[[], object]:
    """Copy so many bytes from memory to memory: half of them read, half written."""
    source = torch.ones(nbytes // 8, device=ranks.device())
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def exchange(numel: int) -> Callable[[], object]:
    """Every rank sends `numel` float32 elements to each other rank, all receives posted before."""
    others = [other for other in range(dist.get_world_size()) if other != dist.get_rank()]
    mine = torch.ones(numel, device=ranks.device())
    theirs = [torch.empty(numel, device=mine.device) for _ in others]

    def run() -> None:
        works = [dist.irecv(flat, group_src=other) for flat, other in zip(theirs, others)]
        for work in works + [dist.isend(mine, group_dst=other) for other in others]:
            assert work is not None  # None is what ranks outside the group get
            work.wait()

    return run
