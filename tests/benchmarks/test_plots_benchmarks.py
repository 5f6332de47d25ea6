"""The picture of paired ratios: dots where they were measured; outcomes told apart without colour."""

from __future__ import annotations

import pytest
from library.pictures import Plot, assert_readable, drawn, written
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.plots import benchmarks
from benchmarks.results import Spread
from zero_ref.lab import plots

RATIOS = {
    "torch": Spread(2.3, 2.2, 2.6),
    "limit: exchange of shares": Spread(0.5, 0.48, 0.55),
    "torch, best": Spread(1.01, 0.96, 1.04),
    "fairscale, fused": Spread(0.85, 0.83, 0.9),
    "limit: both, one after the other": Spread(0.84, 0.8, 0.88),
    "fairscale": Spread(14.0, 12.5, 15.0),
}


def mixed(ax: Axes) -> Axes:
    return benchmarks(RATIOS, ax, ours="zero_ref, best")


def line(ax: Axes, label: str) -> Line2D:
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return found


def test_dots_are_the_medians_and_bars_the_quartiles_peers_first():
    ax = drawn(mixed)
    rows = [text.get_text() for text in ax.get_yticklabels()]
    peers = ["torch", "torch, best", "fairscale, fused", "fairscale"]
    assert rows == [*peers, "exchange of shares", "both, one after the other"]
    for name, ratio in RATIOS.items():
        place = rows.index(name.removeprefix("limit: "))
        assert line(ax, name).get_xydata().tolist() == [[ratio.median, place]]
        assert line(ax, f"quartiles: {name}").get_xydata().tolist() == [
            [ratio.low, place],
            [ratio.high, place],
        ]
    assert {"2.3 ×", "0.85 ×", "14 ×"} <= set(written(ax))


def test_outcomes_have_marks_of_their_own_and_the_title_counts_them():
    ax = drawn(mixed)
    marks = {name: line(ax, name).get_marker() for name in RATIOS}
    assert marks["torch"] == marks["fairscale"]
    assert marks["limit: exchange of shares"] == marks["limit: both, one after the other"]
    assert len(set(marks.values())) == 4
    assert ax.get_title("left") == "Faster than 2 of 4 peers"


@pytest.mark.parametrize("ratios", [{}, {"torch": Spread(1.0, 0.0, 1.0)}])
def test_what_has_no_logarithm_is_refused(ratios: dict[str, Spread]) -> None:
    with pytest.raises(ValueError, match="give one or more, all above 0"):
        benchmarks(ratios, plots.figure()[1], ours="ours")


# -------------------------------------------------------------------------------------------- all pictures

PICTURES: dict[str, Plot] = {
    "mixed": mixed,
    "one": lambda ax: benchmarks({"torch": Spread(1.0, 1.0, 1.0)}, ax, ours="zero_ref, to owners"),
    "far": lambda ax: benchmarks(
        {"torch": Spread(105.0, 99.0, 120.0), "limit: copy": Spread(0.01, 0.01, 0.02)}, ax, ours="zero_ref"
    ),
    "titled": lambda ax: benchmarks(RATIOS, ax, ours="zero_ref, best", title="step, gpt, 2 ranks"),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("height", [3.2, 4.2])
def test_all_text_is_inside_the_picture_none_lies_on_another_and_nothing_warns(
    name: str, height: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_readable(PICTURES[name], monkeypatch, height=height)
