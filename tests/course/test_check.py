"""`check` grades any answer, whatever the answer does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import zero_ref
import zero_ref_course as course
from zero_ref.lab import ranks
from zero_ref_course import ExerciseFailed, StillTheStub, call_text, check, exercise, grade


@pytest.fixture(autouse=True)
def _graders_for_these_tests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    course.exercises()  # what a test imports first would be registered in the copy alone
    monkeypatch.setattr(course, "_registered", dict(course._registered))

    @exercise("test.double", seconds=0.3)
    def double(answer: Callable[[int], int]) -> str:
        for number in (2, 5):
            if answer(number) != 2 * number:  # not an assert: pytest adds to the message of those in tests
                raise AssertionError(f"twice {number} is {2 * number}")
        return "2 and 5 doubled"

    @exercise("test.in_place", may_return_none=True)
    def in_place(answer: Callable[[list[int]], None]) -> str:
        numbers = [1, 2]
        answer(numbers)
        assert numbers == [2, 4]
        return "doubled in place"


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    ranks.shutdown()


def failure(name: str, answer: Any) -> str:
    with pytest.raises(ExerciseFailed) as failed:
        grade(name, answer)
    return str(failed.value)


def test_a_right_answer_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    check("test.double", lambda number: 2 * number)
    assert capsys.readouterr().out == "✓ test.double: 2 and 5 doubled\n"


def test_a_wrong_answer_gets_the_graders_message_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ExerciseFailed, match=r"^twice 5 is 10$"):
        check("test.double", lambda number: number + 2)
    assert capsys.readouterr().out == ""


def test_a_value_in_place_of_the_function_is_told_apart() -> None:
    assert 'no parentheses after its name: check("test.double", double)' in failure("test.double", 4)


def test_an_unknown_exercise_lists_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no exercise 'test\.duoble'; there are .*partition\.largest_first"):
        check("test.duoble", abs)


def test_a_stub_is_not_a_wrong_answer() -> None:
    def double(number: int) -> int:
        raise NotImplementedError

    with pytest.raises(StillTheStub, match=r"^double is still the stub: write its body"):
        check("test.double", double)


def test_what_a_library_has_not_implemented_is_no_stub() -> None:
    def double(number: int) -> Any:
        return torch.nn.Module()(number)  # raised in torch, not by the reader

    assert failure("test.double", double).startswith("double(2) raised NotImplementedError")


def test_an_answer_that_raises_is_told_with_its_call_and_its_line() -> None:
    def double(number: int) -> int:
        return [0, 2, 4][number]

    message = failure("test.double", double)
    assert message.startswith("double(5) raised IndexError: list index out of range (line ")
    assert message.endswith(": return [0, 2, 4][number])")


def test_a_readers_own_assertion_is_an_exception_like_others() -> None:
    def double(number: int) -> int:
        assert number < 3, "too large"
        return 2 * number

    assert failure("test.double", double).startswith("double(5) raised AssertionError: too large")


def test_a_forgotten_return_is_named() -> None:
    assert "returned None. Does the function end in a `return`?" in failure(
        "test.double", lambda number: None
    )


def test_where_answers_work_in_place_none_is_fine() -> None:
    def double(numbers: list[int]) -> None:
        numbers[:] = [2 * number for number in numbers]

    assert grade("test.in_place", double) == "doubled in place"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="without alarms a loop is not ended")
@pytest.mark.usefixtures("impatient")
def test_an_answer_that_does_not_end_is_ended() -> None:
    def double(number: int) -> int:
        while True:
            try:
                time.sleep(3600)
            except Exception:  # what ends it is no Exception
                return 2 * number

    message = failure("test.double", double)
    assert message == "double(2) did not return within 0.3 s. Is there a loop that never ends?"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no alarms to keep")
def test_somebody_elses_alarm_goes_on() -> None:
    handler, (delay, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 5000.0)
    try:
        grade("test.double", lambda number: 2 * number)
        assert 1000 < signal.getitimer(signal.ITIMER_REAL)[0] < 5000
        assert signal.getsignal(signal.SIGALRM) == handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, delay)


def test_a_notebook_shows_the_message_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # IPython warns of one that is not that of the tests
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell.instance()
    try:
        shell.run_cell("from zero_ref_course import check")
        capsys.readouterr()
        shell.run_cell('check("test.double", lambda number: number + 2)')
        assert capsys.readouterr().out == "ExerciseFailed: twice 5 is 10\n"
    finally:
        interactiveshell.InteractiveShell.clear_instance()


def test_long_arguments_are_shortened() -> None:
    text = call_text("f", list(range(291)), torch.zeros(40, 40), world_size=1024)
    assert text.startswith("f([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...], tensor(")
    assert text.endswith("world_size=1024)")
    assert len(text) < 200
    assert "\n" not in text


def test_without_asserts_nothing_is_graded() -> None:
    script = 'from zero_ref_course import check; check("partition.adversary", lambda: [1])'
    root = str(Path(zero_ref.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-O", "-c", script],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert "run Python without -O" in done.stderr


def test_an_answer_travels_and_is_the_same_there() -> None:
    answer = course.Answer(lambda number: None)
    with pytest.raises(ExerciseFailed, match="returned None"):
        cloudpickle.loads(cloudpickle.dumps(answer))(2)


# --------------------------------------------------------------------------------------- on real ranks


@pytest.fixture
def _a_grader_on_ranks() -> None:
    @exercise("test.sum", seconds=0.5, on_ranks=True)
    def sum_of_ranks(answer: Callable[[], int]) -> str:
        sums = ranks.run(lambda: answer(dist.get_rank()), 2, timeout=600.0, backend="gloo")  # type: ignore[call-arg]
        if sums != [1, 1]:
            raise AssertionError(f"0 + 1 is 1, not {sums}")
        return "summed"


def summed(rank: int) -> int:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return int(total)


def stub(rank: int) -> int:
    raise NotImplementedError


def fails_on_rank_1(rank: int) -> int:
    return [1][rank]


def hangs_on_rank_1(rank: int) -> int:
    while rank:
        pass
    return 1


def ends_its_process(rank: int) -> int:
    import os

    os._exit(3)


@pytest.mark.ranks
@pytest.mark.usefixtures("_a_grader_on_ranks")
def test_a_right_answer_passes_on_ranks() -> None:
    assert grade("test.sum", summed) == "summed"


@pytest.mark.ranks
@pytest.mark.usefixtures("_a_grader_on_ranks")
def test_a_stub_is_known_on_a_rank() -> None:
    with pytest.raises(StillTheStub, match=r"^stub is still the stub"):
        grade("test.sum", stub)


@pytest.mark.ranks
@pytest.mark.usefixtures("_a_grader_on_ranks")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda rank: rank, r"^0 \+ 1 is 1, not \[0, 1\]$"),
        (fails_on_rank_1, r"^on rank 1: fails_on_rank_1\(1\) raised IndexError: .* \(line \d+: return"),
        (ends_its_process, r"^on real ranks:\nrank \d ended with exit code 3"),
    ],
)
def test_what_goes_wrong_on_a_rank_is_told_with_the_rank(answer: Any, message: str) -> None:
    with pytest.raises(ExerciseFailed, match=message):
        grade("test.sum", answer)


@pytest.mark.ranks
@pytest.mark.usefixtures("_a_grader_on_ranks", "impatient")
def test_an_answer_that_hangs_on_a_rank_is_ended_and_told_with_the_rank() -> None:
    with pytest.raises(ExerciseFailed, match=r"^on rank 1: hangs_on_rank_1\(1\) did not return within 0.5 s"):
        grade("test.sum", hangs_on_rank_1)
