"""The devices of ranks and the backend of their messages, chosen from this machine's accelerators.

| torch finds here | backend | tensors of rank r |
|---|---|---|
| an accelerator for each rank | the accelerator's own, NCCL for NVIDIA's GPUs | on accelerator r |
| fewer, but at least one | Gloo | on accelerator r % count, which ranks share |
| none | Gloo | on the CPU |

Ranks share accelerators only of a kind whose tensors Gloo takes; on others they use the CPU. Whoever asks for
Gloo by name, as `ranks.run(..., backend="gloo")`, gets it on the CPU of every machine: a kernel counts bytes
there, and a time-out is an error. RPC sends tensors of the CPU, so its ranks are there too.

Two environment variables of the process that starts ranks override this, for all its ranks but those of RPC:

- ZERO_REF_DEVICE: "cpu"; a kind of accelerator, by torch's name, for the ranks in turn; or one accelerator,
  a kind with a number, for all of them. An accelerator that is named so also becomes the ranks' default
  device: code that names no device, such as this package's tests, runs there, and what a call brings along
  is there. In a notebook it becomes no default device, and Gloo that is asked for by name stays on the CPU.
- ZERO_REF_BACKEND: "gloo" or "nccl", whatever backend a call asks for.

In a rank's own environment ZERO_REF_DEVICE names that rank's device.
"""

from __future__ import annotations

import operator
import os
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero_ref.comm import devices
from zero_ref.comm.devices import CPU

__all__ = ["Placement", "place_ranks"]

DEVICE, BACKEND = "ZERO_REF_DEVICE", "ZERO_REF_BACKEND"
GLOO = "gloo"
TITLES = {GLOO: "Gloo", "nccl": "NCCL"}


class Placement(NamedTuple):
    """The devices and the backend that the ranks of one machine use.

    Args:
        backend: of torch.distributed, such as "gloo".
        devices: of each rank, in rank order: "cpu" or an accelerator with its number.
        is_default: whether a rank's device is also its default one.
    """

    backend: str
    devices: tuple[str, ...]
    is_default: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on the machine's processor and in its memory."""
        return self.devices[0] == CPU.type

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The accelerators in use, each once; none on the CPU."""
        return () if self.on_cpu else tuple(dict.fromkeys(self.devices))

    def names(self) -> str:
        """Return the drivers' names of these accelerators: one name if all are alike."""
        return " and ".join(dict.fromkeys(devices.name_of(torch.device(each)) for each in self.accelerators))

    def describe(self) -> str:
        """One line for the reader.

        >>> Placement("gloo", ("cpu",) * 4).describe()
        "4 ranks: Gloo, on this machine's CPU"
        """
        world_size, used = len(self.devices), self.accelerators
        numbers = ", ".join(used)
        if self.on_cpu:
            where = "on this machine's CPU"
        elif world_size == 1:
            where = f"on {self.names()} ({numbers})"
        elif len(used) == world_size:
            where = f"one {self.names()} each ({numbers})"
        else:
            where = f"sharing {len(used)} {self.names()} ({numbers})"
        who = "1 rank" if world_size == 1 else f"{world_size} ranks"
        return f"{who}: {TITLES.get(self.backend, self.backend)}, {where}"


def place_ranks(world_size: int, backend: str | None = None, *, rpc: bool = False) -> Placement:
    """Choose for `world_size` ranks of this machine, as the table above says.

    Args:
        backend: "gloo", "nccl", or None for the choice.
        rpc: whether the ranks are RPC workers as well.
    Raises:
        ValueError: an unknown backend or device, here or in a variable; or one that this machine lacks.
    """
    if operator.index(world_size) < 1:
        raise ValueError(f"world_size must be 1 or more, not {world_size}")
    own, asked = devices.own_backend(), os.environ.get(BACKEND) or None
    for name, value in (("backend", backend), (BACKEND, asked)):
        if value not in (None, "nccl", GLOO, own):
            raise ValueError(f'{name} must be "nccl", "gloo" or left out, not {value!r}')
    on_cpu = (CPU.type,) * world_size
    if rpc and backend in (None, GLOO):
        return Placement(GLOO, on_cpu)
    named = os.environ.get(DEVICE) or None
    where = _in_turn(world_size) if named is None else _named_devices(named, world_size)
    if backend == GLOO and asked in (None, GLOO) and (named is None or in_notebook()):
        where = on_cpu
    one_each = where != on_cpu and len(set(where)) == world_size
    chosen = asked or backend or (own if one_each and own else GLOO)
    if chosen != GLOO and not (one_each and chosen == own):
        raise ValueError(
            f'"{chosen}" needs an accelerator of its own for each of {world_size} ranks, such as a GPU. '
            f"This machine has {devices.accelerator_count()} that torch can use"
            f"{'' if named is None else f', and {DEVICE} is {named!r}'}."
        )
    if chosen == GLOO and not devices.gloo_takes(torch.device(where[0])):
        if named is not None:
            raise ValueError(f"{DEVICE} is {named!r}, and Gloo takes no tensors there: set it to cpu.")
        where = on_cpu
    is_default = named is not None and where != on_cpu and not in_notebook()
    return Placement(chosen, where, is_default)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose cells say what is on which device."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _in_turn(world_size: int) -> tuple[str, ...]:
    found, count = devices.accelerator(), devices.accelerator_count()
    if found is None or count == 0:
        return (CPU.type,) * world_size
    return tuple(f"{found.type}:{rank % count}" for rank in range(world_size))


def _named_devices(name: str, world_size: int) -> tuple[str, ...]:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f'{DEVICE} is {name!r}, which torch does not know: it must be "cpu", or "{devices.EXAMPLE}" or '
            f'another kind of accelerator, with or without a number, as in "{devices.EXAMPLE}:0".'
        ) from error
    if device.type == CPU.type:
        return (CPU.type,) * world_size
    found, count = devices.accelerator(), devices.accelerator_count()
    if found is None or device.type != found.type or (device.index or 0) >= count:
        has = "no accelerator" if found is None else f"{count} of the kind {found.type!r}"
        raise ValueError(f"{DEVICE} is {name!r}, and torch {torch.__version__} finds {has} on this machine.")
    return _in_turn(world_size) if device.index is None else (str(device),) * world_size


def settle(device: str, is_default: bool) -> None:
    """Make this the device of this process, which is a rank: the current one, and what `device_here` gives.

    Args:
        is_default: also the device of tensors for which none is named.
    """
    os.environ[DEVICE] = device
    devices.use(torch.device(device))
    if is_default:
        torch.set_default_device(device)


def own_device(backend: str, device: str) -> torch.device | None:
    """The `device_id` for `init_process_group`: NCCL connects at once, and knows where barriers are."""
    return None if backend == GLOO else torch.device(device)


def device_here() -> torch.device:
    """Return the device of this process's tensors if it is a rank, else the CPU.

    A rank that was not started by this package has its accelerator, unless its backend is Gloo.
    """
    if not dist.is_initialized():
        return CPU
    if name := os.environ.get(DEVICE):
        is_kind = devices.is_accelerator(torch.device(name)) and ":" not in name
        return devices.current_device() if is_kind else torch.device(name)
    return CPU if dist.get_backend() == GLOO else devices.current_device()
