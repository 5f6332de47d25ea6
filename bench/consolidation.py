"""consolidate_state_dict here, in torch's ZeroRedundancyOptimizer and in FairScale's OSS, side by side.

    python bench/consolidation.py [--ranks 2 4] [--rounds 10]

FairScale's takes part where `pip install --no-deps fairscale==0.4.13` was made, and is left out elsewhere.

All contenders live in one process group, one thread each, and hold the Adam state of the same model and
gradients: the GPT of zero_ref.lab.model with 12 layers of width 464, which has 148 tensors and 31.3 million
parameters, so 251 MB of state. A round consolidates onto rank 0 once with each contender, in an order drawn
anew. A contender's time is from a barrier until its slowest rank is done; what it gathered in the round
before was freed by then. CPU time is that of all ranks together. A ratio divides two times of the same round.
At the end the state dicts must be equal, bit for bit.

Memory is what the kernel counts: the peak of a process's resident memory (VmHWM in /proc/self/status, reset
by /proc/self/clear_refs) above what was resident before. That sees every allocator, torch's and Python's.
Free memory that malloc keeps is handed back first, so that an allocation cannot hide in it. Linux with glibc.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import gather_from_ranks
from zero_ref.lab.model import GPT
from zero_ref.optimizer import ZeroRedundancyOptimizer

OURS, TORCH, FAIRSCALE = "zero_ref", "torch", "fairscale"
MODEL = GPTConfig(layers=12, heads=8, width=464, context=256)
MEMORY_ROUNDS = 3
TOUCHED_NBYTES = 2 * 2**30
# Where each keeps what it has gathered, and what stands there before.
RESULT: dict[str, tuple[str, Any]] = {
    OURS: ("_consolidated", None),
    TORCH: ("_all_state_dicts", []),
    FAIRSCALE: ("_all_states", []),
}


class Cost(NamedTuple):
    """Of one consolidation: until its slowest rank was done, of all ranks together."""

    wall_ms: float
    cpu_ms: float


class Measured(NamedTuple):
    """By contender: the cost in each round; for each round the peak bytes of each rank."""

    costs: dict[str, list[Cost]]
    peaks: dict[str, list[list[int]]]


def make_contenders() -> dict[str, Any]:
    """Optimizers that have made one step, each on its own copy of the model."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchOptimizer

    classes: dict[str, Any] = {OURS: ZeroRedundancyOptimizer, TORCH: TorchOptimizer}
    try:
        from fairscale.optim import OSS

        classes[FAIRSCALE] = OSS
    except ImportError:
        pass

    contenders = {}
    for name, optimizer_class in classes.items():
        params = list(GPT(MODEL).parameters())
        optimizer = optimizer_class(params, torch.optim.Adam)
        generator = torch.Generator().manual_seed(0)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        for param in params:
            param.grad = None
        contenders[name] = optimizer
    return contenders


def measure(rounds: int) -> Measured:
    """What each rank does; all return the same."""
    torch.set_num_threads(1)
    contenders = make_contenders()
    names = sorted(contenders)
    shuffled = random.Random(0)  # the same order on every rank
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    peaks: dict[str, list[list[int]]] = {name: [] for name in names}
    for _ in range(1 + rounds):
        for name in shuffled.sample(names, len(names)):
            forget(name, contenders[name])
            touch_memory()
            costs[name].append(timed(contenders[name].consolidate_state_dict))
            forget(name, contenders[name])
    for _ in range(MEMORY_ROUNDS):
        for name in names:
            forget(name, contenders[name])
            peaks[name].append(gather_from_ranks(peak_growth(contenders[name].consolidate_state_dict)))
    if dist.get_rank() == 0:
        check_equal({name: contenders[name].state_dict()["state"] for name in names})
    return Measured({name: of_rounds[1:] for name, of_rounds in costs.items()}, peaks)  # the first warms up


def forget(name: str, optimizer: Any) -> None:
    """Free what was gathered, so that freeing it is in nobody's time."""
    attribute, empty = RESULT[name]
    setattr(optimizer, attribute, empty)
    gc.collect()


def touch_memory() -> None:
    """Leave the system with free memory that was in use a moment ago, whoever consolidated before.

    A virtual machine gets memory from its host when it first touches it, and may lose it again while it is
    free. Where this was written that took 3 ms a MB, thirty times what the page faults themselves take.
    """
    held = torch.ones(TOUCHED_NBYTES // dist.get_world_size() // 4)
    dist.barrier()  # all ranks hold theirs at once
    del held


def timed(action: Callable[[], Any]) -> Cost:
    """What `action` costs; all ranks call it together."""
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    action()
    mine = (1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu_began))
    wall, cpu = zip(*gather_from_ranks(mine), strict=True)
    return Cost(max(wall), sum(cpu))


def peak_growth(action: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory at its peak during `action` exceeds that before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


def memory(line: str) -> int:
    """Bytes on this line of the kernel's account of this process."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, f"no {line} in /proc/self/status"
    return 1024 * int(found[1])


def check_equal(states: dict[str, Any]) -> None:
    """All contenders gathered the same."""
    for name, state in states.items():
        assert state.keys() == states[OURS].keys(), name
        for number, of_param in state.items():
            for key, value in of_param.items():
                assert torch.equal(value, states[OURS][number][key]), f"{name}: {key} of parameter {number}"


def report(world_size: int, measured: Measured) -> None:
    """Medians, with quartiles in brackets, as a table."""
    print(f"\n{world_size} ranks")
    print("| contender | wall ms | CPU ms | wall ratio | CPU ratio | peak MB, rank 0 | peak MB, others |")
    print("|---|---|---|---|---|---|---|")
    ours = measured.costs[OURS]
    for name in RESULT:
        if name not in measured.costs:
            print(f"| {name} | missing: pip install --no-deps fairscale==0.4.13 |")
            continue
        costs, peaks = measured.costs[name], measured.peaks[name]
        cells = [
            spread([cost.wall_ms for cost in costs]),
            spread([cost.cpu_ms for cost in costs]),
            spread([theirs.wall_ms / our.wall_ms for theirs, our in zip(costs, ours, strict=True)]),
            spread([theirs.cpu_ms / our.cpu_ms for theirs, our in zip(costs, ours, strict=True)]),
            f"{statistics.median(of_rank[0] for of_rank in peaks) / 1e6:.1f}",
            f"{max(max(of_rank[1:]) for of_rank in peaks) / 1e6:.2f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def spread(values: list[float]) -> str:
    """Median (first to third quartile)."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def main() -> None:
    """One table for each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    params = list(GPT(MODEL).parameters())
    print(f"{len(params)} tensors, {sum(param.numel() for param in params) / 1e6:.1f} M parameters, Adam")
    for world_size in options.ranks:
        report(world_size, ranks.run(measure, world_size, options.rounds, timeout=1800)[0])


if __name__ == "__main__":
    main()
