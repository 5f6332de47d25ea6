"""Resharding: the model's elements under their old owners and their new ones, and what moves between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from matplotlib.axes import Axes

from zero_ref.lab.plots._style import SMALL_PT, bare, filled_box, in_style, label_box
from zero_ref.live.names import names_of, short_names
from zero_ref.live.palette import FAINT, INK, MUTED, PAPER, RANK_COLOURS, rank_colour, tint
from zero_ref.plan.moves import moves
from zero_ref.plan.partition import Partition

BAR, FLOW, NAMES = 1.0, 1.7, 0.55
"""Heights of a bar, of the bands between the two bars, and of the strip with the parameters' names."""

MOVING = 0.4
"""The strength of the new owner's colour in the bands of the elements that it receives."""


class Band(NamedTuple):
    """Elements `left` to `right` of the flat range, which rank `src` has and rank `dst` is to have."""

    src: int
    dst: int
    left: int
    right: int


@in_style
def reshard(
    old: Partition,
    new: Partition,
    ax: Axes,
    *,
    names: Sequence[str] | None = None,
    titles: tuple[str, str] | None = None,
) -> Axes:
    """Draw what moves when `old` becomes `new`: elements end to end, their old owners above, the new below.

    Between the bars, bands in the new owner's colour show elements that are sent, empty bands elements that
    stay. Lines between the names separate the parameters.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.rules import even
    >>> numels = [384, 24, 192, 8]
    >>> fig, ax = figure(6, 3)
    >>> _ = reshard(even(numels, 4), even(numels, 3), ax, names=["W1", "b1", "W2", "b2"])

    Args:
        old, new: partitions of the same parameters, over at most 8 ranks each.
        names: of the parameters, written above where they fit; their numbers if None.
        titles: of the two bars; their numbers of ranks if None.
    Raises:
        ValueError: more than 8 ranks, other parameters in `new`, or not one name for each parameter.
    """
    most = max(old.world_size, new.world_size)
    if most > len(RANK_COLOURS):
        raise ValueError(f"{most} ranks do not fit: draw at most {len(RANK_COLOURS)}.")
    names = names_of(old, names)
    bands = list(_bands(old, new))

    below = BAR + FLOW
    _bar(ax, 0, [(band.src, band.left, band.right) for band in bands])
    for band in bands:
        _flow(ax, band)
    _bar(ax, below, [(band.dst, band.left, band.right) for band in bands])
    starts = [0, *accumulate(old.numels)]
    for name, start, stop in zip(names, starts, starts[1:], strict=False):
        label_box(ax, (start, -0.05, stop, -NAMES), short_names(name), color=INK, fontsize=SMALL_PT)
    for border in sorted({start for start in starts if 0 < start < starts[-1]}):
        ax.plot([border] * 2, [-NAMES, -0.06], color=MUTED, linewidth=0.8, label="border")

    ax.set_xlim(0, starts[-1] or 1)
    ax.set_ylim(below + BAR, -NAMES)
    bare(ax, keep=())
    ax.set_xticks([])
    ax.set_xlabel("elements, end to end, to scale", loc="left")
    above_title, below_title = titles or (_ranks(old), _ranks(new))
    ax.set_yticks([BAR / 2, BAR + FLOW / 2, below + BAR / 2], [above_title, "sent", below_title])
    ax.tick_params(labelcolor=INK)
    return ax


def _bands(old: Partition, new: Partition) -> Iterator[Band]:
    """Runs of the flat range with one old and one new owner, also across borders of parameters."""
    left = 0
    runs = moves(old, new, staying=True)
    for (src, dst), run in groupby(runs, key=lambda move: (move.src, move.dst)):
        numel = sum(move.piece.numel for move in run)
        if numel:
            yield Band(src, dst, left, left + numel)
            left += numel


def _bar(ax: Axes, top: float, parts: Sequence[tuple[int, int, int]]) -> None:
    """A box for each run of elements of one owner."""
    for owner, run in groupby(parts, key=lambda part: part[0]):
        of_owner = list(run)
        left, right = of_owner[0][1], of_owner[-1][2]
        colour, label, numel = rank_colour(owner, len(RANK_COLOURS)), f"rank {owner}", f"{right - left:,}"
        choices = [f"{label}\n{numel}", f"{owner}\n{numel}", f"{owner}"]
        box = (left, top + BAR, right, top)
        filled_box(ax, box, colour, choices, edgecolor=PAPER, linewidth=1.6, label=label)


def _flow(ax: Axes, band: Band) -> None:
    src, dst, left, right = band
    colour = rank_colour(dst, len(RANK_COLOURS))
    moving = src != dst
    face = tint(colour, MOVING) if moving else PAPER
    label, numel = f"{src} to {dst}", f"{right - left:,}"
    choices = [f"{label}\n{numel}", numel] if moving else [f"stays\n{numel}", "stays"]
    box, text = (left, BAR + FLOW, right, BAR), {"color": INK if moving else MUTED}
    filled_box(ax, box, face, choices, text=text, edgecolor=FAINT, linewidth=0.6, label=label)


def _ranks(partition: Partition) -> str:
    return f"{partition.world_size} rank" + "s" * (partition.world_size > 1)
