"""What the machine can do, measured beside the contenders: computing alone, communicating alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.optim import AdamW

from zero_ref.lab import ranks

ALIGNMENT = 64


def fused_update(numel: int) -> Callable[[], object]:
    """AdamW's fused step on one flat tensor of `numel` elements: 28 bytes of memory traffic an element."""
    flat = torch.zeros(numel, requires_grad=True, device=ranks.device())
    flat.grad = torch.randn_like(flat)
    return AdamW([flat], fused=True).step


def copy(nbytes: int) -> Callable[[], object]:
    """Copy so many bytes from memory to memory: half of them read, half written."""
    source = torch.ones(nbytes // 8, device=ranks.device())
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def exchange(numel: int) -> Callable[[], object]:
    """Every rank sends `numel` float32 elements to each other rank, all receives posted before."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    mine = torch.ones(numel, device=ranks.device())
    theirs = {rank: torch.empty_like(mine) for rank in others}

    def run() -> None:
        works = [dist.irecv(theirs[rank], group_src=rank) for rank in others]
        works += [dist.isend(mine, group_dst=rank) for rank in others]
        for work in works:
            assert work is not None  # None is what ranks outside the group get
            work.wait()

    return run


def share(parameters: int, world_size: int) -> int:
    """Elements that each rank owns of an even split."""
    return -(-parameters // (world_size * ALIGNMENT)) * ALIGNMENT
