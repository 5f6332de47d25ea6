"""ZeRO stage 3 as torch does it, FSDP2's `fully_shard`, measured as `meter` measures our own optimizer.

Its parameters, gradients and optimizer state are DTensors: each stands for a whole tensor of which this rank
has some rows. What is counted here is those rows, and the padding that lies in memory behind them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from zero_ref.lab.meter import HeldBytes


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a DTensor, in the same memory; any other tensor as it is.

    A DTensor's own `nbytes` is that of the whole tensor, and its own storage cannot be read.

    >>> local_part(torch.ones(3))
    tensor([1., 1., 1.])
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    return part


def held_bytes(params: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> HeldBytes:
    """What `meter.held_bytes` gives, where parameters are DTensors: the bytes of this rank's parts.

    Parameters and gradients count by the memory they keep, padding included; state has none.

    >>> linear = torch.nn.Linear(3, 2)
    >>> held_bytes(linear.parameters(), torch.optim.SGD(linear.parameters()))
    HeldBytes(parameters=32, gradients=0, optimizer_state=0)
    """
    params = list(params)
    state = [value for of_param in optimizer.state.values() for value in of_param.values()]
    return HeldBytes(
        _memory_of(params),
        _memory_of(param.grad for param in params if param.grad is not None),
        sum(local_part(value).nbytes for value in state if isinstance(value, torch.Tensor)),
    )


def _memory_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = (local_part(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
