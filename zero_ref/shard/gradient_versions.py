"""Changes of gradients between a backward and what follows it, noticed by version counters and by hooks.

In `stairs/owners.py` all ranks have all gradients, so a gradient may be changed or added to at any time.
Where only owners have them, or the update was made from them already, a change would be right on some ranks
only, or have no effect. `gradients.py` asks this module whether a gradient was changed, or is still there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import TensorWeakRef


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
