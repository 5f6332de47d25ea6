"""Pictures of a run: its losses, and its measurements beside what was predicted."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._style import MARKERS, SMALL_PT, bare, in_style, with_levels
from zero_ref.live.numbers import short
from zero_ref.live.palette import ALARM, FAINT, INK, MUTED, SERIES_COLOURS


@in_style
def loss_curves(
    losses: Mapping[str, Sequence[float]],
    ax: Axes,
    *,
    steps: Sequence[int] | None = None,
    rtol: float = 1e-6,
    differ: bool = False,
) -> Axes:
    """Losses of several runs; runs that coincide stay visible as several, and are counted.

    The first run is drawn broad, each later one narrower on top of it, so equal curves look like one line
    with coloured borders. Which ones are equal is computed, not left to the eye. Runs that are to `differ`
    are drawn alike, with a mark for each loss, and not compared.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> loss_curves({"ddp": [3.0, 2.0], "zero": [3.0, 2.0]}, ax).get_title(loc="left")
    '2 curves coincide'

    Args:
        losses: for each run its losses, in the order in which they were taken.
        steps: at which steps they were taken; 1, 2, ... if None.
        rtol: two runs coincide if no pair of losses differs by more than this part of the larger one.
    """
    count = len(losses)
    for index, ((name, values), colour) in enumerate(zip(losses.items(), SERIES_COLOURS * count)):
        at = list(steps)[: len(values)] if steps is not None else list(range(1, len(values) + 1))
        width = 1.8 if differ else 1.6 + min(2.6, 9 / max(1, count - 1)) * (count - 1 - index)
        ax.plot(
            at,
            values,
            color=colour,
            linewidth=width,
            solid_capstyle="round",
            label=name,
            marker=MARKERS[index % len(MARKERS)] if differ else "o" if len(values) == 1 else None,
        )
    with_levels(ax)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if all(len(values) < 2 for values in losses.values()):
        ax.set_xlim(0, 2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.legend(loc="upper right", handlelength=2.2, labelspacing=0.8)
    ax.set_title("" if differ else _coincidence(losses, rtol))
    return ax


def _coincidence(losses: Mapping[str, Sequence[float]], rtol: float) -> str:
    """Which curves are the same, in words; and how far the others are from the first."""
    families: list[list[str]] = []
    for name, values in losses.items():
        same = [family for family in families if _gap(losses[family[0]], values) <= rtol]
        if same:
            same[0].append(name)
        else:
            families.append([name])
    if len(losses) < 2:
        return ""
    if len(families) == 1:
        return f"{len(losses)} curves coincide"
    several = [f"{len(family)} of {len(losses)} curves coincide" for family in families if len(family) > 1]
    first, *others = families
    gaps = {family[0]: _gap(losses[first[0]], losses[family[0]]) for family in others}
    apart = [
        f"{name} differs by {short(100 * gap)}%" if math.isfinite(gap) else f"{name} cannot be compared"
        for name, gap in gaps.items()
    ]
    return textwrap.fill("; ".join((several or ["No two curves coincide"]) + apart), 58)


def _gap(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference between two curves, as a part of the larger value; infinite if one is longer."""
    if len(one) != len(other):
        return math.inf
    gaps = [abs(a - b) / (max(abs(a), abs(b)) or 1) for a, b in zip(one, other)]
    # A NaN is unequal to everything, but max() may pass it over.
    return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


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
    left = [textwrap.fill(quantity, 24) for _, quantity, _, _ in rows]
    right = [_in_words(predicted, measured) for _, _, predicted, measured in rows]
    pitch = 0.45 + 0.45 * max((text.count("\n") + 1 for text in left + right), default=1)
    place, before = 0.0, None
    for (strategy, _, predicted, measured), quantity, words in zip(rows, left, right):
        if strategy != before:
            place += 0.25 if before is None else 0.55
            _beside(ax, place, textwrap.fill(strategy, 18), "left", color=INK, weight="bold")
            place, before = place + pitch, strategy
        equal = predicted == measured
        _beside(ax, place, quantity, "left", color=MUTED, fontsize=SMALL_PT)
        _pair(ax, place, _log_ratio(predicted, measured), equal)
        look = {"color": INK} if equal else {"color": ALARM, "weight": "bold"}
        _beside(ax, place, words, "right", fontsize=SMALL_PT, **look)
        place += pitch
    count = sum(predicted == measured for _, _, predicted, measured in rows)
    bare(ax, keep=())
    ax.set_ylim(place, -0.35)
    ax.set_xlim(-1.25, 1.25)
    ax.set_yticks([])
    ax.set_xticks([-1, 0, 1], ["½ ×", "equal", "2 ×"])
    ax.set_xlabel("measured / predicted")
    noun = "prediction" if len(rows) == 1 else "predictions"
    verb = "equals its" if count == 1 else "equal their"
    colour = INK if count == len(rows) else ALARM
    ax.set_title(f"{count} of {len(rows)} {noun} {verb} measurement", loc="center", color=colour)
    return ax


def _pair(ax: Axes, place: float, where: float, equal: bool) -> None:
    """Draw a ring at the prediction, and a dot at the measurement."""
    ax.plot([0], [place], "o", ms=11, mfc="none", mec=MUTED, mew=1.2, label="predicted")
    if equal:
        ax.plot([where], [place], "o", color=INK, ms=6, label="measured")
    else:
        ax.plot([0, where], [place, place], color=ALARM, linewidth=2.4, solid_capstyle="butt", label="miss")
        marker = ">" if where > 1 else "<" if where < -1 else "D"
        ax.plot([where], [place], marker, color=ALARM, ms=9, label="measured")


def _in_words(predicted: float, measured: float) -> str:
    if predicted == measured:
        return f"both {_number(measured)}"
    pair = f"{_number(predicted)} ≠ {_number(measured)}"
    return pair if len(pair) <= 26 else pair.replace(" ≠ ", "\n≠ ")


def _beside(ax: Axes, place: float, text: str, side: str, **look: Any) -> None:
    """Text in the margin, level with `place`."""
    x, align = (-0.02, "right") if side == "left" else (1.02, "left")
    ax.text(x, place, text, transform=ax.get_yaxis_transform(), ha=align, va="center", **look)


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
