"""Lanes of time: what a rank computes, and what its network carries meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from zero_ref.lab.plots._style import SMALL_PT, bare, colour_key, in_style, label_box
from zero_ref.live.lanes import alone, flowed_together, label_colour, label_key, rows_of
from zero_ref.live.numbers import short
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, PAPER, text_colour_on
from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.timeline import Event, Timeline

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
    >>> from zero_ref.simulator.timeline import WAYS_OF_DDP, BucketTimes, simulate
    >>> fig, ax = figure(6, 6)
    >>> _ = timeline({way: simulate([BucketTimes(4, 3, 1, 1.5)] * 4, way) for way in WAYS_OF_DDP}, ax)

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
    colour_key(ax, label_key(labels))
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


def _lane(ax: Axes, events: Sequence[Event], top: float, scale_ms: float) -> float:
    """The bars of one lane, in as many rows as are under way together; returns how high it is."""
    events = [event for event in events if event.stop_ms > event.start_ms]
    row_of, rows = rows_of(events)
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
                facecolors=label_colour(label),
                linewidth=0,
                snap=False,  # pieces narrower than a pixel are a paler colour, not all or nothing
                label=f"{of_row[0].lane}: {label}, many",
            )
    return whole


def _bar(ax: Axes, event: Event, low: float, height: float, *, thin: bool) -> None:
    """One event; a thin one without the border, which would leave nothing of it."""
    colour, left = label_colour(event.label), event.start_ms
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


def _underline(ax: Axes, pieces: Sequence[tuple[float, float]], y: float) -> None:
    if len(pieces) > MOST_BARS:
        starts, stops = zip(*pieces)
        ax.hlines([y] * len(pieces), starts, stops, colors=ALARM, linewidth=3, label="exposed, many")
        return
    for start, stop in pieces:
        ax.plot([start, stop], [y, y], color=ALARM, linewidth=3, solid_capstyle="butt", label="exposed")
