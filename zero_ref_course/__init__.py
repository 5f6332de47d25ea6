"""The book's graders: `check("partition.largest_first", largest_first)` says what is wrong with an answer.

Each chapter has one module with the graders of its exercises; this module has the parts that all of them use.
A grader is a function that takes the reader's function, calls it, asserts, and returns the line to print:

    @exercise("partition.largest_first")
    def largest_first(answer: Callable[..., Any]) -> str:
        owners = answer([6, 5, 4, 1], 2)
        assert owners == [0, 1, 1, 0], "..."
        return "3 models on 1 to 1,024 ranks"

The grader is given an `Answer`, so it need not care for functions that raise, hang or return nothing. It may
send the `Answer` to ranks: `on_ranks` of `_company` has real ones, where a `Company` raises if ranks would
wait for each other, and `on_virtual_ranks` has threads of one process.

An exercise registered with `draws=` has a picture: the grader hands the answer's value and the right one to
`answer.shows`, and in a notebook `check` draws both.

`notebook.check_notebook` grades a whole notebook file, `grading.grade_class` the notebooks of a class. Both
check each answer in a process of its own.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from zero_ref.lab._rank_error import RankError
from zero_ref.lab.patience import patience
from zero_ref.live.svg import Drawing

__all__ = ["check", "exercise", "exercises", "Answer", "ExerciseFailed", "StillTheStub"]

CHAPTERS = (
    "ledger",
    "collectives",
    "partition",
    "step",
    "buckets",
    "overlap",
    "sharded",
    "stages",
    "which_stage",
    "checkpoint",
    "clipping",
    "precision",
    "matrices",
    "groups",
    "museum",
    "scale",
)
"""The modules with graders, in the order of the chapters. A new chapter adds its name."""

APPENDICES = ("local_sgd", "rpc", "join")
"""Notebooks of a page, without exercises, after the chapters."""


class _Short:
    """An exception that a notebook shows without the traceback; its message quotes the reader's own line."""

    def _render_traceback_(self) -> list[str]:  # what IPython asks an exception for
        return [f"{type(self).__name__}: {self}"]


class ExerciseFailed(_Short, AssertionError):
    """The answer is wrong; the message says why, in the exercise's own terms."""


class StillTheStub(_Short, NotImplementedError):
    """There is no answer yet."""


# ------------------------------------------------------------------------------------------- for readers


def check(name: str, answer: Callable[..., Any], seed: int = 0) -> None:
    """Grade an answer and print how it went; silence never means success.

    In a notebook some checks also draw the answer beside the right one, whether it passes or not.

    >>> def largest_first(numels, world_size):
    ...     return [0 for _ in numels]
    >>> check("partition.largest_first", largest_first)                                 # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zero_ref_course.ExerciseFailed: largest_first([...

    Args:
        name: of the exercise, chapter first: one of `exercises()`.
        answer: the function itself, not a value that it returned.
        seed: of further cases that are drawn from it; 0 for none.
    Raises:
        ExerciseFailed: the answer is wrong, raises or does not end; says which call showed it.
        StillTheStub: the function still raises NotImplementedError.
        ValueError: there is no such exercise.
    """
    __tracebackhide__ = True
    given = Answer(answer) if callable(answer) and not isinstance(answer, Answer) else answer
    try:
        line = grade(name, given, seed)
    except ExerciseFailed:
        _show_in_notebook(name, given, passed=False)
        raise
    print(f"✓ {name}: {line}")
    _show_in_notebook(name, given, passed=True)


def picture_of(name: str, answer: object, passed: bool) -> Drawing | None:
    """The picture of a graded answer beside the right one; None where there is nothing to draw.

    Args:
        answer: an `Answer`, after `grade`.
        passed: the answer was right: the picture has the first case. Otherwise it has the case that failed.
    """
    draws = _exercise_named(name).draws
    if draws is None or not isinstance(answer, Answer) or not answer.shown:
        return None
    return draws(*answer.shown[0 if passed else -1])


def _show_in_notebook(name: str, answer: object, passed: bool) -> None:
    """Display the picture of an answer under the cell; in a terminal, do nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:
        return
    with contextlib.suppress(Exception):  # an answer too odd to draw still hears what is wrong with it
        if (picture := picture_of(name, answer, passed)) is not None:
            from IPython.display import display

            display(picture)


def exercises() -> list[str]:
    """The names of all exercises, chapter by chapter."""
    for chapter in CHAPTERS:
        import_module(f"{__name__}.{chapter}")
    return list(_registered)


def function_of(name: str) -> str:
    """Return the name of the function that an exercise in `exercises()` asks for.

    >>> function_of("partition.even_split"), function_of("step.step_in_slices")
    ('even_split', 'step')
    """
    return _exercise_named(name).function


def draws_a_picture(name: str) -> bool:
    """Whether the check of an exercise in `exercises()` draws the answer beside the right one."""
    return _registered[name].draws is not None


def starts_ranks(name: str) -> bool:
    """Whether the grader of an exercise in `exercises()` starts processes."""
    return _registered[name].on_ranks


# ------------------------------------------------------------------------------------------- for graders


T = TypeVar("T")
Grader = TypeVar("Grader", bound=Callable[[Any], str])


class _Exercise(NamedTuple):
    grader: Callable[[Any], str]
    seconds: float
    may_return_none: bool
    on_ranks: bool
    function: str
    draws: Callable[..., Drawing] | None


_registered: dict[str, _Exercise] = {}


def exercise(
    name: str,
    *,
    seconds: float = 5.0,
    may_return_none: bool = False,
    on_ranks: bool = False,
    function: str = "",
    draws: Callable[..., Drawing] | None = None,
) -> Callable[[Grader], Grader]:
    """Register a grader. It is given an `Answer`, asserts, and returns the line that is printed on success.

    Args:
        name: chapter and exercise, "partition.largest_first". The notebook's cells are then
            `largest-first-stub`, `largest-first-check` and `largest-first-solution`.
        seconds: that one call of the answer may take, times `patience()`.
        may_return_none: the answer works in place, so None is not a forgotten `return`.
        on_ranks: the grader starts real ranks; its tests then run one after another.
        function: the name of the reader's function, where it differs from the exercise's.
        draws: makes a picture from the arguments of `Answer.shows`; a function of `_pictures`.
    """

    def register(grader: Grader) -> Grader:
        called = function or name.partition(".")[2]
        _registered[name] = _Exercise(grader, seconds, may_return_none, on_ranks, called, draws)
        return grader

    return register


class Answer:
    """A reader's function, which a grader can call: any error in it becomes an `ExerciseFailed`.

    The message gives the arguments of the call. An `Answer` can be sent to ranks, where it does the same.

    Args:
        function: the reader's function.
        seconds, may_return_none: as in `exercise`.

    Attributes:
        function: the bare function.
        name: the reader's name of the function.
        seed: 0 for the cases that everybody can read in the grader; any other adds cases drawn from it, which
            decide over marks. See `drawn`.
        shown: the arguments of the first and of the last call of `shows`.
    """

    seed = 0

    def __init__(
        self, function: Callable[..., Any], seconds: float = 5.0, may_return_none: bool = False
    ) -> None:
        self.function = function
        self.seconds = seconds
        self.may_return_none = may_return_none
        self.shown: list[tuple[Any, ...]] = []
        self.name: str = getattr(function, "__name__", type(function).__name__)

    def limited(self, seconds: float, may_return_none: bool, seed: int) -> Answer:
        """Return this answer with the limits of an exercise."""
        limited = Answer(self.function, seconds, may_return_none)
        limited.seed, limited.shown = seed, self.shown
        return limited

    def shows(self, *what: Any) -> None:
        """Keep the values for a picture of this answer, in the case that the grader is about to judge."""
        self.shown[1:] = [what]

    def drawn(self, case: Callable[[random.Random], T], count: int = 8) -> list[T]:
        """Cases that nobody knows beforehand: none for seed 0, else `count`, drawn from the seed."""
        return [case(random.Random(f"{self.seed} {number}")) for number in range(count if self.seed else 0)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        seconds = self.seconds * patience()
        call = call_text(self.name, *args, **kwargs)  # before the call: it may change its arguments
        try:
            with _time_limit(seconds):
                value = self.function(*args, **kwargs)
        except _TooLong:
            raise ExerciseFailed(
                f"{call} did not return within {seconds:g} s. Is there a loop that never ends?"
            ) from None
        except NotImplementedError as error:
            if self._raised_itself(error.__traceback__):
                raise StillTheStub(
                    f"{self.name} is still the stub: write its body, run its cell, then check again."
                ) from None
            raise ExerciseFailed(self._what_it_raised(call, error)) from None
        except (ExerciseFailed, RankError):
            raise  # the grader is inside: it gave the answer a function of its own to call
        except Exception as error:
            raise ExerciseFailed(self._what_it_raised(call, error)) from None
        if value is None and not self.may_return_none:
            raise ExerciseFailed(f"{call} returned None. Does the function end in a `return`?")
        return value

    def _what_it_raised(self, call: str, error: Exception) -> str:
        text = f"{call} raised {type(error).__name__}" + (f": {error}" if str(error) else "")
        line = 0
        for frame in _frames(error.__traceback__):
            if frame.tb_frame.f_code.co_filename == self._filename:
                line = frame.tb_lineno
        source = linecache.getline(self._filename, line).strip()
        return f"{text} (line {line}: {source})" if source else text

    def _raised_itself(self, trace: TracebackType | None) -> bool:
        """Whether the answer itself raised, not a library that it called: torch has the same exception."""
        return [frame.tb_frame.f_code.co_filename for frame in _frames(trace)][-1] == self._filename

    @property
    def _filename(self) -> str:
        code = getattr(self.function, "__code__", None)
        return code.co_filename if code else ""


def grade(name: str, answer: object, seed: int = 0) -> str:
    """Grade an answer like `check`, but return the line instead of printing it.

    Args:
        answer: a function, or an `Answer`.
        seed: of hidden cases; 0 for none.
    """
    __tracebackhide__ = True
    if not __debug__:
        raise RuntimeError("graders use assert, which `python -O` leaves out: run Python without -O.")
    found = _exercise_named(name)
    if not callable(answer):
        raise ExerciseFailed(
            f"check was given {shown(answer)}. It takes the function itself, with no parentheses "
            f'after its name: check("{name}", {found.function}).'
        )
    given = answer if isinstance(answer, Answer) else Answer(answer)
    try:
        return found.grader(given.limited(found.seconds, found.may_return_none, seed))
    except RankError as error:
        raise _failure_on_a_rank(error) from None
    # With no frames: a plain script's traceback is short too.
    except StillTheStub as failure:
        raise StillTheStub(str(failure)) from None
    except AssertionError as failure:
        raise ExerciseFailed(str(failure)) from None


def _exercise_named(name: str) -> _Exercise:
    chapter = name.partition(".")[0]
    if chapter in CHAPTERS:
        import_module(f"{__name__}.{chapter}")
    if name not in _registered:
        raise ValueError(f"there is no exercise {name!r}; there are {', '.join(exercises())}.")
    return _registered[name]


def call_text(name: str, *args: object, **kwargs: object) -> str:
    """A call as code, its long arguments shortened.

    >>> call_text("largest_first", [6, 5, 4, 1], world_size=2)
    'largest_first([6, 5, 4, 1], world_size=2)'
    """
    words = [shown(value) for value in args]
    words += [f"{key}={shown(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(words)})"


@contextlib.contextmanager
def in_words(words: str, answer: Answer, *args: object) -> Iterator[None]:
    """A context for a call whose arguments would fill a page: messages describe them in these words."""
    call = call_text(answer.name, *args)  # before the call: it may change its arguments
    try:
        yield
    except ExerciseFailed as failure:
        raise type(failure)(str(failure).replace(call, f"{answer.name}({words})")) from None


def shown(value: object) -> str:
    """A value on one line of a message, shortened.

    >>> shown(list(range(1000)))
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]'
    """
    return " ".join(_shorten.repr(value).split())


# ------------------------------------------------------------------------------------------- small parts

_shorten = reprlib.Repr()  # takes no arguments before Python 3.12
_shorten.maxlist = _shorten.maxtuple = 12
_shorten.maxstring = _shorten.maxother = 80


class _TooLong(BaseException):
    """The time is up. Not an Exception, so that an answer's own `except Exception` does not catch it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the body after so many seconds.

    It uses a signal, which only a main thread receives and Windows does not have. Without the signal, an
    endless loop goes on until the notebook's stop button, or until `check_notebook` ends the whole process.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _TooLong

    began = time.monotonic()
    handler_before = signal.signal(signal.SIGALRM, ring)
    delay_before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before)
        if delay_before:  # somebody else's alarm, such as pytest's: let it go on
            signal.setitimer(signal.ITIMER_REAL, max(0.001, delay_before - (time.monotonic() - began)))


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace:
        yield trace
        trace = trace.tb_next


def _failure_on_a_rank(error: RankError) -> ExerciseFailed | StillTheStub:
    cause = error.__cause__
    if isinstance(cause, StillTheStub):
        return StillTheStub(str(cause))
    if isinstance(cause, AssertionError):  # the grader's, or what Answer made of the reader's exception
        return ExerciseFailed(f"on rank {error.rank}: {cause}")
    return ExerciseFailed(f"on real ranks:\n{error}")
