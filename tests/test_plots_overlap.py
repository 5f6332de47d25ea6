"""The picture of a timeline shows its events: places, lengths, colours, numbers, what is exposed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from pictures import Plot, assert_readable, assert_repeatable, drawn, written

from zero_ref.lab import plots
from zero_ref.lab.plots._style import FittingText
from zero_ref.lab.plots._timeline import LANE, ROOM, TITLE
from zero_ref.live.lanes import COLOURS, alone
from zero_ref.live.palette import PART_COLOURS
from zero_ref.simulator.timeline import WAYS_OF_DDP, BucketTimes, Event, Timeline, simulate

FOUR = [BucketTimes(4, 3, 1, 1.5)] * 4
MEASURED = Timeline(
    (
        Event("compute", "backward", 0, 0.0, 8.0),
        Event("network", "reduce", 0, 8.5, 20.0),
        Event("network", "broadcast", 0, 10.0, 12.0),
        Event("network", "reduce", 1, 11.0, 18.0),
        Event("compute", "step", 0, 19.0, 21.0),
    )
)
whole_ms = st.integers(0, 20).map(float)


def timelines(lines: Mapping[str, Timeline], height: float = 6.0) -> Axes:
    return drawn(lambda ax: plots.timeline(lines, ax), height)


def bars(ax: Axes) -> dict[str, Rectangle]:
    return {str(patch.get_label()): patch for patch in ax.patches if isinstance(patch, Rectangle)}


@pytest.mark.parametrize("way", WAYS_OF_DDP)
def test_a_bar_lies_where_its_event_does_and_is_as_long(way: str) -> None:
    timeline = simulate(FOUR, way)
    found = bars(timelines({"one": timeline}, height=3))
    assert len(found) == len(timeline.events)
    for event in timeline.events:
        number = "all" if event.bucket is None else event.bucket
        bar = found[f"{event.lane}: {event.label} {number}"]
        assert (bar.get_x(), bar.get_x() + bar.get_width()) == (event.start_ms, event.stop_ms)
        assert to_hex(bar.get_facecolor()).upper() == COLOURS[event.label].upper()
        lane = timeline.lanes.index(event.lane)
        assert TITLE + lane * LANE <= bar.get_y() < TITLE + (lane + 1) * LANE


def test_what_travels_has_the_colour_of_what_it_carries() -> None:
    assert COLOURS["reduce"] == PART_COLOURS["gradients"]
    assert COLOURS["broadcast"] == PART_COLOURS["parameters"]
    assert len(set(COLOURS.values())) == len(COLOURS) == 4


def test_a_title_says_how_long_it_takes_and_how_much_is_exposed() -> None:
    ax = timelines({way: simulate(FOUR, way) for way in WAYS_OF_DDP})
    assert {"plain: 29 ms,", "9 ms exposed", "interleaved: 24 ms,", "4 ms exposed"} <= set(written(ax))
    ends = [line.get_xdata()[0] for line in ax.lines if line.get_label() == "end"]
    assert ends == [29, 26, 24]


def test_exposed_communication_is_underlined() -> None:
    ax = timelines({"one": simulate(FOUR, "interleaved")}, height=3)
    lines = [tuple(line.get_xdata()) for line in ax.lines if line.get_label() == "exposed"]
    assert lines == [(19, 21), (22, 24)]


def test_calls_under_way_together_share_their_lane() -> None:
    found = bars(timelines({"measured": MEASURED}, height=3))
    network = [bar for label, bar in found.items() if label.startswith("network")]
    (height,) = {round(bar.get_height(), 6) for bar in network}  # three rows, in one lane and a half
    assert height == pytest.approx((1.5 * LANE - ROOM) / 3)
    for one, other in combinations(network, 2):
        apart_in_time = (
            one.get_x() + one.get_width() <= other.get_x() or other.get_x() + other.get_width() <= one.get_x()
        )
        assert apart_in_time or abs(one.get_y() - other.get_y()) >= one.get_height() - 1e-9
    assert found["compute: step 0"].get_height() == LANE - ROOM


def test_what_takes_no_time_is_not_drawn() -> None:
    found = bars(timelines({"one": simulate([BucketTimes(4, 3, 0, 1)] * 2, "interleaved")}, height=3))
    assert not [label for label in found if "step" in label]


def test_numbers_stand_in_their_bars() -> None:
    fig, ax = plots.figure(6, 6)
    plots.timeline({way: simulate(FOUR, way) for way in WAYS_OF_DDP} | {"measured": MEASURED}, ax)
    fig.draw_without_rendering()
    labels = [artist for artist in ax.texts if isinstance(artist, FittingText) and artist.get_text()]
    assert {"0", "1", "2", "3", "all"} == {label.get_text() for label in labels}
    for label in labels:
        (x0, y0), (x1, y1) = ax.transData.transform([label.box[:2], label.box[2:]])
        extent = label.get_window_extent(fig.canvas.get_renderer())
        assert x0 <= extent.x0
        assert extent.x1 <= x1
        assert min(y0, y1) <= extent.y0
        assert extent.y1 <= max(y0, y1)


@settings(max_examples=50)
@given(
    st.lists(st.builds(BucketTimes, whole_ms, whole_ms, whole_ms, whole_ms), min_size=1, max_size=6),
    st.sampled_from(WAYS_OF_DDP),
    st.booleans(),
)
def test_the_exposed_pieces_add_up_to_what_is_exposed(
    buckets: list[BucketTimes], way: str, side_stream: bool
) -> None:
    timeline = simulate(buckets, way, side_stream=side_stream)
    pieces = alone(timeline)
    assert sum(stop - start for start, stop in pieces) == timeline.exposed_ms
    assert all(start < stop for start, stop in pieces)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(pieces))


PICTURES: dict[str, Plot] = {
    "three ways": lambda ax: plots.timeline({way: simulate(FOUR, way) for way in WAYS_OF_DDP}, ax),
    "longest title": lambda ax: plots.timeline(
        {"hook_with_zero_step_interleaved": simulate([BucketTimes(400, 313, 11, 187)] * 4, "interleaved")}, ax
    ),
    "on a side stream": lambda ax: plots.timeline(
        {"GPU": simulate(FOUR, "interleaved", side_stream=True)}, ax
    ),
    "100 buckets": lambda ax: plots.timeline({"many": simulate(FOUR * 25, "interleaved")}, ax),
    "measured": lambda ax: plots.timeline({"measured": MEASURED}, ax),
    "nothing takes time": lambda ax: plots.timeline(
        {"none": simulate([BucketTimes(1, 0, 0, 0)], "plain")}, ax
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_timeline_has_the_same_bytes_every_time_and_warns_of_nothing(name: str, tmp_path: Path) -> None:
    assert_repeatable(PICTURES[name], tmp_path)


@pytest.mark.parametrize("name", PICTURES)
def test_all_text_of_a_timeline_is_inside_and_none_lies_on_another(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_readable(PICTURES[name], monkeypatch, height=5)
