"""Bytes that a training iteration puts on the wire in each way, from the kernel's counters. Linux, as root:

    unshare --net .venv/bin/python bench/wire.py

In a network namespace of its own, loopback carries nothing but the ranks' traffic. What is counted is a
whole iteration, backward and step, of all ranks together: payload, TCP/IP headers, acknowledgements and the
barriers around it. The model is large, so that these last are nothing beside it, and nothing is subtracted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from zero_ref import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    post_localSGD_hook,
    reduce_to_owners,
)
from zero_ref.lab import meter, ranks

WIDTH, DEPTH, BUCKET_MIB = 1024, 8, 4  # Ψ is 33.6 MB, in buckets of a layer each


class Way(NamedTuple):
    """A way to reduce gradients and to send new parameters.

    Args:
        predicted: bytes of all ranks, in (N-1)Ψ: 2 for an all-reduce, 1 for a reduction to owners, 1 for
            broadcasts, 1 for an all-gather, 2 for a reduce-scatter, which Gloo makes by an all-reduce.
        sharded: options of ZeroRedundancyOptimizer; None for the plain optimizer.
        to_owners: gradients go to their owners only.
        overlap: makes the hook that steps in backward, if one does.
        stage_3: parameters are sharded too, by torch's `fully_shard` on each layer.
        period: each rank trains by itself, and parameters are averaged once in so many iterations. Then all
            of them together are counted.
    """

    predicted: int
    sharded: dict[str, Any] | None = None
    to_owners: bool = False
    overlap: Callable[..., Any] | None = None
    stage_3: bool = False
    period: int = 1


EVEN: dict[str, Any] = {"partition": "even", "parameters_as_bucket_view": True}
WAYS = {
    "ddp, plain optimizer": Way(2),
    "all-reduce, broadcast of parameters": Way(3, {}),
    "all-reduce, broadcast of buckets": Way(3, {"parameters_as_bucket_view": True}),
    "all-reduce, broadcast of even shards": Way(3, EVEN),
    "all-reduce, overlapped": Way(3, {}, overlap=hook_with_zero_step),
    "all-reduce, interleaved": Way(3, {}, overlap=hook_with_zero_step_interleaved),
    "to owners, broadcast of parameters": Way(2, {}, to_owners=True),
    "to owners, broadcast of even shards": Way(2, EVEN, to_owners=True),
    "to owners, overlapped": Way(2, {}, to_owners=True, overlap=hook_with_zero_step),
    "to owners, interleaved": Way(2, {}, to_owners=True, overlap=hook_with_zero_step_interleaved),
    "to owners, interleaved, even": Way(2, EVEN, to_owners=True, overlap=hook_with_zero_step_interleaved),
    "stage 3, fully_shard": Way(4, stage_3=True),
    "local SGD, a period of 4": Way(2, period=4),
}


def training(way: Way) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    """A model, and an iteration of its training."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    wrapped: Any = model
    if way.stage_3:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)
    if way.sharded is None:
        optimizer: Any = torch.optim.AdamW(model.parameters())
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, overlap_with_ddp=way.overlap is not None, **way.sharded
        )
        hook: Any = reduce_to_owners(optimizer) if way.to_owners else allreduce_hook
        wrapped.register_comm_hook(None, way.overlap(hook, wrapped, optimizer) if way.overlap else hook)
    if way.period > 1:
        averager = PeriodicModelAverager(way.period)
        wrapped.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, averager)

    def iterate(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()

    return model, iterate


def bytes_of_an_iteration(way: Way, iterations: int = 8) -> tuple[float, int]:
    """Median over iterations, or periods, of what all ranks sent together, and bytes of the parameters."""
    model, iterate = training(way)
    sent = []
    for _ in range(iterations):
        inputs = torch.randn(2, WIDTH)
        dist.barrier()
        before = meter.wire_bytes() or 0
        dist.barrier()
        for _ in range(way.period):
            iterate(inputs)
        dist.barrier()
        sent.append((meter.wire_bytes() or 0) - before)
        dist.barrier()
    return statistics.median(sent[2:]), sum(param.nbytes for param in model.parameters())  # buckets rebuilt


def main() -> None:
    """One line for each number of ranks and way: bytes, in (N-1)Ψ, and how far from the prediction."""
    meter.raise_loopback()
    print(f"{'ranks':>5}  {'way':<36} {'bytes':>13} {'(N-1)Ψ':>8} {'predicted':>9} {'deviation':>9}")
    for world_size in (2, 4):
        for name, way in WAYS.items():
            sent, parameters = ranks.run(bytes_of_an_iteration, world_size, way)[0]
            share = sent / ((world_size - 1) * parameters)
            deviation = 100 * (share / way.predicted - 1)
            print(
                f"{world_size:>5}  {name:<36} {sent:>13,.0f} {share:>8.4f} {way.predicted:>9} "
                f"{deviation:>8.2f}%"
            )


if __name__ == "__main__":
    main()
