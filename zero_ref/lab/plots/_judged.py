"""Pictures that judge a comparison: what would change its conclusion."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from zero_ref.lab.plots._style import bare, in_style, numbered, write_beside
from zero_ref.live.numbers import short
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, PAPER
from zero_ref.simulator.sensitivity import Variation


@in_style
def sensitivity(
    variations: Sequence[Variation], ax: Axes, *, strategies: tuple[str, str] = ("A", "B")
) -> Axes:
    """Which circumstance would change the conclusion of which of two strategies is faster.

    A row for each factor: a dot for each scale, at the second strategy's time over the first's; the diamond
    is the setting as it is. What lies on the other side of the line of equal times is red: there the other
    strategy wins. The factors that matter most come first, and those that decide are named in red.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.price import Workload
    >>> from zero_ref.simulator.schedule import schedule
    >>> from zero_ref.simulator.sensitivity import Setting, sensitivity as vary
    >>> params, two = [ParamSpec(10**7, "bfloat16")] * 40, ("ddp", "zero-even")
    >>> def make(strategy, setting):
    ...     return schedule(strategy, params, setting.world_size)
    >>> found = vary(make, two, Setting(cluster("h100-ib"), 8), Workload(4096), factors=("latency", "ranks"))
    >>> fig, ax = figure(6, 2.5)
    >>> sensitivity(found, ax, strategies=two).get_title("left")
    '1 of 2 factors would change which is faster'

    Args:
        variations: of `simulator.sensitivity.sensitivity`.
        strategies: the two names, in the order in which they were compared.
    Raises:
        ValueError: there is no variation, or a time is not above 0.
    """
    if not variations or min(min(one.first_ms, one.second_ms) for one in variations) <= 0:
        raise ValueError(f"{len(variations)} variations: give one or more, of times above 0.")
    of_factor: dict[str, list[Variation]] = {}
    for one in variations:
        of_factor.setdefault(one.factor, []).append(one)
    rows = sorted(of_factor, key=lambda factor: -_spread(of_factor[factor]))
    for place, factor in enumerate(rows):
        _row_of_factor(ax, place, sorted(of_factor[factor], key=lambda one: one.scale))
    low, high = min(1.0, *(one.ratio for one in variations)), max(1.0, *(one.ratio for one in variations))
    room = max(high / low, 1.05) ** 0.25  # for the scales beside the ends
    beside_one(ax, low / room, high * room, [textwrap.fill(factor, 17) for factor in rows])
    first, second = strategies
    ax.set_xlabel(f"time of {second} / time of {first}\n← {second} is faster    {first} is faster →")
    decisive = [factor for factor in rows if any(one.changes_winner for one in of_factor[factor])]
    for label, factor in zip(ax.get_yticklabels(), rows):
        label.set_color(ALARM if factor in decisive else MUTED)
    if decisive:
        of_all = f"{len(decisive)} of {len(rows)} factors"
        title = f"{of_all} would change which is faster"
    else:
        winner = variations[0].winner
        title = "None would change that " + (f"{winner} is faster" if winner else "both are equally fast")
    ax.set_title(title, color=ALARM if decisive else INK)
    return ax


def beside_one(ax: Axes, low: float, high: float, rows: Sequence[str]) -> None:
    """Axes for ratios from `low` to `high`, with a line at 1 and a row for each name."""
    ax.axvline(1, color=INK, linewidth=1.1, zorder=0.9, label="equal")
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    bare(ax, keep=())
    numbered(ax.xaxis, lambda value: f"{short(value)} ×", FixedLocator(_ratio_ticks(low, high)))
    ax.grid(axis="x", color=FAINT, linewidth=0.6)
    ax.set_yticks(range(len(rows)), rows)


def _ratio_ticks(low: float, high: float) -> list[float]:
    """1 and a few simple ratios on either side of it, none too close to another for its number."""
    ticks = [1.0]
    for ratio in (1000, 100, 10, 5, 2, 1.5, 1.2, 1.1, 1.05, 1.02, 1.01):
        for tick in (ratio, 1 / ratio):
            apart = min(abs(math.log(tick / other)) for other in ticks)
            if low <= tick <= high and apart >= 0.2 * math.log(high / low):
                ticks.append(tick)
    return ticks


def _spread(variations: Sequence[Variation]) -> float:
    ratios = [one.ratio for one in variations]
    return max(ratios) / min(ratios)


def _row_of_factor(ax: Axes, place: int, variations: Sequence[Variation]) -> None:
    """The ratios of one factor, and what scale gives the smallest and the largest of them."""
    least = min(variations, key=lambda one: one.ratio)
    most = max(variations, key=lambda one: one.ratio)
    ax.plot(
        [least.ratio, most.ratio], [place] * 2, color=FAINT, linewidth=8, zorder=1, label=variations[0].factor
    )
    for one in variations:
        ax.plot(
            [one.ratio],
            [place],
            "D" if one.scale == 1 else "o",
            color=ALARM if one.changes_winner else INK if one.scale == 1 else "#8A94A6",
            ms=6.5,
            zorder=3 if one.scale == 1 else 2,
            label=f"{one.factor} {short(one.scale)}",
        )
    if math.isclose(least.ratio, most.ratio, rel_tol=1e-9):
        return
    for one, side in ((least, -1), (most, 1)):
        write_beside(
            ax,
            "as it is" if one.scale == 1 else f"{short(one.scale)} ×",
            (one.ratio, place),
            (9 * side, 0),
            ha="left" if side > 0 else "right",
            va="center",
            color=MUTED,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
        )
