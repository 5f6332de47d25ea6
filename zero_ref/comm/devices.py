"""Accelerators, through torch.accelerator and each device's own module: the one place that knows of kinds.

A GPU, another accelerator and the pretend device of the tests take the same path everywhere else. A CPU has
no streams and nothing to wait for, so here each function says what it does for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def accelerator() -> torch.device | None:
    """The kind of this machine's accelerator, without an index; None if no accelerator can be used."""
    return torch.accelerator.current_accelerator(check_available=True)


def accelerator_count() -> int:
    """How many accelerators this process can use."""
    found = accelerator()
    return 0 if found is None else int(_module_of(found).device_count())


def current_device() -> torch.device:
    """This process's accelerator, with its index; the CPU if there is none."""
    found = accelerator()
    return CPU if found is None else torch.device(found.type, _module_of(found).current_device())


def use(device: torch.device) -> None:
    """Make this accelerator the process's current one. Does nothing for a CPU."""
    if is_accelerator(device):
        _module_of(device).set_device(device)


def is_accelerator(device: torch.device) -> bool:
    """Whether work on the device is queued, so that the host goes on before it is done."""
    return device.type not in ("cpu", "meta")


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed for tensors on this kind of device: "nccl" for a GPU."""
    return str(dist.get_default_backend_for_device(device.type))


def own_backend() -> str | None:
    """The backend that is made for this machine's accelerator, such as "nccl".

    None without an accelerator, and where torch has no such backend or was built without it.
    """
    found = accelerator()
    if found is None or found.type not in dist.Backend.default_device_backend_map:
        return None
    own = backend_of(found)
    return own if own != dist.Backend.GLOO and dist.is_backend_available(own) else None


def gloo_takes(device: torch.device) -> bool:
    """Whether Gloo carries tensors of this kind of device: of CPUs, and of NVIDIA's and AMD's GPUs."""
    return device.type in dist.Backend.backend_capability[dist.Backend.GLOO]


def name_of(device: torch.device) -> str:
    """The device's name, as its driver gives it; its kind if there is none."""
    get_name = getattr(_module_of(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def synchronize() -> None:
    """Wait until all that this process has queued on its accelerator is done, if it has ever used one."""
    found = accelerator()
    if found is not None and _module_of(found).is_initialized():
        _module_of(found).synchronize()


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread queues work for the accelerator."""
    return _module_of(device).current_stream(device)


def new_stream(device: torch.device) -> Any:
    """A stream beside the others of the accelerator."""
    return _module_of(device).Stream(device)


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Queue this thread's work on the stream."""
    with _module_of(stream.device).stream(stream):
        yield


def future(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """A future whose `wait` lets the waiter's stream wait for the one that set its result."""
    return torch.futures.Future(devices=[device] if is_accelerator(device) else None)


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
