"""A weight of few bits: a bar for each value that it holds, as long as it holds it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from pictures import Plot, drawn, written

from zero_ref.lab import plots

EXACT = [1.0, 1.3, 1.6, 1.9]
HELD = {"lost": [1.0, 1.0, 1.0, 1.0], "nearest": [1.0, 1.0, 2.0, 2.0], "random": [1.0, 2.0, 1.0, 2.0]}
GRID = [1.0, 2.0, 3.0]


def three_ways(ax: Axes) -> Axes:
    return plots.rounded_values(EXACT, HELD, GRID, ax)


def runs(ax: Axes, label: str) -> list[list[tuple[float, float]]]:
    (bars,) = (bars for bars in ax.collections if bars.get_label() == label)
    assert isinstance(bars, LineCollection)
    return [[(float(x), float(y)) for x, y in segment] for segment in bars.get_segments()]


def test_a_bar_is_as_long_as_the_weight_has_its_value() -> None:
    ax = drawn(three_ways)
    assert runs(ax, "lost") == [[(-0.5, 1.0), (3.5, 1.0)]]
    assert runs(ax, "nearest") == [[(-0.5, 1.0), (1.5, 1.0)], [(1.5, 2.0), (3.5, 2.0)]]
    assert [segment[0][1] for segment in runs(ax, "random")] == [1.0, 2.0, 1.0, 2.0]


def test_there_is_a_line_and_a_label_for_each_value_of_the_grid() -> None:
    ax = drawn(three_ways)
    exact, grid = ax.lines[-1], ax.lines[:-1]
    assert [list(line.get_ydata()) for line in grid] == [[value, value] for value in GRID]
    assert list(exact.get_ydata()) == EXACT
    assert {"1.0", "2.0", "3.0", "exact", *HELD} <= set(written(ax))


def test_ways_that_hold_the_same_value_lie_above_each_other() -> None:
    ax = drawn(three_ways)
    heights = [bars.get_transform().transform((0, 1))[1] for bars in ax.collections]
    points = [(upper - lower) * 72 / ax.figure.dpi for upper, lower in pairwise(heights)]
    assert points == pytest.approx([4.5, 4.5])  # a bar is 3.7 points high


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(GRID), min_size=1, max_size=30))
def test_the_bars_of_a_way_cover_every_step_once(values: list[float]) -> None:
    _, ax = plots.figure(6, 3)
    plots.rounded_values(values, {"way": values}, GRID, ax)
    bars = runs(ax, "way")
    assert [bar[0][0] for bar in bars[1:]] == [bar[1][0] for bar in bars[:-1]]
    assert (bars[0][0][0], bars[-1][1][0]) == (-0.5, len(values) - 0.5)
    for (start, value), (stop, _) in bars:
        assert set(values[round(start + 0.5) : round(stop + 0.5)]) == {value}


@pytest.mark.parametrize(
    ("held", "grid", "message"),
    [
        ({}, GRID, "0 ways to round do not fit: draw 1 to 4"),
        (dict.fromkeys("abcde", EXACT), GRID, "5 ways"),
        (HELD, [1.0], "at least two values, in ascending order"),
        (HELD, [2.0, 1.0], "ascending"),
        ({"short": [1.0]}, GRID, "'short' has 1 values and `exact` 4"),
        ({"off": [1.0, 1.5, 1.0, 1.0]}, GRID, "'off' holds 1.5, which is not in the grid"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    held: dict[str, list[float]], grid: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plots.rounded_values(EXACT, held, grid, plots.figure()[1])


PICTURES: dict[str, Plot] = {
    "rounded_values, three ways": three_ways,
    "rounded_values, one way": lambda ax: plots.rounded_values(
        [0.1] * 300, {"way": [0.125] * 300}, [0.0625, 0.125], ax
    ),
    "rounded_values, many values": lambda ax: plots.rounded_values(
        [n / 100 for n in range(30)], {"way": [n / 128 for n in range(30)]}, [n / 128 for n in range(40)], ax
    ),
    "rounded_values, below zero": lambda ax: plots.rounded_values(
        [-1.0, -2.0], {"way": [-1.0, -2.0]}, [-2.0, -1.0], ax
    ),
}
