"""The plain optimizer beside a job's own: given what the job has, it makes the step that the job ought to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.watched import Facts, Tensors
from zero_ref.shard.buckets import flat_like, flat_view

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

    def take_state(self, params: Sequence[Any], keys: Sequence[str], group: dist.ProcessGroup | None) -> bool:
        """Begin with the state that the job has, put together from the ranks' parts; return if there is any.

        Args:
            keys: of the state that the plain optimizer keeps of a parameter.
            group: a group of Gloo. Collective: all its ranks.
        """
        state = dict[int, Facts]()
        for number, (param, twin) in enumerate(zip(params, self.twins)):
            for key, start, value in _of_ranks(self.parts.parts_of_state(param, keys), twin, group):
                of_param = state.setdefault(number, {})
                if start is None:
                    of_param[key] = value
                else:
                    whole = of_param.setdefault(key, torch.zeros_like(twin, dtype=value.dtype).detach())
                    flat_view(whole)[start : start + len(value)] = value
        if state:
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        return bool(state)

    def step(self) -> None:
        """Make the plain step."""
        with torch.enable_grad():
            self.optimizer.step()

    def departure(self, number: int, value: torch.Tensor) -> str | None:
        """How a parameter has moved otherwise than its copy; None if it has not."""
        return departure(value, self.old[number], self.twins[number].detach(), self.tolerance)

    def lost_state(self, params: Sequence[Any]) -> tuple[dict[str, tuple[int, str]], set[tuple[int, str]]]:
        """What the job's optimizer shows of its state on this rank and is not the shadow's.

        Returns:
            By the state's key the number of the first parameter, and the norms. And all that it shows: the
            numbers of parameters, with the keys.
        """
        found, there = dict[str, tuple[int, str]](), set[tuple[int, str]]()
        for number, (param, twin) in enumerate(zip(params, self.twins)):
            expected = self.optimizer.state[twin]
            shown = self.parts.state(param, list(expected))
            parts = self.parts.parts_of_state(param, list(expected))
            there |= {(number, key) for *_, values in parts for key in values}
            for key, value in expected.items() if shown else ():
                was, now = torch.as_tensor(value), shown.get(key, 0.0)
                now = self.parts.value(now) if isinstance(now, torch.Tensor) else torch.tensor(now)
                was, now = was.cpu().double().flatten(), now.cpu().double().flatten()
                if now.numel() in (1, was.numel()) and not torch.allclose(now, was, self.tolerance):
                    found.setdefault(key, (number, f"its norm is {now.norm():.6g} and was {was.norm():.6g}"))
        return found, there


def _of_ranks(
    parts: Sequence[tuple[int, int, Facts]], twin: torch.Tensor, group: dist.ProcessGroup | None
) -> Iterator[tuple[str, int | None, Any]]:
    """What the ranks' parts of one parameter's state have, each thing once, from the first rank that has it.

    Yields:
        The key, and elements in the order of memory with the number of the first one; or None and a value
        that has not a number for each element.
    """
    mine, facts = [], []
    for start, stop, values in parts:
        tensors = {key: one for key, one in values.items() if isinstance(one, torch.Tensor)}
        each = {key: one for key, one in tensors.items() if one.ndim and one.numel() == stop - start}
        flat = flat_like if stop - start == twin.numel() else lambda one, _: one.flatten()
        mine.append({key: flat(one, twin).cpu() for key, one in each.items()})
        others = {k: tensors[k].cpu() if k in tensors else v for k, v in values.items() if k not in each}
        facts.append((start, stop, {key: one.dtype for key, one in each.items()}, others))
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    of_ranks, seen = [facts] * size, set[tuple[str, int]]()
    if group is not None:
        dist.all_gather_object(of_ranks, facts, group=group)
    for root, of_rank in enumerate(of_ranks):
        for place, (start, stop, dtypes, others) in enumerate(of_rank):
            yield from ((key, None, value) for key, value in others.items() if (key, start) not in seen)
            new = {key: dtype for key, dtype in dtypes.items() if (key, start) not in seen}
            seen.update((key, start) for key in [*others, *dtypes])
            for key, dtype in new.items():
                elements = torch.empty(stop - start, dtype=dtype)
                if root == rank:
                    elements.copy_(mine[place][key])
                if group is not None:
                    dist.broadcast(elements, group_src=root, group=group)
                yield key, start, elements


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
    sizes = step.abs().nan_to_num(0.0, 0.0, 0.0)
    # An element may also be off by some units in its last place.
    bound = tolerance * (step.abs() + QUIET * sizes.amax()) if sizes.numel() else sizes
    bound += 4 * torch.finfo(value.dtype).eps * right.abs()
    bad = ~(off <= bound) & ~right.isnan() & (value != right)
    if not bad.any():
        return None
    place = int((off - bound).where(bad, -torch.inf).nan_to_num(torch.inf).flatten().argmax())
    finite = moved.isfinite() & step.isfinite()
    length = step[finite].square().sum()
    times = float((moved * step)[finite].sum() / length) if length else 1.0
    how = "otherwise than" if abs(times - 1) < 5e-4 else f"{times:.3f} times as far as"
    how = f"{how} the plain step" if length else "and the plain step leaves it"
    return (
        f"moved {how}: element {place} is "
        f"{value.flatten()[place]:.6g} and should be {right.flatten()[place]:.6g}, "
        f"{int(bad.sum())} of {bad.numel()} elements are wrong"
    )
