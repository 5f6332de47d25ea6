"""A picture of how fast it is: contenders beside peers and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from benchmarks.comparisons import LOST, UNDECIDED, WON, outcome
from benchmarks.results import Spread
from zero_ref.lab.plots._judged import beside_one
from zero_ref.lab.plots._style import SMALL_PT, in_style
from zero_ref.live.numbers import short
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, PAPER, SERIES_COLOURS

_MARKS: dict[str, dict[str, Any]] = {
    WON: {"marker": "o", "ms": 8.5, "color": SERIES_COLOURS[0], "markeredgecolor": PAPER},
    UNDECIDED: {"marker": "D", "ms": 6.5, "color": INK, "markerfacecolor": PAPER, "markeredgewidth": 1.5},
    LOST: {"marker": "X", "ms": 9.5, "color": ALARM, "markeredgecolor": PAPER},
    "limit": {"marker": "|", "ms": 12, "color": MUTED, "markeredgewidth": 2},
}


@in_style
def benchmarks(ratios: Mapping[str, Spread], ax: Axes, *, ours: str, title: str | None = None) -> Axes:
    """Draw the others' times over `ours`: dots for medians, bars for quartiles.

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
        ours: the name of the contender that the others are compared with.
        title: in place of the number of peers that were slower.
    Raises:
        ValueError: there are no ratios, or one is not above 0.
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


def is_limit(name: str) -> bool:
    """Whether a name is of what the machine can do, not of a contender."""
    return name.startswith("limit: ")
