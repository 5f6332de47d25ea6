"""A schedule played on a cluster: when each operation happens, what waits for what, memory over time.

`price` gives each operation its length. `play` then lets every rank go through its operations in order: each
rank has a lane for computing, the network is one lane that all share, since a collective needs all ranks. So
a late rank makes all others wait, and whoever waits shows it. No random event unless asked for, with a seed.

Calls in groups of ranks are played as one call too: all groups begin when the last of them can. Beside a slow
rank a group without one would run ahead, and wait at the average instead. When that is over is the same, if
the calls of all groups take equally long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

from zero_ref.simulator.cluster import Cluster, Device
from zero_ref.simulator.operations import COMPUTE, NETWORK, Operation
from zero_ref.simulator.schedule import Schedule
from zero_ref.simulator.timeline import Event, Timeline

# ------------------------------------------------------------------------------------------ how long it takes


@dataclass(frozen=True)
class Work:
    """What a rank computes in an iteration, for its own part of the batch.

    Args:
        tokens: of the rank's own part.
        recompute: activations are computed again in backward (checkpointing): a forward more.
        attention_share: what attention adds to the operations of forward and backward, as a share of them.
        step_bytes: what an optimizer step reads and writes for each element that it updates. AdamW: value,
            gradient, two moments read, value and moments written, 4 bytes each; a mixed-precision step that
            reads 16-bit gradients and writes 16-bit parameters beside them comes to 28 too.
    Raises:
        ValueError: a negative number of tokens or bytes.
    """

    tokens: int
    recompute: bool = False
    step_bytes: float = 28.0
    attention_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "step_bytes", "attention_share"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")

    def compute_ms(self, operation: Operation, numel: int, device: Device) -> float:
        """How long a device computes on so many elements.

        A forward takes 2 floating-point operations for each parameter and token, a backward twice that, and
        a forward more if activations were not kept. Attention's products over the sequence come on top.
        """
        if operation.label == "step":
            return device.touch_ms(self.step_bytes * numel, operation.tensors)
        passes = 1 if operation.label == "forward" else 3 if self.recompute else 2
        flops = 2.0 * passes * numel * self.tokens * (1 + self.attention_share)
        return device.compute_ms(flops, operation.tensors * passes / 3)


class Price(NamedTuple):
    """Milliseconds of an operation: on every rank, and on the ranks for which it is something else."""

    ms: float
    of_rank: Mapping[int, float] = {}


class _OfShares(Mapping[int, float]):
    """Milliseconds of each rank that has a share, computed once for each size of a share."""

    def __init__(self, numel_of_rank: Mapping[int, int], ms_of: Callable[[int], float]) -> None:
        self._numel_of_rank = numel_of_rank
        self._ms_of_numel = {numel: ms_of(numel) for numel in set(numel_of_rank.values())}

    def __getitem__(self, rank: int) -> float:
        return self._ms_of_numel[self._numel_of_rank[rank]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numel_of_rank)

    def __len__(self) -> int:
        return len(self._numel_of_rank)


def price(plan: Schedule, cluster: Cluster, work: Work) -> list[Price]:
    """How long each operation of a schedule takes, if nothing holds it up.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import schedule
    >>> plan = schedule("ddp", [ParamSpec(10**9, "bfloat16")], world_size=64)
    >>> prices = price(plan, cluster("h100-ib"), Work(tokens=4096))
    >>> [(one.label, round(cost.ms, 1)) for one, cost in zip(plan.operations, prices)]
    [('forward', 20.7), ('backward', 41.4), ('reduce', 10.1), ('step', 8.4)]
    """
    prices: list[Price] = []
    previous: Operation | None = None  # on the network
    for one, nbytes_of_calls in plan.stretches:
        place = len(prices)
        if one.lane == NETWORK:
            shares = [nbytes for _, nbytes in one.shares or ()] if one.op == "exchange" else []
            ms_of = partial(cluster.ms, one.op, world_size=plan.world_size, ranks=one.ranks)
            follows = previous is not None and (previous.op, previous.after) == (one.op, one.after)
            first, *others = nbytes_of_calls
            prices.append(Price(ms_of(first, shares=shares or None, follows=follows)))
            # Of a million owners' calls many have as many bytes as others.
            price_of = {nbytes: Price(ms_of(nbytes, follows=True)) for nbytes in set(others)}
            prices += map(price_of.__getitem__, others)
            previous = one
        elif one.shares is None:
            prices.append(Price(work.compute_ms(one, one.numel, cluster.device)))
        else:
            ms_of = partial(work.compute_ms, one, device=cluster.device)
            prices.append(Price(0.0, _OfShares(plan.computing_shares[place], ms_of)))
    return prices


# ------------------------------------------------------------------------------------------------ play


class Wait(NamedTuple):
    """A stretch of the critical path: an operation whose end decides when the next one begins.

    Args:
        operation: its place in the schedule.
        rank: the one that was last; None for the network.
    """

    operation: int
    rank: int | None
    start_ms: float
    stop_ms: float


@dataclass(frozen=True)
class Played:
    """What `play` found: for all ranks the end of each operation, and any rank's timeline on request.

    Args:
        pace: how many times as long each rank computes.
        deciding: the ranks that were played: no other can be the last one of an operation, see `play`.
        begin_ms, end_ms: of each operation; of computing, those of the rank that ends last.
        last_rank: that rank; None for the network.
    """

    plan: Schedule
    prices: Sequence[Price]
    overlaps: bool
    slow: Mapping[int, float]
    jitter: float
    seed: int
    pace: Sequence[float] = field(repr=False)
    deciding: Sequence[int] = field(repr=False)
    begin_ms: Sequence[float] = field(repr=False)
    end_ms: Sequence[float] = field(repr=False)
    last_rank: Sequence[int | None] = field(repr=False)

    @cached_property
    def makespan_ms(self) -> float:
        """From the beginning of the schedule until the last rank has done everything."""
        return max(self.end_ms, default=0.0)

    @property
    def iteration_ms(self) -> float:
        """The same for one iteration, on average: local SGD's schedule is of several."""
        return self.makespan_ms / self.plan.iterations

    def on(self, cluster: Cluster, work: Work) -> Played:
        """The same schedule and the same ranks, each at its pace, on another cluster or with other work."""
        return _play(self.plan, cluster, work, self.slow, self.jitter, self.seed, self.pace, self.deciding)

    def timeline(self, rank: int = 0) -> Timeline:
        """The events of one rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.plan.world_size:
            raise ValueError(f"there are ranks 0 to {self.plan.world_size - 1}, and no rank {rank}.")
        return Timeline(
            tuple(
                Event(self._lane_of(one), one.label, one.part, start, stop)
                for one, start, stop in self._of_rank(rank)
                if one.lane == NETWORK or one.shares is None or stop > start
            )
        )

    def _of_rank(self, rank: int) -> Iterator[tuple[Operation, float, float]]:
        """Each operation as one rank sees it: the ends of the network's are known, its own follow."""
        free_ms: dict[str, float] = {}
        for place, (one, cost) in enumerate(zip(self.plan.operations, self.prices)):
            if one.lane == NETWORK:
                yield one, self.begin_ms[place], self.end_ms[place]
                if not self.overlaps:
                    free_ms[COMPUTE] = self.end_ms[place]
                continue
            waits = max((self.end_ms[before] for before in one.after), default=0.0)
            lane = self._lane_of(one)
            start = max(free_ms.get(lane, 0.0), waits)
            free_ms[lane] = start + self.pace[rank] * cost.of_rank.get(rank, cost.ms)
            yield one, start, free_ms[lane]

    def _lane_of(self, one: Operation) -> str:
        """Where nothing overlaps, nothing is computed beside backward either."""
        return COMPUTE if one.lane != NETWORK and not self.overlaps else one.lane

    def memory(
        self, rank: int = 0, held_bytes: int | None = None, *, gradients_stay: bool = False
    ) -> list[tuple[float, int]]:
        """Bytes that a rank holds, each time they change: (milliseconds, bytes from then on).

        Args:
            held_bytes: at the beginning; None for the rank's parameters and optimizer state.
            gradients_stay: they lie in DDP's buckets for good, so `held_bytes` has them and nothing of them
                is taken in backward or given back.
        """
        if held_bytes is None:
            held_bytes = self.plan.parameter_bytes[rank] + self.plan.state_bytes[rank]
            held_bytes += self.plan.gradient_bytes[rank] if gradients_stay else 0
        changes: dict[float, int] = {0.0: 0}
        for one, start, stop in self._of_rank(rank):
            of_gradients = one.label in ("reduce", "step")
            takes = 0 if gradients_stay and one.label == "backward" else one.takes
            own = dict(one.shares or ()).get(rank, 0) if one.op else 0
            gives = 0 if gradients_stay and of_gradients else one.gives - own
            changes[start] = changes.get(start, 0) + takes
            changes[stop] = changes.get(stop, 0) - gives
        curve = []
        for moment in sorted(changes):
            held_bytes += changes[moment]
            curve.append((moment, held_bytes))
        return curve

    @cached_property
    def critical_path(self) -> tuple[Wait, ...]:
        """The chain of operations that decides the makespan, the first one first.

        Each begins when the one before it ends. To make the iteration faster something on this path has to
        become shorter; what is not on it may even take a little longer.
        """
        times: dict[int | None, list[tuple[float, float]]] = {None: list(zip(self.begin_ms, self.end_ms))}

        def on(rank: int | None) -> list[tuple[float, float]]:
            if rank not in times:
                times[rank] = [(start, stop) for _, start, stop in self._of_rank(rank or 0)]
            return times[rank]

        previous = self._previous_in_lane()
        firsts = set(accumulate((len(sizes) for _, sizes in self.plan.stretches), initial=0))
        path: list[Wait] = []
        place = max(range(len(self.end_ms)), key=lambda i: self.end_ms[i], default=None)
        rank = None if place is None else self.last_rank[place]
        while place is not None:
            while place not in firsts:  # it began when the one before it in its stretch had ended
                path.append(Wait(place, None, self.begin_ms[place], self.end_ms[place]))
                place -= 1
            path.append(Wait(place, rank, *on(rank)[place]))
            # What let it begin: the end of what it waited for, or of what came before in its own lane.
            ends = [
                (self.end_ms[before], before, self.last_rank[before])
                for before in self.plan.operations[place].after
            ]
            if (earlier := previous[place]) is not None:
                same = self.last_rank[earlier] if rank is None or self.last_rank[earlier] is None else rank
                ends.append((on(same)[earlier][1], earlier, same))
            _, place, rank = max(ends, key=lambda one: one[:2], default=(0.0, None, None))
        return tuple(reversed([wait for wait in path if wait.stop_ms > wait.start_ms]))

    def _previous_in_lane(self) -> list[int | None]:
        """For each operation the one before it in its lane. Where nothing overlaps, all is one lane."""
        latest: dict[str, int] = {}
        previous = []
        for place, one in enumerate(self.plan.operations):
            lane = one.lane if self.overlaps else COMPUTE
            previous.append(latest.get(lane))
            latest[lane] = place
        return previous

    def critical_ms(self) -> dict[str, float]:
        """The critical path by what is done: how much of the makespan each label is to blame for."""
        shares: dict[str, float] = {}
        for wait in self.critical_path:
            label = self.plan.operations[wait.operation].label
            shares[label] = shares.get(label, 0.0) + wait.stop_ms - wait.start_ms
        return shares


def play(
    plan: Schedule,
    cluster: Cluster,
    work: Work,
    *,
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Played:
    """Play a schedule on a cluster.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import schedule
    >>> plan = schedule("ddp", [ParamSpec(10**8, "bfloat16")] * 4, world_size=64)
    >>> played = play(plan, cluster("h100-ib"), Work(tokens=4096))
    >>> round(played.makespan_ms, 1), round(played.timeline().exposed_ms, 1)
    (29.3, 1.1)
    >>> round(play(plan, cluster("h100-ib"), Work(4096), slow={7: 1.5}).makespan_ms, 1)     # one slow rank
    43.4

    Args:
        slow: for a rank, how many times as long it computes.
        jitter: standard deviation of the ranks' computing times, as a share of them: each rank draws once.
        seed: of the jitter.
    Raises:
        ValueError: a jitter that is negative, or a slow rank that does not exist or is not above 0.
    """
    slow = dict(slow or {})
    for rank, factor in slow.items():
        if rank not in range(plan.world_size) or not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"slow takes ranks 0 to {plan.world_size - 1} and factors above 0; got {factor:g} for {rank}."
            )
    if not (math.isfinite(jitter) and jitter >= 0):
        raise ValueError(f"jitter is a share of each rank's computing time, 0 or more; got {jitter:g}.")
    if jitter:
        draw = random.Random(seed)
        pace = [slow.get(rank, 1.0) * max(0.0, draw.gauss(1.0, jitter)) for rank in range(plan.world_size)]
    else:
        pace = [slow.get(rank, 1.0) for rank in range(plan.world_size)] if slow else [1.0] * plan.world_size
    return _play(plan, cluster, work, slow, jitter, seed, pace, _deciding(plan, pace))


def _deciding(plan: Schedule, pace: Sequence[float]) -> list[int]:
    """The ranks of which one ends last, the first of those that end together.

    Of two ranks with equal shares of every computation, the one of the larger pace never ends before the
    other. So a rank decides nothing if one before it has equal shares and at least its pace. What is left is
    one rank for each size of a share, and with jitter some log N: a million ranks cost little more than ten.
    """
    largest: dict[int, float] = {}
    deciding = []
    for rank, (kind, factor) in enumerate(zip(plan.kind_of_rank, pace)):
        if factor > largest.get(kind, -1.0):
            largest[kind] = factor
            deciding.append(rank)
    return deciding


def _play(
    plan: Schedule,
    cluster: Cluster,
    work: Work,
    slow: Mapping[int, float],
    jitter: float,
    seed: int,
    pace: Sequence[float],
    deciding: Sequence[int],
) -> Played:
    """The ranks that decide go through the operations in order."""
    prices = price(plan, cluster, work)
    paces = [pace[rank] for rank in deciding]
    free_ms: dict[str, list[float]] = {}  # of each computing lane, on each of these ranks
    network_ms = 0.0
    begin_ms: list[float] = []
    end_ms: list[float] = []
    last_rank: list[int | None] = []
    for one, nbytes_of_calls in plan.stretches:
        place = len(end_ms)
        cost = prices[place]
        waits = max((end_ms[before] for before in one.after), default=0.0)
        if one.lane == NETWORK:
            start = max(network_ms, waits)
            if not cluster.overlaps:
                start = max(start, max(free_ms.get(COMPUTE, [0.0])))
            took = (cost.ms for cost in prices[place : place + len(nbytes_of_calls)])
            *begins, network_ms = accumulate(took, initial=start)  # each begins when the one before it ends
            if not cluster.overlaps:
                free_ms[COMPUTE] = [network_ms] * len(deciding)
            begin_ms += begins
            end_ms += begins[1:]
            end_ms.append(network_ms)
            last_rank += [None] * len(begins)
            continue
        lane = one.lane if cluster.overlaps else COMPUTE
        before_ms = free_ms.get(lane) or [0.0] * len(deciding)
        started = [ms if ms > waits else waits for ms in before_ms]
        ended = [
            start + factor * cost.of_rank.get(rank, cost.ms)
            for rank, start, factor in zip(deciding, started, paces)
        ]
        free_ms[lane] = ended
        latest = max(ended)
        which = ended.index(latest)
        begin_ms.append(started[which])
        end_ms.append(latest)
        last_rank.append(deciding[which])
    return Played(
        plan, prices, cluster.overlaps, slow, jitter, seed, pace, deciding, begin_ms, end_ms, last_rank
    )
