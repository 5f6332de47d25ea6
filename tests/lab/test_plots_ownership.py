"""The ownership map: what each worker holds, and what crosses between them, in order."""

from __future__ import annotations

import pytest
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle

from zero_ref.lab.plots import Crossing, ownership
from zero_ref.live.palette import PART_COLOURS

HELD = [["layer 0", "layer 3"], ["layer 1"], []]
CROSSINGS = [
    Crossing("forward", 0, 1, "activations"),
    Crossing("forward", 1, 0, "outputs"),
    Crossing("backward", 0, 1, "gradient of the outputs"),
    Crossing("step", 0, 2, "the order to step", tensors=0),
]


def three(ax: Axes) -> Axes:
    return ownership(HELD, CROSSINGS, ax)


def arrows(ax: Axes) -> list[FancyArrowPatch]:
    return [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]


PICTURES: dict[str, Plot] = {"ownership": three}


def test_each_parameter_has_its_gradient_and_state_on_its_own_worker() -> None:
    for worker, names in enumerate(HELD):
        squares = [p for p in drawn(three).patches if str(p.get_label()).endswith(f", worker {worker}")]
        assert len(squares) == len(PART_COLOURS) * len(names)
        for name in names:
            of_name = [p for p in squares if str(p.get_label()).startswith(name)]
            colours = {to_hex(p.get_facecolor()).upper() for p in of_name}
            assert colours == set(PART_COLOURS.values())
            for square in of_name:
                assert isinstance(square, Rectangle)
                assert worker - 0.5 < square.get_x() < worker + 0.5


def test_arrows_go_from_sender_to_receiver_one_below_the_other() -> None:
    ends = [arrow._posA_posB for arrow in arrows(drawn(three))]  # type: ignore[attr-defined]
    assert [(start[0], stop[0]) for start, stop in ends] == [(c.sender, c.receiver) for c in CROSSINGS]
    heights = [start[1] for start, _ in ends]
    assert heights == sorted(set(heights))


def test_a_phase_is_named_where_it_begins() -> None:
    labels = [label.get_text() for label in drawn(three).get_yticklabels()]
    assert labels == ["forward", "backward", "step"]
    assert {crossing.what for crossing in CROSSINGS} <= set(written(drawn(three)))


@pytest.mark.parametrize("held", [[], [["a"]] * 9])
def test_no_workers_and_too_many_are_refused(held: list[list[str]]) -> None:
    with pytest.raises(ValueError, match=f"{len(held)} workers do not fit"):
        drawn(lambda ax: ownership(held, [], ax))


@pytest.mark.parametrize(("sender", "receiver"), [(0, 0), (0, 3), (-1, 0)])
def test_a_crossing_is_between_two_workers(sender: int, receiver: int) -> None:
    crossing = Crossing("forward", sender, receiver, "activations")
    with pytest.raises(ValueError, match=f"from worker {sender} to worker {receiver}: .*0 to 2"):
        drawn(lambda ax: ownership(HELD, [crossing], ax))
