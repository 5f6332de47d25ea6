"""The numbers that a conclusion depends on: a comparison with one circumstance changed at a time.

"Strategy A is faster than B" holds for a cluster, a number of ranks and a bucket size, and none of them is
known exactly. `sensitivity` varies each of them, and says where the other strategy wins. `what_if` takes one
strategy, and says what would have to improve for its iteration to get faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.cluster import Cluster, Link
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.schedule import MIB, Schedule

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Setting:
    """The circumstances of a run.

    Args:
        bucket_bytes: of DDP's gradient buckets.
    Raises:
        ValueError: there is no rank, or a bucket is not above 0.
    """

    cluster: Cluster
    world_size: int
    bucket_bytes: int = 25 * MIB

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.bucket_bytes < 1:
            raise ValueError(
                f"world_size and bucket_bytes must be at least 1, got {self.world_size} and "
                f"{self.bucket_bytes}."
            )


def _closer(one: Cluster, scale: float) -> Cluster:
    """Each link's share of its rate multiplied, up to all of it."""

    def of(link: Link) -> Link:
        return replace(link, reached=min(1.0, link.reached * scale))

    of_op = {op: of(link) for op, link in one.link_of_op.items()}
    return replace(one, within=of(one.within), between=of(one.between), link_of_op=of_op)


def _with_share(one: Cluster, name: str, scale: float) -> Cluster:
    """A share of the device's peak, or of its memory's bandwidth, multiplied, up to all of it."""
    share = getattr(one.device, name)
    changes: dict[str, Any] = {name: None if share is None else min(1.0, share * scale)}
    return replace(one, device=replace(one.device, **changes))


_OF_CLUSTER: dict[str, Callable[[Cluster, float], Cluster]] = {
    "latency": lambda one, scale: one.with_links(latency=scale),
    "bandwidth within nodes": lambda one, scale: replace(
        one.with_links(bandwidth=scale), between=one.between
    ),
    "bandwidth between nodes": lambda one, scale: replace(one, between=one.between.scaled(bandwidth=scale)),
    "compute": lambda one, scale: replace(one, device=one.device.faster(computing=scale)),
    "memory bandwidth": lambda one, scale: replace(one, device=one.device.faster(memory=scale)),
    "share of links": _closer,
    "share of products": lambda one, scale: _with_share(one, "reached", scale),
    "share of attention": lambda one, scale: _with_share(one, "attention_reached", scale),
    "share of memory": lambda one, scale: _with_share(one, "memory_reached", scale),
}
"""The cluster with one of its figures multiplied, by the name of the factor. Shares end at 1."""

SWITCH = "sums in the switch"
"""The name of the improvement that `Cluster.nvls` is."""

FACTORS: dict[str, str] = {
    "latency": "of every link",
    "bandwidth within nodes": "of the links between ranks of a node",
    "bandwidth between nodes": "of the links from node to node",
    "bucket size": "of DDP's gradient buckets",
    "ranks": "how many there are, each with as much work as before",
    "compute": "peak of the device",
    "memory bandwidth": "of the device: of the optimizer step, and of kernels that are limited by it",
    "share of links": "what large messages reach of a link's rate, 1 at most",
    "share of products": "what large matrix products reach of the peak, 1 at most",
    "share of attention": "what attention reaches of it, 1 at most",
    "share of memory": "what kernels limited by memory reach of its bandwidth, 1 at most",
}
"""The circumstances that can be varied, by name."""


def scaled(setting: Setting, factor: str, scale: float) -> Setting:
    """The setting with one circumstance multiplied. Ranks and bytes stay whole, and at least 1.

    >>> from zero_ref.simulator.cluster import cluster
    >>> setting = Setting(cluster("h100-ib"), world_size=64)
    >>> scaled(setting, "latency", 4).cluster.between.latency_us, scaled(setting, "ranks", 0.25).world_size
    (56.0, 16)

    Raises:
        ValueError: the factor is not in FACTORS, or the scale is not above 0.
    """
    check_name("factor", factor, FACTORS)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{factor} can be multiplied by what is above 0, got {scale:g}.")
    if factor == "ranks":
        return replace(setting, world_size=max(1, round(setting.world_size * scale)))
    if factor == "bucket size":
        return replace(setting, bucket_bytes=max(1, round(setting.bucket_bytes * scale)))
    return replace(setting, cluster=_OF_CLUSTER[factor](setting.cluster, scale))


@dataclass(frozen=True)
class Variation:
    """Both strategies' iterations with one circumstance multiplied by `scale`.

    Args:
        setting: with the circumstance multiplied.
        winner: the faster strategy; None where both take the same time.
        changes_winner: another strategy wins in the unchanged setting.
    """

    factor: str
    scale: float
    setting: Setting
    first_ms: float
    second_ms: float
    winner: str | None
    changes_winner: bool

    @property
    def ratio(self) -> float:
        """The second strategy's time, as a multiple of the first's."""
        if not self.first_ms:
            return math.inf if self.second_ms else 1.0
        return self.second_ms / self.first_ms


def sensitivity(
    make: Callable[[str, Setting], Schedule],
    strategies: tuple[str, str],
    setting: Setting,
    workload: Workload,
    *,
    factors: Sequence[str] = tuple(FACTORS),
    scales: Sequence[float] = SCALES,
) -> list[Variation]:
    """Compare two strategies with each circumstance better or worse, one at a time.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import ddp_buckets, schedule
    >>> params = [ParamSpec(10**7, "bfloat16")] * 40
    >>> def make(strategy, setting):
    ...     buckets = ddp_buckets(params, cap_bytes=setting.bucket_bytes)
    ...     return schedule(strategy, params, setting.world_size, ddp_buckets=buckets)
    >>> setting = Setting(cluster("h100-ib"), world_size=8)
    >>> found = sensitivity(make, ("ddp", "zero-even"), setting, Workload(tokens=4096))
    >>> for one in found:
    ...     if one.changes_winner:
    ...         times = f"{one.first_ms:.1f} : {one.second_ms:.1f} ms"
    ...         print(f"{one.factor} x{one.scale:g}: {one.winner}, {times}")
    bandwidth within nodes x0.25: ddp, 25.6 : 30.9 ms
    bandwidth within nodes x0.5: ddp, 19.0 : 20.0 ms
    ranks x0.25: ddp, 18.7 : 18.9 ms
    memory bandwidth x2: ddp, 16.8 : 17.4 ms
    memory bandwidth x4: ddp, 15.8 : 17.3 ms
    share of links x0.25: ddp, 25.6 : 30.9 ms
    share of links x0.5: ddp, 19.0 : 20.0 ms

    In the unchanged setting ZeRO wins: it saves more of the step than its broadcasts take. DDP wins where
    broadcasts take longer, or the step less. Latency, bucket size and compute change nothing.

    Args:
        make: the schedule of a strategy in a setting.
        strategies: the two names that `make` is called with.
        workload: of each rank, the same in every setting.
        factors: names in FACTORS.
        scales: what each is multiplied by.
    Returns:
        One variation for each factor and scale, in this order.
    Raises:
        ValueError: as `scaled`.
    """
    schedules: dict[tuple[str, int, int], Schedule] = {}

    def iteration_ms(strategy: str, changed: Setting) -> float:
        key = strategy, changed.world_size, changed.bucket_bytes
        if key not in schedules:  # most factors change times only, and leave the schedule as it is
            schedules[key] = make(strategy, changed)
        return play(schedules[key], changed.cluster, workload).iteration_ms

    first, second = strategies
    usual = _winner(strategies, iteration_ms(first, setting), iteration_ms(second, setting))
    variations = []
    for factor in factors:
        for scale in scales:
            changed = scaled(setting, factor, scale)
            first_ms, second_ms = iteration_ms(first, changed), iteration_ms(second, changed)
            winner = _winner(strategies, first_ms, second_ms)
            variations.append(Variation(factor, scale, changed, first_ms, second_ms, winner, winner != usual))
    return variations


def _winner(strategies: tuple[str, str], first_ms: float, second_ms: float) -> str | None:
    # Sums of the same times in another order differ in their last bits.
    if math.isclose(first_ms, second_ms, rel_tol=1e-9):
        return None
    return strategies[first_ms > second_ms]


@dataclass(frozen=True)
class WhatIf:
    """The time of an iteration, what it is spent on, and what it would be with one improvement.

    Args:
        iteration_ms: without an improvement.
        critical_ms: its parts, by the labels of the operations on the critical path.
        improved_ms: the time with each improvement. SWITCH is among them if ranks of NCCL's are on nodes
            without it. "even pace" is if ranks were slow or had jitter, and is the time without either.
    """

    iteration_ms: float
    critical_ms: Mapping[str, float]
    improved_ms: Mapping[str, float]

    @property
    def best(self) -> str | None:
        """The improvement that helps most; None if none helps."""
        name = min(self.improved_ms, key=lambda one: self.improved_ms[one], default=None)
        if name is None or math.isclose(self.improved_ms[name], self.iteration_ms, rel_tol=1e-9):
            return None
        return name


def what_if(
    schedule: Schedule, cluster: Cluster, workload: Workload, *, times: float = 2.0, **paces: Any
) -> WhatIf:
    """The time of an iteration with everything that could be better improved, one thing at a time.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import schedule
    >>> even = schedule("zero-even", [ParamSpec(10**7, "bfloat16")] * 40, world_size=64)
    >>> found = what_if(even, cluster("h100-ib"), Workload(tokens=4096))
    >>> {label: round(ms, 1) for label, ms in found.critical_ms.items()}
    {'forward': 4.9, 'backward': 9.5, 'reduce': 0.5, 'step': 0.1, 'broadcast': 3.2}
    >>> {name: round(ms, 1) for name, ms in found.improved_ms.items()}        # doctest: +NORMALIZE_WHITESPACE
    {'latency': 17.6, 'bandwidth within nodes': 18.1, 'bandwidth between nodes': 18.1, 'compute': 12.7,
     'memory bandwidth': 18.1, 'share of links': 17.9, 'share of products': 13.7, 'share of attention': 18.1,
     'share of memory': 18.1, 'sums in the switch': 18.1}

    Computing is eight tenths of the time, so nothing but a faster device would help much. The workload has
    matrix products only: that attention and memory change nothing says nothing about a model.

    Args:
        times: how many times as good: half the latency, twice the bandwidth or speed, a share of 1 at most.
        paces: `slow`, `jitter` and `seed` for `play`.
    Raises:
        ValueError: `times` is not above 0, or as `play`.
    """
    unchanged = play(schedule, cluster, workload, **paces)
    setting = Setting(cluster, schedule.world_size)
    improved = {}
    for factor in _OF_CLUSTER:
        better = scaled(setting, factor, 1 / times if factor == "latency" else times)
        improved[factor] = unchanged.on(better.cluster, workload).iteration_ms
    if cluster.backend == "nccl" and not cluster.nvls:
        improved[SWITCH] = unchanged.on(replace(cluster, nvls=True), workload).iteration_ms
    if paces.get("slow") or paces.get("jitter"):
        improved["even pace"] = play(schedule, cluster, workload).iteration_ms
    critical = {label: ms / schedule.iterations for label, ms in unchanged.critical_ms().items()}
    return WhatIf(unchanged.iteration_ms, critical, improved)
