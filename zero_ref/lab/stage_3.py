"""ZeRO stage 3 as torch does it, FSDP2's `fully_shard`: set up, saved whole, and measured as `meter` does.

Its parameters, gradients and optimizer state are DTensors: each stands for a whole tensor of which this rank
has some rows. What is counted here is those rows, and the padding that lies in memory behind them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


WORD_OF = {
    "fsdp::all_gather_copy_in": "copy in",
    "c10d::_allgather_base_": "all-gather",
    "fsdp::split_with_sizes_copy": "copy out",
    "fsdp::chunk_cat": "copy in",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
}
"""What a `Watch` calls the operations that `fully_shard` makes."""


class Done(NamedTuple):
    """One thing that a rank did, as `Watch` saw it.

    Args:
        what: a word of `WORD_OF`; "forward" or "backward" for a product of matrices.
        nbytes: of the largest tensor that it reads or writes.
        stream: the stream that it was given to; "compute" for the one that computes.
        inputs: the inputs of reduce-scatters that are in memory when it is done.
    """

    what: str
    nbytes: int
    stream: str
    inputs: int


class Watch(TorchDispatchMode):
    """Lists what a model that is sharded by `fully_shard` does while it lasts: calls, copies, computing.

    On a CPU all is done in turn, in whichever stream. The streams are named there too, so that one can see
    what would go on side by side on a GPU.

    >>> with Watch(model) as watch:                                         # doctest: +SKIP
    ...     model(x).sum().backward()
    >>> watch.done[0]                                                       # doctest: +SKIP
    Done(what='copy in', nbytes=262144, stream='all_gather_copy_in', inputs=0)

    Args:
        model: the root, on a CPU, after its first forward. Its linear layers take inputs of two dimensions.

    Attributes:
        done: in the order of the program; what computes on one unit without anything else between is one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[Done] = []
        shared = vars(model._get_fsdp_state()._comm_ctx)  # type: ignore[operator]
        self._stream_names = {
            id(value): name.removesuffix("_stream")
            for name, value in shared.items()
            if name.endswith("_stream")
        }
        self._inputs: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        what = WORD_OF.get(func.name())
        if func.name() in ("aten::mm", "aten::addmm"):
            # Only inside a backward is there a task of autograd.
            what = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        if what is None:
            return made
        if what == "reduce-scatter":
            self._inputs.append(weakref.ref(args[1]))
        tensors = [one for one in tree_leaves((args, kwargs, made)) if isinstance(one, torch.Tensor)]
        stream = self._stream_names.get(id(torch.cpu.current_stream()), "compute")
        inputs = sum(one() is not None for one in self._inputs)
        found = Done(what, max(one.nbytes for one in tensors), stream, inputs)
        if what not in ("forward", "backward") or self.done[-1:] != [found]:
            self.done.append(found)
        return made
