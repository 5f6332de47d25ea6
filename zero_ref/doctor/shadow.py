"""The plain optimizer beside a job's own: given what the job has, it makes the step that the job ought to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.watched import Facts, Tensors

QUIET = 0.01
"""What moves less than this share of its tensor's largest step may be off as if it moved so far."""


class Shadow:
    """A plain optimizer with whole copies of all parameters.

    Args:
        plain: makes the plain optimizer of parameter groups.
        parts: the way to the job's parameters and gradients.
        masters: the copies have 32 bits, also where the parameters have 16.
        tolerance: the share of its own step by which an element may be off.
    Collective: all ranks make it, and call `step`, together.
    """

    def __init__(self, plain: Callable[..., Any], parts: Tensors, masters: bool, tolerance: float) -> None:
        self.parts, self.masters, self.tolerance = parts, masters, tolerance
        self.twins: list[nn.Parameter] = []
        self.old: list[torch.Tensor] = []
        self.optimizer = plain([self._twins_of(group) for group in parts.groups()])

    def _twins_of(self, group: tuple[Facts, list[Any]]) -> Facts:
        options, params = group
        twins = [
            nn.Parameter(value.float() if self.masters and value.itemsize < 4 else value.clone())
            for value in map(self.parts.stepped, params)
        ]
        self.twins += twins
        return options | {"params": twins}

    def follow(self, used: Sequence[bool], add_up: bool, group: dist.ProcessGroup | None) -> bool:
        """Take the job's groups, options, parameters and gradients; return whether the job makes a step.

        Args:
            used: for each parameter whether any rank has its gradient.
            add_up: gradients of the ranks are parts, whose sum is the gradient.
            group: a group of Gloo, for these sums.
        """
        groups = self.parts.groups()
        for new in groups[len(self.optimizer.param_groups) :]:
            self.optimizer.add_param_group(self._twins_of(new))
        for (options, _), theirs in zip(groups, self.optimizer.param_groups):
            theirs.update({key: value for key, value in options.items() if key in theirs})
        self.old = []
        params = [param for _, of_group in groups for param in of_group]
        for param, twin, has in zip(params, self.twins, used):
            value, grad = self.parts.stepped(param), self.parts.grad(param)
            twin.requires_grad_(param.requires_grad)
            if twin.dtype == value.dtype:  # masters keep what rounding took from the parameters
                twin.copy_(value)
            if add_up and has:
                whole = (torch.zeros_like(value) if grad is None else grad).cpu().clone()
                dist.all_reduce(whole, group=group)
                grad = whole.to(value.device)
            twin.grad = None if grad is None else grad.to(twin.dtype, copy=True)
            self.old.append(twin.detach().clone())
        grads = [twin.grad for twin in self.twins if twin.grad is not None]
        factor = self.parts.factor(grads)
        for grad in grads:
            grad.mul_(1.0 if factor is None else factor)
        return factor is not None

    def step(self) -> None:
        """Make the plain step."""
        with torch.enable_grad():
            self.optimizer.step()

    def departure(self, number: int, value: torch.Tensor) -> str | None:
        """How a parameter has moved otherwise than its copy; None if it has not."""
        return departure(value, self.old[number], self.twins[number].detach(), self.tolerance)

    def lost_state(self, params: Sequence[Any]) -> dict[str, tuple[int, str]]:
        """What the job's optimizer shows of its state on this rank and is not the shadow's.

        Returns:
            By the state's key the number of the first parameter, and the norms.
        """
        found = dict[str, tuple[int, str]]()
        for number, (param, twin) in enumerate(zip(params, self.twins)):
            expected = self.optimizer.state[twin]
            shown = self.parts.state(param, list(expected))
            for key, value in expected.items() if shown else ():
                was, now = torch.as_tensor(value), shown.get(key, 0.0)
                now = self.parts.value(now) if isinstance(now, torch.Tensor) else torch.tensor(now)
                was, now = was.cpu().double().flatten(), now.cpu().double().flatten()
                if now.numel() in (1, was.numel()) and not torch.allclose(now, was, self.tolerance):
                    found.setdefault(key, (number, f"its norm is {now.norm():.6g} and was {was.norm():.6g}"))
        return found


def departure(value: torch.Tensor, old: torch.Tensor, ought: torch.Tensor, tolerance: float) -> str | None:
    """How a tensor has moved otherwise than it ought to have; None if it has not.

    >>> old, ought = torch.tensor([1.0, 1.0]), torch.tensor([0.75, 0.5])
    >>> departure(torch.tensor([0.5, 0.0]), old, ought, tolerance=1e-3)
    'moved 2.000 times as far as the plain step: element 1 is 0 and should be 0.5, 2 of 2 elements are wrong'

    Args:
        value, old, ought: of one shape: the tensor now, before its step, and after the plain one.
        tolerance: the share of its own step by which an element may be off.
    """
    step, right = ought.double() - old.double(), ought.to(value.dtype).double()
    moved, off = value.double() - old.double(), (value.double() - right).abs()
    # An element may also be off by some units in its last place.
    bound = tolerance * (step.abs() + QUIET * step.abs().max())
    bound += 4 * torch.finfo(value.dtype).eps * right.abs()
    bad = ~(off <= bound) & ~right.isnan()
    if not bad.any():
        return None
    place, length = int((off - bound).flatten().argmax()), step.square().sum()
    how = f"{(moved * step).sum() / length:.3f} times as far as the plain step"
    return (
        f"moved {how if length else 'and the plain step leaves it'}: element {place} is "
        f"{value.flatten()[place]:.6g} and should be {right.flatten()[place]:.6g}, "
        f"{int(bad.sum())} of {bad.numel()} elements are wrong"
    )
