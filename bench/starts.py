"""Start the overlapped run many times: does it ever hang, does it ever lose an update?

    python bench/starts.py --starts 100

Each start has a process group of its own. The two hooks, the two reductions and the three values of
`shard_buckets` are taken in turn, and ranks are held up for random milliseconds in forward and backward, so
that they never come to a call together. At the end the parameters must be those of DistributedDataParallel
with the plain optimizer, bit for bit: gradients are added in the same order there.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from zero_ref import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_to_owners,
)
from zero_ref.lab import ranks

ITERATIONS = 12
TIMEOUT_S = 60.0
WAYS = list(
    itertools.product(
        [hook_with_zero_step, hook_with_zero_step_interleaved], [False, True], [None, False, True]
    )
)


class HeldUp(nn.Module):
    """Layers between which a rank sleeps, now and then, on the way there and back."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.random = random.Random(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.sleep()
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(self.sleep)
        return x

    def sleep(self, _: object = None) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 3e-3)


def sum_in_rank_order(_, bucket):  # type: ignore[no-untyped-def]
    """A reference for `reduce_to_owners`, which adds in the order of the ranks, not of Gloo's ring."""
    mine = bucket.buffer().mul_(1 / dist.get_world_size())
    total, *others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather([total, *others], mine)
    for other in others:
        total.add_(other)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(mine.copy_(total))
    return done


def train(
    seed: int, make_optimizer: Callable[[Any], Any], make_hook: Callable[[Any, Any], Any]
) -> tuple[torch.Tensor, int]:
    """All parameters after the last iteration, end to end, and how many buckets DDP had."""
    rank = dist.get_rank()
    ddp: Any = DistributedDataParallel(HeldUp(100 * seed + rank), bucket_cap_mb=0.01)
    optimizer = make_optimizer(ddp)
    hook = make_hook(ddp, optimizer)
    buckets = 0

    def counting(state, bucket):  # type: ignore[no-untyped-def]
        nonlocal buckets
        buckets = bucket.index() + 1
        return hook(state, bucket)

    ddp.register_comm_hook(None, counting)
    for iteration in range(ITERATIONS):
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * iteration + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in ddp.parameters()]), buckets


def start(seed: int) -> tuple[bool, float, int]:
    """One start on this rank: whether ranks and optimizers agree, how far parameters moved, the buckets."""
    way, to_owners, shard_buckets = WAYS[seed % len(WAYS)]
    ours, buckets = train(
        seed,
        lambda ddp: ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-2
        ),
        lambda ddp, zero: way(
            reduce_to_owners(zero) if to_owners else allreduce_hook, ddp, zero, shard_buckets
        ),
    )
    plain, _ = train(
        seed,
        lambda ddp: torch.optim.AdamW(ddp.parameters(), lr=1e-2),
        lambda ddp, optimizer: sum_in_rank_order if to_owners else allreduce_hook,
    )
    everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, ours)
    same = torch.equal(ours, plain) and all(torch.equal(ours, other) for other in everyones)
    before = torch.cat([param.detach().flatten() for param in HeldUp(0).parameters()])
    return same, (ours - before).abs().min().item(), buckets


def main() -> None:
    """One line for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    for world_size in options.ranks:
        failures, lost, buckets, moved = [], [], set(), float("inf")
        began = time.monotonic()
        for seed in range(options.starts):
            try:
                outcomes = ranks.run(start, world_size, seed, timeout=TIMEOUT_S)
            except ranks.RankError as error:
                failures.append(f"start {seed}, {WAYS[seed % len(WAYS)]}: {error}")
                continue
            lost += [f"start {seed}, {WAYS[seed % len(WAYS)]}"] * (not all(same for same, _, _ in outcomes))
            buckets |= {count for _, _, count in outcomes}
            moved = min(moved, *(distance for _, distance, _ in outcomes))
        seconds = time.monotonic() - began
        print(
            f"{world_size} ranks: {options.starts} starts of {ITERATIONS} iterations with {sorted(buckets)} "
            f"buckets, {seconds:.0f} s: {len(failures)} hung or failed, {len(lost)} lost an update; each "
            f"parameter moved by at least {moved:.1e}"
        )
        for text in failures + lost:
            print(text)


if __name__ == "__main__":
    main()
