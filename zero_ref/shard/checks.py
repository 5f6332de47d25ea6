"""Checks before anything is sent: some by each rank alone, some as facts that must be equal on all ranks.

`stairs/owners.py` checks nothing. Here it is an error if the result would differ from the unsharded
optimizer's.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero_ref.comm.agreement import Fact
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.groups import (
    ParamGroup,
    describe_options,
    name_of,
    params_of,
    plain,
)

ELEMENTWISE: dict[type[Optimizer], bool] = {
    torch.optim.ASGD: True,
    torch.optim.Adadelta: True,
    torch.optim.Adafactor: False,
    torch.optim.Adagrad: True,
    torch.optim.Adam: True,
    torch.optim.AdamW: True,
    torch.optim.Adamax: True,
    torch.optim.LBFGS: False,
    torch.optim.Muon: False,
    torch.optim.NAdam: True,
    torch.optim.RAdam: True,
    torch.optim.RMSprop: True,
    torch.optim.Rprop: True,
    torch.optim.SGD: True,
    torch.optim.SparseAdam: False,
}
"""For each of torch's optimizers, whether it updates each element by itself, so that a parameter may be cut.

A subclass is not in the table, since its `step` may do anything.
"""


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Return whether this is one of torch's classes that update each element by itself."""
    return ELEMENTWISE.get(optimizer_class, False)


def check_master_dtype(dtype: object) -> None:
    """Refuse what cannot be the dtype of master copies.

    Raises:
        TypeError: it is no torch.dtype, nor None for no copies.
        ValueError: it holds no floating-point numbers.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"master_dtype={dtype!r} is no dtype: use torch.float32.")
    if not dtype.is_floating_point:
        raise ValueError(f"master_dtype={dtype} holds no floating-point numbers: use torch.float32.")


def check_buffer_size(size: object) -> None:
    """Refuse what cannot be the number of elements of a buffer.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"broadcast_buffer_size={size!r} is no number of elements: use one such as 65536.")
    if size < 0:
        raise ValueError(f"broadcast_buffer_size={size} is negative: use 0 to send each parameter by itself.")


def check_is_class(optimizer_class: object) -> None:
    """Refuse what cannot be a local optimizer.

    Raises:
        TypeError: `optimizer_class` is not an optimizer class.
        ValueError: the optimizer couples parameters (LBFGS).
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"optimizer_class takes a class such as torch.optim.AdamW, not {_described(optimizer_class)}; "
            "its options, such as lr=1e-3, follow as keyword arguments."
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes one direction from all parameters together; on shards it would be another "
            "algorithm. Use an optimizer that updates each parameter by itself."
        )


def check_can_be_sharded(
    optimizer_class: type[Optimizer],
    partition: Partition,
    params: Sequence[torch.Tensor],
    specs: Sequence[ParamSpec],
) -> None:
    """Refuse parameters for which sharding would change the result.

    Args:
        optimizer_class: the class of the local optimizer.
    Raises:
        ValueError: a parameter is split whose optimizer may use shapes; a parameter is sparse, has gaps in
            memory, shares memory with another, is sharded already (a DTensor), or wraps other tensors.
    """
    # 1. A parameter whose optimizer uses its shape has one owner.
    for number, (spec, pieces) in enumerate(zip(specs, partition.pieces_of_param, strict=True)):
        if spec.whole and len(pieces) > 1:
            raise ValueError(
                f"{optimizer_class.__name__} may look at a parameter's shape, and this partition splits "
                f'parameter {name_of(specs, number)}. Use partition="even", which keeps such parameters '
                "whole, or, for a class that is not torch's and treats each element by itself, pass "
                "elementwise=True."
            )
    # 2. Each rank has all elements of each parameter, and they fill a range of memory that can be cut.
    for number, param in enumerate(params):
        _check_is_held_whole(specs, number, param)
        if param.layout != torch.strided:
            raise ValueError(
                f"parameter {name_of(specs, number)} has the layout {param.layout}, in which elements have "
                "no fixed places in memory for a rank to own. Make it dense by to_dense(); its gradient may "
                "be sparse."
            )
        try:
            param.is_contiguous() or flat_view(param.detach())  # raises if there are gaps
        except ValueError as error:
            raise ValueError(f"parameter {name_of(specs, number)}: {error}") from None
    # 3. No two parameters share memory, or two ranks would own it.
    _check_memory_is_apart(params, specs)


def stays_whole(optimizer_class: type[Optimizer], elementwise: bool | None, cuts: bool) -> bool:
    """Return whether the parameters of this class must not be cut.

    >>> stays_whole(torch.optim.AdamW, None, cuts=True), stays_whole(torch.optim.Muon, None, cuts=True)
    (False, True)

    Args:
        elementwise: what the user says about a class that is not torch's: whether it updates each element by
            itself; None if the user has said nothing.
        cuts: the partition is made by a rule that cuts parameters.
    Raises:
        ValueError: the rule cuts, and the user has said nothing about a class that is not torch's.
    """
    if cuts and elementwise is None and optimizer_class not in ELEMENTWISE:
        raise ValueError(
            f"this partition cuts parameters, and {optimizer_class.__name__} is not one of torch's own "
            "classes, so only you know whether it updates each element by itself. Pass elementwise=True if "
            "it does, or elementwise=False to keep its parameters whole."
        )
    return not ELEMENTWISE.get(optimizer_class, bool(elementwise))


def _check_is_held_whole(specs: Sequence[ParamSpec], number: int, param: torch.Tensor) -> None:
    """Refuse a parameter that is sharded already, or whose values are in several tensors.

    No rank has all of a sharded parameter to own. And a step sends one tensor for each parameter.

    Raises:
        ValueError: the parameter is a DTensor, or one of FullyShardedDataParallel's, or its class wraps other
            tensors.
    """
    if type(param) is torch.nn.Parameter and not hasattr(param, "_fsdp_flattened"):
        return  # a quick answer for ordinary parameters: a model may have thousands
    # If the DTensor module was not imported, no DTensor exists; importing the module here would be slow.
    tensor_module = sys.modules.get("torch.distributed.tensor")
    kind = ""
    if tensor_module is not None and isinstance(param, tensor_module.DTensor):
        kind = f"a DTensor, as `fully_shard` and `parallelize_module` make them ({param.placements})"
    elif getattr(param, "_fsdp_flattened", False):
        kind = "one of FullyShardedDataParallel's, which cuts and moves it"
    if kind:
        raise ValueError(
            f"parameter {name_of(specs, number)} is {kind}, so each rank holds another part of it, and the "
            "owner would overwrite the parts of the others. Its optimizer is sharded already: use the plain "
            "optimizer class on these parameters, or this one on a model in DistributedDataParallel."
        )
    if wrapped := _wrapped_in(param):
        raise ValueError(
            f"parameter {name_of(specs, number)} is a {type(param).__name__}, which keeps its values in "
            f"other tensors ({', '.join(wrapped)}). A step sends parameters and not such tensors, so other "
            "ranks would not get what the owner has. List only plain parameters, such as adapters beside a "
            "quantized model, or step this one with the plain optimizer class on all ranks."
        )


def _wrapped_in(param: torch.Tensor) -> list[str]:
    """List the attributes in which a parameter of a tensor subclass has other tensors: codes and scales."""
    is_wrapper: bool = is_traceable_wrapper_subclass(param)
    if is_wrapper:
        names, _ = param.__tensor_flatten__()  # type: ignore[attr-defined]
        return list(names)
    # Programs set tensors such as `main_grad` on plain parameters. A subclass with operations of its own that
    # nothing can take apart is taken as one tensor.
    is_own_class = type(param) not in (torch.Tensor, torch.nn.Parameter)
    has_memory = type(param).__torch_dispatch__ == torch.Tensor.__torch_dispatch__
    beside = vars(param).items() if is_own_class and has_memory else ()
    return [name for name, value in beside if isinstance(value, torch.Tensor)]


def _check_memory_is_apart(params: Sequence[torch.Tensor], specs: Sequence[ParamSpec]) -> None:
    # Each parameter fills one range of memory. If any ranges overlap, two that are adjacent in the order of
    # their starts do. Tensors without memory ("meta") start at 0 and are left out.
    ranges = sorted(
        (specs[index].device, start, param.nbytes, index)
        for index, param in enumerate(params)
        if (start := param.data_ptr())
    )
    for (device, start, nbytes, one), (other_device, other_start, _, other) in pairwise(ranges):
        if device != other_device or start + nbytes <= other_start:
            continue
        first, second = sorted((one, other))
        name, other_name = name_of(specs, first), name_of(specs, second)
        if params[first] is params[second]:
            raise ValueError(
                f"parameter {name} is listed twice, at {first} and {second}, so two ranks would own "
                "it. List it once: it gets the gradients of all its uses."
            )
        raise ValueError(
            f"parameters {name} and {other_name} are different Parameter objects on the same "
            "memory, so two ranks would own it. Tie weights by using one Parameter in both places."
        )


def facts_of(
    param_groups: Sequence[ParamGroup], specs: Sequence[ParamSpec], partition: Partition, first: int = 0
) -> list[str]:
    """Write a line for each fact that must be equal on all ranks, about parameters from number `first` on."""
    # The index of an accelerator differs between ranks, so compare the kinds of devices and their order.
    devices: dict[str, str] = {}
    for spec in specs:
        devices.setdefault(spec.device, f"{spec.device.split(':')[0]} device {len(devices)}")
    facts = [f"{len(specs)} parameters"]
    for number, param in enumerate(params_of(param_groups)[first:], start=first):
        spec = specs[number]
        facts.append(
            f"parameter {name_of(specs, number)}: shape {spec.shape}, {spec.dtype}, "
            f"{devices[spec.device]}, group {spec.group}, requires_grad={spec.trainable}, "
            f"strides {param.stride()}"
        )
    for index, group in enumerate(param_groups):
        facts += [f"group {index}: {option}" for option in describe_options(group)]
    return [*facts, fact_of(partition)]


def fact_of(partition: Partition) -> str:
    """Write a line that is equal for equal partitions, and differs for others."""
    # A digest of the integers: the slices of a large model would fill megabytes.
    digest = hashlib.sha256(repr(partition.ranges).encode())
    for slices in partition.slices_of_rank:
        digest.update(array("q", [len(slices), *chain.from_iterable(slices)]))
    return f"partition {digest.hexdigest()[:12]}"


def _described(value: object) -> str:
    return f"the object {type(value).__name__}(...)" if isinstance(value, Optimizer) else repr(value)


def facts_of_options(
    param_groups: Sequence[ParamGroup], optimizer_class: type[Optimizer], kept: Mapping[str, Any]
) -> list[str]:
    """The facts that must be equal at any time: options, and values that belong to no single parameter.

    If a local optimizer computes such a value from all its parameters, the value differs between ranks, since
    each rank has other parameters; then the ranks do not make the same update together.

    Args:
        kept: the values by description: "attribute latest_loss".
    """
    remedy = (
        "Set options and attributes alike on every rank, such as by a scheduler on each, or to a loss that "
        f"was averaged over ranks. If your program has not set this one, {optimizer_class.__name__} computes "
        "it from all parameters that it has, and cannot be sharded: use an optimizer that updates each "
        "parameter by itself."
    )
    lines = [
        f"group {index}: {option}"
        for index, group in enumerate(param_groups)
        for option in describe_options(group)
    ]
    lines += [f"{name}: {plain(value)!r}" for name, value in kept.items()]
    return [Fact(line, remedy) for line in lines]
