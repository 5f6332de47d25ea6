"""Lightning's Fabric, DDP, with this package's optimizer."""

import os

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy

from zero_ref import ZeroRedundancyOptimizer
from zero_ref.doctor.adapters import Fabric


def sharded(model):
    # The doctor has started the ranks, as torchrun would.
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"TORCHELASTIC_RUN_ID": "doctor", "GROUP_RANK": "0"}
    strategy = DDPStrategy(find_unused_parameters=True)
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    wrapped, optimizer = fabric.setup(model, optimizer)
    return Fabric(fabric, optimizer, model, wrapped)
