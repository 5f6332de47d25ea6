"""torch's ZeroRedundancyOptimizer under DDP."""

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def sharded(model):
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05), ddp
