"""What DDP's communication hooks have done to an optimizer in the last backward.

The hooks of `overlap.py` and `reduction.py` write it. What stands around the step (`around.py`), clipping,
joins and a repartition read it: the one place where they meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from zero_ref.built import Built
from zero_ref.groups import ParamGroup, options_of


@dataclass
class InBackward:
    """The state of an optimizer between a backward and the step that follows it.

    Args:
        begun: a hook has begun its work on a backward and has not seen the end of it.
        under_way: exchanges of gradients that the hook has started.
        updated: the update was made in backward; the next `step` has nothing left to do.
        owner_only: each rank has the reduced gradients of what it owns, and no others.
        used: where `owner_only`, the parameters that have a gradient on their owner.
        shows_infinities: all the same, each rank has a gradient that is not finite if one rank has.
        first_bucket: the parameters of the bucket that the last backward completed first.
        are_views: gradients are windows of DDP's buckets.
        backwards: how many have begun.
        zeroed: whether gradients that were windows have been zeroed since.
        late: the hook in use makes its update when backward is over, from the gradients it leaves.
        gradients: what the update was made from: each parameter, its gradient and the version of that.
        kept: where gradients were reduced to owners, those that this rank has kept, as in `gradients`.
        may_change: `kept` may be changed before they are used.
        options: the groups with which it was made, and their options at that time.
    """

    begun: bool = False
    under_way: list[Any] = field(default_factory=list)
    updated: bool = False
    owner_only: bool = False
    used: frozenset[int] = frozenset()
    shows_infinities: bool = False
    late: bool = False
    may_change: bool = False
    first_bucket: Sequence[torch.Tensor] = ()
    are_views: bool = False
    backwards: int = 0
    zeroed: list[Zeroed] = field(default_factory=list)
    _task: int = -1
    # Weak, or zero_grad() would free no memory.
    gradients: list[Mark] = field(default_factory=list)
    kept: list[Mark] = field(default_factory=list)
    options: list[tuple[ParamGroup, dict[str, Any]]] = field(default_factory=list)

    def begin(self, first_bucket: Sequence[torch.Tensor] = (), are_views: bool = False) -> None:
        """The first bucket of a backward is there."""
        self.first_bucket, self.are_views = first_bucket, are_views
        task = torch._C._current_graph_task_id()
        self.backwards += task != self._task  # a hook within a hook begins the same one
        self._task = task
        for reduction in self.under_way:
            # Of a backward that ended in an error. Freed before they are done, they would block the network.
            reduction.wait()
        self.begun, self.under_way = True, []

    def end(self) -> None:
        """Backward is over."""
        self.begun, self.under_way = False, []

    def remember(self, params: Iterable[torch.Tensor], groups: Iterable[ParamGroup]) -> None:
        """The update was made: note from what, to notice a later change that could have no effect."""
        self.end()
        self.updated = True
        self.gradients = _marked(params)
        self._watch(self.gradients)
        self.options = [(group, options_of(group)) for group in groups]

    def keep(self, params: Iterable[torch.Tensor]) -> None:
        """Each rank has the reduced gradients of what it owns: these parameters', and no others."""
        self.owner_only = True
        self.kept = _marked(params)
        self._watch(self.kept)

    def changed(self) -> torch.Tensor | None:
        """A parameter whose gradient this rank has kept, and somebody has changed since, if there is one.

        GradScaler's unscaling does not count as a change to torch.
        """
        if self.owner_only and not self.may_change:
            for param, grad, version in self.kept:
                if param.grad is not None and (param.grad is not grad() or param.grad._version != version):
                    return param
        return None

    def check_as_kept(self, rank: int, built: Built) -> None:
        """Refuse gradients that only their owners have, and that somebody has changed as each rank sees fit.

        Raises:
            RuntimeError: the gradient of a parameter was changed, as by torch's `clip_grad_norm_`.
        """
        changed = self.changed()
        if changed is not None:
            number = next(number for number, param in enumerate(built.params) if param is changed)
            raise RuntimeError(
                f"rank {rank}: the gradient of parameter {built.name(number)} was changed after backward. "
                "With reduce_to_owners each rank has only the gradients of what it owns, and "
                "torch.nn.utils.clip_grad_norm_ finds another norm and scales by another factor on each. "
                "Use zero_ref.clip_grad_norm_(optimizer, max_norm). To change each element by itself, as "
                "torch.nn.utils.clip_grad_value_ does, pass reduce_to_owners(zero, may_change=True)."
            )

    def mark_again(self) -> None:
        """Kept gradients were changed, by the same rule on all ranks."""
        self.kept = _marked(param for param, _, _ in self.kept)

    def take_gradients(self) -> None:
        """A step has used the gradients, which are still there."""
        self.owner_only = False
        self.mark_again()

    def forget_gradients(self) -> None:
        """The gradients are gone."""
        self.owner_only = False
        self.kept = []
        self._watch([])

    def _watch(self, marked: Iterable[Mark]) -> None:
        """Find out whether windows are zeroed before the next backward adds to them.

        Afterwards it could not be seen: after zero_grad, too, DDP takes the same window for the gradient.
        """
        for one in self.zeroed:
            one.handle.remove()
        params = [param for param, _, _ in marked] if self.are_views else []
        if self.backwards > 1:
            # Gradients in other buckets are still as they were when the first is complete. Not so after the
            # first backward: DDP then makes new buckets, and puts their windows in place of all gradients.
            first = set(self.first_bucket)
            params = [param for param in params if param in first][:1]
        self.zeroed = [Zeroed(param) for param in params]

    def check_zeroed(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> None:
        """Refuse a backward that adds to gradients which only owners have: they would be averaged once more.

        Args: as `check_not_accumulated`.
        Raises:
            RuntimeError: there are such gradients.
        """
        complete = set(first_bucket)
        for param, grad, version in self.kept:
            if param.grad is None or param.grad is not grad():
                continue
            # Of a window that this backward has completed `zeroed` knows.
            if not (are_views and (param in complete or param.grad._version != version)):
                break
        else:
            if all(self.zeroed) or not self.kept:
                return
        self._watch(self.kept)
        raise RuntimeError(
            "this backward adds to gradients that the last one reduced to their owners, so they would be "
            "averaged over ranks of which most have none. Call optimizer.zero_grad() before it, or set them "
            "to None; to accumulate, run all but the last backward under ddp.no_sync()."
        )

    def check_not_accumulated(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> None:
        """Refuse a second backward on top of gradients that an update was already made from.

        Args:
            first_bucket: the parameters of the bucket that this backward has completed first.
            are_views: gradients are windows of DDP's buckets.
        Raises:
            RuntimeError: neither a step nor zero_grad has followed the update.
        """
        complete = set(first_bucket)
        for param, grad, version in self.gradients:
            added = param in complete
            if added and are_views:
                continue  # of those `zeroed` knows
            if param.grad is not None and param.grad is grad() and param.grad._version == version + added:
                break
        else:
            if all(self.zeroed) or not self.gradients:
                return
        self._watch(self.gradients)
        raise RuntimeError(
            "a second backward has added to gradients from which the parameters were already updated "
            "(overlap_with_ddp=True), so they would count twice. Call optimizer.zero_grad() before it; to "
            "accumulate, run all but the last backward under ddp.no_sync()."
        )

    def take_update(self, options: Mapping[str, Any]) -> bool:
        """Whether backward has made the update; it counts once.

        Args:
            options: what `step` was called with.
        Raises:
            ValueError: options for a local step that has already been made.
            RuntimeError: the gradients, as by clipping, or the learning rate or another option were changed
                after the update; backward has begun the update and not come to its end.
        """
        if self.begun:
            self.begun = False
            raise RuntimeError(
                "the last backward did not come to its end: it raised an error, or some parameter got no "
                "gradient, which DistributedDataParallel(find_unused_parameters=True) allows. Gradients are "
                "reduced, and with overlap_with_ddp=True parameters updated, only in part."
            )
        if self.updated:
            self._check_nothing_is_late(options)
            self._watch([])
        updated, self.updated = self.updated, False
        self.gradients, self.options = [], []
        return updated

    def _check_nothing_is_late(self, options: Mapping[str, Any]) -> None:
        if options:
            raise ValueError(
                f"step() got {sorted(options)}, but with overlap_with_ddp=True the local step was already "
                "made during backward. Set such options when constructing the optimizer."
            )
        for param, grad, version in self.gradients:
            if param.grad is not None and (param.grad is not grad() or param.grad._version != version):
                raise RuntimeError(
                    "gradients were changed between backward() and step(), as by clipping or unscaling, but "
                    "with overlap_with_ddp=True the parameters were already updated from them during "
                    "backward. Construct the optimizer without it to work on gradients before the step."
                )
        for group, before in self.options:
            for key, value in before.items():
                if group[key] is not value and repr(group[key]) != repr(value):
                    raise RuntimeError(
                        f"{key} was changed from {value!r} to {group[key]!r} between backward() and step(), "
                        "but with overlap_with_ddp=True the parameters were already updated during backward. "
                        "Change it after step() or before backward()."
                    )

    @property
    def refuses_scaler(self) -> str | None:
        """Why torch.amp.GradScaler cannot work on the gradients of the last backward; None if it can."""
        if self.updated:
            return (
                "torch.amp.GradScaler unscales gradients before the step, but with overlap_with_ddp=True the "
                "parameters were updated during backward. Construct the optimizer without it."
            )
        if self.owner_only and not self.shows_infinities:
            return (
                "torch.amp.GradScaler looks for infinite gradients on each rank by itself, and with "
                "reduce_to_owners only their owner has them. Use reduce_to_owners(zero, scaled=True)."
            )
        return None

    def check_no_scaler(self, optimizer: object) -> None:
        """Refuse a torch.amp.GradScaler, on all ranks, where it cannot work.

        Raises:
            RuntimeError: with the reason.
        """
        called_by_scaler = vars(optimizer).get("found_inf") is not None
        if called_by_scaler and self.refuses_scaler is not None:
            # The scaler takes back what it lent only if step() returns. A step without it is none of its.
            for lent in ("found_inf", "grad_scale"):
                vars(optimizer).pop(lent, None)
            raise RuntimeError(self.refuses_scaler)


class Zeroed:
    """True if a parameter's gradient was None or zero when the next backward came to it, or is so now."""

    # Weak: a parameter holds its hooks.
    def __init__(self, param: torch.Tensor) -> None:
        self.param = TensorWeakRef(param)
        self.found = False
        self.found_in = -1
        self.handle = param.register_hook(self._before_adding)

    def _before_adding(self, _: torch.Tensor) -> None:
        # Once zero, always so: what is there later was added under no_sync.
        if not self.found:
            self.found_in = torch._C._current_graph_task_id()
            param = self.param()
            self.found = param is None or param.grad is None or not bool(param.grad.any())

    def __bool__(self) -> bool:
        if self.found_in != torch._C._current_graph_task_id():
            self._before_adding(torch.empty(0))  # this backward has not come to it yet
        return self.found


Mark = tuple[torch.Tensor, TensorWeakRef, int]
"""A parameter, its gradient and the version of that."""


def _marked(params: Iterable[torch.Tensor]) -> list[Mark]:
    """The gradients as they are."""
    return [(p, TensorWeakRef(p.grad), p.grad._version) for p in params if p.grad is not None]
