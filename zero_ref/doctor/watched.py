"""Where the optimizers that `watch` knows have their parameters and gradients, and what they shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.gradients import WHOLE
from zero_ref.shard.stepper import GradientSource

Facts = dict[str, Any]


class Tensors:
    """Parameters in the optimizer's groups, with gradients in `.grad`. DTensors are gathered whole."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.inner = optimizer, getattr(optimizer, "optim", optimizer)

    def groups(self) -> list[tuple[Facts, list[Any]]]:
        """The options and the parameters of each group."""
        groups = self.optimizer.param_groups
        other = ("params", "param_names")
        return [({k: v for k, v in group.items() if k not in other}, group["params"]) for group in groups]

    def value(self, tensor: Any) -> torch.Tensor:
        """The whole tensor. Collective: all ranks, if it is a DTensor."""
        full = getattr(tensor, "full_tensor", None)
        return (full() if callable(full) else tensor).detach()

    def grad(self, param: Any) -> torch.Tensor | None:
        """The whole gradient; None if there is none. Collective: all ranks, if it is a DTensor."""
        return None if param.grad is None else self.value(param.grad)

    def add_up(self) -> bool:
        """Whether each rank has other parts of gradients, and zeros or nothing elsewhere."""
        return False

    def numel(self, param: Any) -> int:
        """The number of elements of the whole tensor."""
        return int(param.numel())


class Slices(Tensors):
    """This package's optimizer, whose gradients may lie in the slices that a rank owns."""

    def add_up(self) -> bool:
        """Whether its backward reduced gradients to their owners."""
        return self.optimizer.backward.gradients is not WHOLE

    def value(self, tensor: Any) -> torch.Tensor:
        """The whole tensor, after the new parameters have arrived."""
        if self.optimizer.arriving is not None:
            self.optimizer.arriving.wait()
        return super().value(tensor)

    def grad(self, param: Any) -> torch.Tensor | None:
        """The gradient; after a reduction to owners, with zeros where this rank owns nothing."""
        if not self.add_up():
            return super().grad(param)
        source, whole = GradientSource(None, self.optimizer.backward.gradients.in_slices), None
        for own in self.optimizer.shard.owned:
            part = source.of_slice(own) if own.param is param else None
            if part is not None:
                whole = torch.zeros_like(param) if whole is None else whole
                own.part_of(whole).copy_(part)
        return whole


def parts_of(optimizer: Any) -> Tensors:
    """The way to an optimizer's whole parameters and gradients.

    Raises:
        ValueError: its groups hold flat buffers, as DeepSpeed's, or it makes its update during backward.
    """
    if type(optimizer).__module__.startswith("deepspeed."):
        raise ValueError("DeepSpeed's groups hold flat buffers, which the watch does not know.")
    ours = isinstance(optimizer, ZeroRedundancyOptimizer)
    options, name = (optimizer.registered.options, "") if ours else (optimizer, "_")
    if getattr(options, f"{name}overlap_with_ddp", False):
        raise ValueError("with overlap_with_ddp the update is made during backward, where no step is seen.")
    return Slices(optimizer) if ours else Tensors(optimizer)


def plain_class(optimizer: Any) -> Callable[..., Any]:
    """The class of plain optimizer that this one shards, or is.

    >>> plain_class(torch.optim.SGD([torch.zeros(1)])).__name__
    'SGD'

    Raises:
        ValueError: it cannot be told.
    """
    inner = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None) or optimizer
    if inner is optimizer and not type(inner).__module__.startswith("torch.optim."):
        kind = type(inner).__name__
        raise ValueError(f"{kind} may shard any class: give plain=, which makes the plain optimizer.")
    return type(inner)


def state_tensors(plain: Callable[..., Any], options: Facts) -> int:
    """The number of tensors, each as large as the parameter, that the plain optimizer keeps of one.

    >>> state_tensors(torch.optim.AdamW, {}), state_tensors(torch.optim.SGD, {"momentum": 0.9})
    (2, 1)
    """
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.ones(3, 2)
    made = plain([options | {"params": [param]}])
    with torch.enable_grad():
        made.step()
    return sum(isinstance(one, torch.Tensor) and one.numel() == 6 for one in made.state[param].values())


def fingerprint(tensor: torch.Tensor) -> int:
    """A number of 64 bits that differs where a bit of the tensor does, to compare tensors by 8 bytes.

    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    total, first = 0, 1
    for piece in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(1 << 23):
        words = nn.functional.pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
        # Each word counts times an odd number of its own, so a changed word changes the sum modulo 2**64.
        weights = torch.arange(first, first + 2 * words.numel(), 2, device=words.device)
        total, first = total + int((words * weights).sum()), first + 2 * words.numel()
    return total % (1 << 64)
