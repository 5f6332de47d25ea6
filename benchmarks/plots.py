"""Pictures of how fast it is: contenders beside peers and limits, and how times grow with a size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator

from benchmarks.comparisons import LOST, UNDECIDED, WON, outcome
from benchmarks.results import Spread
from zero_ref.lab.plots._judged import beside_one
from zero_ref.lab.plots._style import MARKERS, SMALL_PT, in_style, key_above, numbered, with_levels
from zero_ref.live.numbers import short, short_count
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, PAPER, SERIES_COLOURS

PROPORTIONAL = "if it grew as its work does"
DECADES = 2.6
"""A picture of fewer decades has numbers at 1, 2 and 5, one of more only at powers of ten."""
_MARKS: dict[str, dict[str, Any]] = {
    WON: {"marker": "o", "ms": 8.5, "color": SERIES_COLOURS[0], "markeredgecolor": PAPER},
    UNDECIDED: {"marker": "D", "ms": 6.5, "color": INK, "markerfacecolor": PAPER, "markeredgewidth": 1.5},
    LOST: {"marker": "X", "ms": 9.5, "color": ALARM, "markeredgecolor": PAPER},
    "limit": {"marker": "|", "ms": 12, "color": MUTED, "markeredgewidth": 2},
}


@in_style
def benchmarks(ratios: Mapping[str, Spread], ax: Axes, *, ours: str, title: str | None = None) -> Axes:
    """How many times as long as `ours` each other one took: dots for medians, bars for the quartiles.

    Right of 1 the others are slower. A disc is a peer that lost to us, a cross one that won, a hollow diamond
    one whose quartiles hold 1. Limits, what the machine takes for the work alone, are grey ticks below.

    >>> from benchmarks.results import Spread
    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 2.6)
    >>> ratios = {"torch": Spread(2.1, 2.0, 2.3), "limit: copy": Spread(0.8, 0.8, 0.9)}
    >>> benchmarks(ratios, ax, ours="zero_ref").get_title("left")
    'Faster than 1 of 1 peer'

    Args:
        ratios: name -> the other's time over ours. A limit's name begins with "limit: ".
        ours: the name of what they are held against.
        title: in place of how many peers were faster.
    Raises:
        ValueError: there is none, or a ratio is not above 0.
    """
    if min((value for ratio in ratios.values() for value in ratio), default=0) <= 0:
        raise ValueError(f"ratios {dict(ratios)}: give one or more, all above 0.")
    peers = [name for name in ratios if not is_limit(name)]
    rows = [*peers, *(name for name in ratios if is_limit(name))]
    found = {name: "limit" if is_limit(name) else outcome(ratios[name]) for name in rows}
    ink = {name: {LOST: ALARM, "limit": MUTED}.get(found[name], INK) for name in rows}
    for place, name in enumerate(rows):
        mark, ratio = _MARKS[found[name]], ratios[name]
        bar = {"color": mark["color"], "linewidth": 2.2, "solid_capstyle": "butt"}
        ax.plot([ratio.low, ratio.high], [place] * 2, label=f"quartiles: {name}", **bar)
        ax.plot([ratio.median], [place], linestyle="none", zorder=3, label=name, **mark)
        ax.annotate(
            f"{short(ratio.median)} ×",
            (1.02, place),
            xycoords=("axes fraction", "data"),
            va="center_baseline",
            fontsize=SMALL_PT,
            color=ink[name],
            annotation_clip=False,
        )
    if peers and len(rows) > len(peers):
        ax.axhline(len(peers) - 0.5, color=FAINT, linewidth=0.8, label="limits below")
    low = min(0.9, *(ratio.low for ratio in ratios.values()))
    high = max(1.1, *(ratio.high for ratio in ratios.values()))
    room = max(high / low, 1.2) ** 0.06
    beside_one(ax, low / room, high * room, [name.removeprefix("limit: ") for name in rows])
    for label, name in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_color(ink[name])
    ax.set_xlabel(f"time / time of {ours}\n← faster than {ours}    slower →")
    won = sum(of_one == WON for of_one in found.values())
    ax.set_title(title or f"Faster than {won} of {len(peers)} peer{'' if len(peers) == 1 else 's'}")
    return ax


@in_style
def growth(
    curves: Mapping[str, Mapping[float, Spread]],
    ax: Axes,
    *,
    along: str,
    work: Mapping[float, float],
    time: str = "Time",
    key: bool = True,
) -> Axes:
    """Times against a size, both axes logarithmic: a mark for each median, a bar from quartile to quartile.

    The thin line is where the first curve would be, had its time grown as the work up to its end: if the
    curve is steeper, some of its time grows faster than the work.

    >>> from benchmarks.results import Spread
    >>> from zero_ref.lab.plots import figure
    >>> ours = {size: Spread(1 + size / 1e5, 1 + size / 2e5, 2 + size / 1e5) for size in (1e4, 1e5, 1e6)}
    >>> fig, ax = figure(6, 2.6)
    >>> _ = growth({"ours": ours}, ax, along="parameters", work={size: size for size in ours})

    Args:
        curves: name -> size -> milliseconds, at least one size each. A curve whose name begins with "limit: "
            is drawn in grey.
        along: what the sizes count.
        work: size -> work, for the sizes of the first curve; where it is 0 the thin line has no point.
        time: which time it is, as a title begins with it.
        key: whether to name the curves above the Axes.
    Raises:
        ValueError: there is no curve or one without a point, too many for their colours, or a size or a time
            that no logarithm has.
    """
    named = [name for name in curves if not is_limit(name)]
    if not 0 < len(named) <= len(SERIES_COLOURS):
        raise ValueError(
            f"{len(named)} curves that are no limits: give 1 to {len(SERIES_COLOURS)}, each a colour."
        )
    for name, curve in curves.items():
        if min([*curve, *(value for times in curve.values() for value in times)], default=0) <= 0:
            raise ValueError(f"{name}: give one size or more, and sizes and times above 0.")
    ax.set_xscale("log")
    ax.set_yscale("log")
    styles = {name: _style(name, named) for name in curves}
    for name, curve in curves.items():
        sizes = sorted(curve)
        for size in sizes:
            colour = styles[name]["color"]
            ax.plot([size] * 2, curve[size][1:], color=colour, linewidth=1.3, label=f"quartiles: {name}")
        ax.plot(sizes, [curve[size].median for size in sizes], label=name, **styles[name])
    # The line may leave below: where there is next to no work, times do not go to nothing, and room is dear.
    low, high = ax.get_ylim()
    _as_the_work(ax, curves[named[0]], work)
    ax.set_ylim(low, high)
    with_levels(ax)
    amounts = sorted({size for curve in curves.values() for size in curve})
    many = len(amounts) > 2 and amounts[-1] / amounts[0] > 20
    numbered(ax.xaxis, short_count, LogLocator(numticks=12) if many else FixedLocator(amounts))
    wide = math.log10(high / low) > DECADES
    levels = LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=7)
    numbered(ax.yaxis, lambda value: f"{short(value)} ms", levels)
    ax.set_xlabel(along)
    ax.set_title(f"{time} against {along}", pad=46 if key else 8)
    if key:
        _key(ax, styles)
    return ax


def is_limit(name: str) -> bool:
    """Whether a name is of what the machine can do, not of a contender."""
    return name.startswith("limit: ")


def _style(name: str, named: list[str]) -> dict[str, Any]:
    if is_limit(name):
        return {"color": MUTED, "linewidth": 1.4, "linestyle": (0, (4, 2)), "marker": "|", "ms": 7}
    place = named.index(name)
    look = {"color": SERIES_COLOURS[place], "marker": MARKERS[place], "markeredgecolor": PAPER}
    first = {"linewidth": 2.2, "ms": 7.0, "zorder": 4}
    return look | (first if place == 0 else {"linewidth": 1.6, "ms": 6.0, "zorder": 3})


def _as_the_work(ax: Axes, curve: Mapping[float, Spread], work: Mapping[float, float]) -> None:
    sizes = [size for size in sorted(curve) if work.get(size, 0) > 0]
    if len(sizes) > 1:
        last = sizes[-1]
        heights = [curve[last].median * work[size] / work[last] for size in sizes]
        ax.plot(sizes, heights, color=INK, linewidth=0.9, label=PROPORTIONAL, zorder=1.5)


def _key(ax: Axes, styles: Mapping[str, dict[str, Any]]) -> None:
    """The curves in two rows above the Axes, the thin line last."""
    looks = {name: {**look, "linewidth": min(look["linewidth"], 2)} for name, look in styles.items()}
    looks[PROPORTIONAL] = {"color": INK, "linewidth": 0.9}
    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    key_above(ax, handles, columns=2, handlelength=1.8, handletextpad=0.5)
