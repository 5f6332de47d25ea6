"""When a rank computes and when the network carries its calls, and what is hidden behind computing.

DDP reduces its gradient buckets one by one while backward goes on. `simulate` follows one rank through them
in the order of the optimizer's code, given how long each part takes. `lab.plots.timeline` draws a timeline. A
measured iteration has the same form, so the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.operations import COMPUTE, HOST, NEEDS, NETWORK, SIDE_STREAM, WAYS_OF_DDP, order


class BucketTimes(NamedTuple):
    """The milliseconds of each part of the work on one gradient bucket, on one rank, if nothing holds it up.

    Args:
        backward_ms: from the end of the bucket before until the gradients of this bucket are complete.
        reduce_ms: the reduction of the bucket's gradients over the ranks.
        step_ms: the local step on the part of the bucket that this rank owns.
        broadcast_ms: all owners' messages with the bucket's new parameters.
    """

    backward_ms: float
    reduce_ms: float
    step_ms: float
    broadcast_ms: float


class Event(NamedTuple):
    """A computation or a call of one rank, from `start_ms` to `stop_ms` after the beginning.

    Args:
        lane: "compute" or "network"; "side stream" for what a GPU computes beside backward.
        label: as `Operation`: "backward", "reduce", "step", "broadcast" and so on.
        bucket: the number of the gradient bucket, in the order in which gradients become ready, or of the
            block; None for all of them together.
    """

    lane: str
    label: str
    bucket: int | None
    start_ms: float
    stop_ms: float


@dataclass(frozen=True)
class Timeline:
    """The events of one iteration on one rank, simulated or measured; the events of a lane are in order."""

    events: tuple[Event, ...]

    def on(self, lane: str) -> list[Event]:
        """The events of one lane."""
        return [event for event in self.events if event.lane == lane]

    @property
    def lanes(self) -> list[str]:
        """The lanes in which something happened, in the order of their first events."""
        return list(dict.fromkeys(event.lane for event in self.events))

    @property
    def makespan_ms(self) -> float:
        """The end of the last event."""
        return max((event.stop_ms for event in self.events), default=0.0)

    @property
    def idle_ms(self) -> float:
        """The milliseconds in which this rank computes nothing."""
        return self.makespan_ms - self.computing_ms

    @property
    def serial_ms(self) -> float:
        """The sum of all durations: the time if nothing overlapped."""
        return sum(event.stop_ms - event.start_ms for event in self.events)

    @property
    def exposed_ms(self) -> float:
        """Exposed communication: how long the network is busy while this rank computes nothing."""
        of_device = (event for event in self.events if event.lane != HOST)
        return covered_ms(of_device) - self.computing_ms

    @property
    def computing_ms(self) -> float:
        """The milliseconds in which this rank computes, not counting what its CPU does beside it."""
        return covered_ms(event for event in self.events if event.lane not in (NETWORK, HOST))


def covered_ms(events: Iterable[Event]) -> float:
    """The milliseconds in which at least one of `events` is under way.

    >>> covered_ms([Event("compute", "backward", 0, 0, 5), Event("network", "reduce", 0, 3, 9)])
    9.0
    """
    total, covered_until = 0.0, float("-inf")
    for start, stop in sorted((event.start_ms, event.stop_ms) for event in events):
        total += max(0.0, stop - max(start, covered_until))
        covered_until = max(covered_until, stop)
    return total


def simulate(buckets: Sequence[BucketTimes], way: str, *, side_stream: bool = False) -> Timeline:
    """One iteration on one rank, in the order in which the optimizer's code computes, starts calls and waits.

    The network carries one call after another, in the order in which they were started. One thread runs
    backward, starts the calls and makes the updates: while it waits for a reduction, backward stands still.

    >>> buckets = [BucketTimes(backward_ms=4, reduce_ms=3, step_ms=1, broadcast_ms=1.5)] * 4
    >>> {way: simulate(buckets, way).makespan_ms for way in WAYS_OF_DDP}
    {'plain': 29.0, 'after_backward': 26.0, 'interleaved': 24.0}
    >>> simulate(buckets, "interleaved").exposed_ms, simulate(buckets, "plain").serial_ms
    (4.0, 38.0)

    Args:
        buckets: in the order in which their gradients become ready: the last layers first.
        way: one of WAYS_OF_DDP.
        side_stream: an interleaved update waits and steps beside backward, as it does on a GPU. Each of the
            two takes as long as if it had the device to itself, which is optimistic.
    Raises:
        ValueError: there are no buckets, a time is negative, or the way is unknown.
    Source: `OverlappedStep.on_bucket` in zero_ref/backward/overlap.py. The order of the calls is that of
        `schedule.calls_of_rank`.
    """
    check_name("way", way, WAYS_OF_DDP)
    if not buckets:
        raise ValueError("there are no buckets: a backward has at least one.")
    for bucket, times in enumerate(buckets):
        if min(times) < 0:
            raise ValueError(f"bucket {bucket} has a negative time: {times}.")
    updating = SIDE_STREAM if way == "interleaved" and side_stream else COMPUTE
    lane_of = {"backward": COMPUTE, "step": updating, "reduce": NETWORK, "broadcast": NETWORK}
    of_all_together = {"plain": ("step", "broadcast"), "after_backward": ("broadcast",)}.get(way, ())
    free_ms: dict[str, float] = {}
    end_ms: dict[tuple[str, int], float] = {}
    events: list[Event] = []
    for label, parts in order(len(buckets), way):
        lane = lane_of[label]
        ready_ms = end_ms[NEEDS[label], parts[-1]] if label in NEEDS else 0.0
        start_ms = max(free_ms.get(lane, 0.0), ready_ms)
        free_ms[lane] = start_ms + sum(getattr(buckets[part], f"{label}_ms") for part in parts)
        part = None if label in of_all_together else parts[0]
        events.append(Event(lane, label, part, start_ms, free_ms[lane]))
        end_ms.update({(label, part): free_ms[lane] for part in parts})
    return Timeline(tuple(events))


def bucket_times(
    nbytes: float,
    bucket_bytes: float,
    *,
    world_size: int,
    latency_ms: float,
    gb_per_s: float,
    backward_ms: float,
    step_ms: float = 0.0,
    broadcasts: int | None = None,
) -> list[BucketTimes]:
    """The times of each bucket if backward completes gradients at a steady pace, and all ranks use one link.

    A call takes the link's latency and the time of its bytes: each rank sends 2(N-1)/N of the payload of an
    all-reduce, and all of a broadcast's.

    >>> bucket_times(50e6, 25e6, world_size=2, latency_ms=1, gb_per_s=5, backward_ms=20)
    [BucketTimes(backward_ms=10.0, reduce_ms=6.0, step_ms=0.0, broadcast_ms=6.0),
     BucketTimes(backward_ms=10.0, reduce_ms=6.0, step_ms=0.0, broadcast_ms=6.0)]

    Args:
        nbytes: of all gradients, and as many of parameters.
        bucket_bytes: of each bucket; the rest is in one more.
        gb_per_s: 10^9 bytes a second that a rank can send.
        backward_ms, step_ms: of the whole model, divided among the buckets by their bytes.
        broadcasts: of all new parameters: a hook sends one for each slice, unless they lie in flat tensors.
            Each takes the latency, and each bucket has its part of them, one at least. None for one a bucket.
    Raises:
        ValueError: a size or the bandwidth is not positive, or there is no rank or no broadcast.
    Source: the bus bandwidths of nccl-tests (doc/PERFORMANCE.md).
    """
    if min(nbytes, bucket_bytes, gb_per_s) <= 0 or world_size < 1:
        raise ValueError(
            f"{nbytes:g} bytes in buckets of {bucket_bytes:g} on {world_size} ranks at {gb_per_s:g} GB/s: "
            "each must be positive."
        )
    if broadcasts is not None and broadcasts < 1:
        raise ValueError(f"new parameters take at least 1 broadcast, got {broadcasts}.")
    if min(latency_ms, backward_ms, step_ms) < 0:
        raise ValueError(
            f"a latency of {latency_ms:g} ms, backward of {backward_ms:g} ms, step of {step_ms:g} ms: none "
            "can be negative."
        )
    whole, rest = divmod(nbytes, bucket_bytes)
    times = []
    for size in [bucket_bytes] * int(whole) + [rest] * (rest >= 1):
        sending_ms = size / (gb_per_s * 1e6)
        calls = max(1.0, (broadcasts or 0) * size / nbytes)
        times.append(
            BucketTimes(
                backward_ms=backward_ms * size / nbytes,
                reduce_ms=latency_ms + 2 * (world_size - 1) / world_size * sending_ms,
                step_ms=step_ms * size / nbytes,
                broadcast_ms=calls * latency_ms + sending_ms,
            )
        )
    return times
