"""The slices that a rank owns, and the tensors that are stepped for them.

In `minimal.py` a rank owns whole parameters, and they are stepped themselves. This module adds slices of
parameters, and copies of them in another dtype (masters) or place (offload).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.merged import place_end_to_end
from zero_ref.shard.offload import StatePlace
from zero_ref.shard.rounding import Masters

MASTER = "master_weight"
"""The key under which the state that is sent and saved has the values of a copy."""


class OwnedSlice(NamedTuple):
    """A slice that this rank owns, and the tensor that the local optimizer steps for it.

    `local` is the parameter itself if the slice is all of it, else a 1-D leaf that shares the parameter's
    memory. If `is_copy`, it is a copy in the same shape, in another dtype (masters) or place (offload).
    """

    piece: Slice
    param: torch.Tensor
    local: torch.Tensor
    is_copy: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the slice is all of the parameter."""
        return self.piece.numel == self.param.numel()

    @property
    def is_master(self) -> bool:
        """Whether `local` is a copy whose values the parameter cannot represent."""
        return self.local.dtype != self.param.dtype

    @property
    def window(self) -> torch.Tensor:
        """The slice as a view of the parameter, in the shape of `local`."""
        return self.local.detach() if not self.is_copy else _window(self.piece, self.param)

    def part_of(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the slice, of that of the parameter."""
        return grad if self.is_whole else flat_like(grad, self.param)[self.piece.start : self.piece.stop]


def _window(piece: Slice, param: torch.Tensor) -> torch.Tensor:
    # detach, not .data: autograd then still detects that a tensor it saved was overwritten.
    whole = piece.numel == param.numel()
    return param.detach() if whole else flat_view(param.detach())[piece.start : piece.stop]


def own_slices(
    pieces: Iterable[Slice],
    params: Sequence[torch.Tensor],
    masters: Masters | None = None,
    place: StatePlace | None = None,
    kept: Mapping[Slice, torch.Tensor] | None = None,
) -> list[OwnedSlice]:
    """The owned slices, each with the tensor to step.

    Args:
        masters: which parameters are copied into another dtype; None for none.
        place: where copies are; None for the parameters' own devices.
        kept: existing copies, which are reused.
    """
    owned, kept = [], kept or {}
    for piece in pieces:
        param = params[piece.param]
        dtype = masters.dtype if masters is not None and masters.copies(param) else param.dtype
        held = place if place is not None and place.holds(param) else None
        if is_copy := held is not None or dtype != param.dtype:
            local = _copy(_window(piece, param), dtype, held, kept.get(piece))
            local.requires_grad_(param.requires_grad)
        elif piece.numel == param.numel():
            local = param
        else:
            local = _window(piece, param).requires_grad_(param.requires_grad)
        owned.append(OwnedSlice(piece, param, local, is_copy))
    if place is None:
        place_end_to_end(own.local for own in owned if own.is_copy and own.local is not kept.get(own.piece))
    return owned


def _copy(
    window: torch.Tensor, dtype: torch.dtype, place: StatePlace | None, kept: torch.Tensor | None
) -> torch.Tensor:
    """A copy of the window in a place: `kept` itself if it is there and its strides are the window's."""
    device = window.device if place is None else place.device
    if kept is not None and (kept.device, kept.dtype) == (device, dtype) and kept.stride() == window.stride():
        return kept
    empty = torch.empty_like(window, dtype=dtype) if place is None else place.empty_like(window, dtype)
    is_master = dtype != window.dtype
    return empty.copy_(kept.detach() if kept is not None and is_master else window)


class Copies:
    """The owned slices whose local tensors are copies, and how values go between these and the parameters.

    Args:
        owned: the slices that a rank owns, copies or not.
        masters, place: as for `own_slices`, which made them.
    """

    def __init__(
        self, owned: Iterable[OwnedSlice], masters: Masters | None, place: StatePlace | None
    ) -> None:
        self.slices = [own for own in owned if own.is_copy]
        self._masters, self._place = masters, place
        self._versions: list[int] = []  # of each copied parameter, when last equal to its rounded copy
        self.note_versions()

    @torch.no_grad()
    def publish(self, slices: Iterable[OwnedSlice], state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Round the values of these copies into their parameters.

        Args:
            state: the local optimizer's, by local tensor.
        """
        new = list(slices)
        if self._place is not None:
            for own in new:
                self._place.keep(state.get(own.local, {}), own.local)
            self._place.send([self._rounded(own) for own in new], [own.window for own in new])
        elif self._masters is not None and self._masters.rounding == "nearest" and new:
            into = [own.param if own.is_whole else own.window for own in new]
            torch._foreach_copy_(into, [own.local for own in new])
        else:
            for own in new:
                own.window.copy_(self._rounded(own))

    def changed(self) -> set[int]:
        """The numbers of the parameters that are not equal to their rounded copies."""
        return {own.piece.param for own in self.slices if not torch.equal(self._rounded(own), own.window)}

    def _rounded(self, own: OwnedSlice) -> torch.Tensor:
        """The values of a copy in its parameter's dtype."""
        if self._masters is None:
            return own.local.detach()
        return self._masters.rounded(own.local.detach(), own.param.dtype, own.piece.start)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Copy values that others have written into the parameters, such as a loaded model, to the copies.

        A copy keeps the elements whose rounded value the parameter still has. Changes are detected by the
        parameter's version counter; a write through `.data` is not detected, and is overwritten.
        """
        for own, version in zip(self.slices, self._versions, strict=True):
            if own.param._version != version:
                window, copy = own.window, own.local.to(own.param.device)  # it may have moved, too
                changed = window != self._rounded(own).to(window.device)
                own.local.copy_(torch.where(changed, window.to(copy.dtype), copy))

    def forget_versions(self) -> None:
        """Compare all next time: a model may be initialized through `.data`, which no version counts."""
        self._versions = [-1] * len(self.slices)

    def note_versions(self) -> None:
        """Record that each parameter now equals its rounded copy."""
        self._versions = [own.param._version for own in self.slices]
