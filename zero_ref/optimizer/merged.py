"""Many small tensors stepped as one, so that a local step takes its time for bytes and not for tensors.

An optimizer spends some microseconds on each tensor, whatever its size. In a bucket the parameters that a
rank owns lie end to end; where the optimizer treats each element by itself, one tensor over many of them can
be stepped instead. Between steps nothing shows of it: the groups list the parameters, and each has a state of
its own, whose tensors are windows of those of the whole. They may be changed in place; another tensor in
their place would not be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zero_ref.optimizer.buckets import Message, messages_within

SMALL_NUMEL = 2**14
"""Up to here copying a gradient takes less time than a tensor of its own does (bench/NOTES.md)."""

ALIGNMENT = 64
"""As in `partition.even`: what begins at such a multiple is computed as in its own tensor, bit for bit."""


class MergedRun:
    """Parameters that lie end to end, and the one tensor over all of them.

    Args:
        message: its tensor is their memory, its slices are whole parameters.
        params: all, in registration order.
    """

    def __init__(self, message: Message, params: Sequence[torch.Tensor]) -> None:
        self.members = [params[piece.param] for piece in message.slices]
        self.whole = message.tensor.detach().requires_grad_()
        self.gradient = torch.empty_like(message.tensor)
        self.gradients = self.windows(self.gradient)
        self.state: dict[Any, Any] = {}
        self.given: list[Any] = []
        self.first: dict[Any, Any] | None = None

    def windows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a tensor over all members, each in its member's shape and strides."""
        parts = whole.split([member.numel() for member in self.members])
        return [part.as_strided(m.size(), m.stride()) for part, m in zip(parts, self.members)]

    def take_gradients(self) -> bool:
        """Copy the members' gradients; False if one is missing or sparse."""
        grads = [grad for m in self.members if (grad := m.grad) is not None and grad.layout == torch.strided]
        if len(grads) == len(self.members):
            torch._foreach_copy_(self.gradients, grads)
        return len(grads) == len(self.members)

    def take_state(self, state: dict[Any, dict[Any, Any]]) -> bool:
        """Make one state of the members', unless it is theirs; False if they were not stepped together."""
        if self.first is not None and state.get(self.members[0]) is self.first:
            return True
        states = [state.get(member, {}) for member in self.members]
        self.state, self.given = {}, []
        for key, value in states[0].items():
            values: list[Any] = [of_member.get(key) for of_member in states]
            if _follows(value, self.members[0]):
                if not all(map(_follows, values, self.members)):
                    return False
                value = torch.empty_like(self.whole, dtype=value.dtype, requires_grad=False)
                torch._foreach_copy_(self.windows(value), values)
            elif any(other != value for other in values):
                return False
            self.state[key] = value
        return all(of_member.keys() == self.state.keys() for of_member in states)

    def give_state(self, state: dict[Any, dict[Any, Any]]) -> None:
        """Give each member its window of what the step has left; what follows no shape they share."""
        values = list(self.state.values())
        if [id(value) for value in values] == [id(value) for value in self.given]:
            return
        parts = [
            self.windows(value) if _follows(value, self.whole) else [value] * len(self.members)
            for value in values
        ]
        for member, *of_member in zip(self.members, *parts):
            state[member] = dict(zip(self.state, of_member))
        self.given, self.first = values, state[self.members[0]]


class MergedSlices:
    """The runs of small tensors in a local optimizer, for the time of a step.

    Args:
        optim: the local optimizer. It treats each element by itself.
        messages: that this rank sends, with all that it may merge.
        params: all, in registration order.
    """

    def __init__(self, optim: Optimizer, messages: Iterable[Message], params: Sequence[torch.Tensor]) -> None:
        self.optim = optim
        numbers = {param: number for number, param in enumerate(params)}
        self.runs: list[MergedRun] = []
        self.apart = [group["params"] for group in optim.param_groups]
        self.together: list[list[torch.Tensor]] = []
        for of_group in self.apart:
            small = {
                numbers[param]
                for param in of_group
                if param in numbers and param.numel() <= SMALL_NUMEL and param.numel() % ALIGNMENT == 0
            }
            runs = [MergedRun(m, params) for m in messages_within(messages, small) if len(m.slices) > 1]
            merged = {member for run in runs for member in run.members}
            self.runs += runs
            self.together.append(
                [*(run.whole for run in runs), *(param for param in of_group if param not in merged)]
            )

    def merge(self) -> None:
        """Put the runs in their members' places; if one cannot be stepped whole, none of them from now on."""
        if not all(run.take_gradients() and run.take_state(self.optim.state) for run in self.runs):
            self.dissolve()
        for run in self.runs:
            run.whole.grad = run.gradient
            self.optim.state[run.whole] = run.state
        self._list(self.together if self.runs else self.apart)

    def split(self) -> None:
        """Leave groups and state as if each member had been stepped by itself."""
        self._list(self.apart)
        for run in self.runs:
            run.whole.grad = None
            run.state = self.optim.state.pop(run.whole, run.state)
            run.give_state(self.optim.state)

    def dissolve(self) -> None:
        """From now on each is stepped by itself, and counts its own steps."""
        for run in self.runs:
            for member in run.members:
                of_member = self.optim.state.get(member, {})
                for key, value in of_member.items():
                    if isinstance(value, torch.Tensor) and not _follows(value, member):
                        of_member[key] = value.clone()
        self.runs = []

    def _list(self, params_of_group: Sequence[list[torch.Tensor]]) -> None:
        for group, params in zip(self.optim.param_groups, params_of_group):
            group["params"] = params


def _follows(value: Any, param: torch.Tensor) -> bool:
    """It has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and value.device == param.device
