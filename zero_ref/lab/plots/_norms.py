"""Norms of gradients that two ranks own: the sides of a right angle, and what clipping makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._style import bare, in_style
from zero_ref.live.numbers import short
from zero_ref.live.palette import ALARM, INK, MUTED, PAPER, rank_colour

FLATTEST = 0.4
"""The shorter axis is at least this part of the longer one, or its side would be a line's width."""


@in_style
def norms_together(norms: Sequence[float], max_norm: float, ax: Axes) -> Axes:
    """Two ranks' own 2-norms as the sides of a right-angled triangle, whose third side is the global norm.

    Squares of norms add up, as squares of sides do. One factor for both ranks shortens the third side and
    keeps its direction. Two factors, each from a rank's own norm, also turn it: that is another gradient, and
    it may still be longer than `max_norm`.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> _ = norms_together([3.0, 4.0], 2.5, ax)

    Args:
        norms: of what rank 0 owns and of what rank 1 owns.
        max_norm: the limit.
    Raises:
        ValueError: there are not two norms, one is negative or not finite, or the limit is not positive.
    """
    if len(norms) != 2:
        raise ValueError(f"{len(norms)} norms: a right angle has two sides, give those of 2 ranks.")
    if not all(0 <= norm < math.inf for norm in norms):
        raise ValueError(f"norms {list(norms)}: each must be finite and not negative.")
    if not 0 < max_norm < math.inf:
        raise ValueError(f"max_norm={max_norm}: it must be finite and positive.")

    x, y = norms
    total = math.hypot(x, y)
    together = _factor(total, max_norm)
    own = [_factor(norm, max_norm) for norm in norms]

    colours = [rank_colour(rank, 2) for rank in range(2)]
    ax.plot([0, x], [0, 0], color=colours[0], linewidth=5, label=f"rank 0: norm {short(x)}", clip_on=False)
    ax.plot([x, x], [0, y], color=colours[1], linewidth=5, label=f"rank 1: norm {short(y)}", clip_on=False)
    ax.plot([0, x], [0, y], color=INK, linewidth=1.6, label=f"together: norm {short(total)}")
    angles = [math.pi / 2 * part / 60 for part in range(61)]
    circle = (
        [max_norm * math.cos(angle) for angle in angles],
        [max_norm * math.sin(angle) for angle in angles],
    )
    ax.plot(*circle, color=MUTED, linewidth=1.2, linestyle="--", label=f"limit: max_norm {short(max_norm)}")
    at = (own[0] * x, own[1] * y)
    _clipped_to(ax, at, ALARM, "X", f"each by its own norm:\nfactors {short(own[0])} and {short(own[1])}")
    at = (together * x, together * y)
    _clipped_to(ax, at, INK, "o", f"clipped together:\nfactor {short(together)} for both")

    widest = max(x, y, max_norm, own[0] * x, own[1] * y)
    ax.set_xlim(0, 1.08 * max(x, max_norm, FLATTEST * widest))
    ax.set_ylim(0, 1.08 * max(y, max_norm, FLATTEST * widest))
    ax.set_aspect("equal", anchor="SW")
    bare(ax)
    ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_locator(
        MaxNLocator(4, steps=[1, 2, 5, 10], prune="lower")
    )  # one 0 at the corner is enough
    ax.set_xlabel("norm on rank 0", loc="left")
    ax.set_ylabel("norm on rank 1", loc="bottom")
    ax.legend(
        loc="upper left",
        bbox_to_anchor=(1.02, 1),
        borderaxespad=0,
        handlelength=1.6,
        labelspacing=0.75,
    )
    return ax


def _factor(norm: float, max_norm: float) -> float:
    """The factor by which torch.nn.utils.clip_grad_norm_ scales gradients."""
    return min(1.0, max_norm / (norm + 1e-6))


def _clipped_to(ax: Axes, place: tuple[float, float], colour: str, marker: str, label: str) -> None:
    """Draw the clipped gradient, and the way to it from the origin."""
    x, y = place
    ax.plot([0, x], [0, y], color=colour, linewidth=2.6)
    ax.plot([x], [y], marker, color=colour, markersize=11, markeredgecolor=PAPER, label=label, clip_on=False)
