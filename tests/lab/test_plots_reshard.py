"""The picture of a resharding shows every element once: at its old owner, on its way, at its new one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from library.pictures import Plot, drawn
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from zero_ref.lab import plots
from zero_ref.lab.plots._reshard import BAR, FLOW, MOVING
from zero_ref.live.palette import PAPER, tint
from zero_ref.plan.moves import moves, numels_between
from zero_ref.plan.partition import Partition
from zero_ref.plan.rules import even, from_lists, sorted_greedy

NUMELS = [384, 24, 192, 8]
NAMES = ["W1", "b1", "W2", "b2"]
AT_4, AT_3 = even(NUMELS, 4), even(NUMELS, 3)


def four_to_three(ax: Axes) -> Axes:
    return plots.reshard(AT_4, AT_3, ax, names=NAMES)


def boxes(ax: Axes, top: float) -> list[tuple[str, int, int]]:
    """The labels of the boxes that begin at this height, and their ends, from left to right."""
    found = [
        (str(box.get_label()), round(box.get_x()), round(box.get_x() + box.get_width()))
        for box in ax.patches
        if isinstance(box, Rectangle) and box.get_y() == top
    ]
    return sorted(found, key=lambda box: box[1])


def test_the_bars_are_what_each_rank_owns_before_and_after():
    ax = drawn(four_to_three)
    assert boxes(ax, 0) == [
        ("rank 0", 0, 192),
        ("rank 1", 192, 320),
        ("rank 2", 320, 472),
        ("rank 3", 472, 608),
    ]
    assert boxes(ax, BAR + FLOW) == [("rank 0", 0, 256), ("rank 1", 256, 408), ("rank 2", 408, 608)]


def test_what_moves_has_its_new_owners_colour_and_what_stays_has_none():
    ax = drawn(four_to_three)
    faces = {str(box.get_label()): to_hex(box.get_facecolor()).upper() for box in ax.patches}
    for src, dst in numels_between(moves(AT_4, AT_3, staying=True)):
        expected = PAPER if src == dst else tint(plots.rank_colour(dst, 3), MOVING)
        assert faces[f"{src} to {dst}"] == expected
    assert {faces[f"rank {rank}"] for rank in range(4)} == {plots.rank_colour(rank, 4) for rank in range(4)}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 8), st.integers(1, 8))
def test_every_element_is_drawn_once_in_each_of_the_three_rows(numels, before, after):
    _, ax = plots.figure(6, 3)
    old, new = sorted_greedy(numels, before), even(numels, after)
    plots.reshard(old, new, ax)
    for top in (0, BAR, BAR + FLOW):
        ends = [end for _, left, right in boxes(ax, top) for end in (left, right)]
        assert [ends[0], ends[-1]] == [0, sum(numels)] if ends else sum(numels) == 0
        assert ends[1:-1:2] == ends[2::2]
    between: dict[tuple[int, int], int] = {}
    for label, left, right in boxes(ax, BAR):
        src, dst = map(int, label.split(" to "))
        between[src, dst] = between.get((src, dst), 0) + right - left
    planned = numels_between(moves(old, new, staying=True))
    assert between == {pair: numel for pair, numel in planned.items() if numel}


def test_what_does_not_fit_is_refused():
    _, ax = plots.figure()
    with pytest.raises(ValueError, match="9 ranks do not fit"):
        plots.reshard(even([600], 2), even([600], 9), ax)
    with pytest.raises(ValueError, match="one partition is of 4 parameters"):
        plots.reshard(AT_4, even([600], 2), ax)
    with pytest.raises(ValueError, match="1 names for 4 parameters"):
        plots.reshard(AT_4, AT_3, ax, names=["W1"])


def halves_swapped(numel: int) -> tuple[Partition, Partition]:
    return from_lists([numel, numel], [[0], [1]]), from_lists([numel, numel], [[1], [0]])


PICTURES: dict[str, Plot] = {
    "reshard, 4 to 3": four_to_three,
    "reshard, rules": lambda ax: plots.reshard(
        sorted_greedy(NUMELS, 4), AT_4, ax, names=NAMES, titles=("sorted-\ngreedy", "even")
    ),
    "reshard, swapped": lambda ax: plots.reshard(*halves_swapped(50), ax),
    "reshard, 8 to 1": lambda ax: plots.reshard(even([4096, 64, 512], 8), even([4096, 64, 512], 1), ax),
    "reshard, many parameters": lambda ax: plots.reshard(even([97] * 40, 5), sorted_greedy([97] * 40, 8), ax),
    "reshard, nothing": lambda ax: plots.reshard(even([], 1), even([], 2), ax),
    "reshard, long names": lambda ax: plots.reshard(
        AT_4, AT_3, ax, names=["h.0.attn.weight", "a $", "x" * 90, "b"]
    ),
}
