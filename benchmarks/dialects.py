"""What DeepSpeed's stages send, counted by the kernel on two ranks of Gloo.

    python -m benchmarks.dialects

Needs Linux and `pip install deepspeed`, which the package does not. Chapter 8 has the numbers in its table of
dialects. A row is a `zero_optimization` and the passes of an update; its number counts movements, that is
how many times all parameters are sent to the ranks that lack them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.lab import ranks
from zero_ref.lab.meter import bytes_sent_by

WIDTH, LAYERS = 256, 4

RELEASED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
"""Stage 3 frees a layer after its forward. By default it keeps up to a billion parameters."""

ROWS: list[tuple[dict[str, Any], int]] = [
    ({"stage": 0}, 1),
    ({"stage": 1}, 1),
    ({"stage": 2}, 1),
    ({"stage": 3, "stage3_param_persistence_threshold": 0}, 1),
    ({"stage": 3, **RELEASED}, 1),
    ({"stage": 1}, 4),
    ({"stage": 2}, 4),
]


def movements(zero: dict[str, Any], passes: int) -> float | None:
    """On a rank: the movements of an update; None where the kernel does not count.

    Collective: all ranks call it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # DeepSpeed reads these although the group is there already.
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": passes,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    adamw = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=adamw, dist_init_required=False)

    def update() -> None:
        for _ in range(passes):
            engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
            engine.step()

    update()
    sent = bytes_sent_by(update)
    once = 4 * LAYERS * WIDTH**2 * (world_size - 1) / world_size
    return None if sent is None else sent / once


if __name__ == "__main__":
    for zero, passes in ROWS:
        found = ranks.run(movements, 2, zero, passes, backend="gloo", timeout=300.0)[0]
        print(f"{zero}, {passes} passes: {'not counted' if found is None else f'{found:.2f}'}", flush=True)
        ranks.shutdown()  # DeepSpeed keeps a process to the first stage that it was given
