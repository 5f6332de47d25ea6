"""The machine, the versions and the commit of a benchmark. Standard library only.

Nothing that names the machine: no host name, no user, no folder.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "fairscale", "zero_ref")


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement. A field is None if the system does not tell it.

    Args:
        processor: the model's name.
        cores: that this process may use.
        memory_bytes: of the whole machine.
        virtual: whether the processor says that it is a virtual machine's.
    """

    processor: str | None
    cores: int | None
    memory_bytes: int | None
    kernel: str
    virtual: bool | None


def read_machine() -> Machine:
    """The machine that this process runs on."""
    processor = _lines_of("/proc/cpuinfo")
    memory = _lines_of("/proc/meminfo").get("MemTotal")
    flags = processor.get("flags")  # of x86; an ARM processor has no such flag either way
    return Machine(
        processor=processor.get("model name") or platform.processor() or None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory_bytes=1024 * int(memory.split()[0]) if memory else None,
        kernel=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        virtual="hypervisor" in flags.split() if flags else None,
    )


def load_average() -> float | None:
    """The processes that wanted a core in the last minute; None where the system does not say (Windows)."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _lines_of(path: str) -> dict[str, str]:
    """The `name: value` lines of a file in /proc, the first of each name; empty on other systems."""
    try:
        text = Path(path).read_text()
    except OSError:
        return {}
    return dict(reversed(re.findall(r"^(.+?)[ \t]*:[ \t]*(.+)$", text, re.MULTILINE)))


def process_memory(line: str) -> int:
    """Bytes of this process, as a line of /proc/self/status has them: "VmRSS" now, "VmHWM" at its peak.

    Raises:
        OSError: there is no such line: another system than Linux.
    """
    kilobytes = _lines_of("/proc/self/status").get(line)
    if kilobytes is None:
        raise OSError(f"no {line} in /proc/self/status")
    return 1024 * int(kilobytes.split()[0])


def read_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()} | dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@dataclass(frozen=True)
class Commit:
    """The state of a checkout.

    Args:
        name: of the commit, as git prints it in full.
        changed: whether a tracked file differs from it, or a new one stands beside them.
    """

    name: str
    changed: bool


def read_commit(folder: Path = Path(__file__).parent) -> Commit | None:
    """The commit that a folder is at; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return Commit(git("rev-parse", "HEAD"), bool(git("status", "--porcelain")))
    except (OSError, subprocess.CalledProcessError):
        return None
