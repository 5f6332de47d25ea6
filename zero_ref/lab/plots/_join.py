"""Who still has data: a picture of uneven inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from zero_ref.lab.plots._style import SMALL_PT, TEXT_PT, bare, filled_box, in_style
from zero_ref.live.palette import INK, MUTED, PAPER, RANK_COLOURS, rank_colour


@in_style
def shadow_grid(batches: Sequence[int], ax: Axes) -> Axes:
    """Iterations as columns, ranks as rows: filled where a rank trains, hatched where it shadows others.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> _ = shadow_grid([3, 5, 7], ax)

    Args:
        batches: of each rank; at most 8 ranks.
    Raises:
        ValueError: more than 8 ranks, or none.
    """
    if not 1 <= len(batches) <= len(RANK_COLOURS):
        raise ValueError(f"{len(batches)} ranks do not fit: draw 1 to {len(RANK_COLOURS)}.")
    iterations = max(batches)
    for rank, count in enumerate(batches):
        colour = rank_colour(rank, len(batches))
        for iteration in range(iterations):
            box = (iteration + 0.04, rank + 0.06, iteration + 0.96, rank + 0.94)
            frame: dict[str, Any] = {"edgecolor": colour, "linewidth": 1.2}
            if iteration < count:
                words = [f"batch {iteration}", f"{iteration}"]
                filled_box(ax, box, colour, words, text={"fontsize": TEXT_PT}, **frame)
            else:
                filled_box(ax, box, PAPER, hatch="////", **frame)
        if count < iterations:
            ax.text(
                (count + iterations) / 2,
                rank + 0.5,
                "shadows",
                ha="center",
                va="center",
                color=INK,
                fontsize=SMALL_PT,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 2.0},
            )
    ax.set_xlim(0, iterations)
    ax.set_ylim(len(batches), 0)
    bare(ax, keep=())
    ax.set_xticks([iteration + 0.5 for iteration in range(iterations)], [str(i) for i in range(iterations)])
    ax.set_yticks([rank + 0.5 for rank in range(len(batches))], [f"rank {r}" for r in range(len(batches))])
    ax.set_xlabel("iteration", color=MUTED)
    ax.tick_params(labelcolor=INK)
    return ax
