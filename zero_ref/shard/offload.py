"""A shard in other memory than the parameters': on the CPU beside an accelerator, or in files.

In `stairs/owners.py` the values and the optimizer state of a shard lie beside the parameters. Here they lie
in a `StatePlace`, and a step goes through the shard in pieces. While one piece is stepped, the gradients of
the next pieces are copied to the place, and the new values of the pieces before are copied back.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ref.comm import devices

PIECE_NBYTES = 2**25
"""Bytes of values in a piece, about: enough to be copied at full speed, few beside a shard."""

SMALL_NBYTES = 2**16
"""Tensors of fewer bytes get no file of their own."""


class PieceGradients(NamedTuple):
    """The gradients of a piece of a shard, perhaps still being copied to the place of the local tensors.

    Args:
        locals: the local tensors of the piece.
        gradients: the gradient of each, in the gradient's dtype.
        ready: an event after the copies from each device; none if nothing has to be copied.
    """

    locals: list[torch.Tensor]
    gradients: list[torch.Tensor]
    ready: Sequence[Any] = ()  # events


def in_pieces(
    gradients: Iterable[tuple[torch.Tensor, torch.Tensor]], nbytes: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Divide pairs of a local tensor and its gradient into lists of about so many bytes of local tensors."""
    pieces: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    filled = nbytes
    for local, grad in gradients:
        if filled >= nbytes:
            pieces.append([])
            filled = 0
        pieces[-1].append((local, grad))
        filled += local.nbytes
    return pieces


class StatePlace:
    """The memory of local tensors and their state: the CPU's, or files that are mapped into the CPU's.

    Args:
        where: "cpu", or a directory for the files. The files have no names, so they end with the process.
    Raises:
        ValueError: `where` is another device.
        OSError: no file can be made in the directory.
    """

    def __init__(self, where: str | torch.device | os.PathLike[str]) -> None:
        self.device = torch.device("cpu")
        self.folder: Path | None = None
        if isinstance(where, os.PathLike):
            self.folder = Path(where)
            if not self.folder.is_dir():
                raise FileNotFoundError(f"state_device={str(where)!r} is no directory: make it first.")
            self._mapped(1, torch.uint8)  # if no file can be made, raise now, not in the first step
        elif torch.device(where).type != "cpu":
            raise ValueError(
                f'state_device={str(where)!r}: the state may lie on the "cpu", or in files in a pathlib.Path.'
            )
        self._streams: dict[torch.device, Any] = {}  # for copies from each accelerator
        self._sent: list[Any] = []  # events after the copies of new values to each accelerator

    @classmethod
    def of(cls, where: str | torch.device | os.PathLike[str] | None) -> StatePlace | None:
        """Make the place that the optimizer's argument asks for; None for the parameters' own devices."""
        return None if where is None else cls(where)

    def __str__(self) -> str:
        return "files" if self.folder else str(self.device)

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether the local tensors of a parameter are copies in this place."""
        return self.folder is not None or param.device != self.device

    def empty_like(self, window: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory in this place for a tensor with the window's shape and strides.

        A tensor for which the disk has no room stays in memory, with a warning: other ranks, whose disks may
        have room, would wait for a rank that raised an error.
        """
        if self.folder is not None and window.numel() * dtype.itemsize >= SMALL_NBYTES:
            try:
                return self._mapped(window.numel(), dtype).as_strided(window.size(), window.stride())
            except OSError as error:
                warnings.warn(
                    f"{self.folder} takes no more state, which stays in memory: {error}", stacklevel=2
                )
        pinned = devices.accelerator() is not None
        return torch.empty_like(window, dtype=dtype, device=self.device, pin_memory=pinned)

    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        handle, name = tempfile.mkstemp(prefix="zero_ref_state_", dir=self.folder)
        try:
            if hasattr(os, "posix_fallocate"):
                # Without it, a full disk kills the process when it first writes to the mapping.
                os.posix_fallocate(handle, 0, numel * dtype.itemsize)
            return torch.from_file(name, shared=True, size=numel, dtype=dtype)
        finally:
            os.close(handle)
            os.unlink(name)  # the mapping keeps the file until it is freed

    def keep(self, state: dict[Any, Any], local: torch.Tensor) -> None:
        """Move the state of a local tensor into files: the tensors in its shape that are in no file yet."""
        if self.folder is None:
            return
        for key, value in state.items():
            follows = type(value) is torch.Tensor and value.shape == local.shape and value.is_cpu
            if follows and value.nbytes >= SMALL_NBYTES and value.untyped_storage().filename is None:
                state[key] = self.empty_like(value, value.dtype).copy_(value)

    # -------------------------------------------------------------------------------------------- the copies

    def start_copies(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[PieceGradients]:
        """Start to copy gradients into this place, in pieces.

        Args:
            gradients: local tensors, and their gradients on any device.
        """
        # A local tensor that is still being sent must not be stepped.
        for event in self._sent:
            event.synchronize()
        self._sent.clear()
        return [self._start_copy(piece) for piece in in_pieces(gradients, PIECE_NBYTES)]

    def _start_copy(self, piece: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PieceGradients:
        copied, sources = [], set[torch.device]()
        for _, grad in piece:
            # Only a copy to pinned memory, on a stream of its own, runs while another piece is stepped.
            if grad.device != self.device and grad.layout == torch.strided:
                sources.add(grad.device)
                with devices.on_stream(self._copy_stream(grad.device)):
                    pinned = torch.empty_like(grad, device=self.device, pin_memory=True)
                    grad = pinned.copy_(grad, non_blocking=True)
            copied.append(grad.to(self.device))
        ready = [self._streams[device].record_event() for device in sources]
        return PieceGradients([local for local, _ in piece], copied, ready)

    def set_gradients(self, piece: PieceGradients) -> None:
        """Wait for the copies of a piece's gradients, and set the `.grad` of its local tensors."""
        for event in piece.ready:
            event.synchronize()
        for local, grad in zip(piece.locals, piece.gradients, strict=True):
            local.grad = grad.to(local.dtype)

    def release_memory(self) -> None:
        """Do nothing: each piece has memory of its own."""

    def _copy_stream(self, device: torch.device) -> Any:
        """Return the stream for copies from a device; they begin after all that was launched there."""
        if device not in self._streams:
            self._streams[device] = devices.new_stream(device)
        self._streams[device].wait_stream(devices.current_stream(device))
        return self._streams[device]

    def send(self, values: Sequence[torch.Tensor], windows: Sequence[torch.Tensor]) -> None:
        """Start to copy new values into the windows of parameters.

        Nobody has to wait: work that is launched later on the same stream sees the new values.
        """
        for value, window in zip(values, windows, strict=True):
            if window.device != self.device and not value.is_pinned():
                value = torch.empty_like(value, pin_memory=True).copy_(value)
            window.copy_(value, non_blocking=True)
        for device in {window.device for window in windows} - {self.device}:
            self._sent.append(devices.current_stream(device).record_event())
