"""Loads under several rules: each over its mean, in one colour, with the fullest rank's number above."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.container import BarContainer
from pictures import Plot, drawn, written

from zero_ref.lab import plots
from zero_ref.live.palette import SERIES_COLOURS

LOADS = {
    "sorted_greedy": {"elements": [7, 9], "operations": [30, 10]},
    "even": {"elements": [8, 8], "operations": [18, 22]},
}


def two_rules(ax: Axes) -> Axes:
    return plots.loads_by_rule(LOADS, ax)


def bars(ax: Axes, label: str) -> BarContainer:
    (found,) = (one for one in ax.containers if one.get_label() == label)
    assert isinstance(found, BarContainer)
    return found


def heights(ax: Axes, label: str) -> list[float]:
    return [float(bar.get_height()) for bar in bars(ax, label).patches]


def test_each_load_is_over_its_mean() -> None:
    ax = drawn(two_rules)
    assert heights(ax, "sorted_greedy, elements") == [7 / 8, 9 / 8]
    assert heights(ax, "sorted_greedy, operations") == [1.5, 0.5]
    assert heights(ax, "even, operations") == [0.9, 1.1]
    (mean,) = ax.lines
    assert np.asarray(mean.get_ydata()).tolist() == [1, 1]


def test_a_load_has_one_colour_and_the_fullest_rank_is_named() -> None:
    ax = drawn(two_rules)
    for name, colour in zip(["elements", "operations"], SERIES_COLOURS):
        assert {bar.get_facecolor() for rule in LOADS for bar in bars(ax, f"{rule}, {name}")} == {
            to_rgba(colour)
        }
        assert {text.get_color() for text in ax.texts if text.get_text().startswith(name)} == {colour}
    assert {"elements: 1.13 ×", "operations: 1.5 ×", "elements: 1 ×", "operations: 1.1 ×"} <= set(written(ax))
    assert {"sorted greedy", "even", "0", "1"} <= set(written(ax))


def test_ranks_have_numbers_as_long_as_there_is_room() -> None:
    many = {rule: {"elements": [1] * 9} for rule in "abc"}
    ax = drawn(lambda ax: plots.loads_by_rule(many, ax))
    assert list(ax.get_xticks()) == []
    assert "Load of each of 9 ranks over its mean (number: the fullest)" in written(ax)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 30))
def test_no_two_bars_overlap_and_rules_stay_apart(rules: int, counted: int, world_size: int) -> None:
    loads = {
        f"rule {i}": {f"load {k}": range(1, world_size + 1) for k in range(counted)} for i in range(rules)
    }
    _, ax = plots.figure(6, 3)
    plots.loads_by_rule(loads, ax)
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches)  # type: ignore[attr-defined]
    assert len(edges) == rules * counted * world_size
    assert all(left[1] <= right[0] + 1e-9 for left, right in pairwise(edges))
    for place in range(rules):
        mine = [edge for edge in edges if place - 0.5 < edge[0] < place + 0.5]
        assert mine[0][0] + mine[-1][1] == pytest.approx(2 * place)  # in the middle


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ({}, "0 rules and 0 loads do not fit"),
        ({rule: {"a": [1]} for rule in "abcd"}, "4 rules and 1 loads"),
        ({"rule": {name: [1] for name in "abcd"}}, "1 rules and 4 loads"),
        ({"one": {"a": [1]}, "other": {"b": [1]}}, "the same loads of the same ranks"),
        ({"one": {"a": [1]}, "other": {"a": [1, 1]}}, "the same loads of the same ranks"),
        ({"one": {"a": [1], "b": [1, 1]}}, "the same loads of the same ranks"),
        ({"one": {"a": [0, 0]}}, "under 'one' all ranks have no 'a'"),
        ({"one": {"a": []}}, "under 'one' all ranks have no 'a'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(loads: dict[str, dict[str, list[float]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.loads_by_rule(loads, plots.figure()[1])


PICTURES: dict[str, Plot] = {
    "loads_by_rule, two rules": two_rules,
    "loads_by_rule, one rank": lambda ax: plots.loads_by_rule({"only": {"elements": [5]}}, ax),
    "loads_by_rule, three of all": lambda ax: plots.loads_by_rule(
        {rule: {name: [1, 2, 3] for name in ("elements", "operations", "bytes")} for rule in "abc"}, ax
    ),
    "loads_by_rule, many ranks": lambda ax: plots.loads_by_rule(
        {rule: {"elements": range(1, 65), "operations": range(65, 1, -1)} for rule in LOADS}, ax
    ),
}
