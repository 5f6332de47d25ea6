"""Nothing sharded: DDP and a torch optimizer, the plain loop on several ranks."""

import torch
from torch.nn.parallel import DistributedDataParallel


def sharded(model):
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    return torch.optim.AdamW(ddp.parameters(), lr=0.05), ddp
