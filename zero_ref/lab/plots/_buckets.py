"""Flat tensors and their savings: the places of parameters, and the cost of a message beside its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from zero_ref.lab.plots._style import (
    SMALL_PT,
    bare,
    colour_key,
    filled_box,
    in_style,
    label_box,
    with_levels,
    write_beside,
)
from zero_ref.live.names import short_names
from zero_ref.live.numbers import short, short_bytes
from zero_ref.live.palette import INK, MUTED, PAPER, RANK_COLOURS, SERIES_COLOURS, rank_colour, tint
from zero_ref.plan.layout import Bucket, BucketLayout, Flat

ROW = 2.1
"""From one flat tensor to the next, in heights of a window."""

FIXED_COLOUR, BYTES_COLOUR = SERIES_COLOURS[1], tint(SERIES_COLOURS[0], 0.75)


@in_style
def flat_layout(layout: BucketLayout, ax: Axes, *, names: Sequence[str] | None = None) -> Axes:
    """Each flat tensor from end to end: the parameters' windows, the owners' messages, the padding.

    Windows have the colour of their owner. Under them a bar for each message. Hatched is padding; a dashed
    line cuts a parameter that two ranks own.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.layout import lay_out
    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.plan.rules import sorted_greedy
    >>> layout = lay_out(sorted_greedy([15, 3, 6, 2], 2), [ParamSpec(n) for n in (15, 3, 6, 2)])
    >>> fig, ax = figure(6, 1.8)
    >>> _ = flat_layout(layout, ax, names=["W1", "b1", "W2", "b2"])

    Args:
        layout: a small one, of at most 8 ranks.
        names: of the parameters, by number; their numbers if None.
    Raises:
        ValueError: more than 8 ranks, or a parameter without a name.
    """
    owners = {bucket.owner for flat in layout.flats for bucket in flat.buckets}
    if max(owners, default=0) >= len(RANK_COLOURS):
        raise ValueError(f"{max(owners) + 1} ranks do not fit: draw at most {len(RANK_COLOURS)}.")
    params = {param for flat in layout.flats for param in flat.offset_of_param}
    if names is None:
        names = [str(param) for param in range(max(params, default=-1) + 1)]
    if max(params, default=-1) >= len(names):
        raise ValueError(f"{len(names)} names, and a parameter {max(params)}: give one for each.")

    for row, flat in enumerate(layout.flats):
        _draw_flat(ax, flat, row * ROW, names)
    ax.set_xlim(0, max((flat.numel for flat in layout.flats), default=0) or 1)
    ax.set_ylim(ROW * max(len(layout.flats), 1) - 0.25, -0.1)
    bare(ax, keep=())
    edges = sorted({edge for flat in layout.flats for edge in _edges(flat)})
    ax.set_xticks(edges, [f"{edge:,}" for edge in edges])
    several = len(layout.flats) > 1
    ax.set_yticks(
        [row * ROW + 0.5 for row in range(len(layout.flats))] if several else [],
        [f"{flat.dtype}\n{flat.device}" for flat in layout.flats] if several else [],
    )
    ax.set_xlabel("element of the flat tensor", loc="left")
    colour_key(ax, {f"rank {owner}": rank_colour(owner, len(RANK_COLOURS)) for owner in sorted(owners)})
    return ax


def _edges(flat: Flat) -> list[int]:
    """Return where messages begin and the tensor ends; the messages' ends would crowd the axis."""
    return [*(bucket.start for bucket in flat.buckets), flat.numel]


def _draw_flat(ax: Axes, flat: Flat, top: float, names: Sequence[str]) -> None:
    filled = [0, *(edge for bucket in flat.buckets for edge in (bucket.start, bucket.stop)), flat.numel]
    for start, stop in list(pairwise(filled))[::2]:
        if start < stop:
            hatched: dict[str, Any] = {"edgecolor": tint(MUTED, 0.6), "hatch": "////", "linewidth": 0}
            filled_box(ax, (start, top + 1, stop, top), PAPER, label="padding", **hatched)
    for bucket in flat.buckets:
        colour = rank_colour(bucket.owner, len(RANK_COLOURS))
        for piece, place in zip(bucket.slices, bucket.starts):
            start = bucket.start + place
            stop = start + piece.numel
            if start == stop:
                continue
            forms = short_names(names[piece.param])
            choices = [f"{form}\n{piece.numel:,}" for form in forms] + forms
            label = f"parameter {piece.param}, rank {bucket.owner}"
            window = (start, top + 1, stop, top)
            filled_box(ax, window, colour, choices, edgecolor=PAPER, linewidth=1.6, label=label)
        _draw_message(ax, bucket, flat.itemsize, top)
    for before, after in pairwise(flat.buckets):
        if (
            before.slices and after.slices and before.slices[-1].param == after.slices[0].param
        ):  # over the gap that separates two windows
            ax.plot([after.start] * 2, [top, top + 1], color=PAPER, linewidth=3)
            ax.plot([after.start] * 2, [top, top + 1], color=INK, linewidth=1.2, linestyle="--", label="cut")


def _draw_message(ax: Axes, bucket: Bucket, itemsize: int, top: float) -> None:
    """A bar under the windows that travel as one, with its bytes."""
    colour, label = rank_colour(bucket.owner, len(RANK_COLOURS)), f"message of rank {bucket.owner}"
    bar = (bucket.start, top + 1.2, bucket.stop, top + 1.1)
    filled_box(ax, bar, colour, edgecolor=PAPER, linewidth=0.8, label=label)
    nbytes = short_bytes(bucket.numel * itemsize)
    box = (bucket.start, top + 1.75, bucket.stop, top + 1.22)
    label_box(ax, box, [f"one message, {nbytes}", nbytes], color=INK, fontsize=SMALL_PT)


# ------------------------------------------------------------------------------------------ message times


@in_style
def message_times(
    messages: Mapping[int, Sequence[int]],
    ax: Axes,
    *,
    fixed_ms: float,
    bytes_per_ms: float,
    measured_ms: Mapping[int, float] | None = None,
) -> Axes:
    """The same bytes in many small messages or in a few large ones: their number, and the time they take.

    A bar is what the rule says, a fixed time for each message and the time of its bytes; a dot is what was
    measured. Above each stands the number of messages.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> messages = {1_000: [1_000] * 64, 8_000: [8_000] * 8, 64_000: [64_000]}
    >>> _ = message_times(messages, ax, fixed_ms=0.1, bytes_per_ms=1e6, measured_ms={64_000: 0.2})

    Args:
        messages: bytes of each message, by the size of a bucket in bytes.
        fixed_ms: milliseconds that a message takes beside its bytes.
        bytes_per_ms: what the network carries.
        measured_ms: for some or all sizes, the milliseconds of all messages together.
    Raises:
        ValueError: there are no messages, or a measurement is for a size that has none.
    """
    measured_ms = {} if measured_ms is None else measured_ms
    if not messages:
        raise ValueError("no messages: give the bytes of each, for one bucket size or more.")
    unknown = sorted(measured_ms.keys() - messages.keys())
    if unknown:
        raise ValueError(f"a measurement for buckets of {unknown[0]} bytes, and no messages of them.")

    sizes = sorted(messages)
    of_bytes = [sum(messages[size]) / bytes_per_ms for size in sizes]
    fixed = [fixed_ms * len(messages[size]) for size in sizes]
    places = range(len(sizes))
    ax.bar(places, of_bytes, width=0.72, color=BYTES_COLOUR, label="bytes")
    ax.bar(places, fixed, width=0.72, bottom=of_bytes, color=FIXED_COLOUR, label="fixed")
    dots = [place for place in places if sizes[place] in measured_ms]
    heights = [measured_ms[sizes[place]] for place in dots]
    ax.plot(dots, heights, "o", color=INK, markeredgecolor=PAPER, ms=9, label="measured")

    tops = [max(a + b, measured_ms.get(size, 0)) for size, a, b in zip(sizes, of_bytes, fixed)]
    for place, (size, top) in enumerate(zip(sizes, tops)):
        write_beside(ax, f"{len(messages[size]):,}", (place, top), (0, 7), ha="center")
    ax.set_xlim(-0.6, len(sizes) - 0.4)
    ax.set_ylim(0, 1.14 * max(tops) or 1)
    with_levels(ax)
    ax.set_xticks(list(places), [short_bytes(size).replace(" ", "\n") for size in sizes])
    ax.set_xlabel("bucket size; above the bars, the number of messages")
    ax.set_ylabel("ms for all messages")
    key = {"fixed part of each message": FIXED_COLOUR, "its bytes": BYTES_COLOUR}
    colour_key(ax, key | ({"measured": INK} if dots else {}))
    rate = short_bytes(1000 * bytes_per_ms)
    ax.set_title(f"{short(fixed_ms)} ms for each message, and {rate} a second", pad=30)
    return ax
