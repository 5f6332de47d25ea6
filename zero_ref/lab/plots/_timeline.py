"""Lanes of time: what a rank computes, and what its network carries meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

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
from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.timeline import Event, Timeline

# What is sent has the colour of what it carries: gradients, parameters. A step is the optimizer's.
COLOURS = {
    "backward": "#8A94A6",
    "step": PART_COLOURS["optimizer state"],
    "reduce": PART_COLOURS["gradients"],
    "broadcast": PART_COLOURS["parameters"],
}
COLOURS_OF_MORE = {
    "forward": "#B9C0CB",
    "gather": PART_COLOURS["parameters"],
    "average": PART_COLOURS["parameters"],
    "agree": PART_COLOURS["parameters"],
}
OTHER = "#77722A"  # whatever else a measured run may name
TITLE, LANE, GAP = 0.8, 1.0, 0.45
ROOM = 0.14  # below the bars of a lane

MOST_BARS = 100
"""With more in one lane, the short ones are drawn by their shares of each cell of time, without borders."""

SHORT, CELL = 1 / 120, 1 / 720
"""Of the scale: on a picture 6 inches wide about 3 points and half a point. A border takes 0.8 points."""


@in_style
def timeline(timelines: Mapping[str, Timeline], ax: Axes) -> Axes:
    """Iterations on one scale of time, below each other: a lane for what is computed, one for the network.

    A bar carries the number of its bucket or block. Underlined in red is exposed communication: the network
    works and the rank computes nothing. Measured calls may be under way together; then they share their lane.
    In a lane of more than 100 events the short ones flow together: how long each kind takes stays right, and
    nothing moves by more than 1/720 of the scale.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.simulator.timeline import WAYS, BucketTimes, simulate
    >>> fig, ax = figure(6, 6)
    >>> _ = timeline({way: simulate([BucketTimes(4, 3, 1, 1.5)] * 4, way) for way in WAYS}, ax)

    Args:
        timelines: for each title its events, simulated or measured.
    """
    scale_ms = max((one.makespan_ms for one in timelines.values()), default=1.0)
    labels = {event.label for one in timelines.values() for event in one.events}
    top, ticks = 0.0, []
    for title, one in timelines.items():
        _title(ax, top + 0.55 * TITLE, title, one)
        top += TITLE
        begin = top - 0.05
        for lane in sorted(one.lanes, key=lambda lane: lane != COMPUTE):
            height = _lane(ax, one.on(lane), top, scale_ms)
            ticks.append((top + (height - ROOM) / 2, lane))
            top += height
            if lane == NETWORK:
                _underline(ax, alone(one), top - ROOM / 2)
        ax.plot([one.makespan_ms] * 2, [begin, top], color=INK, linewidth=1.2, label="end")
        top += GAP
    bare(ax, keep=("bottom",))
    ax.set_ylim(top - GAP + 0.15, 0)
    ax.set_xlim(0, 1.01 * scale_ms)
    ax.set_yticks([y for y, _ in ticks], [lane for _, lane in ticks])
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    ax.grid(axis="x", color=FAINT, linewidth=0.6)
    ax.set_xlabel(f"ms since the beginning of {'the iteration' if 'forward' in labels else 'backward'}")
    ax.tick_params(axis="y", labelcolor=MUTED)
    colour_key(ax, _key(labels))
    return ax


def _colour(label: str) -> str:
    return COLOURS.get(label) or COLOURS_OF_MORE.get(label, OTHER)


def _key(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each word; words of one colour together. Those of chapter 7 if there is nothing else."""
    shown = set(labels)
    if shown <= COLOURS.keys():
        return COLOURS
    words: dict[str, list[str]] = {}
    for label in (*("forward", *COLOURS), "gather", "agree", "average", *sorted(shown)):
        if label in shown and label not in words.setdefault(_colour(label), []):
            words[_colour(label)].append(label)
    return {", ".join(of_colour): colour for colour, of_colour in words.items() if of_colour}


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


def _lane(ax: Axes, events: Sequence[Event], top: float, scale_ms: float) -> float:
    """The bars of one lane, in as many rows as are under way together; returns how high it is."""
    events = [event for event in events if event.stop_ms > event.start_ms]
    row_of, rows = _rows(events)
    whole = LANE * max(1.0, rows / 2)  # a row of half the height still has room for a number
    height = (whole - ROOM) / rows
    least_ms = SHORT * scale_ms if len(events) > MOST_BARS else 0.0
    short_ones: list[list[Event]] = [[] for _ in range(rows)]
    for event, row in zip(events, row_of):
        if event.stop_ms - event.start_ms < least_ms:
            short_ones[row].append(event)
        else:
            _bar(
                ax, event, top + row * height, height, thin=event.stop_ms - event.start_ms < SHORT * scale_ms
            )
    for row, of_row in enumerate(short_ones):
        for label, pieces in flowed_together(of_row, CELL * scale_ms).items():
            ax.broken_barh(
                [(start, stop - start) for start, stop in pieces],
                (top + row * height, height),
                facecolors=_colour(label),
                linewidth=0,
                snap=False,  # pieces narrower than a pixel are a paler colour, not all or nothing
                label=f"{of_row[0].lane}: {label}, many",
            )
    return whole


def _bar(ax: Axes, event: Event, low: float, height: float, *, thin: bool) -> None:
    """One event; a thin one without the border, which would leave nothing of it."""
    colour, left = _colour(event.label), event.start_ms
    text = "all" if event.bucket is None else str(event.bucket)
    ax.add_patch(
        Rectangle(
            (left, low),
            event.stop_ms - left,
            height,
            facecolor=colour,
            edgecolor=colour if thin else PAPER,
            linewidth=0.3 if thin else 0.8,
            snap=False if thin else None,
            label=f"{event.lane}: {event.label} {text}",
        )
    )
    box = (left, low + height, event.stop_ms, low)
    label_box(ax, box, [text], color=text_colour_on(colour), fontsize=SMALL_PT)


def flowed_together(events: Sequence[Event], cell_ms: float) -> dict[str, list[tuple[float, float]]]:
    """Many short events as few pieces: in each cell of time what each label takes of it, side by side.

    >>> alternating = [Event("network", ("a", "b")[i % 2], i, i, i + 1) for i in range(8)]
    >>> flowed_together(alternating, cell_ms=4)
    {'a': [(0.0, 2.0), (4.0, 6.0)], 'b': [(2.0, 4.0), (6.0, 8.0)]}
    >>> flowed_together(alternating[::2], cell_ms=100)
    {'a': [(0.0, 4.0)]}

    Args:
        events: none two of which go on at one time, in their order.
    Returns:
        For each label (start, stop) in milliseconds. A label's pieces take as long as its events.
    """
    share_ms: dict[int, dict[str, float]] = {}
    begins_ms: dict[int, float] = {}
    for event in events:
        start, cell = event.start_ms, int(event.start_ms // cell_ms)
        while start < event.stop_ms:
            stop = min(event.stop_ms, (cell + 1) * cell_ms)
            begins_ms.setdefault(cell, start)
            of_cell = share_ms.setdefault(cell, {})
            of_cell[event.label] = of_cell.get(event.label, 0.0) + stop - start
            start, cell = stop, cell + 1
    pieces: dict[str, list[tuple[float, float]]] = {}
    for cell, of_label in share_ms.items():
        start = begins_ms[cell]
        for label, length in of_label.items():
            of_this = pieces.setdefault(label, [])
            touches = of_this and start - of_this[-1][1] <= 1e-6 * cell_ms
            begin = of_this.pop()[0] if touches else float(start)
            start += length
            of_this.append((begin, start))
    return pieces


def _underline(ax: Axes, pieces: Sequence[tuple[float, float]], y: float) -> None:
    if len(pieces) > MOST_BARS:
        starts, stops = zip(*pieces)
        ax.hlines([y] * len(pieces), starts, stops, colors=ALARM, linewidth=3, label="exposed, many")
        return
    for start, stop in pieces:
        ax.plot([start, stop], [y, y], color=ALARM, linewidth=3, solid_capstyle="butt", label="exposed")


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
    moments = sorted({moment for event in timeline.events for moment in (event.start_ms, event.stop_ms)})
    computing = _stretches(event for event in timeline.events if event.lane != NETWORK)
    sending = _stretches(timeline.on(NETWORK))
    pieces: list[tuple[float, float]] = []
    for start, stop in pairwise(moments):
        if _goes_on(sending, start, stop) and not _goes_on(computing, start, stop):
            joined = pieces.pop()[0] if pieces and pieces[-1][1] == start else start
            pieces.append((joined, stop))
    return pieces


def _stretches(events: Iterable[Event]) -> list[tuple[float, float]]:
    """When at least one of the events goes on, in order; stretches that touch are one."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted((event.start_ms, event.stop_ms) for event in events):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _goes_on(stretches: Sequence[tuple[float, float]], start_ms: float, stop_ms: float) -> bool:
    """Whether one of the stretches covers this time: the last that begins by `start_ms`, if any does."""
    place = bisect_right(stretches, (start_ms, inf)) - 1
    return place >= 0 and stop_ms <= stretches[place][1]
