"""What each rank has to do under several rules, counted in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._style import in_style, numbered, with_levels, write_beside
from zero_ref.live.numbers import short
from zero_ref.live.palette import INK, SERIES_COLOURS

MOST_NAMED_RANKS = 24
"""More ranks than this in one picture are too narrow for their numbers."""

GROUP = 0.86
"""Width of a rule's bars together, where the rules are 1 apart."""


@in_style
def loads_by_rule(loads_of_rule: Mapping[str, Mapping[str, Sequence[float]]], ax: Axes) -> Axes:
    """Each rank's loads under several rules, every load over its mean.

    A rule that levels one load may leave another uneven. Over their means both are on one axis: 1 is an even
    share. The numbers above a rule are the fullest rank's.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> whole = {"elements": [7, 9], "operations": [20, 12]}
    >>> _ = loads_by_rule({"whole": whole, "cut": {"elements": [8, 8], "operations": [17, 15]}}, ax)

    Args:
        loads_of_rule: rule -> what is counted -> the load of each rank. 1 to 3 rules, 1 to 3 loads.
    Raises:
        ValueError: too many or too few to draw, two rules count different loads or ranks, or a load is zero
            on all ranks.
    """
    counted, world_size = _check(loads_of_rule)
    named = world_size * len(loads_of_rule) <= MOST_NAMED_RANKS
    of_rank = GROUP / world_size
    bar = of_rank * (0.84 if named else 1.0) / len(counted)  # where ranks have numbers, a gap between them
    ticks: list[float] = []
    for place, (rule, loads) in enumerate(loads_of_rule.items()):
        first = place - GROUP / 2 + (of_rank - bar * len(counted)) / 2
        starts = [first + of_rank * rank for rank in range(world_size)]
        ticks += [start + bar * len(counted) / 2 for start in starts]
        for index, name in enumerate(counted):
            heights = [load * world_size / sum(loads[name]) for load in loads[name]]
            lefts = [start + bar * index for start in starts]
            colour = SERIES_COLOURS[index]
            ax.bar(lefts, heights, bar, align="edge", color=colour, linewidth=0, label=f"{rule}, {name}")
            up_pt = 5 + 14 * (len(counted) - 1 - index)
            _write(ax, f"{name}: {short(max(heights))} ×", (place, 1), up_pt, colour)
        _write(ax, rule.replace("_", " "), (place, 0), -36 if named else -20, INK)
    ax.axhline(1, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
    with_levels(ax)
    ax.set_xlim(-0.5, len(loads_of_rule) - 0.5)
    ax.set_xticks(ticks if named else [], [str(n) for n in range(world_size)] * len(loads_of_rule) * named)
    numbered(ax.yaxis, lambda value: f"{short(value)} ×", MaxNLocator(4, steps=[1, 2, 5, 10]))
    which = "each rank" if named else f"each of {world_size:,} ranks"
    ax.set_title(f"Load of {which} over its mean (number: the fullest)", pad=12 + 14 * len(counted))
    return ax


def _write(ax: Axes, text: str, place: tuple[float, float], up_pt: float, colour: str) -> None:
    """Text in the middle of a rule's bars; `place` is in data units and as a part of the Axes' height."""
    of_axes: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "annotation_clip": False}
    write_beside(ax, text, place, (0, up_pt), ha="center", color=colour, **of_axes)


def _check(loads_of_rule: Mapping[str, Mapping[str, Sequence[float]]]) -> tuple[list[str], int]:
    """What is counted, and the number of ranks."""
    first = next(iter(loads_of_rule.values()), {})
    if not (1 <= len(loads_of_rule) <= 3 and 1 <= len(first) <= 3):
        raise ValueError(
            f"{len(loads_of_rule)} rules and {len(first)} loads do not fit: draw 1 to 3 rules, 1 to 3 loads."
        )
    sizes = [{name: len(of_ranks) for name, of_ranks in loads.items()} for loads in loads_of_rule.values()]
    if any(of_rule != sizes[0] for of_rule in sizes) or len(set(sizes[0].values())) > 1:
        raise ValueError(f"each rule needs the same loads of the same ranks; got {sizes}.")
    for rule, loads in loads_of_rule.items():
        for name, of_ranks in loads.items():
            if not sum(of_ranks):
                raise ValueError(f"under {rule!r} all ranks have no {name!r}, so there is no mean.")
    return list(first), len(next(iter(first.values())))
