"""ZeRO stage 3 as torch does it, FSDP2's `fully_shard`, measured as `meter` measures our own optimizer.

Its parameters, gradients and optimizer state are DTensors: each stands for a whole tensor of which this rank
has some rows. What is counted here is those rows, and the padding that lies in memory behind them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zero_ref.calls import Call
from zero_ref.lab.meter import HeldBytes

# What FSDP2 takes from torch.distributed, by op. torch 2.13 gave the first two ops new names and uses those.
_OP_OF_FUNCTION = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}


@contextlib.contextmanager
def recording_stage_3() -> Iterator[list[Call]]:
    """A list that fills with the collectives that `fully_shard` makes while the context lasts.

    A call's bytes are those of its larger tensor, padding included: what an all-gather gives, what a
    reduce-scatter takes. FSDP2 looks the functions up in torch.distributed at each call, so they are replaced
    there, and calls that others make by these names are seen too. DTensor's own collectives are not, such as
    the one of `clip_grad_norm_`.

    >>> with recording_stage_3() as calls:                                  # doctest: +SKIP
    ...     model(x).sum().backward()
    >>> calls[0]                                                            # doctest: +SKIP
    Call(op='all_gather', nbytes=432, peer=None)
    """
    calls: list[Call] = []

    def recorded(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            calls.append(Call(op, max(tensor.nbytes for tensor in tensors)))
            return function(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in _OP_OF_FUNCTION if hasattr(dist, name)}
    for name, function in originals.items():
        setattr(dist, name, recorded(_OP_OF_FUNCTION[name], function))
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


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
