"""The report of `python -m benchmarks gpu` on a machine with accelerators, section by section.

A section that fails is in the report with its error, and the others run. Each has a module beside this one;
`benchmarks.tables` shows a report.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.budget import Budget, Found, Skipped
from benchmarks.gpu.memory import memory
from benchmarks.gpu.speed import speed
from benchmarks.gpu.step import step
from benchmarks.machine import Commit, Machine, read_commit, read_machine, read_versions
from zero_ref.comm import devices
from zero_ref.simulator._records import record
from zero_ref.simulator.models import GPT2

TOTAL_S = 600.0
"""All sections together end after about ten minutes."""


class Section(NamedTuple):
    """Something to measure.

    Args:
        says: what it measures, in a line.
        seconds: it begins nothing more after so many.
        measure: called with the device and the budget.
        quick: further arguments with which `measure` takes a second or two.
    """

    name: str
    says: str
    seconds: int
    measure: Callable[..., Found]
    quick: Mapping[str, Any] = {}


_TINY = GPT2(width=64, depth=2, heads=4, vocabulary=101, positions=32)
_SMALLER = GPT2(width=32, depth=2, heads=4, vocabulary=101, positions=32)

SECTIONS = (
    Section(
        "step",
        "AdamW on flat shards, with and without masters, against a copy kernel",
        45,
        step,
        {"models": (_SMALLER.shapes(), _TINY.shapes()), "copied_bytes": 2**20, "rounds": 3},
    ),
    Section(
        "memory",
        "GPT-2's state and activations, predicted and allocated",
        45,
        memory,
        {"architecture": _TINY, "batch_size": 2},
    ),
    Section(
        "speed",
        "ours beside its peers: step, gradients and step, iteration (2 GPUs or more)",
        480,
        speed,
        {"sets": ("tiny",), "rounds": 2},
    ),
)
"""From short to long."""

MEASURED, FAILED, SKIPPED = "measured", "failed", "skipped"


@dataclass(frozen=True)
class Accelerator:
    """The accelerator that was measured.

    Args:
        kind: as torch names it.
        name: as its driver names it.
        count: how many this process can use. The speed is measured on all, the rest on one.
        memory_bytes: of one; None where the device does not tell.
        software: versions of the driver, of the toolkit that torch was built with, and of NCCL.
    """

    kind: str
    name: str
    count: int
    memory_bytes: int | None
    software: dict[str, str | None]


@dataclass
class SectionResult:
    """The result of a section.

    Args:
        status: MEASURED, FAILED or SKIPPED.
        why: an error, or the reason for which it was skipped; None if it was measured.
        found: the result of the section's function; empty unless it was measured.
    """

    name: str
    status: str
    seconds: float
    why: str | None = None
    found: dict[str, Any] = field(default_factory=dict)


@dataclass
class GpuReport:
    """All measurements, and their machine, as `python -m benchmarks gpu --json` writes them.

    Args:
        versions, commit: as in `results.Report`.
        date: when it began, UTC, ISO 8601.
        quick: whether the command only tried that all sections run.
    """

    accelerator: Accelerator
    machine: Machine
    versions: dict[str, str | None]
    commit: Commit | None
    date: str
    quick: bool
    sections: list[SectionResult] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> GpuReport:
        """Return the report of the plain values that `as_json` has made. The sections' results stay plain.

        Raises:
            ValueError: it is something else.
        """
        return record(cls, value, "report")

    @property
    def failed(self) -> list[str]:
        """The names of the sections that failed."""
        return [one.name for one in self.sections if one.status == FAILED]


def new_report(device: torch.device, quick: bool = False) -> GpuReport:
    """A report without sections."""
    accelerator = Accelerator(
        device.type,
        devices.name_of(device),
        devices.accelerator_count(),
        devices.total_memory(device),
        devices.software_of(device),
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return GpuReport(accelerator, read_machine(), read_versions(), read_commit(), now, quick)


def measure(
    device: torch.device,
    report: GpuReport,
    *,
    sections: Sequence[Section] | None = None,
    tell: Callable[[SectionResult], object] = lambda result: None,
    total_s: float = TOTAL_S,
) -> None:
    """Measure each section, and add it to the report, whether or not it succeeds.

    A section has the seconds that it was given, and what is left of `total_s`. Nothing stops a kernel that
    never ends: Ctrl-C does, and `tell` has then been told of the sections before.

    Args:
        sections: None for all.
        tell: called after each section with its result, which is in the report.
    """
    everything = Budget(total_s)
    for section in SECTIONS if sections is None else sections:
        began = time.monotonic()
        result = SectionResult(section.name, MEASURED, 0.0)
        try:
            if everything.over:
                raise Skipped(f"the sections before took {total_s:g} s, and there is no time left")
            budget = Budget(min(section.seconds, everything.left_s))
            result.found = section.measure(device, budget, **(section.quick if report.quick else {}))
        except Skipped as reason:
            result.status, result.why = SKIPPED, str(reason)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            result.status, result.why = FAILED, f"{type(error).__name__} at {where}: {error}"
        gc.collect()  # a section's tensors must not take the memory of the next
        devices.release_memory(device)
        result.seconds = round(time.monotonic() - began, 1)
        report.sections.append(result)
        tell(result)


def explain_absence() -> str:
    """Say that this machine has no accelerator, and what one would be used for."""
    lines = [
        f"This machine has no accelerator that torch {torch.__version__} can use, so nothing is measured.",
        "",
        f"With one, such as a GPU, `make gpu` would take at most {TOTAL_S / 60:.0f} minutes for:",
        "",
    ]
    width = max(len(section.name) for section in SECTIONS)
    lines += [f"  {one.name:{width}}  {one.seconds:>4} s  {one.says}" for one in SECTIONS]
    return "\n".join(lines)
