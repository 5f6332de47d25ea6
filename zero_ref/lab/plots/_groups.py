"""Groups x ranks: which rank owns how much of which parameter group, before and after one is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from zero_ref.lab.plots._style import SMALL_PT, bare, filled_box, in_style
from zero_ref.live.numbers import short_count
from zero_ref.live.palette import INK, MUTED, PAPER, RANK_COLOURS, rank_colour, tint
from zero_ref.plan.partition import Partition, Slice

COLUMN, ROW, TITLE, GAP = 1.12, 1.0, 0.8, 0.45
"""Sizes in the plot's own units: a bar of the fullest rank is 1 long, a row 1 high."""

OLD = 0.42
"""How strong the colour of what was there before is."""


class Row(NamedTuple):
    """A line of the grid: for each rank the slices that it owns of the groups in this line."""

    label: str
    slices_of_rank: list[list[Slice]]


@in_style
def groups_grid(
    stages: Mapping[str, Partition],
    groups: Sequence[int],
    ax: Axes,
    *,
    names: Sequence[str] | None = None,
) -> Axes:
    """Who owns how much of each parameter group, and of all together: one grid for each stage.

    Each stage's partition goes on from the one before, as `Partition.joined` makes it. Bars are as long as
    they have elements, to one scale, with a gap between two parameters; what was there in the stage before
    is pale. A dashed line marks an even share.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.rules import sorted_greedy
    >>> before = sorted_greedy([6, 5, 4, 1], 2)
    >>> after = before.joined(sorted_greedy([3, 2], 2, loads=before.loads))
    >>> fig, ax = figure(6, 4)
    >>> stages = {"One group": before, "Two groups": after}
    >>> _ = groups_grid(stages, [0, 0, 0, 0, 1, 1], ax, names=["body", "head"])

    Args:
        stages: a partition by its title, each of at least as many parameters as the one before.
        groups: the parameter group of each parameter of the last stage.
        names: of the groups; "group 0" and so on if None.
    Raises:
        ValueError: more than 8 ranks, or the stages, groups and names do not fit together.
    """
    partitions = list(stages.values())
    world_size = _check(partitions, groups, names)
    names = [f"group {group}" for group in range(max(groups, default=0) + 1)] if names is None else names
    longest = max(1, *(load for partition in partitions for load in partition.loads))

    top, known, ticks = 0.0, 0, []
    for title, partition in stages.items():
        ax.text(0, top + 0.42 * TITLE, title, va="center", color=INK)
        top += TITLE
        rows = _rows(partition, groups[: len(partition.numels)], names)
        for row in rows:
            together = len(rows) > 1 and row is rows[-1]
            for rank, slices in enumerate(row.slices_of_rank):
                _cell(ax, rank, top, slices, known, longest)
            if together or len(rows) == 1:
                _even_share(ax, top, sum(partition.numels) / world_size / longest, world_size)
            ticks.append((top + 0.64 * ROW, row.label))
            top += ROW
        known = len(partition.numels)
        top += GAP
    for rank in range(world_size):
        colour = rank_colour(rank, len(RANK_COLOURS))
        filled_box(ax, (rank * COLUMN, -0.28, rank * COLUMN + 0.1, -0.62), colour, linewidth=0)
        ax.text(rank * COLUMN + 0.16, -0.45, f"rank {rank}", va="center", color=INK, fontsize=SMALL_PT)
    ax.set_xlim(0, world_size * COLUMN - (COLUMN - 1.03))
    ax.set_ylim(top - GAP, -0.7)
    bare(ax, keep=())
    ax.set_xticks([])
    pale = "pale: owned before; " if len(stages) > 1 else ""
    ax.set_xlabel(f"elements; {pale}dashed: an even share", loc="left")
    ax.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    ax.tick_params(labelcolor=INK)
    return ax


def _check(partitions: Sequence[Partition], groups: Sequence[int], names: Sequence[str] | None) -> int:
    if not partitions:
        raise ValueError("no stages: give at least one partition by its title.")
    world_sizes = {partition.world_size for partition in partitions}
    if len(world_sizes) > 1 or max(world_sizes) > len(RANK_COLOURS):
        raise ValueError(
            f"stages on {sorted(world_sizes)} ranks: draw one number of them, at most {len(RANK_COLOURS)}."
        )
    last = partitions[-1].numels
    if any(last[: len(partition.numels)] != partition.numels for partition in partitions):
        raise ValueError(
            "a stage has parameters that the last one has not: each goes on from the one before."
        )
    if len(groups) != len(last):
        raise ValueError(f"{len(groups)} groups for {len(last)} parameters: give the group of each.")
    if names is not None and max(groups, default=-1) >= len(names):
        raise ValueError(f"{len(names)} names, and a group {max(groups)}: give one for each group.")
    return world_sizes.pop()


def _rows(partition: Partition, groups: Sequence[int], names: Sequence[str]) -> list[Row]:
    """A row for each group that the partition has, and one for all of them where there are several."""

    def row(label: str, members: set[int]) -> Row:
        return Row(
            label,
            [
                [piece for piece in slices if groups[piece.param] in members]
                for slices in partition.slices_of_rank
            ],
        )

    present = sorted(set(groups))
    rows = [row(names[group], {group}) for group in present]
    return rows if len(rows) == 1 else [*rows, row("together", set(present))]


def _cell(ax: Axes, rank: int, top: float, slices: Sequence[Slice], known: int, longest: int) -> None:
    """One rank's part of a row: a bar of its slices, and their elements above."""
    colour = rank_colour(rank, len(RANK_COLOURS))
    left = rank * COLUMN
    numel = sum(piece.numel for piece in slices)
    start, wide_before = left, False
    for piece in slices:
        old, width = piece.param < known, piece.numel / longest
        face = tint(colour, OLD) if old else colour
        label = f"{'old' if old else 'new'}, rank {rank}"
        filled_box(ax, (start, top + 0.84, start + width, top + 0.44), face, linewidth=0, label=label)
        wide = width > 0.04  # a gap beside a thinner one would eat it up
        if start > left and (wide or wide_before):
            ax.plot([start] * 2, [top + 0.44, top + 0.84], color=PAPER, linewidth=1, label="gap")
        start, wide_before = start + width, wide
    text = short_count(numel) if slices else "nothing"
    ax.text(left, top + 0.22, text, va="center", color=INK if slices else MUTED, fontsize=SMALL_PT)


def _even_share(ax: Axes, top: float, share: float, world_size: int) -> None:
    for rank in range(world_size):
        place = rank * COLUMN + share
        ax.plot([place] * 2, [top + 0.36, top + 0.92], color=INK, linewidth=1.1, linestyle=(0, (2.2, 1.6)))
        ax.lines[-1].set_label("even share")
