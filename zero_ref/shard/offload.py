"""The shard in other memory than the parameters': on the CPU beside an accelerator, or in files.

In `minimal.py` the values and the optimizer state of a shard lie beside the parameters. Here they lie in a
`StatePlace`, and a step goes through the shard in pieces. While one piece is stepped, the gradients of the
next pieces are on their way there, and the new values of those before are on their way back.
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
"""Values of a piece, about: large enough to be copied at full speed, small beside a shard."""

SMALL_NBYTES = 2**16
"""Smaller tensors get no file of their own."""


class Arrival(NamedTuple):
    """The gradients of a piece of a shard, perhaps still on their way to the place of its local tensors.

    Args:
        locals: the local tensors.
        gradients: for each its gradient, in the gradient's dtype.
        ready: the ends of the copies from each device; none if nothing has to be copied.
    """

    locals: list[torch.Tensor]
    gradients: list[torch.Tensor]
    ready: Sequence[Any] = ()  # events


def in_pieces(
    gradients: Iterable[tuple[torch.Tensor, torch.Tensor]], nbytes: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Cut pairs of a local tensor and its gradient into lists with about so many bytes of local tensors."""
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
    """Where local tensors and their state lie: in the CPU's memory, or in files that are mapped into it.

    Args:
        where: "cpu", or a directory for the files. These have no names: they end with the process.
    Raises:
        ValueError: another device.
        OSError: no file can be made in the directory.
    """

    def __init__(self, where: str | torch.device | os.PathLike[str]) -> None:
        self.device = torch.device("cpu")
        self.folder: Path | None = None
        if isinstance(where, os.PathLike):
            self.folder = Path(where)
            if not self.folder.is_dir():
                raise FileNotFoundError(f"state_device={str(where)!r} is no directory: make it first.")
            self._mapped(1, torch.uint8)  # raises now, not in the first step
        elif torch.device(where).type != "cpu":
            raise ValueError(
                f'state_device={str(where)!r}: the state may lie on the "cpu", or in files in a pathlib.Path.'
            )
        self._streams: dict[torch.device, Any] = {}
        self._sent: list[Any] = []  # events

    @classmethod
    def of(cls, where: str | torch.device | os.PathLike[str] | None) -> StatePlace | None:
        """The place for the optimizer's argument; None for the parameters' own devices."""
        return None if where is None else cls(where)

    def __str__(self) -> str:
        return "state in files" if self.folder else f"state on the {self.device}"

    def holds(self, param: torch.Tensor) -> bool:
        """Whether the local tensors of a parameter are copies in this place."""
        return self.folder is not None or param.device != self.device

    def empty_like(self, window: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory in this place for a tensor with the window's shape and strides.

        A tensor for which the disk has no room stays in memory, with a warning: an error on this rank alone
        would come at times when other ranks go on.
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
        """Move the state of a local tensor into files: what has its shape and is not in one yet."""
        if self.folder is None:
            return
        for key, value in state.items():
            follows = type(value) is torch.Tensor and value.shape == local.shape and value.is_cpu
            if follows and value.nbytes >= SMALL_NBYTES and value.untyped_storage().filename is None:
                state[key] = self.empty_like(value, value.dtype).copy_(value)

    # -------------------------------------------------------------------------------------------- the copies

    def fetch(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Arrival]:
        """Start to copy gradients here, in pieces.

        Args:
            gradients: local tensors, and their gradients on any device.
        """
        for event in self._sent:
            event.synchronize()  # a local tensor that is still being sent must not be stepped
        self._sent.clear()
        return [self._fetch(piece) for piece in in_pieces(gradients, PIECE_NBYTES)]

    def _fetch(self, piece: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        here, away = [], set[torch.device]()
        for _, grad in piece:
            if grad.device != self.device and grad.layout == torch.strided:
                away.add(grad.device)
                with devices.on_stream(self._beside(grad.device)):
                    pinned = torch.empty_like(grad, device=self.device, pin_memory=True)
                    grad = pinned.copy_(grad, non_blocking=True)
            here.append(grad.to(self.device))
        ready = [self._streams[device].record_event() for device in away]
        return Arrival([local for local, _ in piece], here, ready)

    def arrive(self, piece: Arrival) -> None:
        """Wait for the gradients of a piece, and set them."""
        for event in piece.ready:
            event.synchronize()
        for local, grad in zip(piece.locals, piece.gradients, strict=True):
            local.grad = grad.to(local.dtype)

    def forget(self) -> None:
        """Nothing is kept: each piece has brought its own memory."""

    def _beside(self, device: torch.device) -> Any:
        """A stream for copies from a device, after all that was launched there."""
        if device not in self._streams:
            self._streams[device] = devices.new_stream(device)
        self._streams[device].wait_stream(devices.current_stream(device))
        return self._streams[device]

    def send(self, values: Sequence[torch.Tensor], windows: Sequence[torch.Tensor]) -> None:
        """Start to copy new values into the windows of parameters; the devices' own order does the rest."""
        for value, window in zip(values, windows, strict=True):
            if window.device != self.device and not value.is_pinned():
                value = torch.empty_like(value, pin_memory=True).copy_(value)
            window.copy_(value, non_blocking=True)
        for device in {window.device for window in windows} - {self.device}:
            self._sent.append(devices.current_stream(device).record_event())
