"""The pictures of flat tensors and of messages: places, lengths, colours, numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from zero_ref.lab import plots
from zero_ref.plan.choice import plan_partition
from zero_ref.plan.layout import BucketLayout, lay_out
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import even

NAMES = ["W1", "b1", "W2", "b2"]
NUMELS = [12, 4, 8, 2]


def layout_of(rule: object, numels: list[int], world_size: int, dtypes: tuple[str, ...] = ()) -> BucketLayout:
    dtypes = dtypes or ("float32",) * len(numels)
    specs = [ParamSpec(numel, dtype) for numel, dtype in zip(numels, dtypes, strict=True)]
    return lay_out(plan_partition(rule, specs, world_size), specs)  # type: ignore[arg-type]


def cut_to_the_element(numels: list[int], world_size: int):
    return even(numels, world_size, alignment=1)


SMALL = layout_of("sorted_greedy", NUMELS, 2)
CUT = layout_of(cut_to_the_element, NUMELS, 3)


def boxes(ax: Axes, label: str) -> list[tuple[float, float]]:
    """From where to where the boxes with a label reach."""
    return [
        (patch.get_x(), patch.get_x() + patch.get_width())
        for patch in ax.patches
        if isinstance(patch, Rectangle) and patch.get_label() == label
    ]


# ------------------------------------------------------------------------------------------- flat layout


def test_windows_lie_at_their_offsets_in_the_colour_of_their_owner():
    ax = drawn(lambda ax: plots.flat_layout(SMALL, ax, names=NAMES), height=2)
    assert boxes(ax, "parameter 0, rank 0") == [(0, 12)]
    assert boxes(ax, "parameter 3, rank 0") == [(12, 14)]
    assert boxes(ax, "parameter 1, rank 1") == [(16, 20)]
    assert boxes(ax, "parameter 2, rank 1") == [(20, 28)]
    for patch in ax.patches:
        for rank in (0, 1):
            if str(patch.get_label()).endswith(f"rank {rank}"):
                assert to_hex(patch.get_facecolor()).upper() == plots.rank_colour(rank, 2)


def test_a_cut_parameter_is_marked_where_it_is_cut():
    ax = drawn(lambda ax: plots.flat_layout(CUT, ax, names=NAMES), height=2)
    assert [line.get_xdata()[0] for line in ax.lines if line.get_label() == "cut"] == [9, 18]
    assert boxes(ax, "parameter 0, rank 0") == [(0, 9)]
    assert boxes(ax, "parameter 0, rank 1") == [(9, 12)]
    whole = drawn(lambda ax: plots.flat_layout(SMALL, ax), height=2)
    assert not [line for line in whole.lines if line.get_label() == "cut"]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.integers(1, 8),
    st.sampled_from(["even", "sorted_greedy"]),
)
def test_windows_messages_and_padding_fill_every_flat_tensor_once(numels, world_size, rule):
    layout = layout_of(rule, numels, world_size)
    _, ax = plots.figure(6, 2)
    plots.flat_layout(layout, ax)
    widths = {"parameter": 0.0, "message": 0.0, "padding": 0.0}
    for patch in ax.patches:
        widths[str(patch.get_label()).split()[0]] += patch.get_width()
    total = sum(flat.numel for flat in layout.flats)
    assert widths["parameter"] == widths["message"] == sum(numels)
    assert widths["padding"] == total - sum(numels)


def test_a_layout_of_9_ranks_or_with_a_name_missing_is_refused():
    _, ax = plots.figure()
    with pytest.raises(ValueError, match="9 ranks do not fit"):
        plots.flat_layout(layout_of("sorted_greedy", [5] * 9, 9), ax)
    with pytest.raises(ValueError, match="3 names, and a parameter 3"):
        plots.flat_layout(SMALL, ax, names=NAMES[:3])


# ----------------------------------------------------------------------------------------- message times

MESSAGES = {1_000: [1_000] * 64, 8_000: [8_000] * 8, 64_000: [64_000]}


def times(ax: Axes, measured: dict[int, float] | None = None) -> Axes:
    return plots.message_times(MESSAGES, ax, fixed_ms=0.5, bytes_per_ms=16_000, measured_ms=measured)


def test_a_bar_is_the_time_of_the_bytes_and_on_it_the_fixed_part_of_each_message():
    ax = drawn(times)
    bars = {
        c.get_label(): [(b.get_y(), b.get_height()) for b in c]
        for c in ax.containers
        if isinstance(c, BarContainer)
    }
    assert bars == {"bytes": [(0, 4)] * 3, "fixed": [(4, 32), (4, 4), (4, 0.5)]}


def test_a_measurement_is_a_dot_at_its_time_and_a_number_above_it():
    ax = drawn(lambda ax: times(ax, {8_000: 20.0, 64_000: 1.0}))
    (dots,) = (line for line in ax.lines if line.get_label() == "measured")
    assert (list(dots.get_xdata()), list(dots.get_ydata())) == ([1, 2], [20, 1])
    assert {text.get_text(): text.xy for text in ax.texts}["8"] == (1, 20)
    assert "measured" in written(ax)
    assert "measured" not in written(drawn(times))


def test_what_cannot_be_drawn_is_refused():
    _, ax = plots.figure()
    with pytest.raises(ValueError, match="no messages"):
        plots.message_times({}, ax, fixed_ms=1, bytes_per_ms=1)
    with pytest.raises(ValueError, match="buckets of 7 bytes"):
        times(ax, {7: 1.0})


# ------------------------------------------------------------------------------------------- both

PICTURES: dict[str, tuple[Plot, float]] = {
    "flat_layout": (lambda ax: plots.flat_layout(SMALL, ax, names=NAMES), 2),
    "flat_layout, cut": (lambda ax: plots.flat_layout(CUT, ax, names=NAMES), 2),
    "flat_layout, two dtypes": (
        lambda ax: plots.flat_layout(
            layout_of("even", NUMELS, 4, ("float32", "float16") * 2), ax, names=NAMES
        ),
        3,
    ),
    "flat_layout, long names": (
        lambda ax: plots.flat_layout(SMALL, ax, names=["blocks.0.mlp.weight", "ln", "$x", "ln_f.bias"]),
        2,
    ),
    "flat_layout, nothing": (lambda ax: plots.flat_layout(BucketLayout(()), ax), 2),
    "message_times": (times, 3.6),
    "message_times, measured": (lambda ax: times(ax, {1_000: 50.0, 8_000: 7.0, 64_000: 0.1}), 3.6),
    "message_times, one size": (
        lambda ax: plots.message_times({1: []}, ax, fixed_ms=0.1, bytes_per_ms=1e6),
        3.6,
    ),
}
