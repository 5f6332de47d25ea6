"""Pictures of gradients that go to shards show their numbers: curves, ways to reduce, groups that share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from zero_ref.lab import plots
from zero_ref.live.palette import rank_colour

RANKS = (2, 8, 64, 512)
MEASURED = {
    "DDP": [(0.0, 1.0), (0.5, 1.05), (1.0, 1.0)],
    "to owners": [(0.0, 1.0), (0.5, 1.6), (1.0, 2.29), (1.0, 1.3)],
    "to shares": [(0.0, 0.0), (0.5, 0.3), (0.9, 0.42), (1.0, 0.25)],
}
PREDICTED = {"to shares": [(0.0, 0.0), (0.5, 0.2), (1.0, 0.3)]}
ARRIVING = {"one owner": {n: n - 1 for n in RANKS}, "ring": dict.fromkeys(RANKS, 1)}


def memory(ax: Axes) -> Axes:
    return plots.gradient_memory(MEASURED, ax, predicted=PREDICTED)


def arriving(ax: Axes) -> Axes:
    return plots.reductions_against_ranks(ARRIVING, ax, title="Messages at once")


def groups(ax: Axes) -> Axes:
    return plots.hybrid_groups(8, 4, ax, within="within: 1.5 Ψ", between="between: 0.25 Ψ")


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def ranks_of(ax: Axes) -> dict[str, Rectangle]:
    found = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return {str(patch.get_label()): patch for patch in found}


PICTURES: dict[str, Plot] = {
    "gradient_memory": memory,
    "reductions_against_ranks": arriving,
    "hybrid_groups": groups,
}


# ---------------------------------------------------------------------------------------- gradient_memory


def test_curves_of_gradients_step_from_point_to_point_and_name_their_peaks() -> None:
    ax = drawn(memory)
    for name, curve in MEASURED.items():
        (line,) = (line for line in ax.lines if line.get_label() == name)
        assert points(line) == curve
        assert line.get_drawstyle() == "steps-post"
    assert {"peak 1.05 Ψ", "peak 2.29 Ψ", "peak 0.42 Ψ"} <= set(written(ax))


def test_curves_that_cannot_be_drawn_are_refused() -> None:
    _, ax = plots.figure(6, 3)
    with pytest.raises(ValueError, match="1 to 8 curves"):
        plots.gradient_memory({}, ax)
    with pytest.raises(ValueError, match="1 to 8 curves"):
        plots.gradient_memory({"DDP": []}, ax)
    with pytest.raises(ValueError, match=r"predicted has \['DDP'\]"):
        plots.gradient_memory({"to shares": [(0, 1)]}, ax, predicted={"DDP": [(0, 1)]})


# --------------------------------------------------------------------------------- reductions_against_ranks


def test_ways_to_reduce_are_lines_on_logarithmic_axes_with_their_counts() -> None:
    ax = drawn(arriving)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    for name, curve in ARRIVING.items():
        (line,) = (line for line in ax.lines if line.get_label() == name)
        assert dict(points(line)) == curve
    assert {"511", "one owner", "ring", "Messages at once"} <= set(written(ax))


def test_a_count_of_nothing_is_refused_on_a_logarithmic_axis() -> None:
    _, ax = plots.figure(6, 3)
    with pytest.raises(ValueError, match="ring: counts must be above 0"):
        plots.reductions_against_ranks({"ring": {1: 0, 2: 1}}, ax, title="")


# -------------------------------------------------------------------------------------------- hybrid_groups


def test_a_row_is_a_group_and_a_colour_is_a_share() -> None:
    ax = drawn(groups)
    boxes = ranks_of(ax)
    assert list(boxes) == [f"rank {rank}, share {rank % 4}" for rank in range(8)]
    for rank, box in enumerate(boxes.values()):
        assert to_hex(box.get_facecolor()) == to_hex(rank_colour(rank % 4, 4))
    rows = {round(box.get_y(), 6) for box in boxes.values()}
    assert len(rows) == 2
    kinds = Counter(type(patch) for patch in ax.patches)
    assert (kinds[FancyBboxPatch], kinds[FancyArrowPatch]) == (2, 4)


def test_what_is_sent_stands_at_each_group_and_between_groups() -> None:
    words = Counter(written(drawn(groups)))
    assert (words["within: 1.5 Ψ"], words["between: 0.25 Ψ"]) == (2, 1)


@pytest.mark.parametrize(("size", "group"), [(8, 3), (16, 16), (10, 2), (8, 0), (4, 8)])
def test_groups_without_room_or_that_do_not_fit_are_refused(size: int, group: int) -> None:
    _, ax = plots.figure(6, 3)
    with pytest.raises(ValueError, match=f"not {size} in groups of {group}"):
        plots.hybrid_groups(size, group, ax)
