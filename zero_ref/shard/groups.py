"""Parameter groups, which `stairs/owners.py` does not have: the order of parameters, and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from zero_ref.plan.partition import ParamSpec

ParamGroup = dict[str, Any]

PARAM_KEYS = ("params", "param_names")
"""The entries of a parameter group that are not options."""


def specs_of(param_groups: Sequence[ParamGroup], whole: bool = False) -> list[ParamSpec]:
    """Make the ParamSpec of each parameter, in registration order.

    Args:
        whole: the parameters must not be cut.
    """
    return [
        ParamSpec(
            numel=param.numel(),
            dtype=dtype_name(param.dtype),
            device=_device_name(param.device),
            group=index,
            trainable=param.requires_grad,
            name=name,
            shape=tuple(param.shape),
            whole=whole,
        )
        for index, group in enumerate(param_groups)
        for param, name in zip(
            group["params"], group.get("param_names") or [""] * len(group["params"]), strict=True
        )
    ]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Write a dtype as torch prints it, without the `torch.`."""
    return str(dtype).removeprefix("torch.")


@cache
def _device_name(device: torch.device) -> str:
    return str(device)


def name_of(specs: Sequence[ParamSpec], number: int) -> str:
    """Return a parameter's name, or its number if it has none."""
    return specs[number].name or str(number)


def params_of(param_groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    """List the parameters in registration order: group by group, each in its own order."""
    return [param for group in param_groups for param in group["params"]]


def ids_in(param_groups: Sequence[ParamGroup]) -> list[list[int]]:
    """List the identities of the parameters of each group, to notice later that a list has changed."""
    return [[*map(id, group["params"])] for group in param_groups]


def difference(now: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> str:
    """Describe the first difference between two results of `ids_in`: a predicate to "param_groups"."""
    if len(now) != len(before):
        return f"has {len(now)} groups, and the optimizer was built with {len(before)}"
    index, ours, theirs = next((i, *pair) for i, pair in enumerate(zip(now, before)) if pair[0] != pair[1])
    if len(ours) != len(theirs):
        return f"has {len(ours)} parameters in group {index}, and the optimizer was built with {len(theirs)}"
    place = next(place for place, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
    return f"has another parameter than before at place {place} of group {index}"


def options_of(group: ParamGroup) -> dict[str, Any]:
    """Return a parameter group's options: learning rate, betas and so on."""
    return {key: value for key, value in group.items() if key not in PARAM_KEYS}


def replace_options(source: Sequence[ParamGroup], target: Sequence[ParamGroup]) -> None:
    """Copy all options from `source` to `target`, and remove those that `source` does not have."""
    for theirs, ours in zip(source, target, strict=True):
        for key in ours.keys() - theirs.keys():
            if key not in PARAM_KEYS:
                del ours[key]
        for key, value in theirs.items():
            if key not in PARAM_KEYS:
                ours[key] = value


def loaded_options(saved: ParamGroup, ours: ParamGroup, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a group's options for loading: the saved ones, and ours for each default that was not saved.

    As in torch, an entry that is not an option of the optimizer, such as a scheduler's `initial_lr`, is
    dropped if it was not saved.
    """
    return {key: ours[key] for key in defaults if key in ours} | options_of(saved)


def describe_options(group: ParamGroup) -> list[str]:
    """Write the options as strings that can be compared between ranks: without addresses and devices."""
    options = sorted(options_of(group).items())
    # The default repr of an object has its address, which differs between processes.
    return [re.sub(r" at 0x[0-9a-fA-F]+", "", f"{key}={plain(value)!r}") for key, value in options]


def plain(value: Any) -> Any:
    """Replace the tensors in a value by numbers, since the repr of a tensor has its device and is rounded."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value
