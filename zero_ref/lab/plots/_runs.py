"""Pictures of a run: its losses, and its measurements beside what was predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._style import (
    ALARM,
    FAINT,
    INK,
    MUTED,
    SERIES_COLOURS,
    SMALL_PT,
    bare,
    in_style,
)


@in_style
def loss_curves(
    losses: Mapping[str, Sequence[float]],
    ax: Axes,
    *,
    steps: Sequence[int] | None = None,
    rtol: float = 1e-6,
) -> Axes:
    """Losses of several runs; runs that coincide stay visible as several, and are counted.

    The first run is drawn broad and pale, each later one narrower on top of it, so equal curves look like
    one line with coloured borders. Which ones are equal is computed, not seen.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> loss_curves({"ddp": [3.0, 2.0], "zero": [3.0, 2.0]}, ax).get_title(loc="left")
    '2 curves coincide'

    Args:
        losses: for each run its losses, in the order in which they were taken.
        steps: at which steps they were taken; 1, 2, ... if None.
        rtol: two runs coincide if no pair of losses differs by more than this part of the larger.
    """
    count = len(losses)
    for index, ((name, values), colour) in enumerate(zip(losses.items(), SERIES_COLOURS * count)):
        at = list(steps)[: len(values)] if steps is not None else list(range(1, len(values) + 1))
        width = 1.6 + min(2.6, 9 / max(1, count - 1)) * (count - 1 - index)
        ax.plot(
            at,
            values,
            color=colour,
            linewidth=width,
            solid_capstyle="round",
            label=name,
            marker="o" if len(values) == 1 else None,
        )
    bare(ax, keep=("bottom",))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if all(len(values) < 2 for values in losses.values()):
        ax.set_xlim(0, 2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.legend(loc="upper right", handlelength=2.2, labelspacing=0.8)
    ax.set_title(_coincidence(losses, rtol))
    return ax


def _coincidence(losses: Mapping[str, Sequence[float]], rtol: float) -> str:
    """Which curves are the same, in words."""
    families: list[list[str]] = []
    for name, values in losses.items():
        for family in families:
            if _same(losses[family[0]], values, rtol):
                family.append(name)
                break
        else:
            families.append([name])
    if len(families) == 1 and len(losses) > 1:
        return f"{len(losses)} curves coincide"
    several = [family for family in families if len(family) > 1]
    if not several:
        return "No two curves coincide" if len(losses) > 1 else ""
    together = "; ".join(f"{len(family)} of {len(losses)} curves coincide" for family in several)
    alone = [family[0] for family in families if len(family) == 1]
    return together + (f"; apart: {', '.join(alone)}" if alone else "")


def _same(one: Sequence[float], other: Sequence[float], rtol: float) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=rtol) for a, b in zip(one, other))


@in_style
def predicted_against_measured(rows: Sequence[tuple[str, str, float, float]], ax: Axes) -> Axes:
    """Every prediction as a ring, its measurement as a dot: all dots inside their rings, or one that is not.

    The horizontal place is measured / predicted, so bytes and counts share one axis. A dot outside
    [1/2, 2] sits at the edge, as an arrow.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 2)
    >>> rows = [("ddp", "collectives", 40, 40), ("zero", "collectives", 44, 48)]
    >>> predicted_against_measured(rows, ax).get_title()
    '1 of 2 predictions equals its measurement'

    Args:
        rows: (strategy, quantity, predicted, measured); rows of one strategy follow one another.
    """
    ax.axvline(0, color=FAINT, linewidth=1.2, zorder=0)
    place, before = 0.0, None
    for strategy, quantity, predicted, measured in rows:
        if strategy != before:
            place += 0.25 if before is None else 0.55
            ax.text(
                -0.02,
                place,
                strategy,
                transform=ax.get_yaxis_transform(),
                ha="right",
                va="center",
                weight="bold",
            )
            place, before = place + 0.9, strategy
        _pair(ax, place, quantity, predicted, measured)
        place += 0.9
    equal = sum(predicted == measured for _, _, predicted, measured in rows)
    bare(ax, keep=())
    ax.set_ylim(place, -0.35)
    ax.set_xlim(-1.25, 1.25)
    ax.set_yticks([])
    ax.set_xticks([-1, 0, 1], ["half", "measured = predicted", "double"])
    verb = (
        "prediction equals its"
        if len(rows) == 1
        else "predictions equals its"
        if equal == 1
        else "predictions equal their"
    )
    colour = INK if equal == len(rows) else ALARM
    ax.set_title(f"{equal} of {len(rows)} {verb} measurement", loc="center", color=colour)
    return ax


def _pair(ax: Axes, place: float, quantity: str, predicted: float, measured: float) -> None:
    """One ring, one dot, and their numbers."""
    equal = predicted == measured
    where = _log_ratio(predicted, measured)
    colour = INK if equal else ALARM
    ax.text(
        -0.02,
        place,
        quantity,
        transform=ax.get_yaxis_transform(),
        ha="right",
        va="center",
        fontsize=SMALL_PT,
        color=MUTED,
    )
    ax.plot(
        [0], [place], "o", markersize=11, markerfacecolor="none", markeredgecolor=MUTED, markeredgewidth=1.2
    )
    if not equal:
        ax.plot([0, where], [place, place], color=ALARM, linewidth=2.4, solid_capstyle="butt")
    marker = "o" if equal else ">" if where >= 1 else "<" if where <= -1 else "D"
    ax.plot([where], [place], marker, color=colour, markersize=6 if equal else 9)
    sign = "=" if equal else "≠"
    ax.text(
        1.02,
        place,
        f"{_number(predicted)} {sign} {_number(measured)}",
        transform=ax.get_yaxis_transform(),
        va="center",
        fontsize=SMALL_PT,
        color=colour,
        weight="normal" if equal else "bold",
    )


def _log_ratio(predicted: float, measured: float) -> float:
    """log2(measured / predicted), kept within [-1.1, 1.1]; a difference too small to see is made visible."""
    if predicted == measured:
        return 0.0
    if predicted <= 0 or measured <= 0:
        return 1.1 if measured > predicted else -1.1
    ratio = math.log2(measured / predicted)
    return math.copysign(min(max(abs(ratio), 0.2), 1.1), ratio)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
