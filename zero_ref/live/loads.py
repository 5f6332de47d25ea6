"""Pictures of the ranks' loads, and of how they change with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from zero_ref.live.names import rank_ticks
from zero_ref.live.numbers import short, short_bytes, short_count
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, PAPER, SERIES_COLOURS, rank_colour, text_colour_on
from zero_ref.live.svg import (
    LINE,
    MARGIN,
    Drawing,
    Stacked,
    bar,
    centred,
    curve,
    element,
    key,
    line,
    paragraph,
    text,
    text_width,
    ticks,
)
from zero_ref.plan.choice import RULES
from zero_ref.plan.partition import Partition

MOST_BARS = 64
"""Above this many ranks a bar is thinner than a line: one outline replaces the bars."""

SCALE = 58.0
"""Pixels of the numbers left of a scale."""

MEAN, LARGEST = "5 3", "1.5 2.5"
"""Dashes of the lines of the mean and of the largest tensor."""


def loads(
    partition: Partition, *, bytes_per_element: float | None = None, fullest_first: bool = False
) -> Drawing:
    """Draw how much each rank owns, beside an even share and beside the largest tensor.

    No partition of whole tensors gets its fullest rank below the largest tensor, and none gets it below the
    mean: the two lines show which of them binds.

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> loads(sorted_greedy([6, 5, 4, 1], 2), bytes_per_element=8).words     # Adam's two means in fp32
    'Fullest rank: 1.13 × the mean. The mean: 64 B; the largest tensor: 48 B.'

    Args:
        partition: any number of ranks; above 64 one outline replaces the bars.
        bytes_per_element: draw bytes, this many an element. Elements if None.
        fullest_first: sort the ranks by what they own.
    """
    scale = 1.0 if bytes_per_element is None else bytes_per_element
    show = short_count if bytes_per_element is None else short_bytes
    heights = [scale * load for load in partition.loads]
    mean = sum(heights) / len(heights)
    largest = scale * max(partition.numels, default=0)
    verdict = _verdict(heights, mean)
    words = f"{verdict}. The mean: {show(mean)}; the largest tensor: {show(largest)}."

    def draw(width: float) -> Stacked:
        # Far above all bars, the largest tensor would press them flat: its line is left out, its name stays.
        far = largest > 3 * max(heights)
        most = 1.06 * (1.35 * max(heights) if far else max(*heights, largest)) or 1.0
        x, wide, high = MARGIN + SCALE, width - 2 * MARGIN - SCALE, 190.0
        parts, y = paragraph(verdict, MARGIN, 24, width - 2 * MARGIN, bold=True)
        top = y - 2
        for value in ticks(most, 4):
            at = top + high * (1 - value / most)
            parts += [line(x, at, x + wide, at), text(x - 8, at + 4, show(value), fill=MUTED, anchor="end")]
        parts += load_bars(heights, show, x, top, wide, high, most, fullest_first)
        for value, dashes in ((mean, MEAN), (largest, LARGEST)):
            if value <= most:
                at = top + high * (1 - value / most)
                parts.append(line(x, at, x + wide, at, INK, 1.3, dashes))
        named, y = _rank_names(_order(heights, fullest_first), fullest_first, x, top + high + 17, wide)
        where = "far above: " if far else "dotted: "
        said = f"dashed: the mean, {show(mean)}; {where}the largest tensor, {show(largest)}"
        below, bottom = paragraph(said, x, y + 20, wide)
        return parts + named + below, bottom - 4

    return Drawing(words, draw)


def _verdict(heights: Sequence[float], mean: float) -> str:
    if not mean:
        return "Nothing to own"
    idle = sum(height == 0 for height in heights)
    owning = f"; {idle:,} of {len(heights):,} ranks own nothing" if idle else ""
    return f"Fullest rank: {short(max(heights) / mean)} × the mean{owning}"


def _order(heights: Sequence[float], fullest_first: bool) -> list[int]:
    """The ranks from left to right."""
    # sorted() keeps the order of equal keys: without fullest_first that of the ranks.
    return sorted(range(len(heights)), key=lambda rank: -heights[rank] * fullest_first)


def _rank_names(ranks: Sequence[int], fullest_first: bool, x: float, y: float, width: float) -> Stacked:
    places = rank_ticks(len(ranks))
    names = [f"{ranks[place]:,}" for place in places]
    if fullest_first and len(ranks) > 16:
        # Count 1st, 2nd, ...: the numbers of the few ranks that can be named would seem picked at random.
        places = [max(0, place - 1) for place in places[:-1]] + places[-1:]
        names = [f"{place + 1:,}" for place in places]
    parts, free_from = [], -math.inf
    for place, name in zip(places, names):
        at, half = x + width * (place + 0.5) / len(ranks), text_width(name) / 2
        if at - half >= free_from:
            parts.append(text(at, y, name, fill=MUTED, anchor="middle"))
            free_from = at + half + 6
    below = "ranks, the fullest first" if fullest_first else "rank"
    return [*parts, text(x + width, y + 16, below, fill=MUTED, anchor="end")], y + 16


def load_bars(
    heights: Sequence[float], show: Callable[[float], str], x: float, y: float, width: float, high: float,
    most: float, fullest_first: bool,
) -> list[str]:  # fmt: skip
    """A bar for each rank in its colour, on a scale up to `most`; of many ranks one outline."""
    ranks = _order(heights, fullest_first)
    each, base = width / len(ranks), line(x, y + high, x + width, y + high, MUTED)
    if len(ranks) > MOST_BARS:
        points = [(x, y + high)]
        for place, rank in enumerate(ranks):
            top = y + high * (1 - heights[rank] / most)
            points += [(x + place * each, top), (x + (place + 1) * each, top)]
        outline = " ".join(f"{px:.2f},{py:.2f}" for px, py in [*points, (x + width, y + high)])
        return [element("polygon", points=outline, fill="#8A94A6"), base]
    gap = min(3.0, 0.15 * each)
    parts = []
    for place, rank in enumerate(ranks):
        left, tall, colour = x + place * each, high * heights[rank] / most, rank_colour(rank, len(ranks))
        hint = f"rank {rank}: {show(heights[rank])}"
        parts.append(bar(left + gap / 2, y + high - tall, each - gap, tall, colour, hint))
        number = show(heights[rank])
        if text_width(number) + gap <= each:
            on = text_colour_on(colour if tall > LINE else PAPER)
            parts.append(text(left + each / 2, y + high - 5, number, fill=on, anchor="middle"))
    return [*parts, base]


def loads_compared(loads_of: Mapping[str, Sequence[float]]) -> Drawing:
    """Draw how much each rank owns under several partitions, below each other and on one scale.

    >>> loads_compared({"yours": [6, 10], "even": [8, 8]}).words
    'yours: the fullest rank owns 10, 1.25 × the mean; even: the fullest rank owns 8, 1 × the mean'

    Args:
        loads_of: for each title the elements of each rank.
    """
    titles = {}
    for title, owned in loads_of.items():
        mean = sum(owned) / len(owned)
        over = f", {short(max(owned) / mean)} × the mean" if mean else ""
        titles[title] = f"{title}: the fullest rank owns {short_count(max(owned))}{over}"

    def draw(width: float) -> Stacked:
        named = {titles[title]: owned for title, owned in loads_of.items()}
        parts, y = bars_compared(named, short_count, MARGIN, 10.0, width - 2 * MARGIN)
        return parts, y + 14

    return Drawing("; ".join(titles.values()), draw)


def bars_compared(
    loads_of: Mapping[str, Sequence[float]], show: Callable[[float], str], x: float, y: float, width: float,
    fullest_first: bool = False,
) -> Stacked:  # fmt: skip
    """Draw the bars of `loads_compared` at a place of a larger picture: a title, bars, a line at the mean.

    Args:
        loads_of: for each title the elements of each rank.
        show: formats a load.
        x, y, width: where to draw, in pixels.
        fullest_first: sort the ranks by what they own.
    """
    parts: list[str] = []
    high, longest = 76.0, max(loads_of.values(), key=len)
    most = max(max(owned) for owned in loads_of.values()) or 1.0
    for title, owned in loads_of.items():
        said, y = paragraph(title, x, y + 13, width, bold=True)
        y -= 9
        parts += said + load_bars(owned, show, x, y, width, high, most, fullest_first)
        at = y + high * (1 - sum(owned) / len(owned) / most)
        parts.append(line(x, at, x + width, at, INK, 1.3, MEAN))
        y += high + 10
    ends = ("the fullest", "the emptiest") if fullest_first else ("rank 0", f"rank {len(longest) - 1:,}")
    parts += [
        text(x, y + 6, ends[0], fill=MUTED),
        text(x + width, y + 6, ends[1], fill=MUTED, anchor="end"),
        text(x + width / 2, y + 6, "dashed: the mean", fill=INK, anchor="middle"),
    ]
    return parts, y + 6


# ----------------------------------------------------------------------------------- balance against ranks


def balance_against_ranks(
    numels: Sequence[int],
    world_sizes: Sequence[int],
    *,
    strategies: Sequence[str] = ("sorted_greedy", "even"),
    bytes_per_element: float | None = None,
) -> Drawing:
    """Draw how full the fullest rank is as ranks are added, and where whole tensors stop helping.

    Below the shaded line no partition of whole tensors can go: some rank owns the largest tensor. An even
    split goes below it, because it may cut that tensor.

    >>> balance_against_ranks([525, 60, 60, 60, 60], [1, 2, 4, 8], bytes_per_element=8).words
    'Fullest rank: bytes. At 8 ranks sorted greedy: 4.2 kB, even: 1.02 kB.'

    Args:
        numels: elements per parameter, in registration order.
        world_sizes: numbers of ranks, rising.
        strategies: names in `zero_ref.plan.choice.RULES`.
        bytes_per_element: draw the fullest rank's bytes, this many an element (8: Adam's two running means in
            fp32). Its load divided by the mean if None.
    Raises:
        ValueError: the model has no elements, a strategy is unknown.
    """
    total, largest = sum(numels), max(numels, default=0)
    if not total:
        raise ValueError("the model has no elements: there is nothing to balance.")
    unknown = [name for name in strategies if name not in RULES]
    if unknown:
        raise ValueError(f"unknown partition {unknown[0]!r}; choose of {', '.join(RULES)}.")

    def height(load: int, world_size: int) -> float:
        return load * world_size / total if bytes_per_element is None else load * bytes_per_element

    def show(value: float) -> str:
        return f"{short(value)} ×" if bytes_per_element is None else short_bytes(value)

    floor = {n: height(largest, n) for n in world_sizes}
    curves = {
        name.replace("_", " "): {n: height(max(RULES[name](numels, n).loads), n) for n in world_sizes}
        for name in strategies
    }
    title = f"Fullest rank: {'load over the mean' if bytes_per_element is None else 'bytes'}"
    ends = ", ".join(f"{name}: {show(curve[world_sizes[-1]])}" for name, curve in curves.items())
    size = "" if bytes_per_element is None else f" ({show(floor[world_sizes[-1]])})"
    shaded = f"below the largest tensor{size}: only by cutting it"

    def draw(width: float) -> Stacked:
        left, wide = MARGIN, width - 2 * MARGIN
        said, y = paragraph(shaded, left + 18, 47.0, wide - 18)
        lines, bottom = curves_against_ranks(curves, show, left, y, wide, floor=floor)
        return [text(left, 24, title, bold=True), bar(left, 36, 12, 12, FAINT), *said, *lines], bottom

    return Drawing(f"{title}. At {world_sizes[-1]:,} ranks {ends}.", draw)


def curves_against_ranks(
    curves: Mapping[str, Mapping[int, float]], show: Callable[[float], str], x: float, y: float, width: float,
    *, floor: Mapping[int, float] | None = None, here: int | None = None,
) -> Stacked:  # fmt: skip
    """Curves over numbers of ranks, on logarithmic axes; in the key their values at the right end.

    Args:
        curves: name -> number of ranks, rising -> a value above 0.
        show: how a value is written.
        floor: number of ranks -> a height below which the picture is shaded.
        here: a number of ranks that is marked.
    """
    ranks = list(next(iter(curves.values())))
    values = [value for curve in curves.values() for value in curve.values()]
    low, most = min(values) / 1.25, max(values) * 1.25
    left, wide, high = x + SCALE, width - SCALE, 150.0

    def at(n: int, value: float) -> tuple[float, float]:
        across = math.log(n / ranks[0]) / math.log(ranks[-1] / ranks[0]) if len(ranks) > 1 else 0.5
        return left + wide * across, y + high * (1 - math.log(max(value, low) / low) / math.log(most / low))

    parts = []
    if floor:
        above = [at(n, min(value, most)) for n, value in floor.items()]
        corners = [*above, (above[-1][0], y + high), (above[0][0], y + high)]
        outline = " ".join(f"{px:.2f},{py:.2f}" for px, py in corners)
        parts.append(element("polygon", points=outline, fill=FAINT, fill_opacity=0.55))
    for value in log_ticks(low, most):
        _, level = at(ranks[0], value)
        parts += [line(left, level, left + wide, level)]
        parts += [text(left - 8, level + 4, show(value), fill=MUTED, anchor="end")]
    free_until = math.inf
    for n in reversed(ranks):  # from the last one down, as many as have room
        across, name = at(n, low)[0], f"{n:,}"
        if across + text_width(name) / 2 <= free_until:
            parts.append(centred(across, y + high + 17, name, MUTED, x, left + wide + MARGIN - 4))
            free_until = across - text_width(name) / 2 - 8
    if here is not None:
        parts.append(line(at(here, low)[0], y, at(here, low)[0], y + high, ALARM, 1.6, "5 3"))
    names = {}
    for place, (colour, (name, curve_of)) in enumerate(zip(SERIES_COLOURS, curves.items())):
        thick = 2.0 + 5.0 * (len(curves) - 1 - place) / len(curves)  # lines that coincide are all seen
        points = [at(n, value) for n, value in curve_of.items()]
        parts.append(curve(points, colour, thick))
        parts += [element("circle", cx=px, cy=py, r=thick / 2 + 1.2, fill=colour) for px, py in points]
        names[f"{name}: {show(curve_of[ranks[-1]])}"] = colour
    below = "ranks" if here is None else "ranks; dashed: here"
    parts.append(text(left + wide, y + high + 34, below, fill=MUTED, anchor="end"))
    parts.append(text(x, y + high + 34, f"at {ranks[-1]:,} rank{'s' if ranks[-1] > 1 else ''}:"))
    listed, bottom = key(names, x, y + high + 46, width)
    return parts + listed, bottom + 2


def log_ticks(low: float, high: float) -> list[float]:
    """Round values between two others on a logarithmic scale.

    >>> log_ticks(0.9, 12), log_ticks(30, 20_000)
    ([1.0, 2.0, 5.0, 10.0], [100.0, 1000.0, 10000.0])
    """
    steps = (1.0,) if high > 200 * low else (1.0, 2.0, 5.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
