"""Names of curves at their right ends, and levels that a picture may be too small for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from matplotlib.axes import Axes

from zero_ref.lab.plots._style import SMALL_PT, write_beside
from zero_ref.live.palette import ALARM, INK

LINE_PT = 1.35 * SMALL_PT


def end_labels(
    ax: Axes, ends: Mapping[str, float], colours: Mapping[str, str], show: Callable[[float], str]
) -> None:
    """Name each curve at its right end in its own colour, its height below the name.

    Curves that end at one height to the eye have one number together. Names that would touch are moved
    apart. Call it when the limits and scales of the Axes are set.
    """
    to_fraction = ax.transData + ax.transAxes.inverted()
    right = ax.get_xlim()[1]
    fraction = {name: float(to_fraction.transform((right, value))[1]) for name, value in ends.items()}
    lines: list[tuple[float, str, str]] = []  # where it would stand, text, colour; the lowest first
    names = sorted(ends, key=lambda name: fraction[name])
    for place, name in enumerate(names):
        first = place == 0 or show(ends[name]) != show(ends[names[place - 1]])
        if first:
            lines.append((fraction[name], show(ends[name]), INK))
        lines.append((fraction[name], name, colours[name]))
    # The height on paper is known roughly only, before things are laid out.
    height_pt = 0.8 * ax.bbox.height * 72 / ax.figure.dpi
    step = LINE_PT / height_pt
    places: list[float] = []
    for wanted, _, _ in lines:
        places.append(max(wanted - step / 2, places[-1] + step if places else 0.0))
    for place in reversed(range(len(places))):
        above = places[place + 1] - step if place + 1 < len(places) else 1.0
        places[place] = min(places[place], above)
    for at, (_, text, colour) in zip(places, lines):
        ax.text(1.03, at, text, transform=ax.transAxes, va="center", fontsize=SMALL_PT, color=colour)


def level(ax: Axes, value: float, name: str) -> None:
    """A dashed line across, with its name above it at the right, in red."""
    ax.axhline(value, color=ALARM, linewidth=1.3, linestyle=(0, (4, 2)), label="device")
    at_right = ("axes fraction", "data")
    write_beside(ax, name, (1, value), (0, 3), xycoords=at_right, ha="right", va="bottom", color=ALARM)
