"""The picture of growth: curves where they were measured, the thin line as steep as the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.axes import Axes
from pictures import Plot, assert_readable, assert_repeatable, drawn, written

from benchmarks.comparisons import exponent
from benchmarks.plots import PROPORTIONAL, growth
from benchmarks.results import Spread
from zero_ref.lab import plots

SIZES = [10.0**power for power in range(6, 9)]


def curve(latency_ms: float, ms: float, power: float = 1.0) -> dict[float, Spread]:
    heights = {size: latency_ms + ms * (size / 1e6) ** power for size in SIZES}
    return {size: Spread(at, 0.8 * at, 1.5 * at) for size, at in heights.items()}


CURVES = {
    "zero_ref, best": curve(3, 2),
    "torch, best": curve(1, 3),
    "limit: exchange of shares": curve(0.5, 2),
}
WORK = {size: 44 * size for size in SIZES}


def three(ax: Axes) -> Axes:
    return growth(CURVES, ax, along="parameters", work=WORK)


def points(ax: Axes, label: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for line in ax.lines
        if line.get_label() == label
        for x, y in zip(*line.get_data())
    ]


def test_marks_are_the_medians_and_bars_the_quartiles():
    ax = drawn(three)
    for name, of_one in CURVES.items():
        assert points(ax, name) == [(size, of_one[size].median) for size in SIZES]
        assert points(ax, f"quartiles: {name}") == [(size, end) for size in SIZES for end in of_one[size][1:]]


@settings(max_examples=10)
@given(st.floats(0.2, 3))
def test_the_thin_line_is_as_steep_as_the_work_and_ends_at_the_first_curve(power: float) -> None:
    _, ax = plots.figure(6, 3)
    growth(CURVES, ax, along="parameters", work={size: size**power for size in SIZES})
    line = points(ax, PROPORTIONAL)
    assert exponent(*zip(*line)) == pytest.approx(power)
    assert line[-1] == pytest.approx((SIZES[-1], CURVES["zero_ref, best"][SIZES[-1]].median))


def test_where_there_is_no_work_the_thin_line_has_no_point():
    ranks = {float(n): Spread(5.0 * n, 5.0, 50.0) for n in (1, 2, 4)}
    ax = drawn(lambda ax: growth({"ours": ranks}, ax, along="ranks", work={1: 0, 2: 16, 4: 48}))
    assert points(ax, PROPORTIONAL) == [(2, 20 / 3), (4, 20)]
    assert {"1", "2", "4"} <= set(written(ax))


def test_curves_differ_in_more_than_colour():
    ax = drawn(three)
    lines = {str(line.get_label()): line for line in ax.lines}
    assert len({lines[name].get_marker() for name in CURVES}) == len(CURVES)
    assert lines["limit: exchange of shares"].get_linestyle() != lines["zero_ref, best"].get_linestyle()


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ({}, "0 curves that are no limits"),
        ({"limit: copy": curve(1, 1)}, "0 curves that are no limits"),
        ({str(number): curve(1, 1) for number in range(8)}, "8 curves that are no limits: give 1 to 7"),
        ({"a": {}}, "a: give one size or more"),
        ({"a": {0.0: Spread(1, 1, 1)}}, "sizes and times above 0"),
        ({"a": {1.0: Spread(1, 0, 1)}}, "sizes and times above 0"),
    ],
)
def test_what_has_no_logarithm_or_no_colour_is_refused(curves: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        growth(curves, plots.figure()[1], along="ranks", work={})


# -------------------------------------------------------------------------------------------- all pictures

PICTURES: dict[str, Plot] = {
    "three": three,
    "flat": lambda ax: growth({"ours": curve(5, 0.001)}, ax, along="tensors", work=WORK),
    "wide": lambda ax: growth(
        {"ours": curve(1e-3, 1, 3)}, ax, along="tensors", work=WORK, time="Consolidation"
    ),
    "no key": lambda ax: growth(CURVES, ax, along="parameters", work=WORK, key=False),
    "one point": lambda ax: growth({"ours": {3.0: Spread(1, 1, 2)}}, ax, along="ranks", work={3.0: 1.0}),
    "ranks": lambda ax: growth(
        {"ours": {n: Spread(n, n, n) for n in (1, 2, 3, 4, 6, 8)}}, ax, along="ranks", work={}
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_the_same_bytes_every_time_and_warns_of_nothing(name: str, tmp_path: Path) -> None:
    assert_repeatable(PICTURES[name], tmp_path)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("height", [2.9, 4.2])
def test_all_text_is_inside_the_picture_and_none_lies_on_another(
    name: str, height: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_readable(PICTURES[name], monkeypatch, height=height)
