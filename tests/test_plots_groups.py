"""The grid of groups and ranks shows who owns how much, and what was there before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from pictures import Plot, drawn, written

from zero_ref.lab import plots
from zero_ref.lab.plots._groups import COLUMN, OLD
from zero_ref.live.palette import tint
from zero_ref.plan.partition import Partition
from zero_ref.plan.rules import even, sorted_greedy


def added(before: Partition, numels: list[int]) -> Partition:
    return before.joined(sorted_greedy(numels, before.world_size, loads=before.loads))


BEFORE = sorted_greedy([60, 50, 40, 10], 2)  # rank 0 owns 60 and 10, rank 1 owns 50 and 40
AFTER = added(BEFORE, [30, 5])  # the 30 goes to rank 0, the 5 to rank 1
STAGES = {"One group": BEFORE, "Two groups": AFTER}
GROUPS = [0, 0, 0, 0, 1, 1]


def grid(ax: Axes) -> Axes:
    return plots.groups_grid(STAGES, GROUPS, ax, names=["body", "head"])


def bars(ax: Axes, label: str) -> dict[tuple[int, int], float]:
    """Elements of the boxes with a label, by their row from above and their rank; the longest is 100."""
    tops = sorted({patch.get_y() for patch in ax.patches if " rank " in str(patch.get_label())})
    found: dict[tuple[int, int], float] = {}
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and str(patch.get_label()).startswith(label):
            place = tops.index(patch.get_y()), int(patch.get_x() // COLUMN)
            found[place] = found.get(place, 0) + round(100 * patch.get_width(), 6)
    return found


def test_a_bar_is_as_long_as_what_its_rank_owns_of_the_group():
    ax = drawn(grid)
    new, old = bars(ax, "new"), bars(ax, "old")
    assert {place: new[place] for place in ((0, 0), (0, 1))} == {(0, 0): 70, (0, 1): 90}
    assert {place: old[place] for place in ((1, 0), (1, 1))} == {(1, 0): 70, (1, 1): 90}
    assert {place: new[place] for place in ((2, 0), (2, 1))} == {(2, 0): 30, (2, 1): 5}


def test_the_last_row_puts_new_behind_old():
    ax = drawn(grid)
    assert {rank: bars(ax, "old")[3, rank] for rank in (0, 1)} == {0: 70, 1: 90}
    assert {rank: bars(ax, "new")[3, rank] for rank in (0, 1)} == {0: 30, 1: 5}


def test_old_is_pale_and_new_has_the_ranks_colour():
    ax = drawn(grid)
    for patch in ax.patches:
        for rank in (0, 1):
            colour = plots.rank_colour(rank, 2)
            if patch.get_label() == f"new, rank {rank}":
                assert to_hex(patch.get_facecolor()).upper() == colour
            if patch.get_label() == f"old, rank {rank}":
                assert to_hex(patch.get_facecolor()).upper() == tint(colour, OLD)


def test_elements_are_written_and_a_rank_without_any_says_so():
    ax = drawn(lambda ax: plots.groups_grid({"": sorted_greedy([600, 400], 3)}, [0, 0], ax))
    assert {"600", "400", "nothing", "group 0"} <= set(written(ax))
    assert {"70", "90", "30", "5", "100", "95", "body", "head", "together"} <= set(written(drawn(grid)))
    assert {"rank 0", "rank 1", "One group", "Two groups"} <= set(written(drawn(grid)))


def test_a_gap_separates_two_parameters_unless_it_would_eat_them_up():
    def gaps(numels: list[int]) -> list[float]:
        ax = drawn(lambda ax: plots.groups_grid({"": sorted_greedy(numels, 1)}, [0] * len(numels), ax))
        return [line.get_xdata()[0] for line in ax.lines if line.get_label() == "gap"]

    assert gaps([50, 30, 20]) == pytest.approx([0.5, 0.8])
    assert gaps([97, 1, 1, 1]) == pytest.approx([0.97])


def test_an_even_share_is_marked_once_a_stage_for_each_rank():
    ax = drawn(grid)
    shares = [line.get_xdata()[0] for line in ax.lines if line.get_label() == "even share"]
    assert shares == pytest.approx([0.8, COLUMN + 0.8, 0.975, COLUMN + 0.975])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=12),
    st.lists(st.integers(0, 500), min_size=1, max_size=12),
    st.integers(1, 8),
)
def test_the_rows_together_hold_every_element_once(first, second, world_size):
    before = sorted_greedy(first, world_size)
    after = added(before, second)
    _, ax = plots.figure(6, 4)
    plots.groups_grid({"before": before, "after": after}, [0] * len(first) + [1] * len(second), ax)
    longest = max(1, *after.loads)
    drawn_elements = sum(
        patch.get_width() * longest for patch in ax.patches if " rank " in str(patch.get_label())
    )
    assert drawn_elements == pytest.approx(3 * sum(first) + 2 * sum(second))


def test_a_cut_parameter_has_a_part_on_each_of_its_owners():
    ax = drawn(lambda ax: plots.groups_grid({"even": even([100], 2, alignment=1)}, [0], ax))
    assert bars(ax, "new") == {(0, 0): 100, (0, 1): 100}


def test_what_does_not_fit_together_is_refused():
    _, ax = plots.figure()
    with pytest.raises(ValueError, match="no stages"):
        plots.groups_grid({}, [], ax)
    with pytest.raises(ValueError, match=r"on \[9\] ranks"):
        plots.groups_grid({"": sorted_greedy([1], 9)}, [0], ax)
    with pytest.raises(ValueError, match=r"on \[2, 3\] ranks"):
        plots.groups_grid({"a": BEFORE, "b": sorted_greedy([60], 3)}, [0], ax)
    with pytest.raises(ValueError, match="a stage has parameters that the last one has not"):
        plots.groups_grid({"a": AFTER, "b": BEFORE}, [0] * 4, ax)
    with pytest.raises(ValueError, match="4 groups for 6 parameters"):
        plots.groups_grid(STAGES, [0] * 4, ax)
    with pytest.raises(ValueError, match="1 names, and a group 1"):
        plots.groups_grid(STAGES, GROUPS, ax, names=["body"])


EIGHT = sorted_greedy([4096, 4096, 3072, 1024] + [128] * 4, 8)
PICTURES: dict[str, Plot] = {
    "groups_grid, two stages": grid,
    "groups_grid, one stage": lambda ax: plots.groups_grid({"Only": AFTER}, GROUPS, ax),
    "groups_grid, one rank": lambda ax: plots.groups_grid({"Only": sorted_greedy([5], 1)}, [0], ax),
    "groups_grid, eight ranks": lambda ax: plots.groups_grid(
        {"Before": EIGHT, "After": added(EIGHT, [4096, 3072, 128])}, [0] * 8 + [1] * 3, ax
    ),
    "groups_grid, nothing": lambda ax: plots.groups_grid({"Nothing": sorted_greedy([0], 2)}, [0], ax),
    "groups_grid, long names": lambda ax: plots.groups_grid(
        STAGES, GROUPS, ax, names=["embeddings", "a long name $x"]
    ),
}
