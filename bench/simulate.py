"""How long it takes to simulate a trillion parameters on very many ranks, and how much memory.

    python bench/simulate.py

Everything that `zero-ref simulate` does for a strategy: shapes, partition, schedule, play, critical path, a
rank's timeline and its memory. Each line is a process of its own, so that its peak memory is its own. Times
are the best of some rounds, without the interpreter's start; one thread does it all, so on a machine that is
busy with other things its processor time is what it would take on an idle one, and that is held against the
limit. One line plays ranks of uneven pace.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from typing import Any, NamedTuple

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import blocks, shapes, specs
from zero_ref.simulator.play import Work, play
from zero_ref.simulator.schedule import schedule

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "zero": ("zero", {}),
    "zero-bucket": ("zero-bucket", {}),
    "zero-even": ("zero-even", {}),
    "zero-even, to owners": ("zero-even", {"to_owners": True}),
    "zero-even, interleaved": ("zero-even", {"way": "interleaved", "side_stream": True}),
    "zero-2": ("zero-2", {}),
    "zero-2, native": ("zero-2", {"native": True}),
    "zero-3": ("zero-3", {}),
    "local-sgd": ("local-sgd", {}),
    "zero-even, jitter": ("zero-even", {}),
}
LIMIT_S = {1024: 1.0, 4096: 4.0}
LIMIT_MB = 500


class Cost(NamedTuple):
    """What a simulation took, how many operations its schedule has, and how long the iteration takes."""

    cpu_s: float
    wall_s: float
    peak_mb: float
    operations: int
    iteration_s: float


def cost(name: str, world_size: int, rounds: int) -> Cost:
    """Of one line, in a process that does nothing else."""
    strategy, options = RUNS[name]
    cpu_s, wall_s = [], []
    for _ in range(rounds):
        wall, processor = time.perf_counter(), time.process_time()
        listed = shapes("zero-1t")
        if strategy == "zero-3":
            options = {"blocks": blocks(listed), "rows": [param.shape[0] for param in listed]}
        plan = schedule(strategy, specs(listed, "bfloat16"), world_size, activation_bytes=10**10, **options)
        jitter = 0.05 if name.endswith("jitter") else 0.0
        played = play(plan, cluster("h100-ib"), Work(2048, recompute=True), jitter=jitter)
        played.critical_ms()
        played.timeline()
        played.memory()
        cpu_s.append(time.process_time() - processor)
        wall_s.append(time.perf_counter() - wall)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return Cost(min(cpu_s), min(wall_s), peak_mb, len(plan.operations), played.iteration_ms / 1e3)


def main() -> int:
    """One line for each number of ranks and strategy; 1 if one takes too long or too much."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # Not forked, so that a line's peak memory is not that of this process.
    processes = multiprocessing.get_context("spawn")
    print("| ranks | strategy | processor s | wall s | peak MB | operations | simulated iteration, s |")
    print("|---|---|---|---|---|---|---|")
    within = True
    for world_size, limit_s in LIMIT_S.items():
        for name in RUNS:
            with processes.Pool(1) as pool:
                found = pool.apply(cost, (name, world_size, args.rounds))
            within &= found.cpu_s < limit_s and found.peak_mb < LIMIT_MB
            print(
                f"| {world_size:,} | {name} | {found.cpu_s:.2f} | {found.wall_s:.2f} | {found.peak_mb:.0f} "
                f"| {found.operations:,} | {found.iteration_s:,.1f} |",
                flush=True,
            )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
