"""dion's Muon for matrices, which its ranks share out, and AdamW for the rest. DDP averages the gradients."""

import torch
import torch.distributed as dist
from dion import Muon
from torch.nn.parallel import DistributedDataParallel


def groups(model):
    # dion compiles its arithmetic, which takes minutes on a CPU. The doctor's matrices are small.
    torch.compiler.set_stance("force_eager")
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [{"params": matrices}, {"params": others, "algorithm": "adamw"}]


def sharded(model):
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    return Muon(groups(model), distributed_mesh=dist.group.WORLD, lr=0.05), ddp


def plain(model):
    return Muon(groups(model), lr=0.05)
