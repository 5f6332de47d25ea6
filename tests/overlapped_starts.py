"""Start the overlapped run many times: does it ever hang, does it ever lose an update?

    python tests/overlapped_starts.py --ranks 2 --starts 100

Each start has a process group of its own. The two hooks, the two reductions and the three values of
`shard_buckets` are taken in turn, and ranks are held up for random milliseconds in forward and backward, so
that they never come to a call together. At the end the parameters must be those of DistributedDataParallel
with the plain optimizer, bit for bit: gradients are added in the same order there.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.comm import devices
from zero_ref.lab import ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

ITERATIONS = 12
TIMEOUT_S = 60.0
HOOKS = (hook_with_zero_step, hook_with_zero_step_interleaved)
WAYS = list(itertools.product(HOOKS, [False, True], [None, False, True]))


class Starts(NamedTuple):
    """The results of many starts.

    Args:
        hung: the number, way and error of each start that failed or did not end within a minute.
        lost: the same for each start whose parameters differed from the plain optimizer's, or between ranks.
        smallest_move: the distance of the parameter that moved least, in all starts that ended.
        first_update: the iteration, counted from 1, whose backward made the first update: the latest of all
            starts and ranks. None if one of them never made it.
        buckets: the numbers of DDP's buckets.
    """

    hung: tuple[str, ...]
    lost: tuple[str, ...]
    smallest_move: float
    first_update: int | None
    buckets: tuple[int, ...]


def starts(world_size: int, count: int) -> Starts:
    """Start `count` times on that many ranks, one start after the other.

    >>> starts(world_size=2, count=100)                                          # doctest: +SKIP
    Starts(hung=(), lost=(), smallest_move=7.5e-09, first_update=1, buckets=(6,))

    Raises:
        ValueError: there is nothing to start.
    Cost: a second for each start on 2 ranks, and two on 4, with 2 cores.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    hung, lost, outcomes = [], [], []
    for seed in range(count):
        way, to_owners, shard_buckets = WAYS[seed % len(WAYS)]
        what = f"start {seed}, {way.__name__}, to_owners={to_owners}, shard_buckets={shard_buckets}"
        try:
            of_ranks = ranks.run(_start, world_size, seed, timeout=TIMEOUT_S)
        except ranks.RankError as error:
            hung.append(f"{what}: {error}")
            continue
        outcomes += of_ranks
        if not all(outcome.same for outcome in of_ranks):
            lost.append(what)
    first = [outcome.first_update or ITERATIONS + 1 for outcome in outcomes]
    latest = max(first, default=None)
    return Starts(
        tuple(hung),
        tuple(lost),
        min((outcome.smallest_move for outcome in outcomes), default=0.0),
        None if latest == ITERATIONS + 1 else latest,
        tuple(sorted({outcome.buckets for outcome in outcomes})),
    )


# ---------------------------------------------------------------------------------------------- on a rank


class Outcome(NamedTuple):
    """One start on one rank: whether ranks and optimizers agree, and of `Starts` this one's part."""

    same: bool
    smallest_move: float
    first_update: int | None
    buckets: int


class HeldUp(nn.Module):
    """Layers between which a rank sleeps, now and then, on the way there and back."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.random = random.Random(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layers."""
        for layer in self.layers:
            self.sleep()
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(self.sleep)
        return x

    def sleep(self, _: object = None) -> None:
        """Once in five times, for up to 3 ms."""
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 3e-3)


def sum_in_rank_order(_, bucket):  # type: ignore[no-untyped-def]
    """A reference for `reduce_to_owners`, which adds in the order of the ranks, not of Gloo's ring."""
    mine = bucket.buffer().mul_(1 / dist.get_world_size())
    total, *others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather([total, *others], mine)
    for other in others:
        total.add_(other)
    done = devices.future(mine.device)
    done.set_result(mine.copy_(total))
    return done


def _start(seed: int) -> Outcome:
    way, to_owners, shard_buckets = WAYS[seed % len(WAYS)]

    def make_ours(ddp: Any) -> tuple[Any, Any]:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-2)
        reduce = reduce_to_owners(zero) if to_owners else allreduce_hook
        return zero, way(reduce, ddp, zero, shard_buckets)

    def make_plain(ddp: Any) -> tuple[Any, Any]:
        hook = sum_in_rank_order if to_owners else allreduce_hook
        return torch.optim.AdamW(ddp.parameters(), lr=1e-2), hook

    ours, buckets, first_update = _train(seed, make_ours)
    plain, *_ = _train(seed, make_plain)
    everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, ours)
    same = all(torch.equal(ours, other) for other in (plain, *everyones))
    smallest_move = (ours - _flat(HeldUp(0))).abs().min().item()
    return Outcome(same, smallest_move, first_update, buckets)


def _train(seed: int, make: Callable[[Any], tuple[Any, Any]]) -> tuple[torch.Tensor, int, int | None]:
    """All parameters at the end, DDP's buckets, and in which iteration backward first updated.

    Args:
        make: the optimizer and the hook, of the model under DDP.
    """
    rank = dist.get_rank()
    ddp: Any = DistributedDataParallel(HeldUp(100 * seed + rank), bucket_cap_mb=0.01)
    optimizer, hook = make(ddp)
    buckets, first_update = 0, None

    def counting(state, bucket):  # type: ignore[no-untyped-def]
        nonlocal buckets
        buckets = bucket.index() + 1
        return hook(state, bucket)

    ddp.register_comm_hook(None, counting)
    for iteration in range(ITERATIONS):
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * iteration + rank)
        optimizer.zero_grad()
        before = _flat(ddp)
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
        if first_update is None and not torch.equal(before, _flat(ddp)):
            first_update = iteration + 1
        optimizer.step()
    return _flat(ddp), buckets, first_update


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def main() -> int:
    """Print what came of the starts, and what went wrong in each; 1 if anything did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=100)
    arguments = parser.parse_args()
    try:
        found = starts(arguments.ranks, arguments.starts)
    finally:
        ranks.shutdown()
    for text in (*found.hung, *(f"{what} lost an update" for what in found.lost)):
        print(text, file=sys.stderr)
    bad = len(found.hung) + len(found.lost)
    print(
        f"{arguments.starts} starts on {arguments.ranks} ranks: {bad} hung, failed or lost an update; the "
        f"first update in iteration {found.first_update or 'none'}; the smallest move of a parameter "
        f"{found.smallest_move:.2g}"
    )
    return 1 if bad or found.first_update is None else 0


if __name__ == "__main__":
    sys.exit(main())
