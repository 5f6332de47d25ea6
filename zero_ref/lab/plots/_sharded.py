"""Gradients that go to shards: what a rank holds in backward, how they are sent, who shares with whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import LogLocator, MaxNLocator

from zero_ref.lab.plots._ends import end_labels
from zero_ref.lab.plots._style import (
    SMALL_PT,
    bare,
    colours_of,
    filled_box,
    in_style,
    numbered,
    with_levels,
)
from zero_ref.lab.plots._volume import in_psi, lines_over_ranks
from zero_ref.live.numbers import short
from zero_ref.live.palette import INK, MUTED, PAPER, rank_colour

MOST_SHARES, MOST_GROUPS = 8, 4

WIDE, HIGH, BETWEEN = 0.8, 0.62, 0.58
"""Width and height of a rank's box, and the gap between groups, in the plot's units: ranks are 1 apart."""


@in_style
def gradient_memory(
    measured: Mapping[str, Sequence[tuple[float, float]]],
    ax: Axes,
    *,
    predicted: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Axes:
    """Gradients on a rank while backward goes through the model, in units of Ψ, the number of parameters.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> whole = [(0, 1), (1, 1)]
    >>> shares = [(0, 0), (0.5, 0.5), (0.5, 0.25), (1, 0.75), (1, 0.5)]
    >>> _ = gradient_memory({"DDP": whole, "shares": shares}, ax, predicted={"shares": shares})

    Args:
        measured: name -> (share of the gradients that are computed, gradients from then on, over Ψ).
        predicted: the same, drawn dashed in the colour of its name.
    Raises:
        ValueError: there is no curve, more than 7, one without a point, or a prediction of another name.
    """
    colours = colours_of(measured)
    predicted = predicted or {}
    if not predicted.keys() <= measured.keys():
        raise ValueError(f"predicted has {sorted(predicted)}, and measured only {sorted(measured)}.")
    for name, curve in measured.items():
        ax.plot(*zip(*curve), drawstyle="steps-post", color=colours[name], linewidth=2.2, label=name)
    for name, curve in predicted.items():
        ax.plot(
            *zip(*curve),
            drawstyle="steps-post",
            color=colours[name],
            linewidth=1.3,
            linestyle=(0, (3, 2)),
            label=f"{name}, predicted",
        )
    peaks = {name: max(held for _, held in curve) for name, curve in measured.items()}
    ax.set_xlim(0, 1.01)
    ax.set_ylim(0, 1.12 * max(peaks.values()))
    with_levels(ax)
    numbered(ax.xaxis, lambda share: f"{share:.0%}")
    numbered(ax.yaxis, in_psi, MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.tick_params(axis="x", pad=10)  # 0% stands below 0 Ψ
    ax.set_xlabel("gradients that are computed")
    end_labels(ax, peaks, colours, lambda held: f"peak {held:.2f} Ψ")
    ax.set_title("Gradients on a rank during backward" + (", dashed: predicted" if predicted else ""))
    return ax


@in_style
def reductions_against_ranks(curves: Mapping[str, Mapping[int, float]], ax: Axes, *, title: str) -> Axes:
    """A count of each way to reduce gradients as ranks are added, on logarithmic axes.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> rounds = {"ring": {n: n - 1 for n in (2, 8, 64)}, "pairs": {n: 1 for n in (2, 8, 64)}}
    >>> _ = reductions_against_ranks(rounds, ax, title="Rounds, one after another")

    Args:
        curves: way -> number of ranks -> a count above 0.
        title: what is counted.
    Raises:
        ValueError: there is no way, more than 7, or one without a point; or a count is not above 0.
    """
    for name, curve in curves.items():
        if min(curve.values(), default=1) <= 0:
            raise ValueError(f"{name}: counts must be above 0 to be drawn on a logarithmic axis.")
    colours = lines_over_ranks(ax, curves)
    counts = [count for curve in curves.values() for count in curve.values()]
    ax.set_yscale("log")
    ax.set_ylim(min(counts) / 1.6, 1.6 * max(counts))
    numbered(ax.yaxis, short, LogLocator())
    ends = {name: curve[max(curve)] for name, curve in curves.items()}
    end_labels(ax, ends, colours, short)
    ax.set_title(title)
    return ax


@in_style
def hybrid_groups(
    world_size: int, shard_group: int, ax: Axes, *, within: str = "", between: str = ""
) -> Axes:
    """Ranks in groups that share the state: a row for each group, a colour for each share.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> _ = hybrid_groups(8, 4, ax, within="reduce to shares", between="all-reduce of a share")

    Args:
        world_size: ranks.
        shard_group: how many consecutive ranks share the state, at most 8, in at most 4 groups.
        within, between: what is sent within a group, and between the ranks that have the same share.
    Raises:
        ValueError: ranks cannot be divided into such groups, or there is no room for them.
    """
    groups = world_size // max(shard_group, 1)
    if not 1 <= shard_group <= MOST_SHARES or not 1 <= groups <= MOST_GROUPS or world_size % shard_group:
        raise ValueError(
            f"draw 1 to {MOST_GROUPS} groups of 1 to {MOST_SHARES} ranks, not {world_size} in groups of "
            f"{shard_group}."
        )
    step = HIGH + BETWEEN
    for rank in range(world_size):
        group, share = divmod(rank, shard_group)
        _rank(ax, rank, share, shard_group, group * step)
        if group:
            _arrow(ax, share, (group - 1) * step + HIGH, group * step)
    for group in range(groups):
        low = -0.5 + 0.02, group * step - 0.09
        box = FancyBboxPatch(
            low,
            shard_group - 0.04,
            HIGH + 0.18,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="none",
            edgecolor=MUTED,
            linewidth=1.2,
            zorder=0,
            label=f"group {group}",
        )
        ax.add_patch(box)
        if within:
            y = group * step + HIGH / 2
            ax.text(shard_group - 0.4, y, within, va="center", color=INK, fontsize=SMALL_PT)
        if group and between:
            y = group * step - BETWEEN / 2
            ax.text(shard_group - 0.4, y, between, va="center", color=MUTED, fontsize=SMALL_PT)
    bare(ax, keep=())
    ax.set_xlim(-0.55, shard_group - 0.4 + (0.45 * shard_group if within or between else 0))
    ax.set_ylim(groups * step - BETWEEN + 0.12, -0.14)
    ax.set_xticks([])
    ax.set_yticks([group * step + HIGH / 2 for group in range(groups)], [f"group {n}" for n in range(groups)])
    return ax


def _rank(ax: Axes, rank: int, share: int, shares: int, top: float) -> None:
    box = (share - WIDE / 2, top, share + WIDE / 2, top + HIGH)
    words = [f"rank {rank}\nshare {share}", f"{rank}\n({share})", f"{rank}"]
    label = f"rank {rank}, share {share}"
    filled_box(ax, box, rank_colour(share, shares), words, edgecolor=PAPER, label=label)


def _arrow(ax: Axes, x: float, start: float, stop: float) -> None:
    ax.add_patch(
        FancyArrowPatch(
            (x, start),
            (x, stop),
            arrowstyle="<|-|>",
            mutation_scale=12,
            shrinkA=1,
            shrinkB=1,
            color=INK,
            linewidth=1.6,
            label="between groups",
        )
    )
