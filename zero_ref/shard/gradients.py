"""Where the gradients of the last backward are, and what may be done with them.

In `minimal.py` every rank has all averaged gradients after a backward, as after any ordinary one. With the
communication hooks of `overlap.py` and `reduction.py` there are other cases, which this module adds: only
their owners have the gradients, the update has been made from them already, or backward has not ended. Each
case is a class, which says what is allowed and, where something is not, why.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.built import Built
from zero_ref.shard.groups import ParamGroup, options_of


class Gradients:
    """Whole on every rank, as a plain backward or DDP's own reduction leaves them: everything is allowed.

    Attributes:
        on_owners: each rank has the reduced gradients of what it owns, and no others.
        used: if only owners have them, the numbers of the parameters that have a gradient on their owner.
        why_no_scaler: the reason why torch.amp.GradScaler cannot work on the gradients, or None.
        why_no_clipping: the reason why no global norm can be computed, or None.
        versions: versions of the gradients to which a second backward must not add.
        why_not_added_to: the error if a second backward adds to the gradients.
        parts: by slice, this rank's gradients of parameters that are cut; None where `.grad` has these.
        flats: the flat tensors that hold the gradients, by their buckets.
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
        """Refuse gradients that only their owners have, if each rank may have changed them in its own way.

        Raises:
            RuntimeError: another backward has added to them; or the gradient of a parameter was changed, as
                by torch's `clip_grad_norm_`.
        """

    def check_may_be_added_to(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> None:
        """Refuse a backward that adds to these gradients, if gradients would then count twice.

        Args:
            first_bucket: the parameters of the first bucket that this backward has completed.
            are_views: gradients are views of DDP's buckets.
        Raises:
            RuntimeError: the gradients are still there.
        """
        if self.versions is not None and self.versions.still_there(first_bucket, are_views):
            raise RuntimeError(self.why_not_added_to)

    def took_update(self, options: Mapping[str, Any]) -> bool:
        """Whether backward has already made the update from these gradients.

        Args:
            options: what `step` was called with.
        Raises:
            ValueError: there are options, for a local step that was already made.
            RuntimeError: after the update the gradients (as by clipping) or an option such as the learning
                rate were changed; or backward has begun the update and not ended.
        """
        return False

    def note_change(self, *, freely: bool = False) -> None:
        """Allow a change that all ranks made by one rule; with `freely`, allow every change from now on."""

    def show(self, params: Sequence[torch.Tensor], owned: Container[torch.Tensor]) -> None:
        """Move `parts` into the `.grad` of these parameters, with zeros where other ranks own them.

        Args:
            owned: those of which this rank owns a part.
        """

    def stepped(self) -> Gradients:
        """The case after a step has used these gradients."""
        return self

    def owners_changed(self) -> None:
        """Note a repartition: owners may no longer have the gradients of what they own."""

    def zeroed(self) -> Gradients:
        """The case after `zero_grad`."""
        return WHOLE


WHOLE = Gradients()


class _Kept(Gradients):
    """Each gradient is on its owner, and on no other rank.

    Args:
        versions: versions of the gradients that this rank has kept.
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
        # A user who sets every `.grad` to None does not see the parts, so the parts go with the last `.grad`.
        return self._parts if self._parts is None or self.versions.any_left else {}

    @torch.no_grad()
    def show(self, params: Sequence[torch.Tensor], owned: Container[torch.Tensor]) -> None:
        parts = self.parts
        if parts is None:
            return
        for number, param in enumerate(params):
            if number not in self.used and param in owned:
                param.grad = None  # zeros that were only watched: a step would use them now
        shown: dict[int, torch.Tensor] = {}  # a rank may own several pieces of a parameter
        for piece, part in parts.items():
            grad = shown.setdefault(piece.param, torch.zeros_like(params[piece.param], requires_grad=False))
            flat_view(grad)[piece.start : piece.stop] = part
        for number, grad in shown.items():
            params[number].grad = grad
            self.versions.params[params[number]] = None
        self._parts = None


class OnOwners(_Kept):
    """Reduced to their owners by `reduce_to_owners` or `ShardedDataParallel`.

    Args:
        versions, used, parts, flats: as `_Kept`.
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
        for number, param in enumerate(built.params):
            if param.requires_grad and param.grad is not None and param not in self.versions.params:
                raise RuntimeError(
                    f"rank {rank}: a backward that reduced nothing, as under ddp.no_sync(), has added to "
                    "gradients that an earlier one had reduced to their owners: parameter "
                    f"{built.name(number)} is not owned here and has a gradient. Call zero_grad() before it; "
                    "to accumulate, run all but the last backward under ddp.no_sync()."
                )
        # torch does not count GradScaler's unscaling as a change.
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


class Stepped(_Kept):
    """As `OnOwners`, after a step has used the gradients: owners keep them until `zero_grad`."""

    def owners_changed(self) -> None:
        self._parts = {}
        self.why_no_clipping = (
            "gradients were reduced to their owners and used in a step, and then a repartition changed the "
            "owners, so no rank has those of what it owns now. Call zero_grad() and run a backward."
        )


class UsedInBackward(Gradients):
    """Backward has made the update from the gradients (`overlap_with_ddp=True`): `step` has nothing to do.

    Args:
        versions: versions of all gradients. `took_update` refuses a later change, which has no effect.
        groups: the groups with which the update was made. A later change of their options is refused, too.
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
        self.options = [(group, options_of(group)) for group in groups]

    def took_update(self, options: Mapping[str, Any]) -> bool:
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
    """A hook has begun its work on a backward, and that backward has not ended."""

    why_no_clipping = (
        "the last backward did not come to its end, so gradients are reduced only in part and have no common "
        "norm. Find what ended it, then call zero_grad() and run it again."
    )

    def took_update(self, options: Mapping[str, Any]) -> bool:
        raise RuntimeError(
            "the last backward did not come to its end: it raised an error, or some parameter got no "
            "gradient, which DistributedDataParallel(find_unused_parameters=True) allows. Gradients are "
            "reduced, and with overlap_with_ddp=True parameters updated, only in part."
        )

    def zeroed(self) -> Gradients:
        return self


# ------------------------------------------------------------------------------------------- a backward


class Backward:
    """The state of an optimizer's last backward, as the hooks of the model report it.

    Attributes:
        gradients: the case of the last backward's gradients.
        late: the hook in use makes its update when backward is over, from the gradients that are then there.
        under_way: reductions that the hook has started.
    """

    def __init__(self) -> None:
        self.gradients = WHOLE
        self.late = False
        self.under_way: list[Any] = []
        self._first_bucket: Sequence[torch.Tensor] = ()
        self._are_views = False
        self._begun = 0
        self._task = -1

    def begin(
        self, first_bucket: Sequence[torch.Tensor] = (), are_views: bool = False, *, adds: bool = False
    ) -> None:
        """Note that a backward has completed its first bucket.

        Args:
            first_bucket, are_views: as `Gradients.check_may_be_added_to`.
            adds: this backward adds to earlier gradients correctly, so nothing is refused.
        Raises:
            RuntimeError: as `Gradients.check_may_be_added_to`.
        """
        task = torch._C._current_graph_task_id()
        # A rank that has run out of data only shadows a backward, which then has no task.
        if task >= 0 and not adds:
            self.gradients.check_may_be_added_to(first_bucket, are_views)
        self._first_bucket, self._are_views = first_bucket, are_views
        self._begun += task != self._task  # a hook inside another hook begins the same backward
        self._task = task
        for reduction in self.under_way:
            # Left by a backward that raised. If freed before they are complete, they would block the network.
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
        """Backward is over, and `params` are those whose gradients this rank has kept.

        Args: as `OnOwners`.
        """
        self.under_way = []
        versions = self._versions(params, strict=True)
        self._set(OnOwners(versions, used, scaled, may_change, parts, flats))

    def end_updated(self, params: Iterable[torch.Tensor], groups: Iterable[ParamGroup]) -> None:
        """Backward is over, and the parameters were updated."""
        self.under_way = []
        self._set(UsedInBackward(self._versions(params, strict=False), groups))

    def take_update(self, options: Mapping[str, Any]) -> bool:
        """As `Gradients.took_update`, but an update, or its lack of an end, is reported only once."""
        gradients = self.gradients
        if isinstance(gradients, Incomplete):
            self._set(WHOLE)
        taken = gradients.took_update(options)
        if taken:
            self.stepped()
        return taken

    def stepped(self) -> None:
        """A step has used the gradients."""
        if self.gradients is not WHOLE:
            self._set(self.gradients.stepped())

    def zeroed(self) -> None:
        """The gradients are gone, or zero."""
        self._set(self.gradients.zeroed())

    def _set(self, gradients: Gradients) -> None:
        versions = self.gradients.versions
        if versions is not None and versions is not gradients.versions:
            versions.stop_watching()
        self.gradients = gradients

    def _versions(self, params: Iterable[torch.Tensor], strict: bool) -> GradientVersions:
        # One watched gradient is enough, except after the first backward: then DDP makes new buckets and puts
        # their views in place of all gradients, so that one which is zero by itself would not tell.
        prefer = set(self._first_bucket) if self._begun > 1 else None
        return GradientVersions(params, strict, prefer, self._are_views)


def check_no_scaler(optimizer: object, gradients: Gradients) -> None:
    """Refuse a torch.amp.GradScaler, on all ranks, where it cannot work.

    Args:
        optimizer: the optimizer whose `step` is running, called by a scaler or by the user.
    Raises:
        RuntimeError: with the reason.
    """
    if vars(optimizer).get("found_inf") is not None and gradients.why_no_scaler is not None:
        # The scaler removes what it has set on the optimizer only if step() returns.
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise RuntimeError(gradients.why_no_scaler)


# ------------------------------------------------------------------------------- gradients, then and now


class GradientVersion(NamedTuple):
    """The tensor that a parameter's gradient was, and the count of writes to this tensor."""

    param: torch.Tensor
    grad: TensorWeakRef  # weak, or zero_grad() would free no memory
    version: int

    @property
    def is_same(self) -> bool:
        """The gradient is there, and is the same tensor."""
        return self.param.grad is not None and self.param.grad is self.grad()

    def written(self, times: int) -> bool:
        """The gradient is the same tensor, and was written to so many times since."""
        return self.is_same and self.param.grad._version == self.version + times  # type: ignore[union-attr]


class GradientVersions:
    """The versions of some gradients, to notice later that one was changed, or that they are still there.

    Ranks own different parameters and must come to the same answers, or they would wait for each other. A
    gradient may be zero by itself, so the answers depend, as far as possible, not on the values in a gradient
    but on how often it was written to.

    Args:
        params: the parameters. Nothing is noted of a parameter without a gradient.
        strict: a gradient that is the same tensor counts as still there, however often it was written to.
        prefer: watch one parameter only, if possible one of these; None to watch all.
        are_views: gradients are views of DDP's buckets. Such a gradient is the same tensor even after
            `zero_grad`, so its parameter is watched.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        strict: bool,
        prefer: set[torch.Tensor] | None = None,
        are_views: bool = False,
    ) -> None:
        self.params, self._strict = dict.fromkeys(params), strict
        self._prefer, self._are_views = prefer, are_views
        self._watches: list[_Watch] = []
        self.renew()

    def renew(self) -> None:
        """Take the gradients as they are now."""
        self._versions = [
            GradientVersion(param, TensorWeakRef(param.grad), param.grad._version)
            for param in self.params
            if param.grad is not None
        ]
        if self._are_views:
            self._watch()

    def _watch(self) -> None:
        self.stop_watching()
        trained = [one for one in self._versions if one.param.requires_grad]
        # An empty gradient is always zero.
        watched = [one for one in trained if one.param.numel()] or trained
        if self._prefer is not None:
            watched = ([one for one in watched if one.param in self._prefer] or watched)[:1]
        self._watches = [_Watch(one) for one in watched]

    @property
    def any_left(self) -> bool:
        """Whether one of the parameters has a gradient."""
        return any(one.param.grad is not None for one in self._versions)

    def first_changed(self) -> torch.Tensor | None:
        """The first parameter whose gradient is there and was replaced or written to, if there is one."""
        return next((o.param for o in self._versions if o.param.grad is not None and not o.written(0)), None)

    def still_there(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> bool:
        """Whether the backward that has completed this bucket adds to the gradients."""
        complete = set(first_bucket)
        # Of views in the completed bucket only the watches can tell.
        seen = [one for one in self._versions if not (are_views and one.param in complete)]
        there = any(
            one.written(one.param in complete) or (self._strict and not are_views and one.is_same)
            for one in seen
        ) or not all(watch.gone for watch in self._watches)
        if there and self._are_views:
            self._watch()  # the next backward is checked again
        return there

    def stop_watching(self) -> None:
        """Remove the hooks on the parameters."""
        for watch in self._watches:
            watch.handle.remove()
        self._watches = []


class _Watch:
    """A hook on a parameter that sees, when the next backward comes to it, if its gradient is gone or zero.

    After backward it would be too late: even after zero_grad, DDP uses the same view for the gradient. All
    views of a bucket count their writes together. So where other gradients of the bucket come first, or DDP
    has made new buckets, only the values can tell. A rank on which all watched values are zero by themselves
    does not notice, goes on, and waits for the ranks that refuse.
    """

    def __init__(self, watched: GradientVersion) -> None:
        # Weak: a parameter holds its hooks.
        self.param, self.grad, self.version = TensorWeakRef(watched.param), watched.grad, watched.version
        self._gone = False
        self._looked_in: int | None = None
        self.handle = watched.param.register_hook(self._before_adding)

    @property
    def gone(self) -> bool:
        if self._looked_in != torch._C._current_graph_task_id():
            self._before_adding(None)  # this backward has not come to the parameter yet
        return self._gone

    def _before_adding(self, _: torch.Tensor | None) -> None:
        # Once the gradient was gone, what is there later was added under no_sync.
        if not self._gone:
            self._looked_in = torch._C._current_graph_task_id()
            param = self.param()
            grad = None if param is None else param.grad
            untouched = grad is not None and grad is self.grad() and grad._version == self.version
            self._gone = grad is None or not (untouched or bool(grad.any()))
