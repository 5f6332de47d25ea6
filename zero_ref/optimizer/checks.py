"""Checks before anything is sent: some by each rank alone, some as facts that must be equal on all ranks.

This module adds to `minimal.py` an error wherever the result would differ from the unsharded optimizer's.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from zero_ref.comm.agreement import Fact
from zero_ref.optimizer.buckets import flat_view
from zero_ref.optimizer.coupling import couples_parameters, updates_elementwise
from zero_ref.optimizer.groups import (
    OPTIMIZER_CLASS,
    ParamGroup,
    describe_options,
    name_of,
    options_of,
    params_of,
)
from zero_ref.plan.partition import ParamSpec, Partition

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers that treat each element by itself, so that a parameter may be cut anywhere."""


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether the optimizer is in `ELEMENTWISE` or has set `elementwise = True`, which subclasses inherit.

    A subclass of one in `ELEMENTWISE` does not count, since its `step` may do anything.
    """
    return optimizer_class in ELEMENTWISE or bool(getattr(optimizer_class, "elementwise", False))


def check_is_class(optimizer_class: object) -> None:
    """Refuse what cannot be a local optimizer.

    Raises:
        TypeError: `optimizer_class` is not an optimizer class.
        ValueError: the optimizer couples parameters (LBFGS).
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"optimizer_class takes a class such as torch.optim.AdamW, not {_kind(optimizer_class)}; "
            "its options, such as lr=1e-3, follow as keyword arguments."
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS computes one direction from all parameters together; on shards it would be another "
            "algorithm. Use an optimizer that updates each parameter by itself."
        )


def check_can_be_sharded(
    classes: Sequence[type[Optimizer]],
    partition: Partition,
    params: Sequence[torch.Tensor],
    specs: Sequence[ParamSpec],
) -> None:
    """Refuse parameters for which sharding would change the result.

    Args:
        classes: the optimizer class of each parameter group.
    Raises:
        ValueError: a parameter is split whose optimizer uses shapes; a parameter has gaps in memory, shares
            memory with another, or is a part on each rank (DTensor).
    """
    names = [name_of(specs, index) for index in range(len(specs))]
    for name, spec, pieces in zip(names, specs, partition.pieces_of_param, strict=True):
        if spec.whole and len(pieces) > 1:
            of_class = classes[spec.group].__name__
            raise ValueError(
                f"{of_class} may look at a parameter's shape, and this partition splits parameter {name}. "
                'Use partition="even", which keeps such parameters whole, or, if the optimizer treats each '
                f"element by itself in spite of the trial, set {of_class}.elementwise = True."
            )
    for name, param in zip(names, params, strict=True):
        _check_is_held_whole(name, param)
        try:
            param.is_contiguous() or flat_view(param.detach())
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None
    _check_memory_is_apart(names, params, specs)


def groups_kept_whole(
    groups: Sequence[ParamGroup], optimizer_class: type[Optimizer], defaults: Mapping[str, Any], tried: bool
) -> set[int]:
    """The numbers of the groups whose parameters must not be cut.

    Args:
        groups: what the user gave for each.
        optimizer_class, defaults: the class of groups that name none, and the options of its constructor.
        tried: find out by a trial whether a class that is neither torch's nor declared is elementwise.
    """

    def stays_whole(group: ParamGroup) -> bool:
        of_class = group.get(OPTIMIZER_CLASS, optimizer_class)
        if is_elementwise(of_class):
            return False
        declared = hasattr(of_class, "elementwise") or of_class.__module__.startswith("torch.optim.")
        its_defaults = defaults if of_class is optimizer_class else {}
        return declared or not tried or not updates_elementwise(of_class, options_of(group), its_defaults)

    return {index for index, group in enumerate(groups) if stays_whole(group)}


def check_updates_apart(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Refuse an optimizer whose update of a parameter, under these options, depends on other parameters.

    Raises:
        ValueError: a trial showed that it does. torch's optimizers and elementwise ones are not tried.
    """
    known = optimizer_class.__module__.startswith("torch.optim.") or is_elementwise(optimizer_class)
    if not known and couples_parameters(optimizer_class, options, defaults):
        raise ValueError(
            f"{optimizer_class.__name__} moved a tensor otherwise beside another one than by itself: it "
            "computes something from all parameters together, such as a norm or a learning rate. On shards, "
            "where each rank has other parameters, that would be another algorithm. Use an optimizer that "
            "updates each parameter by itself, or turn that off in its options."
        )


def _check_is_held_whole(name: str, param: torch.Tensor) -> None:
    """Refuse a parameter that is sharded already, since no rank has all of it to own.

    Raises:
        ValueError: the parameter is a DTensor, or one of FullyShardedDataParallel's.
    """
    # If the DTensor module was not imported, no DTensor exists; importing the module here would be slow.
    tensor_module = sys.modules.get("torch.distributed.tensor")
    what = ""
    if tensor_module is not None and isinstance(param, tensor_module.DTensor):
        what = f"a DTensor, as `fully_shard` and `parallelize_module` make them ({param.placements})"
    elif getattr(param, "_fsdp_flattened", False):
        what = "one of FullyShardedDataParallel's, which cuts and moves it"
    if what:
        raise ValueError(
            f"parameter {name} is {what}, so each rank holds another part of it, and the owner would "
            "overwrite the others'. Its optimizer is sharded already: use the plain optimizer class on these "
            "parameters, or this one on a model in DistributedDataParallel."
        )


def _check_memory_is_apart(
    names: Sequence[str], params: Sequence[torch.Tensor], specs: Sequence[ParamSpec]
) -> None:
    # Each parameter fills one range of memory. If any ranges overlap, two that are adjacent in the order of
    # their starts do. Tensors without memory ("meta") start at 0.
    ranges = sorted(
        (specs[index].device, start, param.nbytes, index)
        for index, param in enumerate(params)
        if (start := param.data_ptr())
    )
    for (device, start, nbytes, one), (other_device, other_start, _, other) in pairwise(ranges):
        if device != other_device or start + nbytes <= other_start:
            continue
        first, second = sorted((one, other))
        if params[first] is params[second]:
            raise ValueError(
                f"parameter {names[first]} is listed twice, at {first} and {second}, so two ranks would own "
                "it. List it once: it gets the gradients of all its uses."
            )
        raise ValueError(
            f"parameters {names[first]} and {names[second]} are different Parameter objects on the same "
            "memory, so two ranks would own it. Tie weights by using one Parameter in both places."
        )


def facts_of(
    param_groups: Sequence[ParamGroup], specs: Sequence[ParamSpec], partition: Partition, first: int = 0
) -> list[str]:
    """One line for each fact that must be equal on all ranks, about the parameters from number `first` on."""
    devices: dict[str, str] = {}
    for spec in specs:  # the index of an accelerator differs between ranks, so compare kind and order
        devices.setdefault(spec.device, f"{spec.device.split(':')[0]} device {len(devices)}")
    facts = [f"{len(specs)} parameters"]
    for number, param in enumerate(params_of(param_groups)[first:], start=first):
        spec = specs[number]
        facts.append(
            f"parameter {name_of(specs, number)}: shape {tuple(param.shape)}, {spec.dtype}, "
            f"{devices[spec.device]}, group {spec.group}, requires_grad={spec.trainable}, "
            f"strides {param.stride()}"
        )
    for index, group in enumerate(param_groups):
        facts += [f"group {index}: {option}" for option in describe_options(group)]
        if OPTIMIZER_CLASS in group:
            facts.append(f"group {index}: {group[OPTIMIZER_CLASS].__name__}")
    return [*facts, fact_of(partition)]


def fact_of(partition: Partition) -> str:
    """A line that is equal for equal partitions."""
    plan = repr((partition.slices_of_rank, partition.ranges)).encode()
    return f"partition {hashlib.sha256(plan).hexdigest()[:12]}"


def facts_of_values(params: Sequence[torch.Tensor], specs: Sequence[ParamSpec], first: int = 0) -> list[str]:
    """As `facts_of`, about the parameters' initial values."""
    remedy = (
        "Ranks start from the same values, in the same order: call torch.manual_seed with one number on all "
        "before the model is made, or construct DistributedDataParallel before the optimizer (it sends rank "
        "0's values to all), or torch.distributed.broadcast each parameter. If only their order differs, "
        "list the parameters in one that all processes share, as that of a set is not."
    )
    return [
        Fact(f"parameter {name_of(specs, number)}: values with the digest {digest}", remedy)
        for number, digest in enumerate(digests(params[first:]), start=first)
    ]


WORDS = 16_381
"""The number of different weights. A prime, so that no two rows of a matrix get the same weights."""


@torch.no_grad()
def digests(params: Iterable[torch.Tensor]) -> list[str]:
    """A digest of each parameter's bits, in hexadecimal; empty if its values cannot be read.

    The digest is a sum of the bits, read as 64-bit integers, each times a weight that depends on its offset.
    Integer sums are exact in any order. NaNs compare by their bits.

    >>> digests([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])])
    ['400000003f800000', '3f80000040000000', '400000003f800000']

    Cost: one pass over the parameters' memory, on their devices, and one synchronization with each device.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places: list[tuple[torch.device, int] | None] = []
    for param in params:
        # The values of a "meta" tensor, or of a subclass with its own dispatch, cannot be read this way.
        if param.is_meta or type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            places.append(None)
            continue
        device = param.device
        if device not in weights:
            weights[device] = 2 * torch.arange(WORDS, device=device) + 1
            sums[device] = []
        places.append((device, len(sums[device])))
        sums[device].append(_sum_of_bits(flat_view(param.detach()), weights[device]))
    numbers = {device: torch.stack(of_device).tolist() for device, of_device in sums.items()}
    return [f"{numbers[place[0]][place[1]] % 2**64:016x}" if place else "" for place in places]


def _sum_of_bits(flat: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum modulo 2**64, shape ()."""
    if flat.storage_offset() * flat.itemsize % 8:  # not aligned to int64, as it may be on another rank
        flat = flat.clone()
    split = flat.nbytes // 8 * 8
    whole = split == flat.nbytes  # most parameters are; skip the views, for a model may have thousands
    words = flat.view(torch.int64) if whole else flat.view(torch.uint8)[:split].view(torch.int64)
    in_rows = words.numel() // WORDS * WORDS
    total = _weighted(words[in_rows:] if in_rows else words, weights)
    if in_rows:
        total = total + _weighted(words[:in_rows].view(-1, WORDS).sum(0), weights)
    return total if whole else total + _weighted(flat.view(torch.uint8)[split:].long(), weights)


def _weighted(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[: words.numel()]
    # A GPU has no dot product of integers.
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


def _kind(value: object) -> str:
    return f"the object {type(value).__name__}(...)" if isinstance(value, Optimizer) else repr(value)
