"""Lanes of time: what a rank computes, and what its network carries meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._numbers import short
from zero_ref.lab.plots._style import (
    ALARM,
    FAINT,
    INK,
    MUTED,
    PAPER,
    PART_COLOURS,
    SMALL_PT,
    bare,
    colour_key,
    in_style,
    label_box,
    text_colour_on,
)
from zero_ref.simulator.timeline import Event, Timeline

# What is sent has the colour of what it carries: gradients, parameters. A step is the optimizer's.
COLOURS = {
    "backward": "#8A94A6",
    "step": PART_COLOURS["optimizer state"],
    "reduce": PART_COLOURS["gradients"],
    "broadcast": PART_COLOURS["parameters"],
}
TITLE, LANE, GAP = 0.8, 1.0, 0.45
ROOM = 0.14  # below the bars of a lane


@in_style
def timeline(timelines: Mapping[str, Timeline], ax: Axes) -> Axes:
    """Iterations on one scale of time, below each other: a lane for what is computed, one for the network.

    A bar carries the number of its bucket. Underlined in red is exposed communication: the network works and
    the rank computes nothing. Measured calls may be under way together; then they share their lane.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.simulator.timeline import WAYS, BucketTimes, simulate
    >>> fig, ax = figure(6, 6)
    >>> _ = timeline({way: simulate([BucketTimes(4, 3, 1, 1.5)] * 4, way) for way in WAYS}, ax)

    Args:
        timelines: for each title its events, simulated or measured.
    """
    top, ticks = 0.0, []
    for title, one in timelines.items():
        _title(ax, top + 0.55 * TITLE, title, one)
        top += TITLE
        begin = top - 0.05
        for lane in one.lanes:
            height = _lane(ax, one.on(lane), top)
            ticks.append((top + (height - ROOM) / 2, lane))
            top += height
            if lane == "network":
                for start, stop in alone(one):
                    line = [start, stop], [top - ROOM / 2] * 2
                    ax.plot(*line, color=ALARM, linewidth=3, solid_capstyle="butt", label="exposed")
        ax.plot([one.makespan_ms] * 2, [begin, top], color=INK, linewidth=1.2, label="end")
        top += GAP
    bare(ax, keep=("bottom",))
    ax.set_ylim(top - GAP + 0.15, 0)
    ax.set_xlim(0, 1.01 * max((one.makespan_ms for one in timelines.values()), default=1.0))
    ax.set_yticks([y for y, _ in ticks], [lane for _, lane in ticks])
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    ax.grid(axis="x", color=FAINT, linewidth=0.6)
    ax.set_xlabel("ms since the beginning of backward")
    ax.tick_params(axis="y", labelcolor=MUTED)
    colour_key(ax, COLOURS)
    return ax


def _title(ax: Axes, y: float, title: str, timeline: Timeline) -> None:
    words = ax.text(0, y, f"{title}: {short(timeline.makespan_ms)} ms,", va="center", color=INK)
    ax.annotate(
        f"{short(timeline.exposed_ms)} ms exposed",
        xy=(1, 0.5),
        xycoords=words,
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=ALARM,
        annotation_clip=False,
    )


def _lane(ax: Axes, events: Sequence[Event], top: float) -> float:
    """The bars of one lane, in as many rows as are under way together; returns how high it is."""
    events = [event for event in events if event.stop_ms > event.start_ms]
    row_of, rows = _rows(events)
    whole = LANE * max(1.0, rows / 2)  # a row of half the height still has room for a number
    height = (whole - ROOM) / rows
    for event, row in zip(events, row_of):
        colour = COLOURS[event.label]
        left, low = event.start_ms, top + row * height
        ax.add_patch(
            Rectangle(
                (left, low),
                event.stop_ms - left,
                height,
                facecolor=colour,
                edgecolor=PAPER,
                linewidth=0.8,
                label=f"{event.lane}: {event.label} {'all' if event.bucket is None else event.bucket}",
            )
        )
        text = "all" if event.bucket is None else str(event.bucket)
        box = (left, low + height, event.stop_ms, low)
        label_box(ax, box, [text], color=text_colour_on(colour), fontsize=SMALL_PT)
    return whole


def _rows(events: Sequence[Event]) -> tuple[list[int], int]:
    """A row for each event such that those of one row follow each other, and how many rows that takes."""
    free_from: list[float] = []
    row_of = []
    for event in events:
        row = next((row for row, free in enumerate(free_from) if free <= event.start_ms), len(free_from))
        free_from[row : row + 1] = [event.stop_ms]
        row_of.append(row)
    return row_of, max(1, len(free_from))


def alone(timeline: Timeline) -> list[tuple[float, float]]:
    """When the network works and nothing else does: the exposed communication, piece by piece.

    >>> from zero_ref.simulator.timeline import BucketTimes, simulate
    >>> alone(simulate([BucketTimes(4, 3, 1, 2)], "plain"))
    [(4.0, 7.0), (8.0, 10.0)]
    """
    computing = [event for event in timeline.events if event.lane != "network"]
    sending = timeline.on("network")
    moments = sorted({moment for event in timeline.events for moment in (event.start_ms, event.stop_ms)})
    pieces: list[tuple[float, float]] = []
    for start, stop in pairwise(moments):
        if _goes_on(sending, start, stop) and not _goes_on(computing, start, stop):
            joined = pieces.pop()[0] if pieces and pieces[-1][1] == start else start
            pieces.append((joined, stop))
    return pieces


def _goes_on(events: Sequence[Event], start_ms: float, stop_ms: float) -> bool:
    return any(event.start_ms <= start_ms and stop_ms <= event.stop_ms for event in events)
