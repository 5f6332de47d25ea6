"""FairScale's OSS and ShardedDataParallel."""

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS

from zero_ref.doctor.adapters import FairScale


def sharded(model):
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.05)
    return FairScale(optimizer, model, ShardedDataParallel(model, optimizer))
