"""Lanes of time, as a picture needs them: colours, rows, what is exposed, and short events taken together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

from zero_ref.live.palette import PART_COLOURS
from zero_ref.simulator.operations import NETWORK
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


def label_colour(label: str) -> str:
    """Of an event with this label.

    >>> label_colour("reduce") == PART_COLOURS["gradients"]
    True
    """
    return COLOURS.get(label) or COLOURS_OF_MORE.get(label, OTHER)


def label_key(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each word; words of one colour together. Those of chapter 7 if there is nothing else."""
    shown = set(labels)
    if shown <= COLOURS.keys():
        return COLOURS
    words: dict[str, list[str]] = {}
    for label in (*("forward", *COLOURS), "gather", "agree", "average", *sorted(shown)):
        if label in shown and label not in words.setdefault(label_colour(label), []):
            words[label_colour(label)].append(label)
    return {", ".join(of_colour): colour for colour, of_colour in words.items() if of_colour}


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
