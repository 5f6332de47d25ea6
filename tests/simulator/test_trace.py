"""Traces: the documented format, and timelines read back as they were."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.operations import WAYS_OF_DDP
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.schedule import ddp_buckets, schedule
from zero_ref.simulator.timeline import Event, Timeline
from zero_ref.simulator.trace import LANES, timelines_of, trace

PARAMS = [ParamSpec(1000, name=f"{i}.weight") for i in range(6)]


def played(way: str = "plain") -> Any:
    buckets = ddp_buckets(PARAMS, cap_bytes=8000)
    strategy = "zero-even" if way in WAYS_OF_DDP else "zero-2"
    plan = schedule(recipe(strategy, way=way), PARAMS, 4, side_stream=True, ddp_buckets=buckets)
    return play(plan, cluster("a100-ib"), Workload(64))


def bars(timelines: dict[str, Timeline]) -> list[dict[str, Any]]:
    return [event for event in trace(timelines)["traceEvents"] if event["ph"] == "X"]


# ----------------------------------------------------------------------------------------------- example


def test_processes_and_threads_are_named_and_sorted() -> None:
    found = trace({"predicted": played("interleaved").timeline(1), "measured": played().timeline(1)})
    named = [
        (one["name"], one["pid"], *one["args"].values()) for one in found["traceEvents"] if one["ph"] == "M"
    ]
    assert ("process_name", 1, "predicted") in named
    assert ("process_name", 2, "measured") in named
    assert [("process_sort_index", pid, pid) in named for pid in (1, 2)] == [True, True]
    threads = {
        (one["pid"], one["args"]["name"]): one["tid"]
        for one in found["traceEvents"]
        if one["name"] == "thread_name"
    }
    assert threads == {
        (1, "compute"): 1100,
        (1, "side stream"): 1200,
        (1, "network"): 1300,
        (2, "compute"): 2100,
        (2, "network"): 2300,
    }


def test_calls_that_overlap_lie_on_threads_of_their_own() -> None:
    spans = [(0, 3), (1, 2), (1, 5), (2, 4), (3, 6)]
    network = Timeline(tuple(Event("network", "reduce", i, *span) for i, span in enumerate(spans)))
    assert [bar["tid"] for bar in bars({"measured": network})] == [1300, 1301, 1302, 1301, 1300]
    assert timelines_of(trace({"measured": network})) == {"measured": network}
    by_half_a_microsecond = (Event("network", "reduce", 0, 0, 1), Event("network", "reduce", 1, 0.9995, 2))
    assert [bar["tid"] for bar in bars({"": Timeline(by_half_a_microsecond)})] == [1300, 1301]


def test_memory_is_drawn_as_a_counter_of_its_process() -> None:
    run = played()
    found = trace({"a": run.timeline(0), "b": run.timeline(1)}, memory={"b": run.memory(1)})
    counters = [one for one in found["traceEvents"] if one["ph"] == "C"]
    assert {one["pid"] for one in counters} == {2}
    assert [one["args"]["bytes"] for one in counters] == [nbytes for _, nbytes in run.memory(1)]


@pytest.mark.parametrize(
    "other",
    [{}, {"traceEvents": 3}, {"traceEvents": [{"ph": "X", "name": "aten::mm"}]}, {"traceEvents": ["x"]}],
)
def test_what_is_no_trace_of_ours_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"this is no trace of timelines.*write_trace"):
        timelines_of(other)


def test_more_calls_at_once_than_a_lane_has_threads_are_refused() -> None:
    busy = Timeline(tuple(Event("network", "reduce", i, 0, 1) for i in range(101)))
    with pytest.raises(ValueError, match="more than 100 events of lane 'network'"):
        trace({"busy": busy})


# ----------------------------------------------------------------------------------------------- property

microseconds = st.integers(0, 10**7).map(lambda us: us / 1e3)
events = st.builds(
    lambda lane, label, bucket, start, length: Event(lane, label, bucket, start, start + length),
    st.sampled_from([*LANES, "disk"]),
    st.sampled_from(["backward", "reduce", "step 1"]),
    st.none() | st.integers(0, 12),
    microseconds,
    microseconds,
)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.lists(events, max_size=12), max_size=3))
def test_every_timeline_comes_back(listed: dict[str, list[Event]]) -> None:
    lines = {t: Timeline(tuple(sorted(of, key=lambda e: e.start_ms))) for t, of in listed.items()}
    back = timelines_of(json.loads(json.dumps(trace(lines))))
    assert list(back) == list(lines)
    for title, line in lines.items():
        for lane in {*line.lanes, *back[title].lanes}:
            for event, twin in zip(line.on(lane), back[title].on(lane), strict=True):
                assert event[:3] == twin[:3]
                assert max(abs(a - b) for a, b in zip(event[3:], twin[3:])) < 1e-6  # to the nanosecond


@given(st.lists(events, max_size=20))
def test_on_one_thread_nothing_overlaps(listed: list[Event]) -> None:
    of_thread: dict[int, list[dict[str, Any]]] = {}
    for bar in bars({"": Timeline(tuple(sorted(listed, key=lambda e: e.start_ms)))}):
        of_thread.setdefault(bar["tid"], []).append(bar)
    for drawn in of_thread.values():
        assert {bar["cat"] for bar in drawn} == {drawn[0]["cat"]}
        for before, after in pairwise(drawn):
            # Equal to a nanosecond's thousandth: what is left of adding two doubles.
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
