"""Step many small tensors as one. This adds speed to the local step of `stairs/owners.py`.

An optimizer spends some microseconds on each tensor, whatever its size. In a bucket the parameters of a rank
are contiguous, and so are small master copies. So an elementwise optimizer can step one tensor over many of
them, its members. Small parameters that lie apart are copied into such a tensor for each step, and back.

The merging is undone after every step: the groups list the members, and each has its own state, whose tensors
are views of the merged state. A program may change these views in place. If it replaces an entry of a
member's state, or changes a step counter, the next step notices and merges the state anew if it can.
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

CONTAINERS = (list, tuple, dict)

MERGED_NUMEL = 2**14
"""Up to this size, copying a gradient is faster than stepping one more tensor (benchmarks/NOTES.md)."""


GATHERED_NUMEL = 2**12
"""Up to this size, it is also faster to copy the parameter, and to copy its new values back."""


def _can_be_merged(tensor: torch.Tensor, limit: float) -> bool:
    numel = tensor.numel()
    return 0 < numel <= limit and numel % ALIGNMENT == 0 and not is_traceable_wrapper_subclass(tensor)


@torch.no_grad()
def place_end_to_end(tensors: Iterable[torch.Tensor]) -> None:
    """Move the tensors that can be merged into one flat tensor for each dtype and device.

    The tensor objects stay the same; their memory changes.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if _can_be_merged(tensor, MERGED_NUMEL):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for of_kind in kinds.values():
        flat = torch.cat([flat_view(tensor.detach()) for tensor in of_kind])
        for tensor, part in zip(of_kind, flat.split([tensor.numel() for tensor in of_kind])):
            tensor.data = part.as_strided(tensor.size(), tensor.stride())


def _contiguous_runs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that follow each other directly in the same memory; each group is sorted by address."""
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


def _over(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a 1-D view over tensors that follow each other directly in the same memory."""
    return tensors[0].detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


Place = tuple[int, int, torch.dtype]
"""(address, address of the storage, dtype). Two tensors are neighbours if one ends where the other begins."""


def _ends(tensor: torch.Tensor) -> tuple[Place, Place]:
    """Return the places at which a tensor begins and ends."""
    start, storage, dtype = tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.dtype
    return (start, storage, dtype), (start + tensor.nbytes, storage, dtype)


def _lie_together(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors follow each other directly in the same memory."""
    ends = [_ends(tensor) for tensor in tensors]
    return all(stop == start for (_, stop), (start, _) in pairwise(ends))


class MergedRun:
    """A run of tensors that follow each other in memory, and one tensor over all of them.

    Args:
        members: the tensors of the run, in order of their addresses.
        params: for each member the tensor whose `.grad` it is stepped with: the member itself, or the
            parameter that it is a copy of.
        copies: gradients that do not lie together may be copied.

    Attributes:
        whole: the tensor over all members, which the optimizer steps.
        state: the state of `whole`.
    """

    def __init__(
        self, members: Sequence[torch.Tensor], params: Sequence[torch.Tensor], copies: bool = True
    ) -> None:
        self.members, self.params, self.copies = members, params, copies
        self.whole = self._whole().requires_grad_()
        self.are_copies = members[0] is not params[0]
        self.gradient: torch.Tensor | None = None
        self.gradients: list[torch.Tensor] = []  # views of `gradient`, one for each member
        self.state: dict[Any, Any] = {}
        # The state as `split_state` has left it, to notice that a program has replaced something:
        self.shared: list[Any] = []  # the values of `state` of which members have views
        self.of_members: list[dict[Any, Any]] = []  # the state of each member
        self.values: list[Any] = []  # all values in `of_members`, end to end
        # (a step counter in `state`, the members' counters in one tensor, the version of that tensor)
        self.counters: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def _whole(self) -> torch.Tensor:
        """Make a tensor over all members."""
        return _over(self.members)

    def windows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Cut a merged tensor into views, one for each member, in the member's shape and strides."""
        parts = whole.split([member.numel() for member in self.members])
        return [part.as_strided(m.size(), m.stride()) for part, m in zip(parts, self.members)]

    def merge_gradients(self) -> bool:
        """Give `whole` the gradients of all members.

        Returns:
            False if that is not possible: a gradient is missing or sparse, or would have to be copied.
        """
        grads = [grad for p in self.params if (grad := p.grad) is not None and grad.layout == torch.strided]
        if len(grads) < len(self.members):
            return False
        # 1. If nothing may be copied, the gradients themselves must lie like the members.
        if not self.copies:
            together = _lie_together(grads) and all(
                grad.stride() == member.stride() for grad, member in zip(grads, self.members)
            )
            if together:
                first = grads[0]
                self.whole.grad = first.as_strided(self.whole.shape, (1,), first.storage_offset())
            return together
        # 2. Otherwise copy them end to end.
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole, requires_grad=False)
            self.gradients = self.windows(self.gradient)
        torch._foreach_copy_(self.gradients, grads)
        # An optimizer may step a list of its own instead of its groups, so members have gradients, too.
        if self.are_copies:
            for member, gradient in zip(self.members, self.gradients):
                member.grad = gradient
        self.whole.grad = self.gradient
        return True

    def drop_gradients(self) -> None:
        """Undo `merge_gradients`. Copied gradients are freed: between steps a rank keeps only its state."""
        self.whole.grad = None
        if self.are_copies:
            self.gradient, self.gradients = None, []
            for member in self.members:
                member.grad = None

    def return_values(self) -> None:
        """Give the members the values of `whole`, whose memory they have already."""

    def merge_state(self, state: dict[Any, dict[Any, Any]]) -> bool:
        """Merge the members' state, if it is not merged yet.

        Args:
            state: the local optimizer's state.
        Returns:
            False if that is not possible, since the members were not always stepped together.
        """
        # 1. The members still have the views that `split_state` gave them: the merged state is up to date.
        if self.of_members and self._is_as_split(state):
            # In a list, a tensor that the optimizer has replaced would not be noticed.
            return not any(isinstance(value, CONTAINERS) for value in self.shared)
        # 2. Merge anew: tensors in the members' shapes end to end; all other values must be equal.
        states = [dict.get(state, member) or {} for member in self.members]
        self.state, self.shared = {}, []
        for key, value in states[0].items():
            values: list[Any] = [of_member.get(key) for of_member in states]
            if _has_shape_of(value, self.members[0]):
                if not all(map(_has_shape_of, values, self.members)):
                    return False
                value = torch.empty_like(self.whole, dtype=value.dtype, requires_grad=False)
                torch._foreach_copy_(self.windows(value), values)
            elif not all(_is_equal(other, value) for other in values):
                return False
            self.state[key] = value
        return all(of_member.keys() == self.state.keys() for of_member in states)

    def _is_as_split(self, state: dict[Any, dict[Any, Any]]) -> bool:
        """Return whether nobody has replaced members' state or written to their counters since the split."""
        values = _values_of(self.of_members)
        # `map` with `is_`: a loop in Python over thousands of values would take as long as the step.
        return (
            all(map(is_, map(partial(dict.get, state), self.members), self.of_members))
            and len(values) == len(self.values)
            and all(map(is_, values, self.values))
            and all(of_members._version == version for _, of_members, version in self.counters)
        )

    def _part(self, value: Any, place: int) -> Any:
        """Make a member's own list, tuple or dict of the merged state's: the run will be dissolved."""

        def part(leaf: Any) -> Any:
            if _has_shape_of(leaf, self.whole):
                return self.windows(leaf)[place]
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(part, value)

    def split_state(self, state: dict[Any, dict[Any, Any]]) -> None:
        """Give each member views of the merged state, and step counters of its own.

        Args:
            state: the local optimizer's state, which receives that of the members.
        """
        # 1. Make the views, if the optimizer has replaced the merged tensors, as in the first step.
        values = list(self.state.values())
        if len(values) != len(self.shared) or not all(map(is_, values, self.shared)):
            self.shared, self.counters = values, []
            parts = [self._split_value(value) for value in values]
            for member, *of_member in zip(self.members, *parts):
                state[member] = dict(zip(self.state, of_member))
            self.of_members = [state[member] for member in self.members]
            self.values = _values_of(self.of_members)
        # 2. Views have the new values already; copy the counters.
        for number, (value, of_members, _) in enumerate(self.counters):
            of_members.copy_(value.expand_as(of_members))
            self.counters[number] = value, of_members, of_members._version

    def _split_value(self, value: Any) -> Sequence[Any]:
        """Split a value of the merged state: one value for each member."""
        if isinstance(value, CONTAINERS):
            return [self._part(value, place) for place in range(len(self.members))]
        if not isinstance(value, torch.Tensor):
            return [value] * len(self.members)
        if _has_shape_of(value, self.whole):
            return self.windows(value)
        # A tensor in another shape, such as a step counter: all members' counters are rows of one tensor.
        of_members = value.new_empty(len(self.members), *value.shape)
        self.counters.append((value, of_members, 0))
        return of_members.unbind()


class GatheredRun(MergedRun):
    """A run of parameters that lie apart in memory: for each step their values are copied to a buffer.

    Args:
        members: the parameters.
        buffer: for each member a 1-D tensor of its size; these follow each other in memory.
    """

    def __init__(self, members: Sequence[torch.Tensor], buffer: Sequence[torch.Tensor]) -> None:
        self._buffer = buffer
        super().__init__(members, members)
        self._places = [member.detach() for member in members]
        self._copies = self.windows(self.whole.detach())
        self._has_values = False  # `whole` has the members' values, as during a step

    def _whole(self) -> torch.Tensor:
        return _over(self._buffer)

    def merge_gradients(self) -> bool:
        """Give `whole` the gradients of all members, and their values. Returns: as `MergedRun`."""
        self._has_values = super().merge_gradients()
        if self._has_values:
            torch._foreach_copy_(self._copies, self._places)
        return self._has_values

    def return_values(self) -> None:
        if self._has_values:
            torch._foreach_copy_(self._places, self._copies)
            self._has_values = False


class MergedSlices:
    """The runs of small tensors in a local optimizer, merged during a step.

    Args:
        optim: the local optimizer; only groups of an elementwise class are merged.
        params: for each tensor that may be merged, the parameter whose `.grad` it is stepped with.
        limit: elements of the largest tensor to merge. None merges tensors of any size, if their gradients
            lie end to end as the tensors do: then no gradient has to be copied.
        buffers: 1-D memory for the values of parameters that lie apart, by parameter.

    Attributes:
        runs: the runs of tensors that are merged.
        members: the tensors in these runs.
        apart, together: for each parameter group the list of tensors to step, without and with merging.
    """

    def __init__(
        self,
        optim: Optimizer,
        params: Mapping[torch.Tensor, torch.Tensor],
        limit: int | None = None,
        buffers: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.optim = optim
        self.runs: list[MergedRun] = []
        self.apart = [group["params"] for group in optim.param_groups]
        most = math.inf if limit is None else limit
        buffers = buffers or {}
        for group in optim.param_groups if params and is_elementwise(type(optim)) else ():
            fit = [t for t in group["params"] if _can_be_merged(t, most) and t in params]
            together = _contiguous_runs(fit)
            self.runs += [
                MergedRun(run, [params[member] for member in run], limit is not None) for run in together
            ]
            # On an accelerator an optimizer's own default steps tensors together, without copies.
            param_at = {
                buffers[t]: t for t in fit if t in buffers and t.numel() <= GATHERED_NUMEL and t.is_cpu
            }
            self.runs += [
                GatheredRun([param_at[buffer] for buffer in run], run) for run in _contiguous_runs(param_at)
            ]
        self._arrange()

    def _arrange(self) -> None:
        """Make the groups' lists for a step: each run in place of its members."""
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
        # 1. Merge gradients and state.
        fit = [run for run in self.runs if run.merge_gradients() and run.merge_state(self.optim.state)]
        if len(fit) < len(self.runs):
            self._dissolve(run for run in self.runs if run not in fit)
            self.runs = fit
            self._arrange()
        # 2. Show the optimizer the runs: in its state and in its groups.
        for run in self.runs:
            self.optim.state[run.whole] = run.state
        self._list(self.together)

    def split(self) -> None:
        """Replace the runs by their members, with groups and state as if each had been stepped by itself."""
        self._list(self.apart)
        for run in self.runs:
            run.return_values()
            run.state = self.optim.state.pop(run.whole, run.state)
            run.split_state(self.optim.state)
            run.drop_gradients()

    def dissolve(self) -> None:
        """Step each member by itself from now on, with its own step counter."""
        if self.runs:
            self._dissolve(self.runs)
            self.runs = []
            self._arrange()

    def unshare(self) -> None:
        """Give each member a step counter of its own, before it is stepped other than in its run."""
        self._dissolve(self.runs)

    def _dissolve(self, runs: Iterable[MergedRun]) -> None:
        for run in runs:
            run.of_members = []
            run.drop_gradients()
            for member in run.members:
                # `dict.get` finds the member's own entry; LocalStates would look for the slices of a
                # parameter that has been cut meanwhile.
                of_member = dict.get(self.optim.state, member) or {}
                for key, value in of_member.items():
                    # A counter is a row of one tensor for all members. Moments may stay views.
                    if isinstance(value, torch.Tensor) and not _has_shape_of(value, member):
                        of_member[key] = value.clone()

    def _list(self, params_of_group: Sequence[list[torch.Tensor]]) -> None:
        for group, params in zip(self.optim.param_groups, params_of_group):
            group["params"] = params


def _values_of(states: Iterable[dict[Any, Any]]) -> list[Any]:
    # Thousands in each step, so without a loop in Python.
    return [*chain.from_iterable(map(dict.values, states))]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, CONTAINERS):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    """Return whether the value is a tensor in the parameter's shape, on its device."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and value.device == param.device
