"""torch's FSDP2: every layer is sharded, and then the model."""

import torch
from torch.distributed.fsdp import fully_shard

from zero_ref.doctor.adapters import FSDP2


def sharded(model):
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return FSDP2(torch.optim.AdamW(model.parameters(), lr=0.05), model)
