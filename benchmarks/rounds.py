"""Contenders in turns: in every round each runs once, in an order drawn anew, all in one process group.

Whatever else the machine does falls on all of them alike, and a ratio divides two times of the same round, so
a busy minute spoils neither. All ranks draw the same order.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.results import Taken
from zero_ref.comm import devices
from zero_ref.lab import meter

WARM_UP = 2
COUNTS = 3
"""Acknowledgements, which a loopback counts too, are not as many each time."""
TOUCHED_NBYTES = 2 * 2**30


class Case(NamedTuple):
    """A call that is timed.

    Args:
        run: all ranks call it together.
        before: called untimed before each `run`.
        after: called untimed after each `run`; may check or free its result.
    """

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def take_turns(cases: Mapping[str, Case], rounds: int, *, seed: int = 0) -> dict[str, Taken]:
    """Run every case once in each round, after two rounds that do not count.

    Args:
        rounds: that count.
    Returns:
        The same on all ranks, by name.
    Collective: all ranks of the default group, with the same names.
    """
    taken = {name: Taken() for name in cases}
    drawn = random.Random(seed)
    for number in range(WARM_UP + rounds):
        for name in drawn.sample(list(cases), len(cases)):
            case = cases[name]
            case.before()
            wall, cpu = _timed(case.run)
            case.after()
            if number >= WARM_UP:
                taken[name].wall_ms.append(wall)
                taken[name].cpu_ms.append(cpu)
    for name, case in cases.items():
        taken[name].wire_bytes = _counted(case)
    return taken


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the slowest rank, and of all ranks' processor time."""
    devices.synchronize()
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    run()
    devices.synchronize()
    mine = (1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu_began))
    wall, cpu = zip(*meter.gather_from_ranks(mine), strict=True)
    return max(wall), sum(cpu)


def _counted(case: Case) -> int | None:
    """Bytes that all ranks sent in one run, less those of the barriers around it; a median."""
    counts = []
    for _ in range(COUNTS):
        with_case, without = (_sent_around(run, case) for run in (case.run, lambda: None))
        if with_case is None or without is None:
            return None
        counts.append(with_case - without)
    return statistics.median_low(counts)


def _sent_around(run: Callable[[], object], case: Case) -> int | None:
    case.before()
    dist.barrier()
    before = _sent_so_far()
    dist.barrier()  # nobody sends while another still reads
    run()
    dist.barrier()  # what is on its way has then arrived everywhere
    after = _sent_so_far()
    dist.barrier()
    case.after()
    mine = None if before is None or after is None else after - before
    of_ranks = meter.gather_from_ranks(mine)
    return None if None in of_ranks else sum(of_ranks)


def _sent_so_far() -> int | None:
    """This rank's part of the bytes sent. On a shared loopback, rank 0 reads the bytes of all ranks."""
    if wire_counter() == INTERFACE:
        return meter.wire_bytes() if dist.get_rank() == 0 else 0
    return meter.sent_bytes()


INTERFACE, CONNECTIONS = "private loopback, headers included", "TCP connections, without headers"


def wire_counter() -> str:
    """Say where bytes on the wire are read: on loopback if nothing else uses it, else on connections."""
    return INTERFACE if meter.loopback_is_private() else CONNECTIONS


# ------------------------------------------------------------------------------------------- memory


def touch_memory() -> None:
    """Leave the system with free memory that was in use a moment ago, whoever ran before.

    A virtual machine gets memory from its host when it first touches it, and may lose it again while it is
    free. Where this was written that took 3 ms a MB, thirty times what the page faults themselves take.
    """
    held = torch.ones(TOUCHED_NBYTES // dist.get_world_size() // 4)
    dist.barrier()  # all ranks hold theirs at once
    del held


def peak_growth(run: Callable[[], object]) -> int | None:
    """Bytes by which this process's resident memory at its peak during `run` exceeds that before.

    What the kernel counts (VmHWM in /proc/self/status, reset by clear_refs): every allocator, torch's and
    Python's. Free memory that malloc keeps is handed back first, so that nothing can hide in it.

    Returns:
        None where the kernel does not tell: other systems than Linux with glibc.
    Collective: all ranks of the default group.
    """
    before = None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = machine.process_memory("VmRSS")
    dist.barrier()
    run()
    return None if before is None else machine.process_memory("VmHWM") - before
