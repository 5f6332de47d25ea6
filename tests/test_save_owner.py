"""One job at a time saves into a directory: a later one hears of it; a dead one's mark is taken over."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from zero_ref.state import save_owner
from zero_ref.state.save_owner import OWNER, STALE_SECONDS, Owner, become_owner
from zero_ref.state.saves import Mark, new_save, sealed


def leave_mark(directory: Path, age: float = 0.0, **changed: Any) -> Owner:
    """Another job's mark, which was renewed `age` seconds ago."""
    parent = os.getppid()
    owner = Owner.this_process()._replace(
        **{"pid": parent, "started": save_owner._started(parent), **changed}
    )
    path = directory / OWNER
    path.write_bytes(sealed(owner._asdict()))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return owner


def token_in(directory: Path) -> str:
    return Owner.read(directory / OWNER).token


ELSEWHERE: dict[str, Any] = {"host": "node7", "machine": "of another boot"}


def test_a_directory_belongs_to_the_process_for_as_long_as_anyone_holds_it(tmp_path: Path) -> None:
    hold = become_owner(tmp_path)
    again = become_owner(tmp_path)
    assert again is hold
    assert Owner.read(tmp_path / OWNER) == hold.owner
    assert (hold.owner.pid, hold.is_valid()) == (os.getpid(), True)
    del again
    gc.collect()
    assert hold.is_valid()
    del hold
    gc.collect()
    assert os.listdir(tmp_path) == [], "nothing is left behind"
    for thread in threading.enumerate():
        if thread.name == "save owner":
            thread.join(100)
            assert not thread.is_alive()


def test_the_later_job_hears_who_the_owner_is(tmp_path: Path) -> None:
    other = leave_mark(tmp_path, job="SLURM_JOB_ID=4711")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="belongs to another job") as raised:
            become_owner(tmp_path)
    said = str(raised.value)
    assert f"process {os.getppid()} on {other.host}, SLURM_JOB_ID=4711, since {other.since}" in said
    assert "pass take_over=True" in said
    assert os.listdir(tmp_path) == [OWNER], "the failed attempt leaves nothing"
    assert token_in(tmp_path) == other.token
    hold = become_owner(tmp_path, take_over=True)
    assert token_in(tmp_path) == hold.owner.token


def gone_process() -> dict[str, Any]:
    """The number and the start of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = save_owner._started(process.pid)
    process.communicate(b"\n", timeout=600)
    return {"pid": process.pid, "started": started}


STALE: dict[str, Any] = {
    "a process that has ended": gone_process,
    "a number given again": lambda: {"started": "1"},
    "this process, before": lambda: {"pid": os.getpid()},
    "elsewhere, not renewed": lambda: {**ELSEWHERE, "age": STALE_SECONDS + 60},
    "elsewhere, an earlier start of this job": lambda: {**ELSEWHERE, "job": "SLURM_JOB_ID=12", "restart": 1},
}
ALIVE: dict[str, Any] = {
    "here, though not renewed": lambda: {"age": 10 * STALE_SECONDS},
    "here, without the clock": lambda: {"started": ""},
    "elsewhere": lambda: ELSEWHERE,
    "elsewhere, renewed some time ago": lambda: {**ELSEWHERE, "age": STALE_SECONDS - 60},
    "elsewhere, the same start of this job": lambda: {**ELSEWHERE, "job": "SLURM_JOB_ID=12", "restart": 2},
    "elsewhere, another job": lambda: {**ELSEWHERE, "job": "SLURM_JOB_ID=13", "restart": 1},
    "elsewhere, the same process number": lambda: {**ELSEWHERE, "pid": os.getpid()},
}


@pytest.fixture
def second_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")


@pytest.mark.usefixtures("second_restart")
@pytest.mark.parametrize("mark", STALE.values(), ids=STALE.keys())
def test_a_stale_mark_is_taken_over(tmp_path: Path, mark: Any) -> None:
    leave_mark(tmp_path, **mark())
    hold = become_owner(tmp_path)
    assert hold.is_valid()
    assert hold.owner.job == "SLURM_JOB_ID=12"
    assert os.listdir(tmp_path) == [OWNER]


@pytest.mark.usefixtures("second_restart")
@pytest.mark.parametrize("mark", ALIVE.values(), ids=ALIVE.keys())
def test_a_mark_that_may_be_of_a_living_job_is_respected(tmp_path: Path, mark: Any) -> None:
    other = leave_mark(tmp_path, **mark())
    with pytest.raises(RuntimeError, match="belongs to another job"):
        become_owner(tmp_path)
    assert token_in(tmp_path) == other.token


def test_a_mark_that_cannot_be_read_is_respected_until_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / OWNER
    path.write_text('{"sha256": "half a ma')
    with pytest.raises(RuntimeError, match="a process that left no readable owner"):
        become_owner(tmp_path)
    then = path.stat().st_mtime - STALE_SECONDS - 60
    os.utime(path, (then, then))
    assert become_owner(tmp_path).is_valid()


@pytest.mark.parametrize("take_over", [False, True])
def test_a_file_of_the_users_own_is_left_as_it_is(tmp_path: Path, take_over: bool) -> None:
    path = tmp_path / OWNER
    path.write_text('{"owner": "Ada"}')
    os.utime(path, (0, 0))
    with pytest.raises(RuntimeError, match="is no mark of a job that saves, so it is left as it is"):
        become_owner(tmp_path, take_over)
    assert [file.name for file in tmp_path.iterdir()] == [OWNER]
    assert path.read_text() == '{"owner": "Ada"}'


def test_an_owner_that_was_taken_for_dead_hears_of_it_and_removes_nothing_of_the_next_one(
    tmp_path: Path,
) -> None:
    hold = become_owner(tmp_path)
    hold.first = 5
    other = leave_mark(tmp_path, **ELSEWHERE)
    assert not hold.is_valid()
    mine, theirs = {"token": hold.owner.token}, {"token": other.token}
    may = [hold.may_remove(Mark(n, "", 1, "", owner)) for n, owner in ((4, theirs), (5, mine), (6, theirs))]
    assert may == [True, True, False]
    with pytest.raises(RuntimeError, match=r"belongs to another job by now: process .* on node7"):
        become_owner(tmp_path)
    del hold
    gc.collect()
    assert token_in(tmp_path) == other.token, "the mark of another is not removed"


def test_an_owner_that_was_taken_for_dead_hears_of_it_when_the_next_one_has_ended_too(tmp_path: Path) -> None:
    hold = become_owner(tmp_path)
    _, mine = new_save(tmp_path, 1, hold.owner._asdict())
    hold.first = mine.number
    leave_mark(tmp_path, **ELSEWHERE)
    new_save(tmp_path, 1, {"token": "of another"})
    (tmp_path / OWNER).unlink()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="belongs to another job by now, which has saved save-00000002"
        ):
            become_owner(tmp_path)
    assert become_owner(tmp_path, take_over=True).is_valid()


def test_the_mark_is_renewed_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Event()
    utime = os.utime

    def noticed(*args: Any) -> None:
        utime(*args)
        renewed.set()

    monkeypatch.setattr(save_owner, "RENEW_SECONDS", 0.01)
    hold = become_owner(tmp_path)
    utime(tmp_path / OWNER, (0, 0))
    monkeypatch.setattr(save_owner.os, "utime", noticed)
    assert renewed.wait(60)
    assert (tmp_path / OWNER).stat().st_mtime > 10**9
    assert hold.is_valid()


def test_a_process_that_was_forked_neither_owns_nor_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = become_owner(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(save_owner.os, "getpid", lambda: -1)
        assert not hold.is_valid()
        save_owner._release(hold.path, hold.owner, threading.Event())
    assert hold.is_valid()
