"""A weight in few bits: the values that it can have, and which of them it has after each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from zero_ref.lab.plots._style import bare, in_style, key_above
from zero_ref.live.palette import FAINT, INK, SERIES_COLOURS

TRACK_PT = 4.5
"""Height of a series' bar. Each series has a track of its own, because several may have the same value."""


@in_style
def rounded_values(
    exact: Sequence[float], held: Mapping[str, Sequence[float]], grid: Sequence[float], ax: Axes
) -> Axes:
    """What a weight holds after each step where it can hold the values of `grid` only, beside the exact sum.

    A grid line for each value; a bar on it as long as the weight has this value. A weight whose updates are
    lost is one long bar on its first line. One that is rounded at random changes between two lines, more
    often on the one that is nearer to the exact value.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> _ = rounded_values([1, 1.3, 1.6, 1.9], {"to the nearest": [1, 1, 2, 2]}, [1, 2], ax)

    Args:
        exact: the value before the first step and after each, without rounding.
        held: name of a way to round -> the value before the first step and after each; at most 4 ways.
        grid: the values that there are, ascending, at least 2.
    Raises:
        ValueError: there are no or too many ways, not as many values as in `exact`, less than two values in
            the grid or not in ascending order, or a way holds a value that is not in the grid.
    """
    _check(exact, held, grid)
    for value in grid:
        ax.axhline(value, color=FAINT, linewidth=1, zorder=1)
    handles = [*ax.plot(range(len(exact)), exact, color=INK, linewidth=1.2, label="exact", zorder=3)]
    for track, (name, values) in enumerate(held.items()):
        up_pt = TRACK_PT * ((len(held) - 1) / 2 - track)
        runs, step = [], 0
        for value, run in groupby(values):
            stop = step + len(list(run))
            runs.append([(step - 0.5, value), (stop - 0.5, value)])
            step = stop
        colour = SERIES_COLOURS[track]
        shifted = ax.transData + ScaledTranslation(0, up_pt / 72, ax.figure.dpi_scale_trans)
        ax.add_collection(
            LineCollection(
                runs, colors=colour, linewidths=TRACK_PT - 0.8, transform=shifted, label=name,
                capstyle="butt", clip_on=False, zorder=2,
            ),
            autolim=False,
        )  # fmt: skip
        handles.append(Line2D([], [], color=colour, linewidth=TRACK_PT, label=name, solid_capstyle="butt"))
    gap = grid[1] - grid[0]
    ax.set_xlim(-0.5, len(exact) - 0.5)
    ax.set_ylim(min(grid[0], *exact) - 0.4 * gap, max(grid[-1], *exact) + 0.4 * gap)
    bare(ax)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    digits = max(0, 1 - math.floor(math.log10(gap)))
    shown = grid[:: -(-len(grid) // 6)]
    ax.set_yticks(shown, [f"{value:.{digits}f}" for value in shown])
    ax.set_xlabel("after step")
    ax.set_ylabel("value of the weight")
    key_above(ax, handles, columns=2, handlelength=1.6)
    return ax


def _check(exact: Sequence[float], held: Mapping[str, Sequence[float]], grid: Sequence[float]) -> None:
    if not 1 <= len(held) <= 4:
        raise ValueError(f"{len(held)} ways to round do not fit: draw 1 to 4.")
    if len(grid) < 2 or any(low >= high for low, high in pairwise(grid)):
        raise ValueError(f"the grid {list(grid)[:6]}: it needs at least two values, in ascending order.")
    for name, values in held.items():
        if len(values) != len(exact):
            raise ValueError(f"{name!r} has {len(values)} values and `exact` {len(exact)}: give one a step.")
        if off := set(values) - set(grid):
            raise ValueError(f"{name!r} holds {min(off)}, which is not in the grid.")
