"""How long a plan and a simulation take, and how much memory: no rank is started, no tensor made."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
import time
import timeit
from collections.abc import Iterator
from functools import partial

from benchmarks import machine
from benchmarks.results import Figure
from zero_ref.plan.choice import RULES, plan_partition
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import blocks, shapes, specs
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import RECIPES, Recipe, recipe
from zero_ref.simulator.schedule import schedule

PLANNED = [ParamSpec(numel) for _ in range(1000) for numel in (64 * 64, 64)]
"""As many tensors as the set `tiny` has, and as large."""

PLANNED_RANKS = 4096

MODEL = "zero-1t"

SIMULATED: dict[str, Recipe] = {
    **RECIPES,
    "zero-even, to owners": recipe("zero-even", to_owners=True),
    "zero-even, interleaved": recipe("zero-even", way="interleaved"),
    "zero-2, in forward": recipe("zero-2", way="in_forward"),
    "zero-2, groups of 8": recipe("zero-2", shard_group=8),
    "zero-even, jitter": recipe("zero-even"),
}
"""The recipe of each case. The last one plays ranks of uneven pace."""

SIMULATED_RANKS = (1024, 4096)


def plan(rounds: int = 5) -> Iterator[Figure]:
    """Who owns what of 2,000 tensors on 4,096 ranks, under each rule: the best of some rounds."""
    for name in RULES:
        once = partial(plan_partition, name, PLANNED, PLANNED_RANKS)
        ms = 1e3 * min(timeit.repeat(once, number=1, repeat=rounds))
        yield Figure("plan", "partition", name.replace("_", "-"), PLANNED_RANKS, ms, "ms")


def simulate(rounds: int = 3) -> Iterator[Figure]:
    """Everything that `zero-ref simulate` does for a strategy on the ZeRO paper's model of 1T parameters.

    Shapes, partition, schedule, play, critical path, a rank's timeline and its memory. Each case has a
    process of its own, so that its peak memory is its own. Times are the best of some rounds, without the
    interpreter's start. One thread does it all, so its processor time is what it would take on a machine
    that does nothing else.
    """
    # Not forked, so that a case's peak memory is not that of this process.
    processes = multiprocessing.get_context("spawn")
    for world_size, case in itertools.product(SIMULATED_RANKS, SIMULATED):
        # Ctrl-C in a terminal reaches this process too; it is the caller who ends it, and says so.
        with processes.Pool(1, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            figures = pool.apply(cost, (case, world_size, rounds))
        for name, (value, unit) in figures.items():
            yield Figure("simulate", name, case, world_size, value, unit)


def cost(case: str, world_size: int, rounds: int) -> dict[str, tuple[float, str]]:
    """Of one case, in a process that does nothing else: each figure and its unit."""
    cpu_s, wall_s = [], []
    for _ in range(rounds):
        wall, processor = time.perf_counter(), time.process_time()
        operations, iteration_ms = _simulated(case, world_size)
        cpu_s.append(time.process_time() - processor)
        wall_s.append(time.perf_counter() - wall)
    found = {"processor time": (min(cpu_s), "s"), "wall time": (min(wall_s), "s")}
    if sys.platform == "linux":
        # Not ru_maxrss: that of a process begins with what the one that started it had.
        found["peak memory"] = (machine.process_memory("VmHWM") / 1e6, "MB")
    return found | {"operations": (operations, ""), "simulated iteration": (iteration_ms / 1e3, "s")}


def _simulated(case: str, world_size: int) -> tuple[int, float]:
    listed = shapes(MODEL)
    plan = schedule(
        SIMULATED[case],
        specs(listed, "bfloat16"),
        world_size,
        blocks=blocks(listed),
        activation_bytes=10**10,
        side_stream=True,
    )
    jitter = 0.05 if case.endswith("jitter") else 0.0
    played = play(plan, cluster("h100-ib"), Workload(2048, recompute=True), jitter=jitter)
    played.critical_ms()
    played.timeline()
    played.memory()
    return len(plan.operations), played.iteration_ms
