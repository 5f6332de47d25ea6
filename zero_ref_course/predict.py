"""Predict, then run: the reader commits a number or an order, and the cell below says how far off it was.

    predict("partition.crossover")               # a box with the question; or predict(..., mine=8)
    ...                                          # the cells that find out
    reveal("partition.crossover", measured)      # compares the prediction with the run
    score("partition")                           # the points of the chapter

`reveal` also asserts that the run gives the package's own answer, or the notebook fails. On
a page of the book the box keeps what was committed in the reader's browser (book/static/predictions.js), and
the results below stay covered until then.
"""

from __future__ import annotations

import html
import json
import math
import os
from typing import Any

import ipywidgets
from IPython.display import HTML, DisplayHandle, display

from zero_ref.live.page import BUILT
from zero_ref.live.svg import element
from zero_ref_course import CHAPTERS
from zero_ref_course.predictions import Prediction, Value, prediction_named, predictions

_committed: dict[str, Value] = {}
_revealed: set[str] = set()


def predict(name: str, mine: Value | None = None) -> Box | HTML:
    """The box in which a reader commits a prediction; while the book is built, the box of its page.

    Args:
        name: of the question.
        mine: the reader's prediction, written into the cell, where a course collects it: a number, or one of
            the choices as a text. None: the box asks.
    Raises:
        ValueError: there is no such question, or `mine` is no answer to it.
    """
    one = prediction_named(name)
    if mine is not None:
        commit(name, mine)
    return HTML(_form(one)) if os.environ.get(BUILT) else Box(one)


def commit(name: str, mine: Value) -> None:
    """Keep a prediction for `reveal` until this Python ends. After `reveal` it can no longer be changed.

    Raises:
        ValueError: there is no such question, or `mine` is no answer to it.
    """
    value = prediction_named(name).value(mine)
    if name not in _revealed or name not in _committed:
        _committed[name] = value


def reveal(name: str, measured: Value) -> HTML:
    """Compare a prediction with the result of a run.

    Args:
        measured: the result of the cells above.
    Raises:
        AssertionError: `measured` is not the package's own answer.
        ValueError: there is no such question.
    """
    one = prediction_named(name)
    answer, found = one.answer(), one.value(measured)
    same = found == answer if one.choices else math.isclose(float(found), float(answer), rel_tol=1e-6)
    assert same, f"{name}: the run gives {found}, and the package's own answer is {answer}"
    _revealed.add(name)
    shown = [f"It is {one.written(answer)}."]
    if name in _committed:
        shown.append(one.compared(_committed[name]))
    return _Result(one, answer, " ".join(shown))


def score(chapter: str) -> HTML:
    """The points of a chapter's predictions, so far.

    Raises:
        ValueError: there is no such chapter, or it has no questions.
    """
    asked = predictions(chapter) if chapter in CHAPTERS else []
    if not asked:
        raise ValueError(f"there are no predictions in {chapter!r}.")
    made = [one for one in asked if one.name in _committed]
    points = sum(one.points(_committed[one.name]) for one in made)
    text = f"{points:g} of {len(asked)} points"
    if len(made) < len(asked):
        text += f", {len(asked) - len(made)} not predicted"
    names = json.dumps([one.name for one in asked])
    return _Told("prediction-score", f"Predictions of this chapter: {text}.", data_predictions=names)


# --------------------------------------------------------------------------------------------- how it looks


class Box:
    """The question as widgets: a field or a list, and a button."""

    def __init__(self, one: Prediction) -> None:
        self.one = one
        self.field: Any
        if one.choices:
            self.field = ipywidgets.Dropdown(options=one.choices, value=None, description="I say")
        else:
            self.field = ipywidgets.Text(placeholder="a number", description="I say")
        self.button = ipywidgets.Button(description="Commit")
        self.button.on_click(self._clicked)
        self._shown: DisplayHandle | None = None
        self._said()

    def _clicked(self, _: object) -> None:
        self.told = ""
        try:
            commit(self.one.name, self.field.value if self.one.choices else _number(self.field.value))
        except ValueError as error:
            self.told = str(error)
        else:
            self._said()
        if self._shown is not None:
            self._shown.update(self._text())

    def _said(self) -> None:
        said = _committed.get(self.one.name)
        self.told = "" if said is None else f"You predict {self.one.written(said)}. Run the cells below."
        self.button.disabled = self.field.disabled = said is not None

    def _text(self) -> HTML:
        return _Told("prediction-question", f"{self.one.question} {self.told}".strip())

    def _ipython_display_(self) -> None:
        self._shown = display(self._text(), display_id=True)
        unit = ipywidgets.Label(self.one.unit)
        display(ipywidgets.HBox([self.field, unit, self.button]))


def _number(text: str) -> float | str:
    """Convert a typed number, also one like 1,024; return any other text unchanged."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


class _Told(HTML):
    """A line of text with a class by which the book's page finds it."""

    def __init__(self, kind: str, text: str, **attributes: str) -> None:
        super().__init__(element("p", html.escape(text), class_=kind, **attributes))
        self.text = text

    def __repr__(self) -> str:  # where there is no HTML
        return self.text


class _Result(_Told):
    def __init__(self, one: Prediction, answer: Value, text: str) -> None:
        known = {"answer": answer, "close": one.close, "written": one.written(answer), "unit": one.unit}
        super().__init__("prediction-result", text, data_prediction=one.name, data_known=json.dumps(known))


def _form(one: Prediction) -> str:
    field = f"prediction-{one.name.replace('.', '-')}"
    if one.choices:
        options = [element("option", "choose", value="")]
        options += [element("option", html.escape(choice)) for choice in one.choices]
        control = element("select", *options, id=field)
        rule = ""
    else:
        control = f'<input id="{field}" type="text" inputmode="decimal" autocomplete="off" size="10" />'
        rule = f" Within {100 * one.close:g}% is right, within a factor of two earns half a point."
    return element(
        "section",
        element("p", "Your prediction", class_="prediction-title"),
        element("p", element("label", html.escape(one.question), for_=field), class_="prediction-question"),
        element(
            "form",
            control,
            element("span", html.escape(one.unit)),
            element("button", "Commit", type="submit"),
            element("button", "Skip: show the answer", type="button", class_="prediction-skip"),
            hidden="hidden",
        ),
        element("p", rule.strip(), class_="prediction-said", aria_live="polite"),
        class_="prediction",
        data_prediction=one.name,
    )
