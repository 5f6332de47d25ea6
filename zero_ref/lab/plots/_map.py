"""The shard map: who owns which elements, to scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from zero_ref.lab.plots._style import SMALL_PT, bare, colour_key, in_style, label_box
from zero_ref.live.names import names_of, rank_ticks, short_names
from zero_ref.live.numbers import short_count
from zero_ref.live.palette import INK, PAPER, RANK_COLOURS, rank_colour, text_colour_on
from zero_ref.plan.partition import Partition


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
    """Draw who owns what, to scale: the model's elements end to end, coloured by their owner.

    Read it as text: parameters in registration order, left to right, row below row, as wide as they have
    elements. A gap separates two parameters, a dashed line two owners of one parameter.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.rules import even
    >>> fig, ax = figure(6, 2)
    >>> _ = shard_map(even([6, 5, 4, 1], 2, alignment=1), ax, names=["wte", "qkv", "fc", "ln"])

    Args:
        partition: any; 4 and 64 ranks read well, 1,024 show the pattern.
        names: of the parameters; written where they fit. Their numbers if None.
        rows: lines to break the range into. Chosen by the number of parameters and ranks if None.
    Raises:
        ValueError: not one name for each parameter, or `rows` is below 1.
    """
    names = names_of(partition, names)
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
    wide = [box for box in boxes if box.right - box.left > per_row / 60]  # below that not even a digit fits
    for box, choices in _labels(wide, partition, names):
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
    """Yield boxes with the labels that may be written into them, the best label first.

    Colours identify up to 8 ranks, so the labels are parameters' names and sizes. With more ranks the colours
    only show the order: then the owner's number comes first, once in each run of the owner's boxes.
    """

    def width(box: Box) -> int:
        return box.right - box.left

    if partition.world_size > len(RANK_COLOURS):
        for _, run in groupby(boxes, key=lambda box: (box.row, box.owner)):
            box = max(run, key=width)
            named = [f"{name}\nrank {box.owner}" for name in short_names(names[box.param])]
            yield box, [*named, f"rank {box.owner}", str(box.owner)]
        return
    for param, of_param in groupby(boxes, key=lambda box: box.param):
        parts = list(of_param)
        widest = max(parts, key=width)
        for box in parts:
            forms = short_names(names[param])
            second = short_count(partition.numels[param]) if box is widest else "(part)"
            yield box, [f"{form}\n{second}" for form in forms] + forms


def _key(ax: Axes, world_size: int) -> None:
    """Which colour is which rank, above the map."""
    if world_size <= len(RANK_COLOURS):
        colour_key(ax, {f"rank {rank}": rank_colour(rank, world_size) for rank in range(world_size)})
        return
    # About 7 points high and as many above the map: the layout changes the map's height only a little.
    unit = 7 / (ax.bbox.height * 72 / ax.figure.dpi)
    strip = ax.inset_axes((0, 1 + unit, 1, unit))
    strip.add_collection(
        PolyCollection(
            [[(rank, 0), (rank + 1, 0), (rank + 1, 1), (rank, 1)] for rank in range(world_size)],
            facecolors=[rank_colour(rank, world_size) for rank in range(world_size)],
            linewidths=0,
        ),
        autolim=False,
    )
    strip.set_xlim(0, world_size)
    bare(strip, keep=())
    strip.set_yticks([])
    ticks = rank_ticks(world_size)
    strip.set_xticks([rank + 0.5 for rank in ticks], [f"{rank:,}" for rank in ticks])
    strip.set_ylabel("rank", rotation=0, ha="right", va="center")
    strip.xaxis.tick_top()
    strip.tick_params(length=0, pad=2)
