"""The slices that a rank owns, and the tensors that are stepped for them.

In `stairs/owners.py` a rank owns whole parameters and steps them. This module adds slices of parameters, and
copies of slices in another dtype (masters) or place (offload).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import flat_like, flat_view
from zero_ref.shard.merged import place_end_to_end
from zero_ref.shard.offload import StatePlace

MASTER = "master_weight"
"""The key of a master copy's values in state that is sent or saved."""


class OwnedSlice(NamedTuple):
    """A slice that this rank owns, and the tensor that the local optimizer steps for it.

    `leaf` is the parameter itself if the slice is all of the parameter, else a 1-D leaf that shares the
    parameter's memory; after a backward of `ShardedDataParallel` its `.grad` is the slice's gradient. `local`
    is `leaf`, or if `is_copy` a copy in the same shape, in another dtype (masters) or place (offload).
    """

    piece: Slice
    param: torch.Tensor
    local: torch.Tensor
    leaf: torch.Tensor

    @property
    def is_copy(self) -> bool:
        """Return whether `local` is a copy."""
        return self.local is not self.leaf

    @property
    def is_whole(self) -> bool:
        """Return whether the slice is all of the parameter."""
        return self.piece.numel == self.param.numel()

    @property
    def is_master(self) -> bool:
        """Return whether `local` is a copy in another dtype than the parameter's."""
        return self.local.dtype != self.param.dtype

    @property
    def window(self) -> torch.Tensor:
        """The slice as a view of the parameter, in the shape of `local`."""
        return self.local.detach() if not self.is_copy else _window(self.piece, self.param)

    @property
    def rounded(self) -> torch.Tensor:
        """The values of `local` in the parameter's dtype."""
        return self.local.detach().to(self.param.dtype)

    def part_of(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the slice's part of the parameter's gradient."""
        return grad if self.is_whole else flat_like(grad, self.param)[self.piece.start : self.piece.stop]


def _window(piece: Slice, param: torch.Tensor) -> torch.Tensor:
    # detach, not .data: autograd then still detects that a tensor it saved was overwritten.
    whole = piece.numel == param.numel()
    return param.detach() if whole else flat_view(param.detach())[piece.start : piece.stop]


def local_dtype(param: torch.Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is stepped: the masters' if that is larger, else its own."""
    if master_dtype is None or not param.is_floating_point():
        return param.dtype
    return max(param.dtype, master_dtype, key=lambda dtype: dtype.itemsize)


def own_slices(
    pieces: Iterable[Slice],
    params: Sequence[torch.Tensor],
    master_dtype: torch.dtype | None = None,
    place: StatePlace | None = None,
    kept: Mapping[Slice, torch.Tensor] | None = None,
) -> list[OwnedSlice]:
    """Make the tensor to step for each slice that a rank owns.

    Args:
        pieces: the slices.
        params: the parameters, by number.
        master_dtype: the dtype of copies of smaller parameters; None copies none.
        place: the place of copies; None leaves them on the parameters' own devices.
        kept: existing copies, which are reused.
    """
    kept = kept or {}
    owned = [_own_slice(piece, params[piece.param], master_dtype, place, kept.get(piece)) for piece in pieces]
    # New small copies move together, so that a step can merge them.
    if place is None:
        place_end_to_end(own.local for own in owned if own.is_copy and own.local is not kept.get(own.piece))
    return owned


def _own_slice(
    piece: Slice,
    param: torch.Tensor,
    master_dtype: torch.dtype | None,
    place: StatePlace | None,
    kept: torch.Tensor | None,
) -> OwnedSlice:
    """Make the tensor to step for a slice: a copy, the parameter, or a view of it.

    Args:
        kept: the slice's existing copy, or None.
        master_dtype, place: as `own_slices`.
    """
    dtype = local_dtype(param, master_dtype)
    place = place if place is not None and place.holds(param) else None
    leaf = local = param
    if piece.numel != param.numel():
        leaf = local = _window(piece, param).requires_grad_(param.requires_grad)
    if place is not None or dtype != param.dtype:
        local = _copy(_window(piece, param), dtype, place, kept).requires_grad_(param.requires_grad)
    return OwnedSlice(piece, param, local, leaf)


def _copy(
    window: torch.Tensor, dtype: torch.dtype, place: StatePlace | None, kept: torch.Tensor | None
) -> torch.Tensor:
    """Copy the window to a place. Return `kept` itself if it is there and has the window's strides."""
    device = window.device if place is None else place.device
    if kept is not None and (kept.device, kept.dtype) == (device, dtype) and kept.stride() == window.stride():
        return kept
    empty = torch.empty_like(window, dtype=dtype) if place is None else place.empty_like(window, dtype)
    # A master copy that has to move is copied itself: the parameter has only its rounded values.
    is_master = dtype != window.dtype
    return empty.copy_(kept.detach() if kept is not None and is_master else window)


class Copies:
    """The owned slices whose local tensors are copies. Copies values from and to the parameters.

    Args:
        owned: the slices that a rank owns, with copies or without.
        place: the argument of `own_slices`, which made the slices.

    Attributes:
        slices: the owned slices that have copies.
    """

    def __init__(self, owned: Iterable[OwnedSlice], place: StatePlace | None) -> None:
        self.slices = [own for own in owned if own.is_copy]
        self._place = place
        # The version counter of each slice's parameter when it was last equal to its rounded copy.
        self._versions: list[int] = []
        self.note_versions()

    @torch.no_grad()
    def publish(self, slices: Iterable[OwnedSlice], state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Round the values of these copies into their parameters.

        Args:
            state: the local optimizer's state, by local tensor.
        """
        new = list(slices)
        if self._place is not None:
            # The first step has made the state in memory: move it to its place.
            for own in new:
                self._place.keep(state.get(own.local, {}), own.local)
            self._place.send([own.rounded for own in new], [own.window for own in new])
        elif new:
            # One call for all of them: a copy into a smaller dtype rounds to the nearest.
            into = [own.param if own.is_whole else own.window for own in new]
            torch._foreach_copy_(into, [own.local for own in new])

    def changed(self) -> set[int]:
        """Find the parameters that are not equal to their rounded copies; return their numbers."""
        return {own.piece.param for own in self.slices if not torch.equal(own.rounded, own.window)}

    def left_behind(self) -> set[int]:
        """Find the parameters that differ from their rounded masters, and that nobody has written since."""
        return {
            own.piece.param
            for own, version in zip(self.slices, self._versions, strict=True)
            if own.is_master and own.param._version == version and not torch.equal(own.rounded, own.window)
        }

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Copy values that a program has written into the parameters, such as a loaded model, to the copies.

        A copy keeps the elements whose rounded value the parameter still has. Changes are detected by the
        parameter's version counter; a write through `.data` is not detected, and is overwritten.
        """
        for own, version in zip(self.slices, self._versions, strict=True):
            if own.param._version != version:
                # The parameter may also have moved to another device: compare there.
                window, copy = own.window, own.local.to(own.param.device)
                changed = window != own.rounded.to(window.device)
                own.local.copy_(torch.where(changed, window.to(copy.dtype), copy))

    def forget_versions(self) -> None:
        """Make the next `follow_parameters` compare all: writes through `.data` change no version counter."""
        self._versions = [-1] * len(self.slices)

    def note_versions(self) -> None:
        """Record that each parameter now equals its rounded copy."""
        self._versions = [own.param._version for own in self.slices]
