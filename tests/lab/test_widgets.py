from __future__ import annotations

import ipywidgets
import pytest
from IPython.display import HTML

from zero_ref.lab import widgets
from zero_ref.lab.widgets import Exploration
from zero_ref.live import EXPLORERS, page
from zero_ref.live.explorer import Value
from zero_ref.live.page import html


def explore(name: str, **values: Value) -> Exploration:
    exploration = widgets.explore(name, **values)
    assert isinstance(exploration, Exploration)
    return exploration


@pytest.fixture(autouse=True)
def _in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(page.BUILT, raising=False)


class Handle:
    def __init__(self) -> None:
        self.updates: list[str] = []

    def update(self, shown: object) -> None:
        self.updates.append(str(getattr(shown, "data", shown)))


class Screen:
    """The objects that a cell displays."""

    def __init__(self) -> None:
        self.displayed: list[object] = []
        self.handles: list[Handle] = []

    def display(self, what: object, display_id: bool = False) -> Handle | None:
        self.displayed.append(
            what if isinstance(what, ipywidgets.Widget) else str(getattr(what, "data", what))
        )
        if display_id:
            self.handles.append(Handle())
        return self.handles[-1] if display_id else None


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr(widgets, "display", screen.display)
    return screen


def shown(exploration: Exploration) -> str:
    return f"{exploration.answer.svg}<p>{exploration.answer.words}</p>"


@pytest.mark.parametrize("name", EXPLORERS)
def test_a_widget_for_each_control_with_all_its_options(name: str) -> None:
    exploration = explore(name)
    assert list(exploration.widget.children) == list(exploration.controls.values())
    assert exploration.values == EXPLORERS[name].values
    for control in EXPLORERS[name].controls:
        widget = exploration.controls[control.name]
        assert widget.description == control.label
        if control.kind == "tick":
            assert isinstance(widget, ipywidgets.Checkbox)
        else:
            assert [value for _, value in widget.options] == list(control.options)
        if control.kind == "slider":
            assert not widget.continuous_update, "a slider draws when it is let go"


def test_the_picture_is_an_output_of_its_own_that_each_change_replaces(screen: Screen) -> None:
    exploration = explore("partition", model="mlp-tiny", ranks=4)
    before = shown(exploration)
    for _ in range(2):  # in two cells
        exploration._ipython_display_()
    assert screen.displayed == [exploration.widget, before] * 2
    exploration.controls["ranks"].value = 8
    assert exploration.answer == EXPLORERS["partition"].answer(model="mlp-tiny", ranks=8)
    assert [handle.updates for handle in screen.handles] == [[shown(exploration)]] * 2
    assert shown(exploration) != before


def test_controls_without_effect_are_greyed_out_and_say_why() -> None:
    exploration = explore("overlap", model="mlp-tiny", ranks=4)
    for strategy, without_effect in {
        "zero-even": [],
        "zero-2": ["bucket_mb"],
        "zero-3": ["way", "bucket_mb"],
        "ddp": ["way"],
    }.items():
        exploration.controls["strategy"].value = strategy
        greyed = [name for name, control in exploration.controls.items() if control.disabled]
        assert greyed == without_effect, strategy
        for name, control in exploration.controls.items():
            assert control.tooltip == exploration.answer.idle.get(name)


def test_while_the_book_is_built_a_cell_gives_the_piece_of_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(page.BUILT, "1")
    # No widget is made: its state alone would have the page load a manager of widgets that nobody sees.
    monkeypatch.setattr(widgets, "Exploration", None)
    piece = widgets.explore("memory", model="gpt2")
    assert isinstance(piece, HTML)
    assert piece.data == html("memory", model="gpt2")
    assert 'data-values="{&quot;model&quot;: &quot;gpt2&quot;}"' in str(piece.data)


def test_what_cannot_be_explored_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown explorer 'memories'; choose one of memory, ring, "):
        explore("memories")
    with pytest.raises(ValueError, match="memory has no control 'rank'; it has model, ranks, stage, "):
        explore("memory", rank=4)
    with pytest.raises(ValueError, match=r"ranks must be one of 1, 2, 3, 4, .*; got 1025"):
        explore("memory", ranks=1025)
