"""accelerate, with this package's optimizer."""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from zero_ref import ZeroRedundancyOptimizer
from zero_ref.doctor.adapters import Accelerate


def sharded(model):
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    return Accelerate(accelerator, optimizer, model, wrapped)
