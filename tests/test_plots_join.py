"""The picture of uneven inputs: what is filled, what is hatched, and that it can be read."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from pictures import Plot, drawn, written

from zero_ref.lab.plots import rank_colour, shadow_grid


def three(ax: Axes) -> Axes:
    return shadow_grid([3, 5, 7], ax)


PICTURES: dict[str, Plot] = {"shadow_grid": three}


def test_a_cell_is_filled_where_a_rank_trains_and_hatched_where_it_shadows() -> None:
    cells = [patch for patch in drawn(three).patches if isinstance(patch, Rectangle)]
    assert len(cells) == 3 * 7
    for cell in cells:
        iteration, rank = int(cell.get_x()), int(cell.get_y())
        trains = iteration < [3, 5, 7][rank]
        assert (cell.get_hatch() is None) == trains
        colour = rank_colour(rank, 3)
        assert cell.get_edgecolor()[:3] == pytest.approx(_rgb(colour))
        assert (cell.get_facecolor()[:3] == pytest.approx(_rgb(colour))) == trains


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_only_ranks_that_leave_early_are_said_to_shadow() -> None:
    assert written(drawn(three)).count("shadows") == 2
    assert "shadows" not in written(drawn(lambda ax: shadow_grid([2, 2], ax)))


@pytest.mark.parametrize("batches", [[], [1] * 9])
def test_no_ranks_and_too_many_are_refused(batches: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(batches)} ranks do not fit"):
        drawn(lambda ax: shadow_grid(batches, ax))
