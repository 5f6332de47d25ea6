"""The timeline of one iteration: by hand, by property, and in the order of the calls that are really made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import pytest
from hypothesis import given, strategies as st

from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.schedule import calls_of_rank, ddp_buckets
from zero_ref.simulator.timeline import (
    WAYS_OF_DDP,
    BucketTimes,
    Event,
    bucket_times,
    covered_ms,
    simulate,
)

# Whole milliseconds, so that sums are exact.
whole_ms = st.integers(0, 20).map(float)
buckets_of_model = st.lists(
    st.builds(BucketTimes, whole_ms, whole_ms, whole_ms, whole_ms), min_size=1, max_size=8
)
ways = st.sampled_from(WAYS_OF_DDP)
TWO = [BucketTimes(4, 6, 1, 3), BucketTimes(5, 2, 1, 3)]


def marks(events: Sequence[Event]) -> list[tuple[str, int | None, float, float]]:
    return [(event.label, event.bucket, event.start_ms, event.stop_ms) for event in events]


# ----------------------------------------------------------------------------------------------- example


def test_plain_hides_reductions_behind_backward_and_nothing_else() -> None:
    timeline = simulate(TWO, "plain")
    assert marks(timeline.on("compute")) == [
        ("backward", 0, 0, 4),
        ("backward", 1, 4, 9),
        ("step", None, 12, 14),  # the network was busy with bucket 0 until 10, then with bucket 1
    ]
    assert marks(timeline.on("network")) == [
        ("reduce", 0, 4, 10),
        ("reduce", 1, 10, 12),
        ("broadcast", None, 14, 20),
    ]
    assert (timeline.makespan_ms, timeline.serial_ms) == (20, 25)
    assert timeline.exposed_ms == 3 + 6  # from 9 to 12, and the broadcasts


def test_after_backward_steps_the_first_bucket_while_the_second_is_reduced() -> None:
    timeline = simulate(TWO, "after_backward")
    assert marks(timeline.on("compute"))[2:] == [("step", 0, 10, 11), ("step", 1, 12, 13)]
    assert marks(timeline.on("network"))[2:] == [("broadcast", None, 13, 19)]


def test_interleaved_waits_for_a_bucket_when_the_next_one_is_on_its_way() -> None:
    three = [*TWO, BucketTimes(3, 2, 1, 3)]
    timeline = simulate(three, "interleaved")
    assert marks(timeline.on("compute")) == [
        ("backward", 0, 0, 4),
        ("backward", 1, 4, 9),
        ("step", 0, 10, 11),  # backward stood still for a millisecond
        ("backward", 2, 11, 14),
        ("step", 1, 14, 15),
        ("step", 2, 17, 18),
    ]
    assert marks(timeline.on("network")) == [
        ("reduce", 0, 4, 10),
        ("reduce", 1, 10, 12),
        ("broadcast", 0, 12, 15),  # started at 11, behind the reduction that was started before it
        ("reduce", 2, 15, 17),
        ("broadcast", 1, 17, 20),
        ("broadcast", 2, 20, 23),
    ]


def test_on_a_side_stream_backward_does_not_stand_still() -> None:
    timeline = simulate([*TWO, BucketTimes(3, 2, 1, 3)], "interleaved", side_stream=True)
    assert marks(timeline.on("compute"))[-1] == ("backward", 2, 9, 12)
    assert marks(timeline.on("side stream"))[0] == ("step", 0, 10, 11)
    assert timeline.lanes == ["compute", "network", "side stream"]


def test_time_covered_twice_counts_once() -> None:
    events = [
        Event("network", "reduce", i, start, stop) for i, (start, stop) in enumerate([(5, 6), (0, 3), (1, 2)])
    ]
    assert covered_ms(events) == 4
    assert covered_ms([]) == 0


def test_a_bucket_takes_latency_and_the_time_of_its_bytes() -> None:
    # 10 MB at 2 GB/s are 5 ms; an all-reduce on 4 ranks sends 6/4 of them.
    times = bucket_times(25e6, 10e6, world_size=4, latency_ms=1, gb_per_s=2, backward_ms=50, step_ms=5)
    assert times == [BucketTimes(20, 1 + 7.5, 2, 1 + 5)] * 2 + [BucketTimes(10, 1 + 3.75, 1, 1 + 2.5)]


def test_each_slice_that_is_broadcast_takes_the_latency() -> None:
    link = {"world_size": 4, "latency_ms": 1.0, "gb_per_s": 2.0, "backward_ms": 50.0}
    one = bucket_times(25e6, 10e6, **link)  # type: ignore[arg-type]
    many = bucket_times(25e6, 10e6, broadcasts=50, **link)  # type: ignore[arg-type]
    assert [times.broadcast_ms for times in many] == [20 + 5, 20 + 5, 10 + 2.5]
    assert [times.reduce_ms for times in many] == [times.reduce_ms for times in one]
    few = bucket_times(25e6, 10e6, broadcasts=1, **link)  # type: ignore[arg-type]
    assert few == one, "each bucket has one at least"
    with pytest.raises(ValueError, match="new parameters take at least 1 broadcast, got 0"):
        bucket_times(25e6, 10e6, broadcasts=0, **link)  # type: ignore[arg-type]


def test_a_bucket_size_that_does_not_come_out_even_in_floats_leaves_no_crumb() -> None:
    for count in range(1, 200):
        link = {"world_size": 2, "latency_ms": 1.0, "gb_per_s": 1.0, "backward_ms": 1.0}
        assert len(bucket_times(1e9, 1e9 / count, **link)) == count


@pytest.mark.parametrize(
    ("buckets", "way", "message"),
    [
        (TWO, "overlapped", r"unknown way 'overlapped'; choose one of plain, after_backward, interleaved"),
        (TWO, "in_forward", "unknown way 'in_forward'; choose one of plain, after_backward, interleaved"),
        ([], "plain", "there are no buckets"),
        ([*TWO, BucketTimes(1, -2, 1, 1)], "plain", r"bucket 2 has a negative time.*reduce_ms=-2"),
    ],
)
def test_what_cannot_be_simulated_is_refused(buckets: list[BucketTimes], way: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(buckets, way)


# ---------------------------------------------------------------------------------------------- property


@given(buckets_of_model, ways, st.booleans())
def test_exposed_communication_is_between_nothing_and_all_of_it(
    buckets: list[BucketTimes], way: str, side_stream: bool
) -> None:
    timeline = simulate(buckets, way, side_stream=side_stream)
    assert 0 <= timeline.exposed_ms <= covered_ms(timeline.on("network"))
    if not side_stream:  # then whoever does not compute waits for the network
        busy_ms = covered_ms(timeline.on("compute"))
        assert timeline.exposed_ms == timeline.makespan_ms - busy_ms


@given(buckets_of_model, ways, st.booleans())
def test_nothing_begins_before_what_it_needs(buckets: list[BucketTimes], way: str, side_stream: bool) -> None:
    found = {
        (event.label, event.bucket): event for event in simulate(buckets, way, side_stream=side_stream).events
    }
    for bucket in range(len(buckets)):
        step = found.get(("step", bucket), found.get(("step", None)))
        broadcast = found.get(("broadcast", bucket), found.get(("broadcast", None)))
        assert step is not None
        assert broadcast is not None
        chain = [found["backward", bucket], found["reduce", bucket], step, broadcast]
        for needed, event in pairwise(chain):
            assert needed.stop_ms <= event.start_ms


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 3000), st.sampled_from([2, 3, 8])
)
def test_the_network_carries_the_calls_that_the_optimizer_makes_in_their_order(
    numels: list[int], cap_bytes: int, world_size: int
) -> None:
    params = [ParamSpec(numel) for numel in numels]
    partition = sorted_greedy(numels, world_size)
    members = ddp_buckets(params, cap_bytes=cap_bytes)
    nbytes = [sum(4 * numels[param] for param in bucket) for bucket in members]
    for way in WAYS_OF_DDP:
        calls = calls_of_rank(partition, params, 0, buckets=members, interleaved=way == "interleaved")
        events = simulate([BucketTimes(1, size, 1, size) for size in nbytes], way).on("network")
        carried = [
            Call({"reduce": "all_reduce"}.get(event.label, event.label), int(event.stop_ms - event.start_ms))
            for event in events
        ]
        assert runs(carried) == runs(calls)


def runs(calls: Sequence[Call]) -> list[tuple[str, int]]:
    """The calls with broadcasts that follow one another as one: a bucket has several messages."""
    joined: list[tuple[str, int]] = []
    for op, group in groupby(calls, key=lambda call: call.op):
        sizes = [call.nbytes for call in group]
        joined += [(op, sum(sizes))] if op == "broadcast" else [(op, size) for size in sizes]
    return joined
