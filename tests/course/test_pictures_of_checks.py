"""Checks that draw: the answer above the right one, in a notebook and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_exercises import CELLS, WRONG, case

import zero_ref_course as course
from zero_ref.lab import ranks
from zero_ref.live.svg import Drawing
from zero_ref_course import (
    Answer,
    ExerciseFailed,
    check,
    draws_a_picture,
    exercise,
    exercises,
    grade,
    picture_of,
)

DRAWN = [name for name in exercises() if draws_a_picture(name)]

TO_LOOK_AT = {
    "overlap.reduce_as_ready": "waits_at_once",
    "overlap.on_bucket": "all_at_the_end",
    "partition.adversary": "one_huge_tensor",
    "partition.even_split": "shares_rounded_up",
    "partition.largest_first": "unsorted",
    "sharded.reduce_in_order": "as_they_come",
    "stages.break_even": "in_thousands",
}
"""For each check that draws a wrong answer whose picture shows the mistake."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    ranks.shutdown()


def test_seven_checks_draw() -> None:
    assert sorted(TO_LOOK_AT) == sorted(DRAWN)


def drawn(name: str, function: Any) -> tuple[Drawing, bool]:
    """The picture of an answer, and whether what it returned looks like what is right."""
    answer = Answer(function)
    passed = True
    try:
        grade(name, answer)
    except ExerciseFailed:
        passed = False
    theirs, right, *_ = answer.shown[0 if passed else -1]
    picture = picture_of(name, answer, passed)
    assert picture is not None
    return picture, theirs == right


@pytest.mark.parametrize("name", [case(name, name) for name in DRAWN])
def test_a_right_answer_and_a_wrong_one_are_drawn_above_what_is_right(name: str) -> None:
    [wrong] = [one for one in WRONG if (one.exercise, one.name) == (name, TO_LOOK_AT[name])]
    rightly, looks_right = drawn(name, CELLS[name].define(CELLS[name].solution))
    wrongly, looks_wrong = drawn(name, wrong.function())
    for picture in (rightly, wrongly):
        assert picture.words.startswith("your")
        assert picture.svg(390).count("<rect") > 4
    if name == "partition.adversary":  # its model is to be packed badly, and a wrong one is packed well
        looks_right, looks_wrong = looks_wrong, looks_right
    assert (looks_right, looks_wrong) == (True, False)


# --------------------------------------------------------------------------------- where it is shown


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The objects that a check displays; the exercise `test.loads` draws two lists of loads."""
    exercises()
    monkeypatch.setattr(course, "_registered", dict(course._registered))
    draws = course._registered["partition.even_split"].draws

    @exercise("test.loads", draws=draws)
    def loads(answer: Answer) -> str:
        for count in (4, 6):
            theirs = answer(count)
            answer.shows(theirs, [count, count])
            if theirs != [count, count]:
                raise AssertionError("not even")
        return "even"

    shown: list[Any] = []
    monkeypatch.setattr(pytest.importorskip("IPython.display"), "display", shown.append)
    return shown


def in_a(kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=kernel) if kernel else SimpleNamespace()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)


def test_a_notebook_shows_the_first_case_of_a_right_answer(
    displayed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a("kernel", monkeypatch)
    check("test.loads", lambda count: [count, count])
    assert [one.words for one in displayed] == [
        "yours: the fullest rank owns 4, 1 × the mean; right: the fullest rank owns 4, 1 × the mean"
    ]


def test_a_notebook_shows_the_case_in_which_an_answer_is_wrong(
    displayed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a("kernel", monkeypatch)
    with pytest.raises(ExerciseFailed, match="not even"):
        check("test.loads", lambda count: [4, 4] if count == 4 else [2, 10])
    assert [one.words.partition(";")[0] for one in displayed] == [
        "yours: the fullest rank owns 10, 1.67 × the mean"
    ]


def test_an_answer_that_cannot_be_drawn_still_hears_what_is_wrong(
    displayed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a("kernel", monkeypatch)
    with pytest.raises(ExerciseFailed, match="not even"):
        check("test.loads", lambda count: "loads")
    assert displayed == []


@pytest.mark.parametrize("where", ["terminal", "IPython in a terminal"])
def test_a_terminal_shows_text_alone(
    where: str, displayed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "terminal":
        monkeypatch.delitem(sys.modules, "IPython")
    else:
        in_a(None, monkeypatch)
    check("test.loads", lambda count: [count, count])
    assert capsys.readouterr().out == "✓ test.loads: even\n"
    assert displayed == []


def test_marks_are_given_without_a_picture(displayed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    in_a("kernel", monkeypatch)
    assert grade("test.loads", lambda count: [count, count]) == "even"
    assert displayed == []
