"""The pictures of ranks that train by themselves: what is drawn is what the data and the schedule say."""

from __future__ import annotations

import pytest
from library.pictures import Plot, drawn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from zero_ref.lab.drift import in_groups
from zero_ref.lab.plots import agreement, drift, rank_colour
from zero_ref.local_sgd.averaging import AveragingSchedule

FLAT = AveragingSchedule.periodic(4, warmup_steps=3)
NODES = AveragingSchedule.hierarchical({2: 4, 4: 8}, warmup_steps=2, gradient_group=2)
APART = [[0.1 * (rank + 1) * ((step - 3) % 4) * (step > 2) for rank in range(4)] for step in range(15)]


def sawtooth(ax: Axes) -> Axes:
    return drift(APART, FLAT, ax)


def groups(ax: Axes) -> Axes:
    return agreement([in_groups(NODES.agreeing(step, 8), 8) for step in range(12)], ax, warmup_steps=2)


def lines(ax: Axes, label: str) -> list[Line2D]:
    return [line for line in ax.lines if str(line.get_label()).startswith(label)]


def test_each_rank_is_a_line_through_its_distances_in_its_colour() -> None:
    found = lines(drawn(sawtooth), "rank")
    assert len(found) == 4
    for rank, line in enumerate(found):
        assert list(line.get_xdata()) == list(range(15))
        assert list(line.get_ydata()) == [of_step[rank] for of_step in APART]
        assert line.get_color() == rank_colour(rank, 4)
    assert len({line.get_marker() for line in found}) == 4


def test_averages_are_marked_where_the_schedule_has_them_and_nowhere_else() -> None:
    marked = [float(line.get_xdata()[0]) for line in lines(drawn(sawtooth), "average")]
    assert marked == [3, 7, 11]


def test_ranks_that_agree_are_one_block_in_the_colour_of_the_first() -> None:
    blocks = [patch for patch in drawn(groups).patches if isinstance(patch, Rectangle)]
    assert len(blocks) == sum(8 // NODES.agreeing(step, 8) for step in range(12))
    for block in blocks:
        step, first = int(block.get_x()), int(block.get_y())
        assert block.get_height() == pytest.approx(NODES.agreeing(step, 8) - 0.14)
        assert block.get_facecolor()[:3] == pytest.approx(_rgb(rank_colour(first, 8)))


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"at least one step"),
        ([[0, 0], [0]], r"\[1, 2\]"),
        ([[]], "0 ranks do not fit"),
        ([[0] * 9], "9 ranks do not fit"),
    ],
)
def test_what_has_no_ranks_or_too_many_is_refused(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn(lambda ax: drift(rows, FLAT, ax))
    with pytest.raises(ValueError, match=message):
        drawn(lambda ax: agreement(rows, ax))


@pytest.mark.parametrize("of_step", [[0, 1, 0], [0, 0, 1], [1, 1, 2], [0, 2, 2]])
def test_ranks_that_do_not_lie_side_by_side_are_no_block(of_step: list[int]) -> None:
    with pytest.raises(ValueError, match="after step 1 ranks agree that do not lie side by side"):
        drawn(lambda ax: agreement([[0, 0, 0], of_step], ax))


PICTURES: dict[str, Plot] = {
    "drift, sawtooth": sawtooth,
    "drift, one rank": lambda ax: drift([[0.0]], FLAT, ax),
    "drift, eight ranks": lambda ax: drift(
        [[float(r * s % 4) for r in range(8)] for s in range(40)], FLAT, ax
    ),
    "drift, small numbers": lambda ax: drift([[1e-7 * s, 2e-7 * s] for s in range(9)], FLAT, ax),
    "agreement, groups": groups,
    "agreement, many steps": lambda ax: agreement([[0, 0, 2, 2]] * 60, ax, warmup_steps=30),
    "agreement, one cell": lambda ax: agreement([[0]], ax),
}
