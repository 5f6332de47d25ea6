"""Pictures of a Partition: who owns what, how much each rank owns, and how that changes with the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from zero_ref.lab.plots._numbers import short, short_bytes, short_count
from zero_ref.lab.plots._style import (
    FAINT,
    INK,
    PAPER,
    RANK_COLOURS,
    SERIES_COLOURS,
    SMALL_PT,
    bare,
    colour_key,
    in_style,
    label_box,
    rank_colour,
    short_names,
    text_colour_on,
)
from zero_ref.partition import STRATEGIES, Partition

MOST_BARS = 64
"""Above this many ranks a bar is thinner than its gap: one filled outline says more."""


class Box(NamedTuple):
    """A run of elements of one parameter and one owner on one row of the map."""

    param: int
    owner: int
    row: int
    left: int
    right: int


@in_style
def shard_map(
    partition: Partition, ax: Axes, *, names: Sequence[str] | None = None, rows: int | None = None
) -> Axes:
    """Who owns what, to scale: the model's elements end to end, coloured by their owner.

    Read it as text: parameters in registration order, left to right, row below row, as wide as they have
    elements. A gap separates two parameters, a dashed line two owners of one parameter.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.partition import even
    >>> fig, ax = figure(6, 2)
    >>> _ = shard_map(even([6, 5, 4, 1], 2, alignment=1), ax, names=["wte", "qkv", "fc", "ln"])

    Args:
        partition: any; 4 and 64 ranks read well, 1,024 show the pattern.
        names: of the parameters; written where they fit. Their numbers if None.
        rows: lines to break the range into. Chosen by the number of parameters and ranks if None.
    Raises:
        ValueError: not one name for each parameter, or `rows` is below 1.
    """
    names = [str(param) for param in range(len(partition.numels))] if names is None else names
    if len(names) != len(partition.numels):
        raise ValueError(f"{len(names)} names for {len(partition.numels)} parameters: give one for each.")
    if rows is None:
        pieces = sum(piece.numel > 0 for slices in partition.slices_of_rank for piece in slices)
        rows = 1 if pieces <= 8 else 3 if pieces <= 24 else 8
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}.")
    total = sum(partition.numels)
    per_row = max(1, -(-total // rows))
    boxes = list(_boxes(partition, per_row))

    for rank in range(partition.world_size):
        corners = [_corners(box) for box in boxes if box.owner == rank]
        ax.add_collection(
            PolyCollection(
                corners,
                facecolors=rank_colour(rank, partition.world_size),
                linewidths=0,
                label=f"rank {rank}",
            ),
            autolim=False,
        )
    _separate(ax, boxes, per_row)
    for box, choices in _labels(boxes, partition, names):
        colour = text_colour_on(rank_colour(box.owner, partition.world_size))
        label_box(ax, _extent(box), choices, color=colour, fontsize=SMALL_PT)

    ax.set_xlim(0, per_row)
    ax.set_ylim(rows, 0)
    bare(ax, keep=())
    ax.set_xticks([])
    starts = [row for row in range(rows) if row * per_row < total and rows > 1]
    ax.set_yticks([row + 0.5 for row in starts], [short_count(row * per_row) for row in starts])
    width = f", {short_count(per_row)} a row" if rows > 1 else ""
    ax.set_xlabel(f"{short_count(total)} elements in registration order{width}", loc="left")
    _key(ax, partition.world_size)
    return ax


def _boxes(partition: Partition, per_row: int) -> Iterator[Box]:
    """Cut the pieces, laid end to end, at the ends of rows."""
    begins = accumulate(partition.numels, initial=0)
    for begin, pieces in zip(begins, partition.pieces_of_param):
        for piece, owner in pieces:
            left, stop = begin + piece.start, begin + piece.stop
            while left < stop:
                row = left // per_row
                right = min(stop, (row + 1) * per_row)
                yield Box(piece.param, owner, row, left - row * per_row, right - row * per_row)
                left = right


def _extent(box: Box) -> tuple[float, float, float, float]:
    return box.left, box.row + 0.9, box.right, box.row + 0.1


def _corners(box: Box) -> list[tuple[float, float]]:
    left, bottom, right, top = _extent(box)
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


def _separate(ax: Axes, boxes: Sequence[Box], per_row: int) -> None:
    """A gap between parameters, unless gaps would eat up small ones; a dashed line where one is cut."""
    gaps: list[list[tuple[float, float]]] = []
    cuts: list[list[tuple[float, float]]] = []
    last_gap = (-1, 0)
    for before, after in pairwise(boxes):
        if before.row != after.row:
            continue
        if before.param == after.param:
            cuts.append([(after.left, after.row + 0.04), (after.left, after.row + 0.96)])
            continue
        wide = max(before.right - before.left, after.right - after.left) > per_row / 60
        if wide and (last_gap[0] != after.row or after.left - last_gap[1] > per_row / 120):
            gaps.append([(after.left, after.row + 0.08), (after.left, after.row + 0.92)])
            last_gap = (after.row, after.left)
    ax.add_collection(LineCollection(gaps, colors=PAPER, linewidths=1.6, label="gaps"), autolim=False)
    crowded = len(cuts) > 160
    ax.add_collection(
        LineCollection(
            cuts,
            colors=PAPER if crowded else INK,
            linewidths=0.3 if crowded else 1.0,
            linestyles="solid" if crowded else (0, (2.2, 1.6)),
            label="cuts",
        ),
        autolim=False,
    )


def _labels(
    boxes: Sequence[Box], partition: Partition, names: Sequence[str]
) -> Iterator[tuple[Box, list[str]]]:
    """What to write into which boxes, best first.

    Colours name up to 8 ranks, so the parameter's name and size are written. Of more ranks the colours
    only show the order: there the owner's number comes first, once in each run of its boxes.
    """

    def width(box: Box) -> int:
        return box.right - box.left

    if partition.world_size > len(RANK_COLOURS):
        for _, run in groupby(boxes, key=lambda box: (box.row, box.owner)):
            box = max(run, key=width)
            short = [f"{name}\nrank {box.owner}" for name in short_names(names[box.param])]
            yield box, [*short, f"rank {box.owner}", str(box.owner)]
        return
    for param, of_param in groupby(boxes, key=lambda box: box.param):
        parts = list(of_param)
        widest = max(parts, key=width)
        for box in parts:
            short = short_names(names[param])
            second = short_count(partition.numels[param]) if box is widest else "(part)"
            yield box, [f"{name}\n{second}" for name in short] + short


def _key(ax: Axes, world_size: int) -> None:
    """Which colour is which rank, above the map."""
    if world_size <= len(RANK_COLOURS):
        colour_key(ax, {f"rank {rank}": rank_colour(rank, world_size) for rank in range(world_size)})
        return
    # 7 points high and as many above the map, whose own height the layout will settle near this.
    unit = 7 / (0.75 * 72 * ax.figure.get_figure(root=True).get_figheight())
    strip = ax.inset_axes((0, 1 + unit, 1, unit))
    for rank in range(world_size):
        strip.axvspan(rank - 0.5, rank + 0.5, color=rank_colour(rank, world_size), linewidth=0)
    strip.set_xlim(-0.5, world_size - 0.5)
    bare(strip, keep=())
    strip.set_yticks([])
    ticks = _rank_ticks(world_size)
    strip.set_xticks(ticks, [f"rank {rank}" if rank == 0 else f"{rank:,}" for rank in ticks])
    strip.xaxis.tick_top()
    strip.tick_params(length=0, pad=2)


def _rank_ticks(world_size: int) -> list[int]:
    """A few ranks to name on an axis: all of up to 16, otherwise the first, the last and some between."""
    if world_size <= 16:
        return list(range(world_size))
    step = -(-world_size // 4)
    return [*range(0, world_size - step // 2, step), world_size - 1]


# -------------------------------------------------------------------------------------------------- loads


@in_style
def loads(
    partition: Partition, ax: Axes, *, bytes_per_element: float | None = None, fullest_first: bool = False
) -> Axes:
    """How much each rank owns, beside an even share and beside the largest tensor.

    No partition of whole tensors gets its fullest rank below the largest tensor, and none gets it below the
    mean: the two lines show which of them binds.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.partition import sorted_greedy
    >>> fig, ax = figure(6, 3)
    >>> _ = loads(sorted_greedy([6, 5, 4, 1], 2), ax, bytes_per_element=8)     # Adam's two moments in fp32

    Args:
        partition: any number of ranks; above 64 one outline replaces the bars.
        bytes_per_element: draw bytes, this many an element. Elements if None.
        fullest_first: sort the ranks by what they own.
    """
    scale = 1.0 if bytes_per_element is None else bytes_per_element
    show = short_count if bytes_per_element is None else short_bytes
    ranks = list(range(partition.world_size))
    if fullest_first:
        ranks.sort(key=lambda rank: -partition.loads[rank])
    heights = [scale * partition.loads[rank] for rank in ranks]
    mean = sum(heights) / len(heights)
    largest = scale * max(partition.numels, default=0)

    bare(ax, keep=("bottom",))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    if len(ranks) <= MOST_BARS:
        colours = [rank_colour(rank, len(ranks)) for rank in ranks]
        ax.bar(range(len(ranks)), heights, width=0.82 if len(ranks) <= 16 else 1.0, color=colours)
    else:
        ax.stairs(heights, [i - 0.5 for i in range(len(ranks) + 1)], fill=True, color="#8A94A6")
    # Far above all bars, the largest tensor would press them flat: its line is left out, its name stays.
    far = largest > 3 * max(heights)
    top = (1.35 * max(heights) if far else max(*heights, largest)) or 1
    if len(ranks) <= 8:
        for place, (rank, height) in enumerate(zip(ranks, heights)):
            colour = text_colour_on(rank_colour(rank, len(ranks)) if height > 0.16 * top else PAPER)
            label_box(ax, (place - 0.41, 0, place + 0.41, 0.16 * top), [show(height)], color=colour)
    _reference_lines(ax, {"mean": mean, "largest tensor": largest}, top, show)

    ax.set_xlim(-0.6, len(ranks) - 0.4)
    ax.set_ylim(0, 1.06 * top)
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    _name_ranks(ax, ranks, fullest_first)
    ax.set_title(_verdict(heights, mean))
    return ax


def _name_ranks(ax: Axes, ranks: Sequence[int], fullest_first: bool) -> None:
    places = _rank_ticks(len(ranks))
    if fullest_first and len(ranks) > 16:
        # Count 1st, 2nd, ...: the numbers of the few ranks that can be named would seem picked at random.
        places = [max(0, place - 1) for place in places[:-1]] + places[-1:]
        ax.set_xticks(places, [f"{place + 1:,}" for place in places])
    else:
        ax.set_xticks(places, [f"{ranks[place]:,}" for place in places])
    ax.set_xlabel("ranks, the fullest first" if fullest_first else "rank")


def _verdict(heights: Sequence[float], mean: float) -> str:
    if not mean:
        return "Nothing to own"
    idle = sum(height == 0 for height in heights)
    owning = f"; {idle:,} of {len(heights):,} ranks own nothing" if idle else ""
    return f"Fullest rank: {short(max(heights) / mean)} × the mean{owning}"


def _reference_lines(ax: Axes, values: Mapping[str, float], top: float, show: Callable[[float], str]) -> None:
    """Named levels, their names to the right; names that would touch are moved apart."""
    dashes = dict(zip(values, ((4, 2), (1, 1.5))))
    lowest = 0.07 - 0.2
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        above = value > 1.001 * top
        if not above:
            ax.axhline(value, color=INK, linewidth=1.1, linestyle=(0, dashes[name]), label=name)
        lowest = max(min(value / top, 1.0), lowest + 0.2)
        ax.annotate(
            f"{name}{' ↑' if above else ''}\n{show(value)}",
            xy=(1.02, lowest * top),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=SMALL_PT,
            color=INK,
            annotation_clip=False,
        )


# ----------------------------------------------------------------------------------- balance against ranks


@in_style
def balance_against_ranks(
    numels: Sequence[int],
    world_sizes: Sequence[int],
    ax: Axes,
    *,
    strategies: Sequence[str] = ("sorted_greedy", "even"),
    bytes_per_element: float | None = None,
) -> Axes:
    """How full the fullest rank is as ranks are added, and where whole tensors stop helping.

    Below the shaded line no partition of whole tensors can go: some rank owns the largest tensor. An even
    split goes below it, because it may cut that tensor.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> _ = balance_against_ranks([525, 60, 60, 60, 60], [1, 2, 4, 8], ax, bytes_per_element=8)

    Args:
        numels: elements per parameter, in registration order.
        world_sizes: numbers of ranks, rising.
        strategies: names in `zero_ref.partition.STRATEGIES`.
        bytes_per_element: draw the fullest rank's bytes, this many an element (8: Adam's two moments in
            fp32). Its load divided by the mean if None.
    Raises:
        ValueError: the model has no elements, a strategy is unknown.
    """
    total, largest = sum(numels), max(numels, default=0)
    if not total:
        raise ValueError("the model has no elements: there is nothing to balance.")
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        raise ValueError(f"unknown partition {unknown[0]!r}; choose of {', '.join(STRATEGIES)}.")

    def height(load: int, world_size: int) -> float:
        return load * world_size / total if bytes_per_element is None else load * bytes_per_element

    def show(value: float) -> str:
        return f"{short(value)} ×" if bytes_per_element is None else short_bytes(value)

    floor = [height(largest, n) for n in world_sizes]
    curves = {
        name: [height(max(STRATEGIES[name](numels, n).loads), n) for n in world_sizes] for name in strategies
    }
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lowest = min(min(curve) for curve in curves.values())
    highest = max(max(curve) for curve in curves.values())
    ax.set_ylim(lowest / 1.4, highest * 1.6)
    ax.set_xlim(min(world_sizes), max(world_sizes))
    ax.fill_between(world_sizes, floor, lowest / 1.4, color=FAINT, alpha=0.55, linewidth=0, label="floor")
    for (name, curve), colour in zip(curves.items(), SERIES_COLOURS):
        ax.plot(
            world_sizes,
            curve,
            color=colour,
            linewidth=2.2,
            marker="o",
            markersize=4,
            label=name,
            clip_on=False,
        )
    _end_labels(ax, {name: curve[-1] for name, curve in curves.items()}, show)
    size = "" if bytes_per_element is None else f" ({show(floor[-1])})"
    colour_key(ax, {f"below the largest tensor{size}: only by cutting it": FAINT})

    bare(ax, keep=("bottom",))
    every = -(-len(world_sizes) // 8)
    named = list(world_sizes)[::-1][::every]
    ax.set_xticks(named, [f"{n:,}" for n in named])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if highest > 50 * lowest else (1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.set_xlabel("ranks")
    what = "load over the mean" if bytes_per_element is None else "bytes"
    ax.set_title(f"Fullest rank: {what}", pad=30)
    return ax


def _end_labels(ax: Axes, ends: Mapping[str, float], show: Callable[[float], str]) -> None:
    """Name each curve at its right end, in its own colour; names that would touch are moved apart."""
    to_fraction = ax.transData + ax.transAxes.inverted()
    taken = -1.0
    for (name, value), colour in sorted(zip(ends.items(), SERIES_COLOURS), key=lambda item: item[0][1]):
        fraction = float(to_fraction.transform((ax.get_xlim()[1], value))[1])
        taken = max(fraction, taken + 0.17)
        ax.text(
            1.03,
            taken,
            f"{name.replace('_', ' ')}\n{show(value)}",
            transform=ax.transAxes,
            va="center",
            fontsize=SMALL_PT,
            color=colour,
        )
