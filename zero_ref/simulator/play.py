"""A schedule on a cluster: when each operation happens, what waits for what, memory over time.

`price` says how long each operation takes. `play` then lets every rank go through its operations in order.
Each rank has a lane for computing, and the network is one lane that all ranks share, since a collective needs
all of them. So all ranks wait for a late one, and the timelines show it. Nothing is random unless jitter is
asked for, with a seed.

Calls in groups of ranks are played as one call too: all groups begin when the last of them can. In reality a
group without a slow rank would run ahead, and wait at the average instead. The average ends at the same time
if the calls of all groups take equally long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.held import held_over_time
from zero_ref.simulator.operations import COMPUTE, NETWORK, Operation
from zero_ref.simulator.price import Price, Workload, price
from zero_ref.simulator.schedule import Schedule
from zero_ref.simulator.timeline import Event, Timeline


class Wait(NamedTuple):
    """A part of the critical path: an operation whose end decides when the next one begins.

    Args:
        operation: its position in the schedule.
        rank: the rank that ended it last; None for the network.
    """

    operation: int
    rank: int | None
    start_ms: float
    stop_ms: float


@dataclass(frozen=True)
class Paces:
    """The speed at which each rank computes.

    Args:
        slow, jitter, seed: as given to `play`.
        of_rank: how many times as long each rank computes.
        deciding: the ranks to play: no other can be the last to end an operation.
    """

    slow: Mapping[int, float]
    jitter: float
    seed: int
    of_rank: Sequence[float] = field(repr=False)
    deciding: Sequence[int] = field(repr=False)


@dataclass(frozen=True)
class Played:
    """The result of `play`: for all ranks the end of each operation, and any rank's timeline on request.

    Args:
        begin_ms, end_ms: of each operation; of computing, those of the rank that ends last.
        last_rank: that rank; None for the network.
    """

    schedule: Schedule
    prices: Sequence[Price]
    cluster: Cluster = field(repr=False)
    paces: Paces
    begin_ms: Sequence[float] = field(repr=False)
    end_ms: Sequence[float] = field(repr=False)
    last_rank: Sequence[int | None] = field(repr=False)

    @property
    def overlaps(self) -> bool:
        """Whether a rank computes while the network is busy."""
        return self.cluster.overlaps

    @cached_property
    def makespan_ms(self) -> float:
        """From the beginning of the schedule until the last rank has done everything."""
        return max(self.end_ms, default=0.0)

    @property
    def iteration_ms(self) -> float:
        """The makespan of one iteration, on average: local SGD's schedule has several iterations."""
        return self.makespan_ms / self.schedule.iterations

    def on(self, cluster: Cluster, workload: Workload) -> Played:
        """The same schedule and the same paces, on another cluster or with another workload."""
        known = self.prices if cluster is self.cluster else ()
        return _play(self.schedule, cluster, workload, self.paces, known)

    def timeline(self, rank: int = 0) -> Timeline:
        """The events of one rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.schedule.world_size:
            raise ValueError(f"there are ranks 0 to {self.schedule.world_size - 1}, and no rank {rank}.")
        return Timeline(
            tuple(
                Event(self._lane_of(one), one.label, one.part, start, stop)
                for one, start, stop in self._of_rank(rank)
                if one.lane == NETWORK or one.shares is None or stop > start
            )
        )

    def link_ms(self, link: str) -> float:
        """The milliseconds of all calls if only one link, "within" nodes or "between" them, took any time."""
        if self.cluster.nodes(self.schedule.world_size) == 1 and link == "between":
            return 0.0
        of_link = price(self.schedule, self.cluster.with_only(link), Workload(0))
        calls = zip(self.schedule.operations, of_link)
        return sum(cost.ms for one, cost in calls if one.lane == NETWORK)

    def _of_rank(self, rank: int) -> Iterator[tuple[Operation, float, float]]:
        """Each operation with its begin and end on one rank, computed from the known ends of the calls."""
        free_ms: dict[str, float] = {}
        for place, (one, cost) in enumerate(zip(self.schedule.operations, self.prices)):
            if one.lane == NETWORK:
                yield one, self.begin_ms[place], self.end_ms[place]
                if not self.overlaps:
                    free_ms[COMPUTE] = self.end_ms[place]
                continue
            waits = max((self.end_ms[before] for before in one.after), default=0.0)
            lane = self._lane_of(one)
            start = max(free_ms.get(lane, 0.0), waits)
            free_ms[lane] = start + self.paces.of_rank[rank] * cost.on(rank)
            yield one, start, free_ms[lane]

    def _lane_of(self, one: Operation) -> str:
        """Return the lane of an operation; the side stream is that of backward where nothing overlaps."""
        return COMPUTE if one.lane != NETWORK and not self.overlaps else one.lane

    def memory(self, rank: int = 0, held_bytes: int | None = None) -> list[tuple[float, int]]:
        """Bytes that a rank holds, each time they change: (milliseconds, bytes from then on).

        Args:
            held_bytes: at the beginning; None for the rank's parameters and optimizer state.
        """
        held = None if held_bytes is None else {"parameters": held_bytes}
        return [(ms, sum(of_kind.values())) for ms, of_kind in self.memory_by_kind(rank, held)]

    def memory_by_kind(
        self, rank: int = 0, held: Mapping[str, int] | None = None, **options: Any
    ) -> list[tuple[float, dict[str, int]]]:
        """The same by kind: (milliseconds, bytes of each of `held.KINDS` from then on).

        Args:
            held: at the beginning, by kind; None for the rank's parameters and optimizer state.
            options: as `held.held_over_time`.
        """
        if held is None:
            parameter_bytes = self.schedule.parameter_bytes[rank]
            held = {"parameters": parameter_bytes, "optimizer state": self.schedule.state_bytes[rank]}
        return held_over_time(list(self._of_rank(rank)), rank, held, **options)

    @cached_property
    def critical_path(self) -> tuple[Wait, ...]:
        """The chain of operations that decides the makespan, the first one first.

        Each begins when the one before it ends. The iteration gets faster only if something on this path gets
        shorter; what is not on it may even take a little longer.
        """
        times: dict[int | None, list[tuple[float, float]]] = {None: list(zip(self.begin_ms, self.end_ms))}

        def on(rank: int | None) -> list[tuple[float, float]]:
            if rank not in times:
                times[rank] = [(start, stop) for _, start, stop in self._of_rank(rank or 0)]
            return times[rank]

        previous = self._previous_in_lane()
        firsts = set(accumulate((len(sizes) for _, sizes in self.schedule.stretches), initial=0))
        path: list[Wait] = []
        place = max(range(len(self.end_ms)), key=lambda i: self.end_ms[i], default=None)
        rank = None if place is None else self.last_rank[place]
        while place is not None:
            while place not in firsts:  # it began when the one before it in its stretch had ended
                path.append(Wait(place, None, self.begin_ms[place], self.end_ms[place]))
                place -= 1
            path.append(Wait(place, rank, *on(rank)[place]))
            # It could begin at the end of what it waited for, or of the operation before it in its lane.
            ends = [
                (self.end_ms[before], before, self.last_rank[before])
                for before in self.schedule.operations[place].after
            ]
            earlier = previous[place]
            if earlier is not None:
                same = self.last_rank[earlier] if rank is None or self.last_rank[earlier] is None else rank
                ends.append((on(same)[earlier][1], earlier, same))
            _, place, rank = max(ends, key=lambda one: one[:2], default=(0.0, None, None))
        return tuple(reversed([wait for wait in path if wait.stop_ms > wait.start_ms]))

    def _previous_in_lane(self) -> list[int | None]:
        """For each operation the one before it in its lane. Where nothing overlaps, all is one lane."""
        latest: dict[str, int] = {}
        previous: list[int | None] = []
        for place, one in enumerate(self.schedule.operations):
            lane = one.lane if self.overlaps else COMPUTE
            previous.append(latest.get(lane))
            latest[lane] = place
        return previous

    def critical_ms(self) -> dict[str, float]:
        """Milliseconds of the critical path, and so of the makespan, for each label."""
        ms_of_label: dict[str, float] = {}
        for wait in self.critical_path:
            label = self.schedule.operations[wait.operation].label
            ms_of_label[label] = ms_of_label.get(label, 0.0) + wait.stop_ms - wait.start_ms
        return ms_of_label


def play(
    schedule: Schedule,
    cluster: Cluster,
    workload: Workload,
    *,
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Played:
    """Play a schedule on a cluster.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import schedule
    >>> ddp = schedule("ddp", [ParamSpec(10**8, "bfloat16")] * 4, world_size=64)
    >>> played = play(ddp, cluster("h100-ib"), Workload(tokens=4096))
    >>> round(played.makespan_ms, 1), round(played.timeline().exposed_ms, 1)
    (19.9, 1.3)
    >>> round(play(ddp, cluster("h100-ib"), Workload(4096), slow={7: 1.5}).makespan_ms, 1)    # one slow rank
    29.1

    Args:
        slow: for a rank, how many times as long it computes.
        jitter: standard deviation of the ranks' computing times, as a share of them: each rank draws once.
        seed: of the jitter.
    Raises:
        ValueError: a jitter that is negative, or a slow rank that does not exist or is not above 0.
    """
    slow, ranks = dict(slow or {}), range(schedule.world_size)
    for rank, factor in slow.items():
        if rank not in ranks or not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"slow takes ranks 0 to {len(ranks) - 1} and factors above 0; got {factor:g} for {rank}."
            )
    if not (math.isfinite(jitter) and jitter >= 0):
        raise ValueError(f"jitter is a share of each rank's computing time, 0 or more; got {jitter:g}.")
    pace = [slow.get(rank, 1.0) for rank in ranks] if slow else [1.0] * len(ranks)
    if jitter:
        draw = random.Random(seed)
        pace = [factor * max(0.0, draw.gauss(1.0, jitter)) for factor in pace]
    return _play(
        schedule, cluster, workload, Paces(slow, jitter, seed, pace, _deciding(schedule.kind_of_rank, pace))
    )


def _deciding(kind_of_rank: Sequence[int], pace: Sequence[float]) -> list[int]:
    """The ranks that can be the last to end an operation, the first of those that end together.

    Of two ranks with equal shares of every computation, the one with the larger pace never ends before the
    other. So a rank decides nothing if one before it has equal shares and at least its pace. What is left is
    one rank for each kind, and with jitter some log N: a million ranks cost little more than ten.
    """
    largest: dict[int, float] = {}
    deciding = []
    for rank, (kind, factor) in enumerate(zip(kind_of_rank, pace)):
        if factor > largest.get(kind, -1.0):
            largest[kind] = factor
            deciding.append(rank)
    return deciding


def _play(
    schedule: Schedule, cluster: Cluster, workload: Workload, paces: Paces, known: Sequence[Price] = ()
) -> Played:
    """The ranks that decide go through the operations in order."""
    prices = price(schedule, cluster, workload, known)
    ranks = [(rank, paces.of_rank[rank]) for rank in paces.deciding]
    free_ms: dict[str, list[float]] = {}  # of each computing lane, on each of these ranks
    begin_ms: list[float] = []
    end_ms: list[float] = []
    network_free_ms = 0.0
    last_rank: list[int | None] = []
    for one, nbytes_of_calls in schedule.stretches:
        place = len(end_ms)
        waits = max((end_ms[before] for before in one.after), default=0.0)
        if one.lane == NETWORK:
            took_ms = [cost.ms for cost in prices[place : place + len(nbytes_of_calls)]]
            computed_ms = 0.0 if cluster.overlaps else max(free_ms.get(COMPUTE, [0.0]))
            starts_ms = max(network_free_ms, waits, computed_ms)
            *begins, network_free_ms = accumulate(took_ms, initial=starts_ms)
            begin_ms += begins
            end_ms += [*begins[1:], network_free_ms]
            if not cluster.overlaps:
                free_ms[COMPUTE] = [network_free_ms] * len(ranks)
            last_rank += [None] * len(took_ms)
            continue
        cost, lane = prices[place], one.lane if cluster.overlaps else COMPUTE
        started = [max(ms, waits) for ms in free_ms.get(lane) or [0.0] * len(ranks)]
        ended = [start + factor * cost.on(rank) for (rank, factor), start in zip(ranks, started)]
        free_ms[lane] = ended
        which = ended.index(max(ended))
        begin_ms.append(started[which])
        end_ms.append(ended[which])
        last_rank.append(ranks[which][0])
    return Played(schedule, prices, cluster, paces, begin_ms, end_ms, last_rank)
