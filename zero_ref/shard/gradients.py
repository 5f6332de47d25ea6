"""The places of the last backward's gradients, and the operations that they allow.

In `stairs/owners.py` every rank has all averaged gradients after a backward, as after any ordinary one. The
communication hooks of `overlap.py` and `reduction.py` add other cases: only the owners have the gradients,
the update has been made from them already, or backward has not ended. Each case is a class. It says which
operations are allowed, and gives the reason where one is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zero_ref.shard.built import Built
from zero_ref.shard.gradient_versions import GradientVersions, WatchedViews
from zero_ref.shard.groups import ParamGroup, options_of


class Gradients:
    """Whole gradients on every rank, as a plain backward or DDP's own reduction leaves them: all is allowed.

    Attributes:
        on_owners: each rank has the reduced gradients of what it owns, and no others.
        used: if only owners have gradients, the numbers of the parameters that have one on their owner.
        why_no_scaler: the reason why torch.amp.GradScaler cannot work on the gradients, or None.
        why_no_clipping: the reason why no global norm can be computed, or None.
        versions: the versions of the gradients, if a second backward must not add to them.
        why_not_added_to: the error message if a second backward adds to the gradients.
        in_slices: gradients of parameters that are cut are in the `.grad` of this rank's slices of them.
    """

    on_owners = False
    used: frozenset[int] = frozenset()
    why_no_scaler: str | None = None
    why_no_clipping: str | None = None
    versions: GradientVersions | None = None
    why_not_added_to = ""
    in_slices: bool = False

    def check_as_left(self, rank: int, built: Built) -> None:
        """Refuse gradients that ranks may have changed in different ways, if only owners have them.

        Raises:
            RuntimeError: another backward has added to the gradients; or the gradient of a parameter was
                changed, as by torch's `clip_grad_norm_`.
        """

    def check_may_be_added_to(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> None:
        """Refuse a backward that adds to these gradients, if they would then count twice.

        Args:
            first_bucket: the parameters of the first bucket that this backward has completed.
            are_views: gradients are views of DDP's buckets.
        Raises:
            RuntimeError: the gradients are still there.
        """
        if self.versions is not None and self.versions.still_there(first_bucket, are_views):
            raise RuntimeError(self.why_not_added_to)

    def is_update_made(self, options: Mapping[str, Any]) -> bool:
        """Return whether backward has already made the update from these gradients.

        Args:
            options: the arguments of `step`.
        Raises:
            ValueError: there are options, but the local step was already made without them.
            RuntimeError: after the update, the gradients were changed (as by clipping) or an option such as
                the learning rate; or a backward has begun the update and not ended.
        """
        return False

    def note_change(self, *, freely: bool = False) -> None:
        """Allow a change that all ranks made by one rule; with `freely`, allow every change from now on."""

    def stepped(self) -> Gradients:
        """Return the case after a step has used these gradients."""
        return self

    def zeroed(self) -> Gradients:
        """Return the case after `zero_grad`."""
        return WHOLE


WHOLE = Gradients()


@dataclass(eq=False)
class _KeptByOwners(Gradients):
    """Gradients that only the owners have.

    Args:
        versions: the versions of the gradients that this rank has kept in the `.grad` of parameters.
        used: as `Gradients`.
        cut_in_slices: backward has left gradients of parameters that are cut in the slices' own `.grad`.
    """

    versions: GradientVersions = field()  # without the default of `Gradients`
    used: frozenset[int] = field()
    cut_in_slices: bool
    why_not_added_to = (
        "this backward adds to gradients that the last one reduced to their owners, so they would be "
        "averaged over ranks of which most have none. Call optimizer.zero_grad() before it, or set them to "
        "None; to accumulate, run all but the last backward under ddp.no_sync()."
    )

    @property
    def in_slices(self) -> bool:  # type: ignore[override]
        # A user who sets every `.grad` to None does not see those of slices, and means to drop them too.
        return self.cut_in_slices and self.versions.any_left


@dataclass(eq=False)
class OnOwners(_KeptByOwners):
    """Gradients that `reduce_to_owners` or `ShardedDataParallel` has reduced to their owners.

    Args:
        versions, used, cut_in_slices: as `_KeptByOwners`.
        scaled, may_change: as `reduce_to_owners`.
    """

    scaled: bool
    may_change: bool
    on_owners = True

    @property
    def why_no_scaler(self) -> str | None:  # type: ignore[override]
        if self.scaled:
            return None
        return (
            "torch.amp.GradScaler looks for infinite gradients on each rank by itself, and with "
            "reduce_to_owners only their owner has them. Use reduce_to_owners(zero, scaled=True), or "
            "ShardedDataParallel(..., scaled=True)."
        )

    def check_as_left(self, rank: int, built: Built) -> None:
        # 1. After a reducing backward, only owned parameters have gradients.
        for number, param in enumerate(built.params):
            if param.requires_grad and param.grad is not None and param not in self.versions.params:
                raise RuntimeError(
                    f"rank {rank}: a backward that reduced nothing, as under ddp.no_sync(), has added to "
                    "gradients that an earlier one had reduced to their owners: parameter "
                    f"{built.name(number)} is not owned here and has a gradient. Call zero_grad() before it; "
                    "to accumulate, run all but the last backward under ddp.no_sync()."
                )
        # 2. The gradients are as backward has left them. GradScaler's unscaling changes no version counter.
        changed = None if self.may_change else self.versions.first_changed()
        if changed is not None:
            number = next(number for number, param in enumerate(built.params) if param is changed)
            raise RuntimeError(
                f"rank {rank}: the gradient of parameter {built.name(number)} was changed after backward. "
                "With reduce_to_owners each rank has only the gradients of what it owns, and "
                "torch.nn.utils.clip_grad_norm_ finds another norm and scales by another factor on each. "
                "Use zero_ref.clip_grad_norm_(optimizer, max_norm). To change each element by itself, as "
                "torch.nn.utils.clip_grad_value_ does, pass may_change=True to reduce_to_owners or "
                "ShardedDataParallel. If another backward has added to the gradient, call zero_grad() before "
                "it."
            )

    def note_change(self, *, freely: bool = False) -> None:
        self.may_change |= freely
        self.versions.renew()

    def stepped(self) -> Gradients:
        self.versions.renew()
        return Stepped(self.versions, self.used, self.cut_in_slices)


class Stepped(_KeptByOwners):
    """The gradients of `OnOwners` after a step has used them: owners still have them until `zero_grad`."""


class UsedInBackward(Gradients):
    """Gradients from which backward has made the update (`overlap_with_ddp=True`): `step` has nothing to do.

    Args:
        versions: the versions of all gradients. Changing a gradient now would have no effect, so it is an
            error at the next step.
        groups: the groups with which the update was made. Changing their options now is an error likewise.
    """

    versions: GradientVersions
    why_not_added_to = (
        "a second backward has added to gradients from which the parameters were already updated "
        "(overlap_with_ddp=True), so they would count twice. Call optimizer.zero_grad() before it; to "
        "accumulate, run all but the last backward under ddp.no_sync()."
    )
    why_no_scaler = (
        "torch.amp.GradScaler unscales gradients before the step, but with overlap_with_ddp=True the "
        "parameters were updated during backward. Construct the optimizer without it."
    )
    why_no_clipping = (
        "clipping by global norm needs all gradients before the first parameter is updated, and with "
        "overlap_with_ddp=True backward has already updated them. Construct the optimizer without "
        "overlap_with_ddp=True, then clip between backward() and step()."
    )

    def __init__(self, versions: GradientVersions, groups: Iterable[ParamGroup]) -> None:
        self.versions = versions
        # (a group, its options as they were in the update)
        self.options = [(group, options_of(group)) for group in groups]

    def is_update_made(self, options: Mapping[str, Any]) -> bool:
        if options:
            raise ValueError(
                f"step() got {sorted(options)}, but with overlap_with_ddp=True the local step was already "
                "made during backward. Set such options when constructing the optimizer."
            )
        if self.versions.first_changed() is not None:
            raise RuntimeError(
                "gradients were changed between backward() and step(), as by clipping or unscaling, but "
                "with overlap_with_ddp=True the parameters were already updated from them during "
                "backward. Construct the optimizer without it to work on gradients before the step."
            )
        for group, before in self.options:
            for key, value in before.items():
                # Compare by repr: `==` of tensors gives a tensor, and NaN differs from itself.
                if group[key] is not value and repr(group[key]) != repr(value):
                    raise RuntimeError(
                        f"{key} was changed from {value!r} to {group[key]!r} between backward() and step(), "
                        "but with overlap_with_ddp=True the parameters were already updated during backward. "
                        "Change it after step() or before backward()."
                    )
        return True

    def stepped(self) -> Gradients:
        return WHOLE

    def zeroed(self) -> Gradients:
        self.versions.stop_watching()  # the gradients are gone; a step may still ask for the update
        return self


class Incomplete(Gradients):
    """Gradients of a backward that has begun to reduce them and has not ended."""

    why_no_clipping = (
        "the last backward did not come to its end, so gradients are reduced only in part and have no common "
        "norm. Find what ended it, then call zero_grad() and run it again."
    )

    def is_update_made(self, options: Mapping[str, Any]) -> bool:
        raise RuntimeError(
            "the last backward did not come to its end: it raised an error, or some parameter got no "
            "gradient, which DistributedDataParallel(find_unused_parameters=True) allows. Gradients are "
            "reduced, and with overlap_with_ddp=True parameters updated, only in part."
        )

    def zeroed(self) -> Gradients:
        return self


# ------------------------------------------------------------------------------------------- a backward


class Backward:
    """The state of the model's last backward, as communication hooks report it to the optimizer.

    Attributes:
        gradients: the case of the last backward's gradients.
        late: the hook in use makes its update when backward is over, from the gradients that are then there.
        under_way: reductions that the hook has started.
    """

    def __init__(self) -> None:
        self.gradients = WHOLE
        self.late = False
        self.under_way: list[Any] = []
        self._versions_of: Callable[[Iterable[torch.Tensor], bool], GradientVersions] = GradientVersions
        self._begun = 0  # the number of backwards
        self._task = -1  # autograd's number of the last backward

    def begin(
        self, first_bucket: Sequence[torch.Tensor] = (), are_views: bool = False, *, adds: bool = False
    ) -> None:
        """Note that a backward has completed its first bucket.

        Args:
            first_bucket, are_views: as `Gradients.check_may_be_added_to`.
            adds: the hook adds to earlier gradients correctly, so these are not refused.
        Raises:
            RuntimeError: as `Gradients.check_may_be_added_to`.
        """
        # 1. Check the earlier gradients. Outside a backward (task < 0) there are none to add to: this rank
        # has run out of data and only takes part in the others' reductions.
        task = torch._C._current_graph_task_id()
        if task >= 0 and not adds:
            self.gradients.check_may_be_added_to(first_bucket, are_views)
        # 2. Note this backward. A hook inside another hook begins the same one.
        self._begun += task != self._task
        self._task = task
        self._versions_of = GradientVersions
        if are_views:
            # Watching one gradient is enough, except in the first backward: after it DDP makes new buckets
            # and replaces all gradients by views of them, so a watched gradient that happens to be zero says
            # nothing.
            self._versions_of = partial(WatchedViews, prefer=set(first_bucket) if self._begun > 1 else None)
        # 3. Complete reductions of a backward that raised: freed too early, they would block the network.
        for reduction in self.under_way:
            reduction.wait()
        self.under_way = []
        self._set(Incomplete())

    def end_on_owners(
        self,
        params: Iterable[torch.Tensor],
        *,
        scaled: bool,
        may_change: bool,
        used: frozenset[int] = frozenset(),
        cut_in_slices: bool = False,
    ) -> None:
        """Note that backward is over and only the owners have its gradients.

        Args:
            params: the parameters whose gradients this rank has kept in `.grad`.
            used: as `Gradients`, for a `Join`.
            scaled, may_change, cut_in_slices: as `OnOwners`.
        """
        self.under_way = []
        self._set(OnOwners(self._versions_of(params, True), used, cut_in_slices, scaled, may_change))

    def end_updated(self, params: Iterable[torch.Tensor], groups: Iterable[ParamGroup]) -> None:
        """Note that backward is over and has updated the parameters."""
        self.under_way = []
        self._set(UsedInBackward(self._versions_of(params, False), groups))

    def take_update(self, options: Mapping[str, Any]) -> bool:
        """Return whether backward has made the update of this step; say so, or raise, once for each backward.

        Args, Raises: as `Gradients.is_update_made`.
        """
        gradients = self.gradients
        if isinstance(gradients, Incomplete):
            self._set(WHOLE)  # the next step after the error is an ordinary one
        is_made = gradients.is_update_made(options)
        if is_made:
            self.stepped()
        return is_made

    def stepped(self) -> None:
        """Note that a step has used the gradients."""
        if self.gradients is not WHOLE:
            self._set(self.gradients.stepped())

    def zeroed(self) -> None:
        """Note that the gradients are None or zero."""
        self._set(self.gradients.zeroed())

    def _set(self, gradients: Gradients) -> None:
        # Remove the old case's hooks from the parameters, unless the new case goes on using them.
        versions = self.gradients.versions
        if versions is not None and versions is not gradients.versions:
            versions.stop_watching()
        self.gradients = gradients


SET_BY_SCALERS = ("found_inf", "grad_scale")
"""The attributes that a torch.amp.GradScaler sets on an optimizer for one call of `step`."""


def check_no_scaler(optimizer: object, gradients: Gradients) -> None:
    """Refuse a step that a torch.amp.GradScaler has called, if no scaler can work on these gradients.

    All ranks raise alike, since the case of the gradients is the same on all.

    Args:
        optimizer: the optimizer that is stepped. A scaler has set `found_inf` on it.
    Raises:
        RuntimeError: with the reason.
    """
    if vars(optimizer).get("found_inf") is not None and gradients.why_no_scaler is not None:
        # The scaler removes what it has set on the optimizer only if step() returns.
        for name in SET_BY_SCALERS:
            vars(optimizer).pop(name, None)
        raise RuntimeError(gradients.why_no_scaler)
