"""Iterations with a clock that moves over them: what is hidden, and how exposed communication adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import NamedTuple

from zero_ref.live.animation import Animation, Motion
from zero_ref.live.lanes import LANE, alone, heading, label_colour, label_key, number_of, rows_of, time_axis
from zero_ref.live.numbers import short_time
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, text_colour_on, tint
from zero_ref.live.svg import LINE, MARGIN, Stacked, element, key, line, text, text_width
from zero_ref.simulator.operations import COMPUTE
from zero_ref.simulator.timeline import Event, Timeline

START_S, RUN_S, LOOP_S = 0.5, 8.0, 11.0
"""The clock starts, needs so long for the longest timeline, and the loop ends."""

MOST_EVENTS = 200


class Frame(NamedTuple):
    """When in the loop an event of a timeline is seen to happen.

    Args:
        title: of its timeline.
    """

    title: str
    event: Event
    start_s: float
    stop_s: float


def overlap_frames(timelines: Mapping[str, Timeline]) -> list[Frame]:
    """Every event in slow motion, all timelines with one clock: the longest takes 8 seconds.

    >>> from zero_ref.simulator.timeline import BucketTimes, simulate
    >>> frames = overlap_frames({way: simulate([BucketTimes(4, 3, 1, 2)], way) for way in ("plain",)})
    >>> [(frame.event.label, round(frame.start_s, 2), round(frame.stop_s, 2)) for frame in frames]
    [('backward', 0.5, 3.7), ('reduce', 3.7, 6.1), ('step', 6.1, 6.9), ('broadcast', 6.9, 8.5)]

    Raises:
        ValueError: nothing happens, or more than can be seen one by one.
    """
    count = sum(len(one.events) for one in timelines.values())
    longest_ms = max((one.makespan_ms for one in timelines.values()), default=0.0)
    if not longest_ms or count > MOST_EVENTS:
        raise ValueError(
            f"{count} events in {longest_ms:g} ms: an animation shows 1 to {MOST_EVENTS}, and takes some "
            "time. `lab.plots.timeline` draws more; fewer buckets make fewer."
        )
    return [
        Frame(title, event, _second(event.start_ms, longest_ms), _second(event.stop_ms, longest_ms))
        for title, one in timelines.items()
        for event in one.events
        if event.stop_ms > event.start_ms
    ]


def _second(ms: float, longest_ms: float) -> float:
    return START_S + RUN_S * ms / longest_ms


def animate_overlap(timelines: Mapping[str, Timeline]) -> Animation:
    """Iterations below each other, with one clock, as the last line of a cell.

    >>> from zero_ref.simulator.timeline import BucketTimes, simulate
    >>> animate_overlap({"zero.step()": simulate([BucketTimes(4, 3, 1, 2)], "plain")}).words
    'A clock moves over one timeline. zero.step(): 10 ms, of which 5 ms are exposed communication.'

    Args:
        timelines: for each title its events, simulated or measured.
    Raises:
        ValueError: as `overlap_frames`.
    """
    frames = overlap_frames(timelines)
    each = [
        f"{title}: {short_time(one.makespan_ms)}, of which {short_time(one.exposed_ms)} are exposed "
        "communication."
        for title, one in timelines.items()
    ]
    count = "one timeline" if len(each) == 1 else f"{len(each)} timelines, from the same beginning"
    words = f"A clock moves over {count}. {' '.join(each)}"
    return Animation("the clock", words, partial(_draw, dict(timelines), frames, words))


def _draw(
    timelines: Mapping[str, Timeline], frames: Sequence[Frame], words: str, width: float, name: str
) -> str:
    x, inner = MARGIN, width - 2 * MARGIN
    longest_ms = max(one.makespan_ms for one in timelines.values())
    motion = Motion(name, LOOP_S, LOOP_S - 1.5)
    labels = {frame.event.label for frame in frames}
    parts, y = key(label_key(labels), x, 14.0, inner)
    top = y
    moves = ((START_S, 0.0), (START_S + RUN_S, inner))
    runs = motion.of(*((second, f"transform:translateX({px:g}px)") for second, px in moves))
    for title, one in timelines.items():
        for words_of_line in heading(title, short_time(one.makespan_ms), inner):
            parts.append(text(x, y + 14, words_of_line, bold=True))
            y += LINE
        begin = y + 4
        for lane in sorted(one.lanes, key=lambda lane: lane != COMPUTE):
            parts.append(text(x, y + 15, lane, fill=MUTED))
            on_lane = [frame for frame in frames if (frame.title, frame.event.lane) == (title, lane)]
            parts += _lane(on_lane, motion, x, y + 20, inner / longest_ms)
            y += 20 + LANE
        clock = element("line", x1=x, y1=begin, x2=x, y2=y + 5, stroke=INK, stroke_width=2.5, class_=runs)
        end = x + inner * one.makespan_ms / longest_ms
        parts += [line(end, begin, end, y + 5, INK, 1.4), element("g", clock, class_="moving")]
        more, y = _exposed(one, motion, x, y, inner / longest_ms, longest_ms)
        parts += more
        y += 12
    parts = [*time_axis(labels, x, inner, top, y, longest_ms), *parts]
    return motion.picture(width, y + 40, words, parts)


def _lane(frames: Sequence[Frame], motion: Motion, x: float, y: float, px: float) -> list[str]:
    """Bars: pale what is to come, and over it what has happened, which grows with the clock."""
    row_of, rows = rows_of([frame.event for frame in frames])
    high = LANE / rows
    parts = []
    for (_, event, start_s, stop_s), row in zip(frames, row_of):
        left, wide = x + px * event.start_ms, px * (event.stop_ms - event.start_ms)
        colour, low = label_colour(event.label), y + row * high
        words = number_of(event)
        hint = f"{event.label} {words}: {short_time(event.start_ms)} to {short_time(event.stop_ms)}"
        rect = partial(element, "rect", x=left, y=low, width=max(0.5, wide - 0.6), height=high - 1)
        named = partial(text, left + wide / 2, low + high / 2 + 4, words, anchor="middle")
        fits = text_width(words) + 2 <= wide and high >= 14
        grows, seen = motion.grows(start_s, stop_s), motion.appears((start_s + stop_s) / 2)
        parts += [
            element("g", rect(fill=tint(colour, 0.3)), named() if fits else "", class_="moving"),
            rect(
                element("title", escape(hint)), fill=colour, class_=grows, data_label=event.label,
                data_bucket=words, data_start_s=start_s, data_stop_s=stop_s,
            ),
        ]  # fmt: skip
        if fits:
            parts.append(element("g", named(fill=text_colour_on(colour)), class_=seen))
    return parts


def _exposed(one: Timeline, motion: Motion, x: float, y: float, px: float, longest_ms: float) -> Stacked:
    """Below the network where nothing hides it, and all of it added up."""
    parts = [text(x, y + 22, f"exposed communication, added up: {short_time(one.exposed_ms)}", fill=ALARM)]
    sum_ms = 0.0
    for start_ms, stop_ms in alone(one):
        grows = motion.grows(_second(start_ms, longest_ms), _second(stop_ms, longest_ms))
        wide = px * (stop_ms - start_ms)
        for left_ms, low, high in ((start_ms, y + 1, 3.5), (sum_ms, y + 28, 9.0)):
            parts.append(
                element("rect", x=x + px * left_ms, y=low, width=wide, height=high, fill=ALARM, class_=grows)
            )
        sum_ms += stop_ms - start_ms
    parts.insert(1, element("rect", x=x, y=y + 28, width=px * sum_ms, height=9, fill=FAINT, class_="moving"))
    return parts, y + 40
