"""Who takes part: this package's optimizer in its forms, and its peers from their released packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

Make = Callable[[Sequence[torch.Tensor]], Optimizer]

OURS = "zero_ref, best"
TORCH, TORCH_BEST = "torch", "torch, best"

BEST: dict[str, Any] = {"parameters_as_bucket_view": True, "fused": True}


def sharded() -> dict[str, Make]:
    """Optimizers that shard their state over the ranks, by name: ours, torch's and FairScale's.

    FairScale takes part where it is installed: pip install --no-deps fairscale==0.4.13.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

    made: dict[str, Make] = {
        "zero_ref": lambda params: ZeroRedundancyOptimizer(params, AdamW),
        "zero_ref, fused": lambda params: ZeroRedundancyOptimizer(params, AdamW, fused=True),
        OURS: lambda params: ZeroRedundancyOptimizer(params, AdamW, **BEST),
        "zero_ref, best, even": lambda params: ZeroRedundancyOptimizer(
            params, AdamW, partition="even", **BEST
        ),
        TORCH: lambda params: TorchOptimizer(params, AdamW),
        TORCH_BEST: lambda params: TorchOptimizer(params, AdamW, **BEST),
    }
    fairscale = fairscale_optimizer()
    if fairscale is not None:
        made["fairscale"] = lambda params: fairscale(params, AdamW)
        made["fairscale, fused"] = lambda params: fairscale(params, AdamW, fused=True)
    return made


def whole() -> dict[str, Make]:
    """Optimizers that keep all state on every rank, for plain data parallelism."""
    return {"ddp": lambda params: AdamW(params), "ddp, fused": lambda params: AdamW(params, fused=True)}


def fairscale_optimizer() -> Any | None:
    """FairScale's OSS, or None where it is not installed."""
    try:
        from fairscale.optim import OSS
    except ImportError:
        return None
    return OSS
