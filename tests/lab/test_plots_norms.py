"""The triangle of two ranks' norms: its sides, where clipping leaves it, and the factors beside it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from zero_ref.lab import plots


def triangle(ax: Axes) -> Axes:
    return plots.norms_together([3.0, 4.0], 2.5, ax)


def line(ax: Axes, label: str) -> Line2D:
    (found,) = (line for line in ax.lines if str(line.get_label()).startswith(label))
    return found


def ends(ax: Axes, label: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*line(ax, label).get_data())]


def test_the_sides_are_the_norms_and_the_third_is_the_global_one():
    ax = drawn(triangle)
    assert ends(ax, "rank 0") == [(0, 0), (3, 0)]
    assert ends(ax, "rank 1") == [(3, 0), (3, 4)]
    assert ends(ax, "together") == [(0, 0), (3, 4)]
    assert {"rank 0: norm 3", "rank 1: norm 4", "together: norm 5", "limit: max_norm 2.5"} <= set(written(ax))


def test_sides_have_the_ranks_colours_and_a_right_angle_looks_like_one():
    ax = drawn(triangle)
    for rank in (0, 1):
        assert line(ax, f"rank {rank}").get_color() == plots.rank_colour(rank, 2)
    origin, right, up = ax.transData.transform([(0, 0), (1, 0), (0, 1)])
    assert right[0] - origin[0] == pytest.approx(up[1] - origin[1])


def test_both_ways_to_clip_end_where_their_factors_say():
    ax = drawn(triangle)
    assert ends(ax, "clipped together")[0] == pytest.approx((1.5, 2.0), rel=1e-6)
    assert ends(ax, "each by its own")[0] == pytest.approx((2.5, 2.5), rel=1e-6)
    assert "clipped together:\nfactor 0.5 for both" in written(ax)
    assert "each by its own norm:\nfactors 0.833 and 0.625" in written(ax)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 1e3), st.floats(0.01, 1e3), st.floats(0.01, 1e3))
def test_clipped_together_is_within_the_limit_in_the_same_direction(x, y, max_norm):
    _, ax = plots.figure(6, 3)
    plots.norms_together([x, y], max_norm, ax)
    ((u, v),) = ends(ax, "clipped together")
    assert math.hypot(u, v) <= max_norm * (1 + 1e-12)
    assert math.atan2(v, u) == pytest.approx(math.atan2(y, x))
    for distance in (math.hypot(*point) for point in ends(ax, "limit")):
        assert distance == pytest.approx(max_norm)
    for drawn_at in [*ends(ax, "rank 1"), *ends(ax, "each by its own"), *ends(ax, "limit")]:
        assert all(-1e-9 <= at <= limits[1] for at, limits in zip(drawn_at, (ax.get_xlim(), ax.get_ylim())))


@pytest.mark.parametrize(
    ("norms", "max_norm", "message"),
    [
        ([1.0], 1.0, "1 norms: a right angle has two sides"),
        ([1.0, 2.0, 3.0], 1.0, "3 norms"),
        ([1.0, math.inf], 1.0, "must be finite"),
        ([1.0, math.nan], 1.0, "must be finite"),
        ([-1.0, 1.0], 1.0, "not negative"),
        ([1.0, 1.0], 0.0, "max_norm=0.0: it must be finite and positive"),
        ([1.0, 1.0], math.inf, "max_norm=inf"),
    ],
)
def test_what_is_no_triangle_is_refused(norms, max_norm, message):
    with pytest.raises(ValueError, match=message):
        plots.norms_together(norms, max_norm, plots.figure()[1])


PICTURES: dict[str, Plot] = {
    "norms_together, both above": triangle,
    "norms_together, one above": lambda ax: plots.norms_together([1.5, 0.7], 1.0, ax),
    "norms_together, below": lambda ax: plots.norms_together([0.1, 0.2], 1.0, ax),
    "norms_together, flat": lambda ax: plots.norms_together([1000.0, 1.0], 0.5, ax),
    "norms_together, tall": lambda ax: plots.norms_together([1.0, 12_345.6], 0.001, ax),
    "norms_together, nothing": lambda ax: plots.norms_together([0.0, 0.0], 1.0, ax),
}
