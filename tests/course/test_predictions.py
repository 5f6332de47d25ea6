"""Predictions: what a reader commits, what it earns, and that nothing above a box gives its answer away."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zero_ref.live import page
from zero_ref_course import predict as boxes
from zero_ref_course.editions import chapters_in
from zero_ref_course.predict import predict, reveal, score
from zero_ref_course.predictions import (
    Prediction,
    prediction_named,
    predictions,
)

CHAPTERS = chapters_in(Path(__file__).parents[2] / "notebooks")


@pytest.fixture(autouse=True)
def _nothing_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "_committed", {})
    monkeypatch.setattr(boxes, "_revealed", set())
    monkeypatch.delenv(page.BUILT, raising=False)


def right(name: str = "partition.even") -> float:
    answer = prediction_named(name).answer()
    assert isinstance(answer, float)
    return answer


# ------------------------------------------------------------------------------------------------- points


@pytest.mark.parametrize(
    ("said", "points"), [(100, 1), (110, 1), (90, 1), (111, 0.5), (50, 0.5), (200, 0.5), (49, 0), (-100, 0)]
)
def test_a_number_that_is_near_enough_earns_points(said: float, points: float) -> None:
    assert Prediction("a.b", "How many?", "", (), 0.1, lambda: 100.0).points(said) == points


def test_where_the_answer_is_zero_or_a_choice_nothing_but_it_is_right() -> None:
    none = Prediction("a.b", "How many?", "", (), 0.1, lambda: 0.0)
    assert [none.points(said) for said in (0.0, 1e-9)] == [1, 0]
    assert none.compared(2.0) == "You predicted 2: too high. No point."
    first = Prediction("a.b", "Which?", "", ("x", "y"), 0.1, lambda: "x")
    assert [first.points(said) for said in ("x", "y")] == [1, 0]
    assert first.compared("y") == "You predicted y: not so. No point."


# -------------------------------------------------------------------------------------------- in a notebook


def test_what_was_committed_is_held_against_the_run() -> None:
    predict("partition.even", mine=50)
    assert repr(reveal("partition.even", right())) == (
        "It is 62.74 MB. You predicted 50 MB: 20% too low. Half a point."
    )
    assert repr(score("partition")).startswith("Predictions of this chapter: 0.5 of ")


def test_after_the_answer_the_first_prediction_stays() -> None:
    predict("partition.even", mine=50)
    reveal("partition.even", right())
    predict("partition.even", mine=right())
    assert "50 MB" in repr(reveal("partition.even", right()))


def test_a_run_that_gives_something_else_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"partition.even: the run gives 63.0, and .* answer is 62.7"):
        reveal("partition.even", 63.0)


@pytest.mark.parametrize(
    ("name", "mine", "message"),
    [
        ("partition.even", "many", "'many' is no number"),
        ("partition.even", float("nan"), "nan is no number"),
        ("partition.even", True, "True is no number"),
        ("partition.may_cut", 15, "15 is none of the answers to partition.may_cut: Adam alone, "),
        ("partition.evn", 1, r"there is no prediction 'partition.evn'; there are .*partition.even"),
    ],
)
def test_what_is_no_answer_is_named(name: str, mine: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(name, mine=mine)


def test_the_box_in_a_notebook_commits_what_is_typed_and_then_is_closed() -> None:
    box = predict("partition.even")
    assert isinstance(box, boxes.Box)
    box.field.value = "1,000"
    box.button.click()
    assert box.told == "You predict 1,000 MB. Run the cells below."
    assert box.field.disabled
    assert "You predicted 1,000 MB" in repr(reveal("partition.even", right()))


def test_the_box_says_what_it_cannot_take() -> None:
    box = predict("partition.even")
    assert isinstance(box, boxes.Box)
    box.field.value = "a lot"
    box.button.click()
    assert box.told == "'a lot' is no number. partition.even asks for one, in MB."
    assert not box.field.disabled


def test_a_page_of_the_book_gets_a_form_that_has_no_answer_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(page.BUILT, "1")
    form = predict("partition.even")
    assert 'data-prediction="partition.even"' in str(form.data)
    assert "62.7" not in str(form.data)


# --------------------------------------------------------------------------------------------- in the book


def boxes_of(path: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """A chapter's cells, and at which of them each prediction is asked."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = {}
    for number, cell in enumerate(cells):
        for name in re.findall(r'^predict\("([\w.]+)"\)$', "".join(cell["source"]), re.MULTILINE):
            found[name] = number
    return cells, found


def forms(value: float | str) -> list[str]:
    """Return the forms of an answer in text or code: 4.187 also as 4.19 and 4.2, 1234 as 1,234 and 1_234."""
    if isinstance(value, str):
        return []
    found = {f"{value:{mark}.{places}f}" for places in range(4) for mark in ("", ",", "_")} | {f"{value:.3g}"}
    return sorted(one for one in found if len(re.sub(r"\D", "", one).strip("0")) >= 2)


def given_away(value: float | str, above: str) -> list[str]:
    """The forms of an answer that stand as a number of their own in what is above its box."""
    return [one for one in forms(value) if re.search(rf"(?<![\d.,]){re.escape(one)}(?![\d]|[.,]\d)", above)]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_each_prediction_is_asked_once_before_it_is_revealed_and_not_given_away(path: Path) -> None:
    cells, asked = boxes_of(path)
    sources = ["".join(cell["source"]) for cell in cells]
    chapter = path.stem.partition("_")[2]
    assert list(asked) == [one.name for one in predictions(chapter)]
    for name, number in asked.items():
        revealed = [place for place, source in enumerate(sources) if f'reveal("{name}", ' in source]
        assert len(revealed) == 1, name
        assert revealed[0] > number, name
        above = "\n".join(sources[:number])
        assert not given_away(prediction_named(name).answer(), above), name
    scores = [place for place, source in enumerate(sources) if source == f'score("{chapter}")']
    assert len(scores) == bool(asked)
