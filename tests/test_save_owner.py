"""One job at a time saves into a directory: a living owner is named, and a dead one's mark becomes stale."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_ref.state import save_owner
from zero_ref.state.save_owner import OWNER, RENEW_SECONDS, STALE_SECONDS, Owner, become_owner
from zero_ref.state.saves import Mark, new_save, sealed


def leave_mark(directory: Path, age: float = 0.0, **changed: Any) -> Owner:
    """Another job's mark, which was renewed `age` seconds ago."""
    owner = Owner.this_process()._replace(**{"host": "node7", **changed})
    path = directory / OWNER
    path.write_bytes(sealed(owner._asdict()))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return owner


def token_in(directory: Path) -> str:
    return Owner.read(directory / OWNER).token


class Clock:
    """The file system's clock: it goes on only while a job waits, and calls `at_wait` then."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.at_wait: Callable[[int], object] = lambda number: None

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.at_wait(len(self.waits))

    def time_at(self, probe: Path) -> float:
        return probe.stat().st_mtime + sum(self.waits)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(save_owner, "sleep", clock.sleep)
    monkeypatch.setattr(save_owner, "time_at", clock.time_at)
    return clock


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


def renew(path: Path) -> None:
    later = path.stat().st_mtime + RENEW_SECONDS
    os.utime(path, (later, later))


@pytest.mark.filterwarnings("ignore:.* this save waits")
@pytest.mark.parametrize("renewed_after", [1, 2, 29])
def test_the_later_job_hears_who_the_owner_is(tmp_path: Path, clock: Clock, renewed_after: int) -> None:
    other = leave_mark(tmp_path, job="SLURM_JOB_ID=4711")
    clock.at_wait = lambda number: number == renewed_after and renew(tmp_path / OWNER)
    with pytest.raises(RuntimeError, match="belongs to another job, which is alive") as raised:
        become_owner(tmp_path)
    assert clock.waits == [RENEW_SECONDS] * renewed_after
    said = str(raised.value)
    assert f"process {os.getpid()} on node7, SLURM_JOB_ID=4711, since {other.since}" in said
    assert "pass take_over=True" in said
    assert os.listdir(tmp_path) == [OWNER], "the failed attempt leaves nothing"
    assert token_in(tmp_path) == other.token
    hold = become_owner(tmp_path, take_over=True)
    assert token_in(tmp_path) == hold.owner.token


AGES = [0.0, 100.0, STALE_SECONDS - 1, STALE_SECONDS + 1]


@pytest.mark.filterwarnings("ignore:.* this save waits")
@pytest.mark.parametrize("age", AGES)
def test_a_mark_is_taken_over_when_it_is_stale_and_not_before(
    tmp_path: Path, clock: Clock, age: float
) -> None:
    other = leave_mark(tmp_path, age)
    clock.at_wait = lambda _: seen.append(token_in(tmp_path))
    seen: list[str] = []
    hold = become_owner(tmp_path)
    assert hold.is_valid()
    assert os.listdir(tmp_path) == [OWNER]
    assert 0 <= age + sum(clock.waits) - STALE_SECONDS <= RENEW_SECONDS
    assert set(seen) <= {other.token}, "as long as the job waits, the mark is the other's"


def test_the_first_wait_warns_with_the_name_of_the_owner(tmp_path: Path, clock: Clock) -> None:
    leave_mark(tmp_path, age=STALE_SECONDS - RENEW_SECONDS / 2)
    with pytest.warns(UserWarning, match=r"belongs to another job: process \d+ on node7.* this save waits"):
        become_owner(tmp_path)
    assert len(clock.waits) == 1


def test_take_over_does_not_wait(tmp_path: Path, clock: Clock) -> None:
    leave_mark(tmp_path)
    assert become_owner(tmp_path, take_over=True).is_valid()
    assert clock.waits == []


@pytest.mark.filterwarnings("ignore:.* this save waits")
@pytest.mark.parametrize("successor", [False, True])
def test_a_job_that_ends_meanwhile_is_succeeded_by_one_job(
    tmp_path: Path, clock: Clock, successor: bool
) -> None:
    """Its mark is gone, and perhaps a third job has created one, which is not replaced."""
    leave_mark(tmp_path)
    path = tmp_path / OWNER

    def end(number: int) -> None:
        if number == 1:
            path.unlink()
        elif number == 2:
            renew(path)

    if successor:
        create = save_owner._create
        clock.at_wait = end
        with pytest.MonkeyPatch.context() as patch:
            calls: list[Path] = []

            def late(path: Path, me: Owner) -> bool:
                calls.append(path)
                if path.name == OWNER and len(calls) == 3:
                    leave_mark(tmp_path, host="node8")
                return create(path, me)

            patch.setattr(save_owner, "_create", late)
            with pytest.raises(RuntimeError, match=r"which is alive: process .* on node8"):
                become_owner(tmp_path)
        assert os.listdir(tmp_path) == [OWNER]
    else:
        clock.at_wait = end
        assert become_owner(tmp_path).is_valid()


def test_the_mark_of_an_earlier_version_is_read(tmp_path: Path, clock: Clock) -> None:
    owner = Owner.this_process()._asdict() | {"machine": "boot", "started": "17", "restart": 2}
    (tmp_path / OWNER).write_bytes(sealed(owner))
    assert Owner.read(tmp_path / OWNER).token == owner["token"]
    clock.at_wait = lambda _: renew(tmp_path / OWNER)
    with (
        pytest.warns(UserWarning, match="this save waits"),
        pytest.raises(RuntimeError, match=f"alive: process {os.getpid()} on"),
    ):
        become_owner(tmp_path)


@pytest.mark.parametrize("name", save_owner.JOB_NAMES)
def test_the_launchers_name_of_the_job_is_in_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in save_owner.JOB_NAMES:
        monkeypatch.delenv(other, raising=False)
    assert become_owner(tmp_path).owner.job == ""
    gc.collect()
    monkeypatch.setenv(name, "12")
    assert become_owner(tmp_path).owner.job == f"{name}=12"


@pytest.mark.filterwarnings("ignore:.* this save waits")
def test_a_mark_that_cannot_be_read_is_respected_until_it_is_old(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / OWNER
    path.write_text('{"sha256": "half a ma')
    clock.at_wait = lambda number: number == 3 and renew(path)
    with pytest.raises(RuntimeError, match="alive: a process that left no readable owner"):
        become_owner(tmp_path)
    clock.at_wait = lambda number: None
    assert become_owner(tmp_path).is_valid()
    assert len(clock.waits) > STALE_SECONDS / RENEW_SECONDS


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
    hold.found = 4
    other = leave_mark(tmp_path)
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
    new_save(tmp_path, 1, hold.owner._asdict())
    leave_mark(tmp_path)
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
