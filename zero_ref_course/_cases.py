"""Parts for graders of plain functions: the form of an answer, a table of cases, the names of mistakes.

    check_cases(
        answer,
        [([6, 5, 4, 1], 2), ([4, 7], 5)],                       # the arguments of each call
        [[0, 1, 1, 0], [1, 0]],                                 # what is right
        Form(list_of(is_whole), "It must return a list: the owner of each parameter.").returned_by,
        mistakes={"Place the largest first.": in_the_given_order},
    )

A mistake is a wrong function with a name. The message gives that name if the wrong function returns in every
case what the answer returned. If none does, `otherwise` makes the message from one case alone.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from zero_ref_course import Answer, call_text, shown


class Form(NamedTuple):
    """The form that a returned value must have: `fits` tests it, `words` describe it in messages."""

    fits: Callable[[Any], bool]
    words: str

    def returned_by(self, answer: Answer, *args: Any, call: str = "") -> Any:
        """Call the answer with copies of these arguments, and return its value if that has the form.

        Args:
            call: the words for the call in messages; by default the call as code.
        """
        value = answer(*copy.deepcopy(args))
        call = call or call_text(answer.name, *args)
        assert self.fits(value), f"{call} returned {shown(value)}. {self.words}"
        return value


def check_cases(
    answer: Answer,
    cases: Iterable[tuple[Any, ...]],
    rights: Iterable[Any],
    called: Callable[..., Any],
    *,
    same: Callable[[Any, Any], bool] = operator.eq,
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
    tells: Callable[[Any, Any], bool] = lambda theirs, right: True,
    otherwise: Callable[..., str] = lambda *_: "",
    said: Callable[..., str] | None = None,
) -> None:
    """Call the answer in every case; raise, for the first wrong one, the returned value and the mistake.

    A picture shows this first wrong case, or the first case if all are right: `draws` is given the answer's
    value, the right value and the case.

    Args:
        cases: the arguments of each call.
        rights: the right value in each case.
        called: `called(answer, *case)` calls the answer; such as `Form(...).returned_by`.
        same: `same(theirs, other)`: whether the answer's value equals the right one, or that of a mistake.
        mistakes: wrong functions of a case, by the message about them.
        tells: `tells(theirs, right)`: whether a case tells mistakes apart.
        otherwise: `otherwise(theirs, right, *case)`: the message if no mistake explains all returned values.
        said: `said(theirs, right, *case)`: the beginning of the message.
    """
    of_cases = [(case, called(answer, *case), right) for case, right in zip(cases, rights, strict=True)]
    wrong = next((each for each in of_cases if not same(*each[1:])), None)
    case, theirs, should = wrong or of_cases[0]
    answer.shows(theirs, should, *case)
    if wrong is None:
        return
    call = f"{call_text(answer.name, *case)} returned {shown(theirs)}; it should be {shown(should)}."
    begin = said(theirs, should, *case) if said else call
    telling = [(each, given) for each, given, right in of_cases if tells(given, right)]
    for mistake, rule in (mistakes or {}).items():
        if telling and all(same(given, rule(*each)) for each, given in telling):
            raise AssertionError(f"{begin} {mistake}".strip())
    raise AssertionError(f"{begin} {otherwise(theirs, should, *case)}".strip())


def named(mistakes: Mapping[str, bool], otherwise: str) -> str:
    """The first of the mistakes that was made, or `otherwise`.

    >>> named({"These are elements.": 12 == 4 * 3, "One is missing.": 12 == 11}, "Count again.")
    'These are elements.'
    """
    return next((mistake for mistake, is_made in mistakes.items() if is_made), otherwise)


# ------------------------------------------------------------------------------------------------ what fits


def is_number(value: object) -> bool:
    """Whether a value is a finite number, and no bool."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python's or of another library's type, and no bool.

    >>> [is_whole(value) for value in (3, 3.0, True)]
    [True, False, False]
    """
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def list_of(fits: Callable[[Any], bool], length: int | None = None) -> Callable[[object], bool]:
    """Return a test: whether a value is a list or tuple, of this length, of elements that fit.

    >>> list_of(is_whole, 2)((1, 2)), list_of(is_whole, 2)([1, "2"])
    (True, False)
    """
    return lambda value: (
        isinstance(value, (list, tuple)) and length in (None, len(value)) and all(map(fits, value))
    )
