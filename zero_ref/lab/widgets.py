"""Explorers in a notebook that has a kernel: the controls of `zero_ref.live` as widgets.

>>> explorer = explore("partition", model="gpt2", ranks=8)
>>> explorer.controls["ranks"].value = 64                  # what a reader does with the slider
>>> explorer.answer.numbers["sorted_greedy, fullest, elements"]
38597376

As the last line of a cell `explore(...)` shows the controls and, as an output of its own, the picture; each
change of a control draws the picture anew. The picture is an ordinary output, so it stays in the notebook
when it is saved and in what nbconvert makes of it, and shows there what it showed last.

A page of the book has no kernel. When the book is built, the same cell gives the piece of page that runs in
the reader's browser (`zero_ref.live.page`).
"""

from __future__ import annotations

import os
from typing import Any

import ipywidgets
from IPython.display import HTML, DisplayHandle, display

from zero_ref.live import explorer as explorer_named, page
from zero_ref.live.explorer import Control, Explorer, Value


def explore(name: str, **values: Value) -> Exploration | HTML:
    """An explorer by its name, at these values; while the book is built, its piece of page.

    Args:
        name: of `zero_ref.live.EXPLORERS`.
        values: where its controls stand at first, by name; the others stand where the explorer has them.
    Raises:
        ValueError: there is no such explorer, control or option.
    """
    if os.environ.get(page.BUILT):
        return HTML(page.html(name, **values))
    return Exploration(explorer_named(name), values)


class Exploration:
    """An explorer with its controls as widgets, and the answer to their values.

    Args:
        explorer: the explorer that answers.
        values: the first values of the controls.
    """

    def __init__(self, explorer: Explorer, values: dict[str, Value]) -> None:
        self.explorer = explorer
        self.answer = explorer.answer(**values)  # which refuses what there is not
        start = {**explorer.values, **values}
        self.controls = {one.name: _widget(one, start[one.name]) for one in explorer.controls}
        self.widget = ipywidgets.VBox(list(self.controls.values()))
        self._shown: list[DisplayHandle] = []
        self._idle()
        for control in self.controls.values():
            control.observe(self._changed, names="value")

    @property
    def values(self) -> dict[str, Value]:
        """Return the current value of each control."""
        return {name: control.value for name, control in self.controls.items()}

    def _changed(self, change: object) -> None:
        self.answer = self.explorer.answer(**self.values)
        self._idle()
        for shown in self._shown:
            shown.update(self._picture())

    def _idle(self) -> None:
        for name, control in self.controls.items():
            control.disabled = name in self.answer.idle
            control.tooltip = self.answer.idle.get(name)  # why it is greyed

    def _picture(self) -> HTML:
        return HTML(f"{self.answer.svg}<p>{self.answer.words}</p>")

    def _ipython_display_(self) -> None:
        # Two outputs. Inside the widget the picture would be lost where there is no kernel.
        display(self.widget)
        shown = display(self._picture(), display_id=True)
        if shown is not None:  # outside of IPython nothing can be drawn anew
            self._shown.append(shown)


_LOOK: dict[str, Any] = {"style": {"description_width": "15em"}, "layout": {"width": "36em"}}


def _widget(control: Control, value: Value) -> Any:
    if control.kind == "tick":
        return ipywidgets.Checkbox(value=value, description=control.label, indent=True, **_LOOK)
    options = [(control.written(one), one) for one in control.options]
    if control.kind == "choice":
        return ipywidgets.Dropdown(options=options, value=value, description=control.label, **_LOOK)
    # A slider that is dragged draws once, when it is let go: pictures do not queue up behind the hand.
    return ipywidgets.SelectionSlider(
        options=options, value=value, description=control.label, continuous_update=False, **_LOOK
    )
