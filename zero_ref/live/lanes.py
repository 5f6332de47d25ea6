"""Lanes of time: colours, rows, what is exposed, short events taken together; and all of it as SVG."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from zero_ref.live.numbers import short, short_bytes, short_time, time_unit
from zero_ref.live.palette import ALARM, INK, MUTED, PART_COLOURS, text_colour_on
from zero_ref.live.svg import (
    BOLD,
    LINE,
    MARGIN,
    Drawing,
    Stacked,
    axis,
    bar,
    element,
    key,
    line,
    text,
    text_width,
    wrapped,
)  # fmt: skip
from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.scenario import SimulatedRun
from zero_ref.simulator.timeline import Event, Timeline

LANE, LEAST_ROW, LOW_LANE = 30.0, 15.0, 17.0
"""Pixels of a lane's height, of a row in it where events are under way together (room for a number), and of a
lane's height where many iterations stand below each other."""

# What is sent has the colour of what it carries: gradients, parameters. A step is the optimizer's.
COLOURS = {
    "backward": "#8A94A6",
    "step": PART_COLOURS["optimizer state"],
    "reduce": PART_COLOURS["gradients"],
    "broadcast": PART_COLOURS["parameters"],
}
COLOURS_OF_MORE = {
    "forward": "#B9C0CB",
    **dict.fromkeys(("gather", "average", "agree"), PART_COLOURS["parameters"]),
}
OTHER = "#77722A"  # whatever else a measured run may name


def label_colour(label: str) -> str:
    """The colour of an event with this label.

    >>> label_colour("reduce") == PART_COLOURS["gradients"]
    True
    """
    return COLOURS.get(label) or COLOURS_OF_MORE.get(label, OTHER)


def label_key(labels: Iterable[str]) -> dict[str, str]:
    """The colour of each word, words of one colour together; chapter 6's words if there are no others."""
    shown = set(labels)
    if shown <= COLOURS.keys():
        return COLOURS
    words: dict[str, list[str]] = {}
    for label in (*("forward", *COLOURS), "gather", "agree", "average", *sorted(shown)):
        if label in shown and label not in words.setdefault(label_colour(label), []):
            words[label_colour(label)].append(label)
    return {", ".join(of_colour): colour for colour, of_colour in words.items() if of_colour}


def flowed_together(events: Sequence[Event], cell_ms: float) -> dict[str, list[tuple[float, float]]]:
    """Many short events as few pieces: in each cell of time what each label takes of it, one after another.

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


def rows_of(events: Sequence[Event]) -> tuple[list[int], int]:
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
    changes = sorted(
        (moment, event.lane == NETWORK, change)
        for event in timeline.events
        for moment, change in ((event.start_ms, 1), (event.stop_ms, -1))
    )
    pieces: list[tuple[float, float]] = []
    under_way = {True: 0, False: 0}  # how many events of the network, and how many others
    before = 0.0
    for moment, network, change in changes:
        if moment > before and under_way[True] and not under_way[False]:
            joined = pieces.pop()[0] if pieces and pieces[-1][1] == before else before
            pieces.append((joined, moment))
        under_way[network] += change
        before = moment
    return pieces


# ------------------------------------------------------------------------------------------------ the picture


def timeline(timelines: Mapping[str, Timeline]) -> Drawing:
    """Iterations on one scale of time, below each other: a lane for what is computed, one for the network.

    A bar carries the number of its bucket or block. Underlined in red is exposed communication: the network
    works and the rank computes nothing. Measured calls may be under way together; then they share their lane.
    Events shorter than two pixels flow together: how long each kind takes stays right, and nothing moves by
    more than a pixel.

    >>> from zero_ref.simulator.timeline import WAYS_OF_DDP, BucketTimes, simulate
    >>> timeline({way: simulate([BucketTimes(4, 3, 1, 1.5)] * 4, way) for way in WAYS_OF_DDP}).words
    'plain: 29 ms, 9 ms exposed; after_backward: 26 ms, 6 ms exposed; interleaved: 24 ms, 4 ms exposed'

    Args:
        timelines: for each title its events, simulated or measured.
    """
    words = "; ".join(f"{title}: {_times(one)}" for title, one in timelines.items())
    return Drawing(words, lambda width: lanes(timelines, MARGIN, 14.0, width - 2 * MARGIN))


def stages_timeline(runs: Mapping[str, SimulatedRun]) -> Drawing:
    """One iteration of each run on one scale of time, in low lanes, and the most that a rank's device holds.

    Exposed communication is underlined as in `timeline`; bars have no numbers of buckets and blocks. Each
    timeline is that of the rank that holds most. If a run accumulates gradients, all of its passes are drawn.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> from zero_ref.simulator.scenario import Scenario
    >>> from zero_ref.simulator.stages import runs_by_stage
    >>> xl = Scenario(MODELS["gpt2-xl"], cluster("h100-ib"), 8)
    >>> stages_timeline(runs_by_stage(xl)).words
    'DDP: 59.9 ms, 0.931 ms exposed, peak 36.5 GB; ...; stage 3: 48.8 ms, 1.02 ms exposed, peak 8.46 GB'

    Args:
        runs: for each title a simulated run, such as `runs_by_stage` gives.
    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("there is no run to draw: give one at least.")
    timelines = {title: run.timeline for title, run in runs.items()}
    notes = {title: f"peak {short_bytes(run.peak_bytes)}" for title, run in runs.items()}
    words = "; ".join(f"{title}: {_times(one)}, {notes[title]}" for title, one in timelines.items())
    return Drawing(words, lambda width: lanes(timelines, MARGIN, 14.0, width - 2 * MARGIN, notes=notes))


def _times(timeline: Timeline) -> str:
    return f"{short_time(timeline.makespan_ms)}, {short_time(timeline.exposed_ms)} exposed"


def lanes(
    timelines: Mapping[str, Timeline],
    x: float,
    y: float,
    width: float,
    notes: Mapping[str, str] | None = None,
) -> Stacked:
    """Draw the lanes of `timeline` at a place of a larger picture.

    Args:
        timelines: for each title its events.
        x, y, width: where to draw, in pixels.
        notes: for each title what stands at the right of it, or in a line below it. With notes the lanes are
            low, bars have words in place of numbers, and a lane is not named again in the next iteration.
    """
    scale_ms = max((one.makespan_ms for one in timelines.values()), default=0.0) or 1.0
    labels = {event.label for one in timelines.values() for event in one.events}
    parts, y = key(label_key(labels), x, y, width)
    grid_top = y
    named: list[str] | None = None  # the lanes of the iteration above, which are named there
    for title, one in timelines.items():
        exposed = f" {short_time(one.exposed_ms)} exposed"
        *above, last = heading(title, f"{short_time(one.makespan_ms)},", width, exposed)
        for words in above:
            parts.append(text(x, y + 14, words, bold=True))
            y += LINE
        beside = element("tspan", exposed, fill=ALARM, font_weight=400)
        parts.append(text(x, y + 14, last, beside, bold=True))
        if notes and BOLD * text_width(last) + text_width(f"{exposed}  {notes[title]}") <= width:
            parts.append(text(x + width, y + 14, notes[title], anchor="end"))
        elif notes:
            y += LINE
            parts.append(text(x, y + 14, notes[title]))
        y += LINE + 4
        end = x + width * one.makespan_ms / scale_ms
        top = y
        of_this = sorted(one.lanes, key=lambda lane: lane != COMPUTE)
        for lane in of_this:
            if not notes or of_this != named:
                parts.append(text(x, y + 11, lane, fill=MUTED))
                y += 15
            bars, y = _lane(one, lane, x, y, width / scale_ms, LOW_LANE if notes else LANE)
            parts += bars
            if lane == NETWORK:
                parts += [
                    line(x + width * start / scale_ms, y + 3, x + width * stop / scale_ms, y + 3, ALARM, 3.5)
                    for start, stop in alone(one)
                ]
                y += 6
        named = of_this
        parts.append(line(end, top, end, y, INK, 1.4))
        y += 12
    return time_axis(labels, x, width, grid_top, y, scale_ms) + parts, y + 40


def heading(title: str, took: str, width: float, more: str) -> list[str]:
    """A timeline's title in bold lines; how long it took ends the last one, if `more` has room behind it."""
    lines = wrapped(title, width / BOLD)
    last = f"{lines[-1]}: {took}"
    if BOLD * text_width(last) + text_width(more) <= width:
        return [*lines[:-1], last]
    return [*lines, took]


def time_axis(
    labels: Collection[str], x: float, width: float, top: float, bottom: float, longest_ms: float
) -> list[str]:
    """Grid lines of time, all in the unit that suits the longest; `labels` say where the time begins."""
    unit, in_ms = time_unit(longest_ms)
    below = f"{unit} since {'the iteration' if 'forward' in labels else 'backward'} began"
    return axis(x, width, top, bottom, longest_ms, lambda ms: short(ms / in_ms), below)


def _lane(timeline: Timeline, lane: str, x: float, y: float, px_per_ms: float, height: float) -> Stacked:
    """The bars of one lane, in as many rows as are under way together; in a low one words, not numbers."""
    events = [event for event in timeline.on(lane) if event.stop_ms > event.start_ms]
    row_of, rows = rows_of(events)
    high = max(height / rows, LEAST_ROW)
    parts: list[str] = []
    short_ones: list[list[Event]] = [[] for _ in range(rows)]
    for event, row in zip(events, row_of):
        wide = px_per_ms * (event.stop_ms - event.start_ms)
        if wide < 2:
            short_ones[row].append(event)
            continue
        number = number_of(event)
        hint = f"{event.label} {number}: {short_time(event.start_ms)} to {short_time(event.stop_ms)}"
        left, gap = x + px_per_ms * event.start_ms, 0.6 if wide >= 4 else 0.0
        colour = label_colour(event.label)
        parts.append(bar(left, y + row * high, wide - gap, high - 1, colour, hint))
        if height == LOW_LANE:
            number = event.label if event.bucket is None else ""
        if number and text_width(number) + 2 <= wide:
            middle, base = left + wide / 2, y + (row + 0.5) * high + 4
            parts.append(text(middle, base, number, fill=text_colour_on(colour), anchor="middle"))
    for row, few in enumerate(short_ones):
        for label, pieces in flowed_together(few, 1 / px_per_ms).items():
            for start, stop in pieces:
                left, wide = x + px_per_ms * start, px_per_ms * (stop - start)
                parts.append(bar(left, y + row * high, wide, high - 1, label_colour(label)))
    return parts, y + rows * high


def number_of(event: Event) -> str:
    """Return the text in an event's bar: the number of its bucket or block, or "all"."""
    return "all" if event.bucket is None else str(event.bucket)
