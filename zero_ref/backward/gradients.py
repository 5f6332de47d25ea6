"""Where the gradients of the last backward are, and what may be done with them.

In `minimal.py` they are whole on every rank, and so they are after an ordinary backward. What this module
adds: the communication hooks of `overlap.py` and `reduction.py` may leave them on their owners only, or have
used them already, or have come to no end. Each of these cases is a class. What works on gradients asks the
one of the last backward whether it may, and gets the reason if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from zero_ref.optimizer.built import Built
from zero_ref.optimizer.groups import ParamGroup, options_of


class Gradients:
    """Whole on every rank, as a plain backward or DDP's own reduction leaves them: everything is allowed.

    Attributes:
        on_owners: each rank has the reduced gradients of what it owns, and no others.
        used: the parameters, by number, that have a gradient on their owner, where it has them alone.
        why_no_scaler: why torch.amp.GradScaler cannot work on them; None if it can.
        why_no_clipping: why they have no common norm; None if they have.
        marks: of those that a second backward must not add to.
        twice: what to say if one does.
    """

    on_owners = False
    used: frozenset[int] = frozenset()
    why_no_scaler: str | None = None
    why_no_clipping: str | None = None
    marks: Marks | None = None
    twice = ""

    def check_as_left(self, rank: int, built: Built) -> None:
        """Refuse gradients that each rank has changed as it sees fit, where only owners have them.

        Raises:
            RuntimeError: the gradient of a parameter was changed, as by torch's `clip_grad_norm_`.
        """

    def check_may_be_added_to(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> None:
        """Refuse a backward that adds to them, where that would count something twice.

        Args:
            first_bucket: the parameters of the bucket that this backward has completed first.
            are_views: gradients are windows of DDP's buckets.
        Raises:
            RuntimeError: they are still there.
        """
        if self.marks is not None and self.marks.still_there(first_bucket, are_views):
            raise RuntimeError(self.twice)

    def took_update(self, options: Mapping[str, Any]) -> bool:
        """Whether backward has made the update from them already.

        Args:
            options: what `step` was called with.
        Raises:
            ValueError: options for a local step that has already been made.
            RuntimeError: the gradients, as by clipping, or the learning rate or another option were changed
                after the update; backward has begun the update and not come to its end.
        """
        return False

    def changed(self, *, freely: bool = False) -> None:
        """All ranks have changed them by one rule; or may do so `freely` from now on."""

    def stepped(self) -> Gradients:
        """What they are when a step has used them."""
        return self

    def zeroed(self) -> Gradients:
        """What they are after `zero_grad`."""
        return self


WHOLE = Gradients()


class OnOwners(Gradients):
    """Reduced to their owners by `reduce_to_owners`.

    Args:
        marks: those that this rank has kept.
        used: the parameters, by number, that have a gradient on their owner.
        scaled: each rank has a gradient that is not finite if one rank has.
        may_change: they may be changed, element by element, before they are used.
    """

    on_owners = True
    marks: Marks
    twice = (
        "this backward adds to gradients that the last one reduced to their owners, so they would be "
        "averaged over ranks of which most have none. Call optimizer.zero_grad() before it, or set them to "
        "None; to accumulate, run all but the last backward under ddp.no_sync()."
    )

    def __init__(self, marks: Marks, used: frozenset[int], *, scaled: bool, may_change: bool) -> None:
        self.marks, self.used, self.may_change = marks, used, may_change
        if not scaled:
            self.why_no_scaler = (
                "torch.amp.GradScaler looks for infinite gradients on each rank by itself, and with "
                "reduce_to_owners only their owner has them. Use reduce_to_owners(zero, scaled=True)."
            )

    def check_as_left(self, rank: int, built: Built) -> None:
        # GradScaler's unscaling does not count as a change to torch.
        changed = None if self.may_change else self.marks.changed()
        if changed is not None:
            number = next(number for number, param in enumerate(built.params) if param is changed)
            raise RuntimeError(
                f"rank {rank}: the gradient of parameter {built.name(number)} was changed after backward. "
                "With reduce_to_owners each rank has only the gradients of what it owns, and "
                "torch.nn.utils.clip_grad_norm_ finds another norm and scales by another factor on each. "
                "Use zero_ref.clip_grad_norm_(optimizer, max_norm). To change each element by itself, as "
                "torch.nn.utils.clip_grad_value_ does, pass reduce_to_owners(zero, may_change=True)."
            )

    def changed(self, *, freely: bool = False) -> None:
        self.may_change |= freely
        self.marks.renew()

    def stepped(self) -> Gradients:
        self.marks.renew()
        return Spent(self.marks)

    def zeroed(self) -> Gradients:
        return WHOLE


class Spent(Gradients):
    """Those of `OnOwners`, which a step has used and nobody has zeroed: owners have them still."""

    twice = OnOwners.twice

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def zeroed(self) -> Gradients:
        return WHOLE


class UsedInBackward(Gradients):
    """The update was made from them in backward (`overlap_with_ddp=True`): a `step` has nothing left to do.

    Args:
        marks: all of them, to notice a later change, which could have no effect.
        groups: with which the update was made; their options are noted, to notice the same.
    """

    marks: Marks
    twice = (
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

    def __init__(self, marks: Marks, groups: Iterable[ParamGroup]) -> None:
        self.marks = marks
        self.options = [(group, options_of(group)) for group in groups]

    def took_update(self, options: Mapping[str, Any]) -> bool:
        if options:
            raise ValueError(
                f"step() got {sorted(options)}, but with overlap_with_ddp=True the local step was already "
                "made during backward. Set such options when constructing the optimizer."
            )
        if self.marks.changed() is not None:
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
        self.marks.let_go()  # a step may still ask whether the update was made
        return self


class Incomplete(Gradients):
    """A hook has begun its work on a backward and has not seen the end of it."""

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


# ------------------------------------------------------------------------------------------- a backward


class Backward:
    """What the hooks of a DDP model tell an optimizer of its backwards.

    Attributes:
        gradients: where those of the last one are.
        late: the hook in use makes its update when backward is over, from the gradients it leaves.
        under_way: exchanges of gradients that the hook has started.
    """

    def __init__(self) -> None:
        self.gradients = WHOLE
        self.late = False
        self.under_way: list[Any] = []
        self._first_bucket: Sequence[torch.Tensor] = ()
        self._are_views = False
        self._begun = 0
        self._task = -1

    def begin(self, first_bucket: Sequence[torch.Tensor] = (), are_views: bool = False) -> None:
        """The first bucket of a backward is there.

        Args:
            first_bucket: its parameters.
            are_views: gradients are windows of DDP's buckets.
        Raises:
            RuntimeError: the backward adds to gradients of the last one, which would count twice.
        """
        task = torch._C._current_graph_task_id()
        if task >= 0:  # else this rank, which has run out of data, only shadows a backward
            self.gradients.check_may_be_added_to(first_bucket, are_views)
        self._first_bucket, self._are_views = first_bucket, are_views
        self._begun += task != self._task  # a hook within a hook begins the same one
        self._task = task
        for reduction in self.under_way:
            # Of a backward that ended in an error. Freed before they are done, they would block the network.
            reduction.wait()
        self.under_way = []
        self._leave(Incomplete())

    def end_on_owners(
        self, params: Iterable[torch.Tensor], used: frozenset[int], *, scaled: bool, may_change: bool
    ) -> None:
        """Backward is over, and each rank has the gradients of what it owns: these parameters'."""
        self.under_way = []
        self._leave(OnOwners(self._marks(params, strict=True), used, scaled=scaled, may_change=may_change))

    def end_updated(self, params: Iterable[torch.Tensor], groups: Iterable[ParamGroup]) -> None:
        """Backward is over, and the parameters were updated."""
        self.under_way = []
        self._leave(UsedInBackward(self._marks(params, strict=False), groups))

    def take_update(self, options: Mapping[str, Any]) -> bool:
        """Whether backward has made the update; it counts once. Args, Raises: as `Gradients.took_update`."""
        gradients = self.gradients
        if isinstance(gradients, Incomplete):
            self._leave(WHOLE)  # it is told once
        taken = gradients.took_update(options)
        if taken:
            self.stepped()
        return taken

    def stepped(self) -> None:
        """A step has used the gradients."""
        if self.gradients is not WHOLE:
            self._leave(self.gradients.stepped())

    def zeroed(self) -> None:
        """The gradients are gone, or zero."""
        self._leave(self.gradients.zeroed())

    def _leave(self, gradients: Gradients) -> None:
        marks = self.gradients.marks
        if marks is not None and marks is not gradients.marks:
            marks.let_go()
        self.gradients = gradients

    def _marks(self, params: Iterable[torch.Tensor], strict: bool) -> Marks:
        # Watching one is enough, had not DDP made new buckets after the first backward, and put their windows
        # in place of all gradients: then one that is zero by itself would tell nothing.
        prefer = set(self._first_bucket) if self._begun > 1 else None
        return Marks(params, strict, prefer, self._are_views)


def check_no_scaler(optimizer: object, gradients: Gradients) -> None:
    """Refuse a torch.amp.GradScaler, on all ranks, where it cannot work.

    Args:
        optimizer: whose `step` the scaler has called, if one has.
    Raises:
        RuntimeError: with the reason.
    """
    called_by_scaler = vars(optimizer).get("found_inf") is not None
    if called_by_scaler and gradients.why_no_scaler is not None:
        # The scaler takes back what it lent only if step() returns. A step without it is none of its.
        for lent in ("found_inf", "grad_scale"):
            vars(optimizer).pop(lent, None)
        raise RuntimeError(gradients.why_no_scaler)


# ------------------------------------------------------------------------------ as they were, and as they are


class Mark(NamedTuple):
    """A parameter's gradient as it was at some time. Weak, or zero_grad() would free no memory."""

    param: torch.Tensor
    grad: TensorWeakRef
    version: int

    @property
    def is_same(self) -> bool:
        """The gradient is there, and is the same tensor."""
        return self.param.grad is not None and self.param.grad is self.grad()

    def written(self, times: int) -> bool:
        """It is, and so often has somebody written to it since."""
        return self.is_same and self.param.grad._version == self.version + times  # type: ignore[union-attr]


class Marks:
    """The gradients of some parameters, to notice later that they were changed, or that they are still there.

    Ranks own different parameters and must come to the same answers, or they wait for each other. So what
    decides is, as far as it can be seen, who has written to a gradient, and not what is in it: a gradient may
    be zero by itself.

    Args:
        params: those without a gradient are left out.
        strict: a gradient that is still the same tensor is still there, whoever has written to it.
        prefer: watch one parameter, of these if there is one among them; None to watch all.
        are_views: gradients are windows of DDP's buckets. These are the same tensors after `zero_grad` too,
            so they are watched.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        strict: bool,
        prefer: set[torch.Tensor] | None = None,
        are_views: bool = False,
    ) -> None:
        self._params, self._strict = list(params), strict
        self._prefer, self._are_views = prefer, are_views
        self._watches: list[_Watch] = []
        self.renew()

    def renew(self) -> None:
        """Take the gradients as they are now."""
        self._marks = [
            Mark(param, TensorWeakRef(param.grad), param.grad._version)
            for param in self._params
            if param.grad is not None
        ]
        self._watch()

    def _watch(self) -> None:
        self.let_go()
        if not self._are_views:
            return
        trained = [mark for mark in self._marks if mark.param.requires_grad]
        # An empty gradient is always zero.
        watched = [mark for mark in trained if mark.param.numel()] or trained
        if self._prefer is not None:
            watched = ([mark for mark in watched if mark.param in self._prefer] or watched)[:1]
        self._watches = [_Watch(mark) for mark in watched]

    def changed(self) -> torch.Tensor | None:
        """A parameter whose gradient is there and was replaced or written to, if there is one."""
        return next((m.param for m in self._marks if m.param.grad is not None and not m.written(0)), None)

    def still_there(self, first_bucket: Iterable[torch.Tensor], are_views: bool) -> bool:
        """Whether the backward that has completed this bucket adds to them."""
        complete = set(first_bucket)
        for mark in self._marks:
            added = mark.param in complete
            if are_views and added:
                continue  # of those the watches know
            if mark.written(added) or (self._strict and not are_views and mark.is_same):
                break
        else:
            if all(watch.gone for watch in self._watches):
                return False
        self._watch()  # the next backward is asked again
        return True

    def let_go(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            watch.handle.remove()
        self._watches = []


class _Watch:
    """Sees whether a gradient is gone, or zeroed, when the next backward comes to it.

    Afterwards it could not be seen: after zero_grad, too, DDP takes the same window for the gradient. Windows
    of a bucket count their writes together, so where other gradients of the bucket come first, or DDP has
    made new buckets, only what is in the window can tell: a rank whose windows are all zero by themselves
    adds to them, and waits for those that refuse.
    """

    def __init__(self, mark: Mark) -> None:
        # Weak: a parameter holds its hooks.
        self.param, self.grad, self.version = TensorWeakRef(mark.param), mark.grad, mark.version
        self._gone = False
        self._looked_in: int | None = None
        self.handle = mark.param.register_hook(self._before_adding)

    @property
    def gone(self) -> bool:
        if self._looked_in != torch._C._current_graph_task_id():
            self._before_adding(None)  # this backward has not come to it yet
        return self._gone

    def _before_adding(self, _: torch.Tensor | None) -> None:
        # Once gone, always so: what is there later was added under no_sync.
        if not self._gone:
            self._looked_in = torch._C._current_graph_task_id()
            param = self.param()
            grad = None if param is None else param.grad
            untouched = grad is not None and grad is self.grad() and grad._version == self.version
            self._gone = grad is None or not (untouched or bool(grad.any()))
