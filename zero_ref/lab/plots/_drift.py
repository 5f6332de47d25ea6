"""Ranks that train by themselves: how far they come apart, and who agrees with whom."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._style import MARKERS, SMALL_PT, bare, filled_box, in_style, key_above, numbered
from zero_ref.live.numbers import short
from zero_ref.live.palette import FAINT, INK, MUTED, PAPER, RANK_COLOURS, rank_colour, tint
from zero_ref.local_sgd.averaging import AveragingSchedule


@in_style
def drift(distances: Sequence[Sequence[float]], schedule: AveragingSchedule, ax: Axes) -> Axes:
    """Each rank's distance after each step; the warm-up shaded and the averages marked, from the schedule.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> apart = [[0.0, 0.0], [0.0, 0.0], [0.4, 0.3], [0.7, 0.5], [0.0, 0.0]]
    >>> _ = drift(apart, AveragingSchedule.periodic(3, warmup_steps=1), ax)

    Args:
        distances: for each step, from 0, each rank's distance from the mean of all; at most 8 ranks.
        schedule: that the ranks followed.
    Raises:
        ValueError: there are no steps, no ranks or more than 8, or not as many in each step.
    """
    world_size = _check_rows(distances, "distances")
    steps = range(len(distances))
    local = min(schedule.warmup_steps, len(distances))
    handles: list[Patch | Line2D] = []
    if local:
        ax.axvspan(-0.5, local - 0.5, color=tint(MUTED, 0.16), linewidth=0, label="warm-up")
        handles.append(Patch(facecolor=tint(MUTED, 0.16), label="warm-up"))
    averaged = [step for step in steps if schedule.level(step)]
    for step in averaged:
        ax.axvline(step, color=MUTED, linewidth=1.1, linestyle=(0, (2.2, 1.8)), label="average", zorder=1)
    if averaged:
        handles.append(Line2D([], [], color=MUTED, linewidth=1.1, linestyle=(0, (2.2, 1.8)), label="average"))
    for rank in range(world_size):
        (line,) = ax.plot(
            steps,
            [row[rank] for row in distances],
            color=rank_colour(rank, world_size),
            linewidth=1.8,
            marker=MARKERS[rank],
            markersize=5,
            label=f"rank {rank}",
            clip_on=False,
        )
        handles.insert(rank, line)
    bare(ax)
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.set_xlim(-0.5, len(distances) - 0.5)
    ax.set_ylim(0, 1.08 * max(max(row) for row in distances) or 1.0)
    if len(distances) <= 20:
        ax.set_xticks(steps)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    ax.tick_params(axis="x", pad=7)  # markers at 0 reach below the axis
    numbered(ax.yaxis, short, MaxNLocator(4))
    ax.set_xlabel("after step")
    ax.set_ylabel("distance from the mean")
    key_above(ax, handles, columns=3, handlelength=1.8)
    return ax


@in_style
def agreement(lowest: Sequence[Sequence[int]], ax: Axes, *, warmup_steps: int = 0) -> Axes:
    """Steps as columns, ranks as rows: after each step, ranks that hold the same have one colour and no gap.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> _ = agreement([[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 2, 2]], ax, warmup_steps=1)

    Args:
        lowest: for each step, from 0, and each rank, the lowest rank that has the same parameters, as
            `lab.drift.who_agrees` finds it. Whoever agrees lies side by side. At most 8 ranks.
        warmup_steps: so many columns are marked as the warm-up.
    Raises:
        ValueError: there are no steps, no ranks or more than 8, not as many in each step, or ranks that agree
            do not lie side by side.
    """
    world_size = _check_rows(lowest, "ranks")
    for step, of_step in enumerate(lowest):
        if list(of_step) != [
            rank if of_step[rank] == rank else of_step[rank - 1] for rank in range(world_size)
        ]:
            raise ValueError(f"after step {step} ranks agree that do not lie side by side: {list(of_step)}.")
        for first in sorted(set(of_step)):
            height = list(of_step).count(first)
            box = (step + 0.07, first + height - 0.07, step + 0.93, first + 0.07)
            filled_box(ax, box, rank_colour(first, world_size), linewidth=0)
            for rank in range(first + 1, first + height):
                ax.plot([step + 0.07, step + 0.93], [rank, rank], color=PAPER, linewidth=0.6, alpha=0.6)
    if warmup_steps:
        end = min(warmup_steps, len(lowest))
        ax.plot([0.07, end - 0.07], [-0.18, -0.18], color=MUTED, linewidth=2.4, solid_capstyle="butt")
        ax.text(0.07, -0.34, "warm-up", ha="left", va="bottom", color=INK, fontsize=SMALL_PT)
    ax.set_xlim(0, len(lowest))
    ax.set_ylim(world_size, -0.3 if warmup_steps else 0)
    bare(ax, keep=())
    ticks = range(0, len(lowest), 1 + len(lowest) // 25)
    ax.set_xticks([step + 0.5 for step in ticks], [str(step) for step in ticks])
    ax.set_yticks([rank + 0.5 for rank in range(world_size)], [f"rank {rank}" for rank in range(world_size)])
    ax.set_xlabel("after step; one colour: the same parameters")
    ax.tick_params(labelcolor=INK)
    return ax


def _check_rows(rows: Sequence[Sequence[float]], what: str) -> int:
    """Check that all rows have equally many ranks, and not too many to draw; return that number."""
    counts = sorted({len(row) for row in rows})
    if len(counts) != 1:
        raise ValueError(
            f"steps with {counts} {what}: give at least one step, and in each step a value for every rank."
        )
    if not 1 <= counts[0] <= len(RANK_COLOURS):
        raise ValueError(f"{counts[0]} ranks do not fit: draw 1 to {len(RANK_COLOURS)}.")
    return counts[0]
