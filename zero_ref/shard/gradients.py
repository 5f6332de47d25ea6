"""The places of the last backward's gradients, and the operations that they allow.

In `stairs/owners.py` every rank has all averaged gradients after a backward, as after any ordinary one. The
communication hooks of `overlap.py` and `reduction.py` add other cases: only the owners have the gradients,
the update has been made from them already, or backward has not ended. Each case is a class. It says which
operations are allowed, and gives the reason where one is not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.built import Built
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
        parts: by slice, this rank's gradients of parameters that are cut; None if `.grad` has the gradients.
        flats: the flat tensors in which the gradients lie, by bucket.
    """

    on_owners = False
    used: frozenset[int] = frozenset()
    why_no_scaler: str | None = None
    why_no_clipping: str | None = None
    versions: GradientVersions | None = None
    why_not_added_to = ""
    parts: Mapping[Slice, torch.Tensor] | None = None
    flats: Mapping[Any, torch.Tensor] = MappingProxyType({})

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

    def show(self, params: Sequence[torch.Tensor], owned: Container[torch.Tensor]) -> None:
        """Move `parts` into the `.grad` of these parameters, with zeros for the parts of other ranks.

        Args:
            owned: the parameters of which this rank owns a part.
        """

    def stepped(self) -> Gradients:
        """Return the case after a step has used these gradients."""
        return self

    def zeroed(self) -> Gradients:
        """Return the case after `zero_grad`."""
        return WHOLE


WHOLE = Gradients()


class _KeptByOwners(Gradients):
    """Gradients that only the owners have.

    Args:
        versions: the versions of the gradients that this rank has kept.
        used, parts, flats: as `Gradients`.
    """

    versions: GradientVersions
    why_not_added_to = (
        "this backward adds to gradients that the last one reduced to their owners, so they would be "
        "averaged over ranks of which most have none. Call optimizer.zero_grad() before it, or set them to "
        "None; to accumulate, run all but the last backward under ddp.no_sync()."
    )

    def __init__(
        self,
        versions: GradientVersions,
        used: frozenset[int],
        parts: Mapping[Slice, torch.Tensor] | None,
        flats: Mapping[Any, torch.Tensor],
    ) -> None:
        self.versions, self.used, self._parts, self.flats = versions, used, parts, flats

    @property
    def parts(self) -> Mapping[Slice, torch.Tensor] | None:  # type: ignore[override]
        # A user who sets every `.grad` to None does not see the parts, and means to drop them too.
        return self._parts if self._parts is None or self.versions.any_left else {}

    @torch.no_grad()
    def show(self, params: Sequence[torch.Tensor], owned: Container[torch.Tensor]) -> None:
        parts = self.parts
        if parts is None:
            return
        # 1. Without `parts`, the step would use a gradient of zeros that was kept only to be watched.
        for number, param in enumerate(params):
            if number not in self.used and param in owned:
                param.grad = None
        # 2. Place the parts in gradients of zeros. A rank may own several slices of a parameter.
        grads: dict[int, torch.Tensor] = {}
        for piece, part in parts.items():
            grad = grads.setdefault(piece.param, torch.zeros_like(params[piece.param], requires_grad=False))
            flat_view(grad)[piece.start : piece.stop] = part
        # 3. Set them. A later change of these is noticed, too.
        for number, grad in grads.items():
            params[number].grad = grad
            self.versions.params[params[number]] = None
        self._parts = None


class OnOwners(_KeptByOwners):
    """Gradients that `reduce_to_owners` or `ShardedDataParallel` has reduced to their owners.

    Args:
        versions, used, parts, flats: as `Gradients`.
        scaled, may_change: as `reduce_to_owners`.
    """

    on_owners = True

    def __init__(
        self,
        versions: GradientVersions,
        used: frozenset[int],
        scaled: bool,
        may_change: bool,
        parts: Mapping[Slice, torch.Tensor] | None,
        flats: Mapping[Any, torch.Tensor],
    ) -> None:
        super().__init__(versions, used, parts, flats)
        self.may_change = may_change
        if not scaled:
            self.why_no_scaler = (
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
        return Stepped(self.versions, self.used, self._parts, self.flats)


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
        used: frozenset[int],
        scaled: bool,
        may_change: bool,
        parts: Mapping[Slice, torch.Tensor] | None = None,
        flats: Mapping[Any, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Note that backward is over and only the owners have its gradients.

        Args:
            params: the parameters whose gradients this rank has kept.
            used, scaled, may_change, parts, flats: as `OnOwners`.
        """
        self.under_way = []
        versions = self._versions_of(params, True)
        self._set(OnOwners(versions, used, scaled, may_change, parts, flats))

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
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise RuntimeError(gradients.why_no_scaler)


# ------------------------------------------------------------------------------- changes of gradients


class GradientVersions:
    """The versions of some gradients, to notice later that one was changed, or that they are still there.

    Ranks own different parameters and must come to the same answers, or they would wait for each other. A
    gradient may happen to be zero, so the answers depend, as far as possible, not on a gradient's values but
    on how often it was written to.

    Args:
        params: the parameters. A parameter without a gradient is left out.
        strict: a gradient that is the same tensor counts as still there, however often it was written to.
    """

    def __init__(self, params: Iterable[torch.Tensor], strict: bool) -> None:
        self.params, self._strict = dict.fromkeys(params), strict
        self.renew()

    def renew(self) -> None:
        """Compare with the gradients as they are now from here on."""
        # Lists side by side: of an object for each gradient the garbage collector would have thousands to
        # look at in every iteration.
        self._noted: list[torch.Tensor] = []
        self._grads: list[TensorWeakRef] = []  # weak, or zero_grad() would free no memory
        self._counts: list[int] = []
        for param in self.params:
            grad = param.grad
            if grad is not None:
                self._noted.append(param)
                self._grads.append(TensorWeakRef(grad))
                self._counts.append(grad._version)

    @property
    def any_left(self) -> bool:
        """Return whether one of the parameters has a gradient."""
        return any(param.grad is not None for param in self._noted)

    def first_changed(self) -> torch.Tensor | None:
        """Find the first parameter that has a gradient which was replaced or written to; None if none has."""
        for param, before, count in zip(self._noted, self._grads, self._counts):
            grad = param.grad
            if grad is not None and (grad is not before() or grad._version != count):
                return param
        return None

    def still_there(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> bool:
        """Return whether the backward that has completed this bucket adds to the gradients."""
        complete = set(first_bucket)
        for param, before, count in zip(self._noted, self._grads, self._counts):
            # For views in the completed bucket only hooks can tell: the views share one version counter.
            if are_views and param in complete:
                continue
            grad = param.grad
            if grad is None or grad is not before():
                continue
            # This backward has written once to each gradient in its first bucket, and not to the others.
            if (self._strict and not are_views) or grad._version == count + (param in complete):
                return True
        return False

    def stop_watching(self) -> None:
        """Remove the hooks on the parameters, if there are any."""


class WatchedViews(GradientVersions):
    """The versions of gradients that are views of DDP's buckets.

    Such a view is the same tensor even after `zero_grad`, so hooks watch the gradients.

    Args:
        prefer: watch one parameter only, one of these if possible; None to watch all.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], strict: bool, prefer: set[torch.Tensor] | None
    ) -> None:
        self._prefer = prefer
        self._watches: list[_Watch] = []
        super().__init__(params, strict)

    def renew(self) -> None:
        super().renew()
        self._watch()

    def _watch(self) -> None:
        self.stop_watching()
        trained = [one for one in zip(self._noted, self._grads, self._counts) if one[0].requires_grad]
        # An empty gradient is always zero.
        watched = [one for one in trained if one[0].numel()] or trained
        if self._prefer is not None:
            watched = ([one for one in watched if one[0] in self._prefer] or watched)[:1]
        self._watches = [_Watch(*one) for one in watched]

    def still_there(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> bool:
        there = super().still_there(first_bucket, are_views) or not all(watch.gone for watch in self._watches)
        if there:
            self._watch()  # the next backward is checked again
        return there

    def stop_watching(self) -> None:
        for watch in self._watches:
            watch.handle.remove()
        self._watches = []


class _Watch:
    """A hook on a parameter that notes whether its gradient is None or zero before a backward adds to it.

    After backward it would be too late: even after `zero_grad`, DDP uses the same view for the gradient. All
    views of a bucket share one version counter. So if backward has written to other gradients of the bucket
    before, or DDP has made new buckets, only the values can tell. A rank on which all watched values happen
    to be zero does not notice, goes on, and waits for the ranks that refuse.
    """

    def __init__(self, param: torch.Tensor, grad: TensorWeakRef, version: int) -> None:
        # Weak: a parameter holds its hooks.
        self.param, self.grad, self.version = TensorWeakRef(param), grad, version
        self._gone = False
        self._looked_in: int | None = None
        self.handle = param.register_hook(self._before_adding)

    @property
    def gone(self) -> bool:
        """Return whether the gradient was None or zero before this backward added to it."""
        if self._looked_in != torch._C._current_graph_task_id():
            self._before_adding(None)  # this backward has not come to the parameter yet
        return self._gone

    def _before_adding(self, _: torch.Tensor | None) -> None:
        # Once the gradient was gone, a gradient that is there later was added under no_sync.
        if not self._gone:
            self._looked_in = torch._C._current_graph_task_id()
            param = self.param()
            grad = None if param is None else param.grad
            untouched = grad is not None and grad is self.grad() and grad._version == self.version
            self._gone = grad is None or not (untouched or bool(grad.any()))
