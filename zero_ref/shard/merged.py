"""Step many small tensors as one. This adds speed to the local step of `minimal.py`.

An optimizer spends some microseconds on each tensor, whatever its size. In a bucket the parameters of a rank
are contiguous, and so are small master copies, so an elementwise optimizer can step one tensor over many of
them instead. The merging is undone after every step: the groups list the members, and each has its own state,
whose tensors are views of the merged state. These views may be changed in place. A member's entry that was
replaced, or a counter that was changed, is found at the next step, which merges the state anew if it can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from zero_ref.plan.partition import ALIGNMENT
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.checks import is_elementwise
from zero_ref.shard.several import class_of

CONTAINERS = (list, tuple, dict)

SMALL_NUMEL = 2**14
"""Up to this size, copying a gradient is faster than stepping one more tensor (bench/NOTES.md)."""


def _can_be_merged(tensor: torch.Tensor, limit: float) -> bool:
    numel = tensor.numel()
    return 0 < numel <= limit and numel % ALIGNMENT == 0 and not is_traceable_wrapper_subclass(tensor)


@torch.no_grad()
def place_end_to_end(tensors: Iterable[torch.Tensor]) -> None:
    """Move those that can be merged into one flat tensor for each dtype and device. The objects stay."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if _can_be_merged(tensor, SMALL_NUMEL):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for of_kind in kinds.values():
        flat = torch.cat([flat_view(tensor.detach()) for tensor in of_kind])
        for tensor, part in zip(of_kind, flat.split([tensor.numel() for tensor in of_kind])):
            tensor.data = part.as_strided(tensor.size(), tensor.stride())


def _runs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those that follow each other directly in the same memory, in order of their addresses."""
    runs: list[list[torch.Tensor]] = []
    end = None
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        start, stop = _ends(tensor)
        if start == end:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        end = stop
    return [run for run in runs if len(run) > 1]


Place = tuple[int, int, torch.dtype]


def _ends(tensor: torch.Tensor) -> tuple[Place, Place]:
    """Where a tensor begins and ends: the address, and what a neighbour has in common with it."""
    start, storage, dtype = tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.dtype
    return (start, storage, dtype), (start + tensor.nbytes, storage, dtype)


def _lie_together(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they follow each other directly in the same memory."""
    ends = [_ends(tensor) for tensor in tensors]
    return all(stop == start for (_, stop), (start, _) in pairwise(ends))


class MergedRun:
    """Tensors that are contiguous in memory, and one tensor over all of them.

    Args:
        members: in order of their addresses.
        params: whose `.grad` each is stepped with: the member itself, or the parameter that it is a copy of.
        copies: gradients that do not lie together may be copied.
    """

    def __init__(
        self, members: Sequence[torch.Tensor], params: Sequence[torch.Tensor], copies: bool = True
    ) -> None:
        self.members, self.params, self.copies = members, params, copies
        flat = members[0].detach().as_strided((sum(member.numel() for member in members),), (1,))
        self.whole = flat.requires_grad_()
        self.are_copies = members[0] is not params[0]
        self.gradients: list[torch.Tensor] = []  # views of the merged gradient
        self.gradient: torch.Tensor | None = None
        self.state: dict[Any, Any] = {}
        self.given: list[Any] = []  # the values of `state` that members have views of
        self.of_members: list[dict[Any, Any]] = []  # the state that each member was given
        self.values: list[Any] = []  # all that is in `of_members`, one after the other
        self.counters: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def windows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The views of a merged tensor, one for each member, in its shape and strides."""
        parts = whole.split([member.numel() for member in self.members])
        return [part.as_strided(m.size(), m.stride()) for part, m in zip(parts, self.members)]

    def take_gradients(self) -> bool:
        """Merge the members' gradients; False if one is missing or sparse, or they may not be copied."""
        grads = [grad for p in self.params if (grad := p.grad) is not None and grad.layout == torch.strided]
        if len(grads) < len(self.members):
            return False
        if not self.copies:
            together = _lie_together(grads) and all(
                grad.stride() == member.stride() for grad, member in zip(grads, self.members)
            )
            if together:
                first = grads[0]
                self.whole.grad = first.as_strided(self.whole.shape, (1,), first.storage_offset())
            return together
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole, requires_grad=False)
            self.gradients = self.windows(self.gradient)
        torch._foreach_copy_(self.gradients, grads)
        if self.are_copies:  # an optimizer may step a list of its own, in place of its groups
            for member, gradient in zip(self.members, self.gradients):
                member.grad = gradient
        self.whole.grad = self.gradient
        return True

    def drop_gradients(self) -> None:
        """Undo `take_gradients`. Those of copies are freed: between steps a rank keeps only its state."""
        self.whole.grad = None
        if self.are_copies:
            self.gradient, self.gradients = None, []
            for member in self.members:
                member.grad = None

    def take_state(self, state: dict[Any, dict[Any, Any]]) -> bool:
        """Merge the members' state, if it is not merged yet; False if they were not stepped together."""
        if self.of_members and self._is_as_given(state):
            # In a list nobody would notice that the optimizer has replaced a tensor.
            return not any(isinstance(value, CONTAINERS) for value in self.given)
        states = [dict.get(state, member) or {} for member in self.members]
        self.state, self.given = {}, []
        for key, value in states[0].items():
            values: list[Any] = [of_member.get(key) for of_member in states]
            if _follows(value, self.members[0]):
                if not all(map(_follows, values, self.members)):
                    return False
                value = torch.empty_like(self.whole, dtype=value.dtype, requires_grad=False)
                torch._foreach_copy_(self.windows(value), values)
            elif not all(_same(other, value) for other in values):
                return False
            self.state[key] = value
        return all(of_member.keys() == self.state.keys() for of_member in states)

    def _is_as_given(self, state: dict[Any, dict[Any, Any]]) -> bool:
        """Whether nobody has replaced what members have, or written to their counters."""
        values = _values_of(self.of_members)
        return (
            all(map(is_, map(partial(dict.get, state), self.members), self.of_members))
            and len(values) == len(self.values)
            and all(map(is_, values, self.values))
            and all(of_members._version == version for _, of_members, version in self.counters)
        )

    def _part(self, value: Any, place: int) -> Any:
        """A member's copy of a list, tuple or dict of the merged state: it will be stepped by itself."""

        def part(leaf: Any) -> Any:
            if _follows(leaf, self.whole):
                return self.windows(leaf)[place]
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(part, value)

    def give_state(self, state: dict[Any, dict[Any, Any]]) -> None:
        """Give each member its view of the merged state, and a counter of its own for each of the run's."""
        values = list(self.state.values())
        if len(values) != len(self.given) or not all(map(is_, values, self.given)):
            self.given, self.counters = values, []
            parts = [self._of_members(value) for value in values]
            for member, *of_member in zip(self.members, *parts):
                state[member] = dict(zip(self.state, of_member))
            self.of_members = [state[member] for member in self.members]
            self.values = _values_of(self.of_members)
        for number, (value, of_members, _) in enumerate(self.counters):
            of_members.copy_(value.expand_as(of_members))
            self.counters[number] = value, of_members, of_members._version

    def _of_members(self, value: Any) -> Sequence[Any]:
        """What each member gets of a value of the merged state."""
        if isinstance(value, CONTAINERS):
            return [self._part(value, place) for place in range(len(self.members))]
        if not isinstance(value, torch.Tensor):
            return [value] * len(self.members)
        if _follows(value, self.whole):
            return self.windows(value)
        of_members = value.new_empty(len(self.members), *value.shape)
        self.counters.append((value, of_members, 0))
        return of_members.unbind()


class MergedSlices:
    """The runs of small tensors in a local optimizer, merged during a step.

    Args:
        optim: the local optimizer; only groups of an elementwise class are merged.
        params: for each tensor that may be merged, the parameter whose `.grad` it is stepped with.
        limit: elements of the largest tensor to merge. None is for tensors of any size, whose gradients lie
            together as they do and so need no copy.

    Attributes:
        members: the tensors that are merged.
    """

    def __init__(
        self, optim: Optimizer, params: Mapping[torch.Tensor, torch.Tensor], limit: int | None = None
    ) -> None:
        self.optim = optim
        self.runs: list[MergedRun] = []
        self.apart = [group["params"] for group in optim.param_groups]
        most = math.inf if limit is None else limit
        for group in optim.param_groups if params else ():
            if is_elementwise(class_of(group, optim)):
                fit = [t for t in group["params"] if _can_be_merged(t, most) and t in params]
                self.runs += [
                    MergedRun(run, [params[member] for member in run], limit is not None)
                    for run in _runs(fit)
                ]
        self._arrange()

    def _arrange(self) -> None:
        """List each run in place of its members."""
        run_of = {member: run for run in self.runs for member in run.members}
        self.members = run_of.keys()
        self.together = self.apart
        if not run_of:
            return
        self.together = []
        for of_group in self.apart:
            runs: dict[MergedRun, None] = {}
            alone = []
            for local in of_group:
                if (run := run_of.get(local)) is not None:
                    runs[run] = None
                else:
                    alone.append(local)
            self.together.append([*(run.whole for run in runs), *alone])

    def merge(self) -> None:
        """Replace the members by their runs; a run that cannot be merged is dissolved for good."""
        fit = [run for run in self.runs if run.take_gradients() and run.take_state(self.optim.state)]
        if len(fit) < len(self.runs):
            self._dissolve(run for run in self.runs if run not in fit)
            self.runs = fit
            self._arrange()
        for run in self.runs:
            self.optim.state[run.whole] = run.state
        self._list(self.together)

    def split(self) -> None:
        """Replace the runs by their members, with groups and state as if each had been stepped by itself."""
        self._list(self.apart)
        for run in self.runs:
            run.drop_gradients()
            run.state = self.optim.state.pop(run.whole, run.state)
            run.give_state(self.optim.state)

    def dissolve(self) -> None:
        """From now on step each member by itself, with its own step counter."""
        if self.runs:
            self._dissolve(self.runs)
            self.runs = []
            self._arrange()

    def unshare(self) -> None:
        """Give each member a step counter of its own, before others than the runs step it."""
        self._dissolve(self.runs)

    def _dissolve(self, runs: Iterable[MergedRun]) -> None:
        for run in runs:
            run.of_members = []
            run.drop_gradients()
            for member in run.members:
                # Its own entry, and not that of its parameter, which may have come to be cut.
                of_member = dict.get(self.optim.state, member) or {}
                for key, value in of_member.items():
                    if isinstance(value, torch.Tensor) and not _follows(value, member):
                        of_member[key] = value.clone()

    def _list(self, params_of_group: Sequence[list[torch.Tensor]]) -> None:
        for group, params in zip(self.optim.param_groups, params_of_group):
            group["params"] = params


def _values_of(states: Iterable[dict[Any, Any]]) -> list[Any]:
    # Thousands in each step, so without a loop in Python.
    return [*chain.from_iterable(map(dict.values, states))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, CONTAINERS):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _follows(value: Any, param: torch.Tensor) -> bool:
    """Whether the value is a tensor in the parameter's shape, on its device."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and value.device == param.device
