"""Common parts of the measurements of `benchmarks.gpu`: their time, and the group of one rank."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zero_ref.comm import devices

Found = dict[str, Any]


class Skipped(Exception):
    """A section cannot be measured on this machine; the message says why."""


class Budget:
    """The seconds that a section may take. It is asked between measurements, so a section may take longer."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left_s == 0.0


@contextlib.contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Make this process the only rank of a group with the device's own backend. No port is opened."""
    devices.use(device)
    dist.init_process_group(
        devices.backend_of(device),
        store=HashStore(),
        rank=0,
        world_size=1,
        device_id=device if devices.is_accelerator(device) else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()
        devices.release_memory(device)
