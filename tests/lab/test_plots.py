"""The pictures show what the data says: widths, heights, colours, words."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.container import BarContainer
from matplotlib.patches import StepPatch

from zero_ref.lab import plots
from zero_ref.live.palette import PART_COLOURS
from zero_ref.plan.choice import RULES
from zero_ref.plan.partition import Partition
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.simulator.ledger import ledger

NUMELS = [600, 500, 400, 100, 0, 30]
NAMES = ["wte.weight", "h.0.qkv.weight", "h.0.fc.weight", "h.0.proj.weight", "none", "ln_f.bias"]
LOSSES = [3.0, 2.5, 2.25]


def widths_of_owner(ax: Axes) -> list[float]:
    return [
        sum(path.get_extents().width for path in collection.get_paths())
        for collection in ax.collections
        if isinstance(collection, PolyCollection)
    ]


# ------------------------------------------------------------------------------------------- shard map


@settings(max_examples=25, deadline=None)
@given(
    lists(integers(0, 10**6), min_size=1, max_size=30),
    integers(1, 70),
    sampled_from(["sorted_greedy", "even"]),
)
def test_each_rank_has_as_much_width_as_it_owns_elements(numels, world_size, strategy):
    partition = RULES[strategy](numels, world_size)
    _, ax = plots.figure(6, 3)
    plots.shard_map(partition, ax)
    assert widths_of_owner(ax) == pytest.approx(partition.loads)


def test_parameters_lie_in_registration_order_wherever_their_owner_is():
    ax = drawn(lambda ax: plots.shard_map(from_lists([60, 40], [[1], [0]]), ax, rows=1))
    first, second = (c.get_paths()[0].get_extents() for c in ax.collections if isinstance(c, PolyCollection))
    assert (first.x0, first.x1) == (60, 100)  # rank 0 owns the parameter registered second
    assert (second.x0, second.x1) == (0, 60)


def test_a_cut_parameter_is_marked_and_a_whole_one_is_not():
    def cuts(partition: Partition) -> list[float]:
        ax = drawn(lambda ax: plots.shard_map(partition, ax, rows=1))
        lines = next(c for c in ax.collections if isinstance(c, LineCollection) and c.get_label() == "cuts")
        return [float(segment[0][0]) for segment in lines.get_segments()]

    assert cuts(even([60, 50, 40, 10], 2, alignment=1)) == [80]
    assert cuts(sorted_greedy([60, 50, 40, 10], 2)) == []


def test_a_map_needs_one_name_for_each_parameter():
    _, ax = plots.figure()
    with pytest.raises(ValueError, match="1 names for 2 parameters"):
        plots.shard_map(sorted_greedy([1, 2], 1), ax, names=["only"])


# ---------------------------------------------------------------------------------------------- memory


def test_stacks_are_as_high_as_the_bytes_and_in_order():
    held = {"ddp": [(4, 3, 2), (4, 3, 2)], "zero": [(4, 3, 2), (4, 3, 0)]}
    ax = drawn(lambda ax: plots.memory_by_rank(held, ax))
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    assert [(c.get_label(), [(b.get_y(), b.get_height()) for b in c]) for c in bars] == [
        ("parameters", [(0, 4), (0, 4)]),
        ("gradients", [(4, 3), (4, 3)]),
        ("optimizer state", [(7, 2), (7, 2)]),
        ("parameters", [(0, 4), (0, 4)]),
        ("gradients", [(4, 3), (4, 3)]),
        ("optimizer state", [(7, 2), (7, 0)]),
    ]
    assert [to_hex(c[0].get_facecolor()) for c in bars[:3]] == [c.lower() for c in PART_COLOURS.values()]
    assert written(ax).count("9 B") == 2  # the fullest rank of each


def test_at_1024_ranks_the_outlines_have_the_same_tops():
    held = {"zero": [(4, 3, rank) for rank in range(1024)]}
    ax = drawn(lambda ax: plots.memory_by_rank(held, ax))
    tops = {p.get_label(): list(p.get_data().values) for p in ax.patches if isinstance(p, StepPatch)}
    bases = {p.get_label(): list(p.get_data().baseline) for p in ax.patches if isinstance(p, StepPatch)}
    assert tops["gradients"] == bases["optimizer state"] == [7] * 1024
    assert tops["optimizer state"] == [7 + rank for rank in range(1024)]


def test_strategies_with_different_ranks_are_refused():
    _, ax = plots.figure()
    with pytest.raises(ValueError, match=r"'zero': 2"):
        plots.memory_by_rank({"ddp": [(1, 1, 1)], "zero": [(1, 1, 1)] * 2}, ax)
    with pytest.raises(ValueError, match=r"'ddp': 0"):
        plots.memory_by_rank({"ddp": []}, ax)


def test_ledger_bars_end_at_the_ledgers_total():
    world_sizes = [1, 4, 64, 1024]
    ax = drawn(lambda ax: plots.ledger_stages(7_500_000_000, world_sizes, ax), height=5.6)
    ends = [c[0].get_x() + c[0].get_width() for c in ax.containers if c.get_label() == "optimizer state"]
    assert ends == pytest.approx(
        [ledger(7_500_000_000, n, stage).total_bytes for stage in range(4) for n in world_sizes]
    )
    # Cells of Table 1 of the ZeRO paper.
    assert {"120 GB", "52.5 GB", "41.3 GB", "30 GB", "31.4 GB", "16.6 GB", "1.88 GB"} <= set(written(ax))


# ---------------------------------------------------------------------------------------------- losses


def test_equal_curves_are_all_visible_and_counted():
    ax = drawn(lambda ax: plots.loss_curves(dict.fromkeys(("ddp", "zero", "even"), LOSSES), ax))
    widths = [line.get_linewidth() for line in ax.lines]
    assert [line.get_label() for line in ax.lines] == ["ddp", "zero", "even"]
    assert all(list(line.get_ydata()) == LOSSES for line in ax.lines)
    # Each later line leaves at least a point of the earlier one on either side.
    assert all(below - above >= 2 for below, above in pairwise(widths))
    assert len({line.get_color() for line in ax.lines}) == 3
    assert ax.get_title(loc="left") == "3 curves coincide"


@pytest.mark.parametrize(
    ("last", "title"),
    [
        (2.25 * (1 + 1e-7), "3 curves coincide"),
        (2.25 / 0.99, "2 of 3 curves coincide; even differs by 1%"),
        (math.nan, "2 of 3 curves coincide; even cannot be compared"),
    ],
)
def test_a_curve_apart_is_named_with_its_distance(last, title):
    losses = {"ddp": LOSSES, "zero": list(LOSSES), "even": [*LOSSES[:2], last]}
    _, ax = plots.figure()
    assert plots.loss_curves(losses, ax).get_title(loc="left") == title


# ------------------------------------------------------------------------------ predicted and measured


def test_a_miss_of_one_byte_is_as_visible_as_any():
    rows = [("ddp", "calls", 4, 4), ("zero", "bytes", 10**9, 10**9 + 1)]
    ax = drawn(lambda ax: plots.predicted_against_measured(rows, ax))
    exact, missed = (line for line in ax.lines if line.get_label() == "measured")
    assert missed.get_xdata()[0] >= 0.2
    assert missed.get_markersize() > exact.get_markersize()
    assert missed.get_color() != exact.get_color()
    assert "1,000,000,000\n≠ 1,000,000,001" in written(ax)
    assert ax.get_title() == "1 of 2 predictions equals its measurement"


@pytest.mark.parametrize(
    ("predicted", "measured", "place"), [(0, 5, 1.1), (5, 0, -1.1), (1, 100, 1.1), (0, 0, 0)]
)
def test_pairs_without_a_ratio_have_a_place(predicted, measured, place):
    ax = drawn(lambda ax: plots.predicted_against_measured([("zero", "calls", predicted, measured)], ax))
    (dot,) = (line for line in ax.lines if line.get_label() == "measured")
    assert dot.get_xdata()[0] == pytest.approx(place)


# ----------------------------------------------------------------------------------- colours and files


def test_the_better_of_black_and_white_always_reaches_contrast_4_5():
    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    for world_size in (8, 64, 1024):
        for rank in range(world_size):
            colour = plots.rank_colour(rank, world_size)
            lighter, darker = sorted((luminance(colour), luminance(plots.text_colour_on(colour))))[::-1]
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, colour


HELD = {"ddp": [(4e6, 4e6, 8e6)] * 4, "zero-with-a-rather-long-name": [(4e6, 4e6, 2e6)] * 4}
PICTURES: dict[str, Plot] = {
    "shard_map": lambda ax: plots.shard_map(sorted_greedy(NUMELS, 4), ax, names=NAMES),
    "shard_map, 1 rank": lambda ax: plots.shard_map(sorted_greedy(NUMELS, 1), ax),
    "shard_map, 64 ranks": lambda ax: plots.shard_map(even([10**6] * 50, 64), ax),
    "shard_map, 1,024 ranks": lambda ax: plots.shard_map(even([10**6] * 50, 1024), ax),
    "shard_map, nothing": lambda ax: plots.shard_map(sorted_greedy([0, 0], 3), ax),
    "shard_map, a dollar": lambda ax: plots.shard_map(sorted_greedy([5], 1), ax, names=["cost_$\\frac$"]),
    "memory_by_rank": lambda ax: plots.memory_by_rank(HELD, ax),
    "memory_by_rank, nothing": lambda ax: plots.memory_by_rank({"zero": [(0, 0, 0)]}, ax),
    "ledger_stages": lambda ax: plots.ledger_stages(10**9, [1, 4], ax),
    "loss_curves": lambda ax: plots.loss_curves({"ddp": LOSSES, "zero": LOSSES}, ax),
    "loss_curves, one loss": lambda ax: plots.loss_curves({"ddp": [3.0]}, ax),
    "predicted_against_measured": lambda ax: plots.predicted_against_measured(
        [
            (
                "zero-even-with-a-long-name",
                "bytes of optimizer state on the fullest of all ranks",
                10**12,
                10**12 + 1,
            )
        ],
        ax,
    ),
}


def test_a_picture_is_the_same_whatever_the_callers_settings_and_leaves_them_alone(tmp_path):
    def svg() -> str:
        fig, ax = plots.figure()
        PICTURES["loss_curves"](ax)
        return fig._repr_svg_()

    plain = svg()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": None}):
        before = dict(matplotlib.rcParams)
        assert svg() == plain
        assert dict(matplotlib.rcParams) == before


def test_only_svg_and_png_are_written(tmp_path: Path):
    fig, _ = plots.figure()
    with pytest.raises(ValueError, match=r"'picture.pdf'.*\.svg or \.png"):
        plots.save(fig, tmp_path / "picture.pdf")
