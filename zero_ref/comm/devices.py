"""Accelerators, through torch.accelerator and each device's own module: the one place that tells kinds apart.

All other code treats a GPU, another accelerator and the pretend device of the tests alike. A CPU has no
streams and nothing to wait for, so each function here says what it does for a CPU.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

EXAMPLE = "cuda"
"""A kind of accelerator to name in error messages: the one that most readers have."""


def accelerator() -> torch.device | None:
    """The kind of this machine's accelerator, without an index; None if no accelerator can be used."""
    return torch.accelerator.current_accelerator(check_available=True)


def accelerator_count() -> int:
    """Count the accelerators that this process can use."""
    found = accelerator()
    return 0 if found is None else int(_module_of(found).device_count())


def current_device() -> torch.device:
    """This process's accelerator, with its index; the CPU if there is none."""
    found = accelerator()
    return CPU if found is None else torch.device(found.type, _ask(found, "current_device", 0))


def use(device: torch.device) -> None:
    """Make this accelerator the process's current one. Does nothing for a CPU."""
    if is_accelerator(device):
        _module_of(device).set_device(device)


def is_accelerator(device: torch.device) -> bool:
    """Return whether work on the device is queued, so that the host goes on before the work is done."""
    return device.type not in ("cpu", "meta")


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed for tensors on this kind of device: "nccl" for a GPU."""
    return str(dist.get_default_backend_for_device(device.type))


def own_backend() -> str | None:
    """The backend that is made for this machine's accelerator, such as "nccl".

    None if there is no accelerator, if torch has no backend for it, or if torch was built without it.
    """
    found = accelerator()
    if found is None or found.type not in dist.Backend.default_device_backend_map:
        return None
    own = backend_of(found)
    return own if own != dist.Backend.GLOO and dist.is_backend_available(own) else None


def gloo_takes(device: torch.device) -> bool:
    """Return whether Gloo sends tensors of this kind of device: CPUs, and NVIDIA's and AMD's GPUs."""
    return device.type in dist.Backend.backend_capability[dist.Backend.GLOO]


def name_of(device: torch.device) -> str:
    """The device's name, as its driver gives it; the kind of device if the driver gives none."""
    get_name = getattr(_module_of(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def synchronize() -> None:
    """Wait until all work that this process has queued on its accelerator is done."""
    found = accelerator()
    # A process that has never used the accelerator has queued nothing, and synchronizing would initialize it.
    if found is not None and _ask(found, "is_initialized", True):
        _module_of(found).synchronize()


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread queues work for the accelerator."""
    return _module_of(device).current_stream(device)


def new_stream(device: torch.device) -> Any:
    """Make one more stream of the accelerator."""
    return _module_of(device).Stream(device)


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Queue this thread's work on the stream."""
    with _module_of(stream.device).stream(stream):
        yield


def future(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """A future whose `wait` makes the current stream wait for the stream on which the result was set."""
    return torch.futures.Future(devices=[device] if is_accelerator(device) else None)


def _ask(device: torch.device, name: str, otherwise: Any) -> Any:
    """Call a function of the device's module; `otherwise` if it has none. Apple's module has few of them."""
    function = getattr(_module_of(device), name, None)
    return otherwise if function is None else function()


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


# ------------------------------------------------------------------------------------ used by measurements


def total_memory(device: torch.device) -> int | None:
    """Bytes of the accelerator's memory; None for a CPU, or if its module does not say."""
    properties = getattr(_module_of(device), "get_device_properties", None)
    if not is_accelerator(device) or properties is None:
        return None
    return getattr(properties(device), "total_memory", None)


def memory_allocated(device: torch.device) -> int | None:
    """Bytes of tensors on the accelerator now, by its allocator's count; None for a CPU."""
    count = getattr(_module_of(device), "memory_allocated", None)
    return int(count(device)) if is_accelerator(device) and count is not None else None


def peak_memory_allocated(device: torch.device) -> int | None:
    """The peak of `memory_allocated` since `reset_peak_memory`; None for a CPU."""
    count = getattr(_module_of(device), "max_memory_allocated", None)
    return int(count(device)) if is_accelerator(device) and count is not None else None


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of `peak_memory_allocated`. Does nothing for a CPU."""
    reset = getattr(_module_of(device), "reset_peak_memory_stats", None)
    if is_accelerator(device) and reset is not None:
        reset(device)


def release_memory(device: torch.device) -> None:
    """Return the free memory that torch's allocator keeps to the accelerator, for other processes."""
    release = getattr(_module_of(device), "empty_cache", None)
    if is_accelerator(device) and release is not None:
        release()


@contextlib.contextmanager
def timing_events(device: torch.device) -> Iterator[Callable[[], float | None]]:
    """Measure the time that the accelerator takes for the work queued in the context.

    Yields:
        A function to call after the context: it waits for the work and returns milliseconds. It returns None
        for a CPU, and for an accelerator whose events record no times.
    """
    if not is_accelerator(device):
        yield lambda: None
        return
    begin, end = (_module_of(device).Event(enable_timing=True) for _ in range(2))

    def elapsed_ms() -> float | None:
        synchronize()
        return float(begin.elapsed_time(end)) if hasattr(begin, "elapsed_time") else None

    begin.record(current_stream(device))
    yield elapsed_ms
    end.record(current_stream(device))


def software_of(device: torch.device) -> dict[str, str | None]:
    """The versions of the driver, of the toolkit that torch was built with, and of NCCL."""
    toolkit = torch.version.cuda or torch.version.hip
    nccl = None
    with contextlib.suppress(Exception):  # a build without NCCL has no such function, or it raises
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"driver": _driver_version(device), "toolkit": toolkit, "nccl": nccl}


def _driver_version(device: torch.device) -> str | None:
    """The driver's version, from NVIDIA's own program, since torch has no function for it; else None."""
    if device.type != "cuda" or torch.version.hip:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
        return words[0] if words else None
    return None
