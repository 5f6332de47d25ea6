"""Timelines, simulated or measured, as a trace for Perfetto or chrome://tracing.

Each timeline is a process of the trace, and each lane a thread. So a simulated and a measured iteration in
one file are shown one below the other, on one axis of time, and their bars have the same names and colours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from zero_ref.simulator.operations import COMPUTE, NETWORK, SIDE_STREAM
from zero_ref.simulator.timeline import Event, Timeline

LANES = (COMPUTE, SIDE_STREAM, NETWORK)
"""The lanes from top to bottom; any other lane comes below."""

ROWS_OF_LANE = 100
"""The most threads of a lane. A viewer shows events that overlap only if they are on different threads."""

Curve = Sequence[tuple[float, int]]
"""Bytes over time, as `Played.memory` gives them: (milliseconds, bytes from then on)."""


class Trace(TypedDict):
    """The JSON object format of Chrome's trace events."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str


def trace(timelines: Mapping[str, Timeline], memory: Mapping[str, Curve] | None = None) -> Trace:
    """Timelines as a trace that Perfetto and chrome://tracing open.

    >>> line = Timeline((Event("network", "reduce", 0, 1.5, 4.0),))
    >>> trace({"rank 0": line})["traceEvents"][-1]                            # doctest: +NORMALIZE_WHITESPACE
    {'ph': 'X', 'name': 'reduce 0', 'cat': 'network', 'pid': 1, 'tid': 1300, 'ts': 1500.0, 'dur': 2500.0,
     'args': {'bucket': 0}}

    Args:
        timelines: by their titles, such as "rank 0" or "ddp, measured"; shown in this order.
        memory: curves by title, to draw above the lanes of the timeline with that title.
    Returns:
        A value to dump as JSON. Times are microseconds, to the nanosecond. A bar is named for its label and
        bucket, and "cat" is its lane; calls of one lane that overlap get threads of their own.
    Raises:
        ValueError: no timeline has the title of a memory curve, or too many calls of a lane overlap.
    Source: "Trace Event Format", the JSON format of chrome://tracing, which Perfetto reads.
    """
    memory = memory or {}
    for title in memory:
        if title not in timelines:
            raise ValueError(f"memory has a curve for {title!r}; there are timelines for {list(timelines)}.")
    listed: list[dict[str, Any]] = []
    # From 1: Perfetto takes process 0 for the kernel's idle process (google/perfetto, issue 394).
    for pid, (title, timeline) in enumerate(timelines.items(), start=1):
        listed.append(_metadata("process_name", pid, pid, name=title))
        listed.append(_metadata("process_sort_index", pid, pid, sort_index=pid))
        lanes = [*LANES, *(lane for lane in timeline.lanes if lane not in LANES)]
        for place, lane in enumerate(lanes, start=1):
            listed += _lane(pid, 1000 * pid + ROWS_OF_LANE * place, lane, timeline.on(lane))
        point = {"ph": "C", "name": "memory", "pid": pid, "tid": pid}
        listed += [
            {**point, "ts": _microseconds(ms), "args": {"bytes": nbytes}}
            for ms, nbytes in memory.get(title, ())
        ]
    return {"traceEvents": listed, "displayTimeUnit": "ms"}


def write_trace(
    path: str | Path, timelines: Mapping[str, Timeline], memory: Mapping[str, Curve] | None = None
) -> None:
    """Write `trace(timelines, memory)` to a file: open it at https://ui.perfetto.dev, or in chrome://tracing.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(trace(timelines, memory)) + "\n")


def timelines_of(trace: Mapping[str, Any]) -> dict[str, Timeline]:
    """The timelines of a trace, by title: those that `trace` was called with, times to the nanosecond.

    >>> timelines = {"rank 0": Timeline((Event("compute", "step", None, 0.25, 1.0),))}
    >>> timelines_of(trace(timelines)) == timelines
    True

    Args:
        trace: as `json.load` returns it.
    Raises:
        ValueError: the value is no trace, or has bars that `trace` has not written.
    """
    try:
        listed = trace["traceEvents"]
        titles = {
            one["pid"]: one["args"]["name"]
            for one in listed
            if one["ph"] == "M" and one["name"] == "process_name"
        }
        found: dict[str, list[Event]] = {title: [] for title in titles.values()}
        for one in listed:
            if one["ph"] == "X":
                found[titles[one["pid"]]].append(_event(one))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"this is no trace of timelines: {type(error).__name__}: {error}. It takes the JSON that "
            "`write_trace` and `zero-ref simulate --trace FILE` write."
        ) from None
    return {
        title: Timeline(tuple(sorted(events, key=lambda event: event.start_ms)))
        for title, events in found.items()
    }


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _lane(pid: int, first: int, lane: str, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """The bars of a lane, each on the first free thread, and the names of these threads."""
    free_us: list[float] = []
    for event in events:
        start, stop = _microseconds(event.start_ms), _microseconds(event.stop_ms)
        row = next((row for row, free in enumerate(free_us) if free <= start), len(free_us))
        if row == len(free_us):
            if row == ROWS_OF_LANE:
                raise ValueError(f"more than {ROWS_OF_LANE} events of lane {lane!r} at one time.")
            free_us.append(stop)
            name = lane if row == 0 else f"{lane} ({row + 1} at a time)"
            yield _metadata("thread_name", pid, first + row, name=name)
            yield _metadata("thread_sort_index", pid, first + row, sort_index=first + row)
        free_us[row] = stop
        yield {
            "ph": "X",
            "name": event.label if event.bucket is None else f"{event.label} {event.bucket}",
            "cat": lane,
            "pid": pid,
            "tid": first + row,
            "ts": start,
            "dur": round(stop - start, 3),
            "args": {} if event.bucket is None else {"bucket": event.bucket},
        }


def _event(bar: Mapping[str, Any]) -> Event:
    bucket = bar["args"].get("bucket")
    label = bar["name"] if bucket is None else bar["name"].removesuffix(f" {bucket}")
    stop_us = round(bar["ts"] + bar["dur"], 3)
    return Event(bar["cat"], label, bucket, bar["ts"] / 1e3, stop_us / 1e3)


def _microseconds(ms: float) -> float:
    return round(ms * 1e3, 3)
