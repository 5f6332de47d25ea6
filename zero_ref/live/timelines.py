"""Lanes of time as SVG: what a rank computes, what the network carries, what of it is exposed."""

from __future__ import annotations

from collections.abc import Mapping

from zero_ref.live.lanes import alone, flowed_together, label_colour, label_key, rows_of
from zero_ref.live.numbers import short, short_time, time_unit
from zero_ref.live.palette import ALARM, INK, MUTED
from zero_ref.live.svg import LINE, axis, bar, element, key, line, text
from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.timeline import Event, Timeline

LANE = 30.0
"""Pixels of a lane's height."""


def lanes(timelines: Mapping[str, Timeline], x: float, y: float, width: float) -> tuple[list[str], float]:
    """Iterations on one scale of time, below each other; and where the next line begins.

    Underlined in red is exposed communication. Events shorter than a pixel flow together: how long each kind
    takes stays right.

    Args:
        timelines: for each title its events.
        x, y, width: where to draw, in pixels.
    """
    scale_ms = max((one.makespan_ms for one in timelines.values()), default=0.0) or 1.0
    labels = {event.label for one in timelines.values() for event in one.events}
    parts, y = key(label_key(labels), x, y, width)
    grid_top = y
    for title, one in timelines.items():
        exposed = element("tspan", f" {short_time(one.exposed_ms)} exposed", fill=ALARM, font_weight=400)
        parts.append(text(x, y + 14, f"{title}: {short_time(one.makespan_ms)},", exposed, bold=True))
        y += LINE + 4
        end = x + width * one.makespan_ms / scale_ms
        top = y
        for lane in sorted(one.lanes, key=lambda lane: lane != COMPUTE):
            parts.append(text(x, y + 11, lane, fill=MUTED))
            y += 15
            parts += _lane(one, lane, x, y, width / scale_ms)
            y += LANE
            if lane == NETWORK:
                parts += [
                    line(x + width * start / scale_ms, y + 3, x + width * stop / scale_ms, y + 3, ALARM, 3.5)
                    for start, stop in alone(one)
                ]
                y += 6
        parts.append(line(end, top, end, y, INK, 1.4))
        y += 12
    return time_axis(x, width, grid_top, y, scale_ms) + parts, y + 40


def time_axis(x: float, width: float, top: float, bottom: float, longest_ms: float) -> list[str]:
    """Grid lines of time, all in the unit that suits the longest."""
    unit, in_ms = time_unit(longest_ms)
    below = f"{unit} since the beginning"
    return axis(x, width, top, bottom, longest_ms, lambda ms: short(ms / in_ms), below)


def _lane(timeline: Timeline, lane: str, x: float, y: float, px_per_ms: float) -> list[str]:
    events = [event for event in timeline.on(lane) if event.stop_ms > event.start_ms]
    row_of, rows = rows_of(events)
    high = LANE / rows
    parts: list[str] = []
    short_ones = [
        [event for event, row in zip(events, row_of) if row == one and _px(event, px_per_ms) < 2]
        for one in range(rows)
    ]
    for event, row in zip(events, row_of):
        wide = _px(event, px_per_ms)
        if wide >= 2:
            named = event.label if event.bucket is None else f"{event.label} {event.bucket}"
            hint = f"{named}: {short_time(event.start_ms)} to {short_time(event.stop_ms)}"
            left = x + px_per_ms * event.start_ms
            gap = 0.6 if wide >= 4 else 0.0
            parts.append(bar(left, y + row * high, wide - gap, high - 1, label_colour(event.label), hint))
    for row, few in enumerate(short_ones):
        for label, pieces in flowed_together(few, 1 / px_per_ms).items():
            for start, stop in pieces:
                left, wide = x + px_per_ms * start, px_per_ms * (stop - start)
                parts.append(bar(left, y + row * high, wide, high - 1, label_colour(label)))
    return parts


def _px(event: Event, px_per_ms: float) -> float:
    return px_per_ms * (event.stop_ms - event.start_ms)
