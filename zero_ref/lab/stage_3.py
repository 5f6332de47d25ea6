"""ZeRO stage 3 as torch does it, FSDP2's `fully_shard`: set up, saved whole, and measured as `meter` does.

Its parameters, gradients and optimizer state are DTensors: each stands for a whole tensor of which this rank
has some rows. What is counted here is those rows, and the padding that lies in memory behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from zero_ref.lab.meter import HeldBytes, memory_of
from zero_ref.lab.ranks import device


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


def shard(
    model: nn.Module,
    group: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Let torch's `fully_shard` make a unit of each of the model's `blocks`, and one of what is left.

    Args:
        group: how many consecutive ranks share the parameters, in groups that are replicas of each other;
            None for all.
        reduce_dtype: what gradients travel in; None for their own.
    """
    # They load for a second: only where they are used.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Left to itself, fully_shard takes a GPU where there is one, also where ranks are too many for the GPUs.
    world_size = dist.get_world_size()
    shape = (world_size,) if group in (None, world_size) else (world_size // (group or 1), group or 1)
    options = {
        "mesh": init_device_mesh(device().type, shape, mesh_dim_names=("replicas", "shard")[-len(shape) :]),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    }
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)  # type: ignore[call-overload]
    fully_shard(model, **options)  # type: ignore[call-overload]


def whole(state: Any, keep: bool = True) -> Any:
    """A state dict with every DTensor in it gathered, one after the other, into the CPU's memory.

    >>> whole({"step": 3, "exp_avg": [torch.ones(1)]})
    {'step': 3, 'exp_avg': [tensor([1.])]}

    Args:
        keep: on this rank; others only take part, and get None for each.
    Collective: all ranks of the DTensors' mesh.
    """
    if isinstance(state, dict):
        return {key: whole(value, keep) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value, keep) for value in state]
    if not isinstance(state, DTensor):
        return state
    gathered = state.full_tensor()
    return gathered.cpu() if keep else None


def load_whole(model: nn.Module, optimizer: torch.optim.Optimizer, of_model: Any, of_optimizer: Any) -> None:
    """Cut whole state dicts as the model's parameters are cut, and load them."""
    params = dict(model.named_parameters())
    model.load_state_dict({name: _cut_as(params[name], value) for name, value in of_model.items()})
    state = {
        number: {
            key: _cut_as(param, value) if value.shape == param.shape else value
            for key, value in of_optimizer["state"][number].items()
        }
        for number, param in enumerate(params.values())
    }
    optimizer.load_state_dict({**of_optimizer, "state": state})


def _cut_as(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return value
    # Every rank has read the same: nothing is sent.
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def held_bytes(params: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> HeldBytes:
    """Return the bytes of this rank's parts of DTensors, as `meter.held_bytes` does for plain tensors.

    Parameters and gradients count by the memory they keep, padding included; state has none.

    >>> linear = torch.nn.Linear(3, 2)
    >>> held_bytes(linear.parameters(), torch.optim.SGD(linear.parameters()))
    HeldBytes(parameters=32, gradients=0, optimizer_state=0)
    """
    params = list(params)
    state = [value for of_param in optimizer.state.values() for value in of_param.values()]
    return HeldBytes(
        memory_of(map(local_part, params)),
        memory_of(local_part(param.grad) for param in params if param.grad is not None),
        sum(local_part(value).nbytes for value in state if isinstance(value, torch.Tensor)),
    )
