"""Pictures of a simulation's errors: predicted against measured, and what would change a conclusion."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, LogLocator
from matplotlib.transforms import Bbox

from zero_ref.lab.plots._style import SMALL_PT, bare, colour_key, in_style, numbered, write_beside
from zero_ref.live.numbers import short
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, PAPER, SERIES_COLOURS
from zero_ref.simulator.sensitivity import Variation


@in_style
def scatter(
    rows: Sequence[tuple[str, str, float, float]], ax: Axes, *, band: float = 0.25, unit: str = "ms"
) -> Axes:
    """Predictions against measurements on logarithmic axes, with a band of what counts as close.

    On the line a prediction equals its measurement. Those outside the band are ringed in red and named; the
    others are named where there is room.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 4.5)
    >>> rows = [("all_reduce", "1 MB", 1.0, 1.1), ("all_reduce", "64 MB", 40.0, 43.0),
    ...         ("broadcast", "1 kB", 0.1, 0.2)]
    >>> scatter(rows, ax).get_title("left")
    '2 of 3 predictions within 25% of their measurement'

    Args:
        rows: (kind, name, predicted, measured); a colour for each kind.
        band: how far from its measurement a prediction may be, as a share of it.
        unit: of all numbers.
    Raises:
        ValueError: there is no row, there are more than 7 kinds, a number is not above 0, or the band is not
            between 0 and 1.
    """
    kinds = list(dict.fromkeys(kind for kind, _, _, _ in rows))
    if not 0 < len(kinds) <= len(SERIES_COLOURS) or not 0 < band < 1:
        raise ValueError(
            f"{len(rows)} rows of {len(kinds)} kinds, band {band:g}: give 1 to {len(SERIES_COLOURS)} kinds "
            "and a band between 0 and 1."
        )
    for kind, name, predicted, measured in rows:
        if min(predicted, measured) <= 0:
            raise ValueError(f"{kind} {name}: {predicted:g} and {measured:g} {unit}; both must be above 0.")
    colours = dict(zip(kinds, SERIES_COLOURS))
    values = [value for _, _, *pair in rows for value in pair]
    low, high = min(values) / 1.6, max(values) * 1.6
    ends = [low, high]
    ax.fill_between(
        ends,
        [(1 - band) * end for end in ends],
        [(1 + band) * end for end in ends],
        color=FAINT,
        alpha=0.6,
        linewidth=0,
        label="band",
    )
    ax.plot(ends, ends, color=MUTED, linewidth=1.1, label="equal")
    far_off = [abs(predicted - measured) > band * measured * (1 + 1e-9) for _, _, predicted, measured in rows]
    for (kind, name, predicted, measured), off in zip(rows, far_off):
        edge = {"markeredgecolor": ALARM, "markeredgewidth": 2} if off else {"markeredgecolor": PAPER}
        ax.plot([measured], [predicted], "o", color=colours[kind], ms=8, label=f"{kind}: {name}", **edge)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    ordered = sorted(zip(far_off, rows), key=lambda row: not row[0])
    ax.add_artist(
        _RoomyLabels(
            [
                (measured, predicted, name, ALARM if off else colours[kind])
                for off, (kind, name, predicted, measured) in ordered
            ]
        )
    )
    bare(ax)
    subs = (1.0,) if high > 50 * low else (1.0, 2.0, 5.0)
    for axis in (ax.xaxis, ax.yaxis):
        numbered(axis, lambda value: f"{short(value)} {unit}", LogLocator(subs=subs))
    ax.set_xlabel("measured")
    ax.set_ylabel("predicted")
    colour_key(ax, colours)
    within = len(rows) - sum(far_off)
    noun = "prediction" if len(rows) == 1 else "predictions"
    whose = "its" if len(rows) == 1 else "their"
    ax.set_title(
        f"{within} of {len(rows)} {noun} within {band:.0%} of {whose} measurement",
        pad=30 if len(kinds) <= 4 else 46,
        color=INK if within == len(rows) else ALARM,
    )
    return ax


class _RoomyLabels(Artist):
    """Names beside points, as far as they have room: the first ones first, none on another or on a point.

    Decided when drawn, because only then is known how large things are on paper.
    """

    def __init__(self, points: Iterable[tuple[float, float, str, str]]) -> None:
        super().__init__()
        self.points = list(points)
        self.shown: list[str] = []
        self.set_in_layout(False)
        self.set_zorder(5)

    def draw(self, renderer: RendererBase) -> None:
        assert self.axes is not None
        inside = self.axes.get_window_extent(renderer)
        away = float(renderer.points_to_pixels(7.0))  # type: ignore[arg-type]  # annotated for arrays only
        at = [self.axes.transData.transform((x, y)) for x, y, _, _ in self.points]
        taken = [Bbox.from_extents(x - away, y - away, x + away, y + away).padded(-0.3 * away) for x, y in at]
        self.shown = []
        for (x, y), (_, _, name, colour) in zip(at, self.points):
            for ha, va, dx, dy in _SIDES:
                text = Text(x + dx * away, y + dy * away, name, ha=ha, va=va, color=colour, fontsize=SMALL_PT)
                text.set_figure(self.axes.figure)
                extent = text.get_window_extent(renderer)
                fits = inside.contains(*extent.min) and inside.contains(*extent.max)
                if fits and not any(extent.overlaps(other) for other in taken):
                    text.draw(renderer)
                    taken.append(extent)
                    self.shown.append(name)
                    break


_SIDES: tuple[tuple[Any, Any, float, float], ...] = (
    ("left", "center_baseline", 1, 0),
    ("right", "center_baseline", -1, 0),
    ("center", "bottom", 0, 1),
    ("center", "top", 0, -1),
)


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
