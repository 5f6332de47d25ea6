"""What a conclusion hangs on: the same comparison with one circumstance changed at a time.

"Strategy A is faster than B" holds for a cluster, a number of ranks, a bucket size, and none of them is known
exactly. `sensitivity` varies each, and says where the other strategy wins. `what_if` looks at one strategy:
what would have to get better for its step to get faster?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_ref.simulator.cluster import Cluster, Link
from zero_ref.simulator.play import Work, play
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


# ----------------------------------------------------------------------------- one circumstance, scaled


def _latency(cluster: Cluster, scale: float) -> Cluster:
    return cluster.with_links(latency=scale)


def _within(cluster: Cluster, scale: float) -> Cluster:
    links = {op: _faster(link, scale) for op, link in cluster.link_of_op.items()}
    return replace(cluster, within=_faster(cluster.within, scale), link_of_op=links)


def _between(cluster: Cluster, scale: float) -> Cluster:
    return replace(cluster, between=_faster(cluster.between, scale))


def _faster(link: Link, scale: float) -> Link:
    return replace(link, gb_per_s=link.gb_per_s * scale)


def _compute(cluster: Cluster, scale: float) -> Cluster:
    device = cluster.device
    return replace(
        cluster,
        device=replace(device, tflops=device.tflops * scale, overhead_us=device.overhead_us / scale),
    )


def _memory(cluster: Cluster, scale: float) -> Cluster:
    device = cluster.device
    return replace(
        cluster,
        device=replace(
            device,
            memory_gb_per_s=device.memory_gb_per_s * scale,
            update_overhead_us=device.update_overhead_us / scale,
        ),
    )


_OF_CLUSTER: dict[str, Callable[[Cluster, float], Cluster]] = {
    "latency": _latency,
    "bandwidth within nodes": _within,
    "bandwidth between nodes": _between,
    "compute": _compute,
    "memory bandwidth": _memory,
}

FACTORS: dict[str, str] = {
    "latency": "of every link",
    "bandwidth within nodes": "of the links between ranks of a node",
    "bandwidth between nodes": "of the links from node to node",
    "bucket size": "of DDP's gradient buckets",
    "ranks": "how many there are, each with as much work as before",
    "compute": "speed of forward and backward",
    "memory bandwidth": "speed of the optimizer step",
}
"""What can be varied, by name."""


def scaled(setting: Setting, factor: str, scale: float) -> Setting:
    """The setting with one circumstance multiplied. Ranks and bytes stay whole, and at least 1.

    >>> from zero_ref.simulator.cluster import cluster
    >>> setting = Setting(cluster("h100-ib"), world_size=64)
    >>> scaled(setting, "latency", 4).cluster.between.latency_us, scaled(setting, "ranks", 0.25).world_size
    (40.0, 16)

    Raises:
        ValueError: the factor is not in FACTORS, or the scale is not above 0.
    """
    if factor not in FACTORS:
        raise ValueError(f"unknown factor {factor!r}; choose one of {', '.join(FACTORS)}.")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{factor} can be multiplied by what is above 0, got {scale:g}.")
    if factor == "ranks":
        return replace(setting, world_size=max(1, round(setting.world_size * scale)))
    if factor == "bucket size":
        return replace(setting, bucket_bytes=max(1, round(setting.bucket_bytes * scale)))
    return replace(setting, cluster=_OF_CLUSTER[factor](setting.cluster, scale))


# --------------------------------------------------------------------------------- two strategies compared


@dataclass(frozen=True)
class Variation:
    """Both strategies' iterations with one circumstance multiplied by `scale`.

    Args:
        setting: as it is then.
        winner: the faster strategy; None where both take the same time.
        changes_winner: it is not the winner of the unchanged setting.
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
        """How many times as long the second takes as the first."""
        if not self.first_ms:
            return math.inf if self.second_ms else 1.0
        return self.second_ms / self.first_ms


def sensitivity(
    make: Callable[[str, Setting], Schedule],
    strategies: tuple[str, str],
    setting: Setting,
    work: Work,
    *,
    factors: Sequence[str] = tuple(FACTORS),
    scales: Sequence[float] = SCALES,
) -> list[Variation]:
    """How two strategies compare when each circumstance is, one at a time, better or worse.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import ddp_buckets, schedule
    >>> params = [ParamSpec(10**7, "bfloat16")] * 40
    >>> def make(strategy, setting):
    ...     buckets = ddp_buckets(params, cap_bytes=setting.bucket_bytes)
    ...     return schedule(strategy, params, setting.world_size, ddp_buckets=buckets)
    >>> setting = Setting(cluster("h100-ib"), world_size=8)
    >>> found = sensitivity(make, ("ddp", "zero-even"), setting, Work(tokens=4096))
    >>> for one in found:
    ...     if one.changes_winner:
    ...         times = f"{one.first_ms:.1f} : {one.second_ms:.1f} ms"
    ...         print(f"{one.factor} x{one.scale:g}: {one.winner}, {times}")
    bandwidth within nodes x0.25: ddp, 28.9 : 33.1 ms
    bandwidth within nodes x0.5: ddp, 28.5 : 29.2 ms
    ranks x0.25: ddp, 28.3 : 28.4 ms
    memory bandwidth x2: ddp, 26.7 : 27.1 ms
    memory bandwidth x4: ddp, 25.9 : 27.0 ms

    As it is ZeRO wins: what it saves of the step is more than its broadcasts take. Not so where broadcasts
    take longer, or where there is less of the step to save. Latency, bucket size and compute change nothing.

    Args:
        make: the schedule of a strategy in a setting.
        strategies: the two names that `make` is called with.
        work: of each rank, the same in every setting.
        factors: names in FACTORS.
        scales: what each is multiplied by.
    Returns:
        One for each factor and scale, in this order.
    Raises:
        ValueError: as `scaled`.
    """
    plans: dict[tuple[str, int, int], Schedule] = {}

    def iteration_ms(strategy: str, changed: Setting) -> float:
        key = strategy, changed.world_size, changed.bucket_bytes
        if key not in plans:  # a schedule knows no clock: most factors leave it as it is
            plans[key] = make(strategy, changed)
        return play(plans[key], changed.cluster, work).iteration_ms

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
    # Sums of the same times in another order differ in their last bits; that is no victory.
    if math.isclose(first_ms, second_ms, rel_tol=1e-9):
        return None
    return strategies[first_ms > second_ms]


# ------------------------------------------------------------------------------ one strategy, made faster


@dataclass(frozen=True)
class WhatIf:
    """One iteration, what its time goes into, and what it would be if one thing were better.

    Args:
        iteration_ms: as it is.
        critical_ms: of it, for each label of the operations on the critical path.
        improved_ms: the iteration when this one thing is so many times as good as it is. "even pace" is
            there if ranks were slow or had jitter: none is.
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


def what_if(plan: Schedule, cluster: Cluster, work: Work, *, times: float = 2.0, **played: Any) -> WhatIf:
    """What would have to change for the step to get faster: everything that could be better, one at a time.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import schedule
    >>> plan = schedule("zero-even", [ParamSpec(10**7, "bfloat16")] * 40, world_size=64)
    >>> found = what_if(plan, cluster("h100-ib"), Work(tokens=4096))
    >>> {label: round(ms, 1) for label, ms in found.critical_ms.items()}
    {'forward': 8.3, 'backward': 16.6, 'reduce': 0.2, 'step': 0.1, 'broadcast': 2.5}
    >>> {name: round(ms, 1) for name, ms in found.improved_ms.items()}        # doctest: +NORMALIZE_WHITESPACE
    {'latency': 27.3, 'bandwidth within nodes': 27.6, 'bandwidth between nodes': 27.4, 'compute': 15.3,
     'memory bandwidth': 27.6}

    Computing is nine tenths of the time, so nothing but a faster device would help much.

    Args:
        times: how many times as good: half the latency, twice the bandwidth or speed.
        played: `slow`, `jitter` and `seed` for `play`.
    Raises:
        ValueError: `times` is not above 0, or as `play`.
    """
    as_it_is = play(plan, cluster, work, **played)
    setting = Setting(cluster, plan.world_size)
    improved = {}
    for factor in _OF_CLUSTER:
        better = scaled(setting, factor, 1 / times if factor == "latency" else times)
        improved[factor] = as_it_is.on(better.cluster, work).iteration_ms
    if played.get("slow") or played.get("jitter"):
        improved["even pace"] = play(plan, cluster, work).iteration_ms
    critical = {label: ms / plan.iterations for label, ms in as_it_is.critical_ms().items()}
    return WhatIf(as_it_is.iteration_ms, critical, improved)
