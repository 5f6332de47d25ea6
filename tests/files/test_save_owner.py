"""One process at a time saves into a directory: another is named, and one that is surely gone is replaced."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_ref.files import save_owner
from zero_ref.files.save_owner import JOB_NAMES, OWNER, Owner, become_owner
from zero_ref.files.saves import sealed


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB_NAMES:
        monkeypatch.delenv(name, raising=False)


def leave_mark(directory: Path, **changed: Any) -> Owner:
    """The mark of a save on another host, unless that is changed."""
    owner = Owner.this_process()._replace(**{"host": "node7", **changed})
    (directory / OWNER).write_bytes(sealed(owner._asdict()))
    return owner


def ended_process() -> int:
    """The number of a process of this host that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def token_in(directory: Path) -> str:
    return Owner.read(directory / OWNER).token


@pytest.mark.parametrize("explicitly", [True, False])
def test_a_directory_belongs_to_the_process_until_the_save_ends(tmp_path: Path, explicitly: bool) -> None:
    hold = become_owner(tmp_path)
    assert Owner.read(tmp_path / OWNER) == hold.owner
    assert (hold.owner.pid, hold.is_valid()) == (os.getpid(), True)
    with pytest.raises(RuntimeError, match=f"belongs to another save.*process {os.getpid()} on"):
        become_owner(tmp_path)
    if explicitly:
        hold.end()
        assert not hold.is_valid()
    del hold
    gc.collect()
    assert os.listdir(tmp_path) == [], "nothing is left behind"
    become_owner(tmp_path)


def test_the_later_save_hears_who_the_owner_is_and_can_take_over(tmp_path: Path) -> None:
    other = leave_mark(tmp_path, job="SLURM_JOB_ID=4711")
    with pytest.raises(RuntimeError, match=r"belongs to another save.*pass take_over=True once") as raised:
        become_owner(tmp_path)
    assert f"process {os.getpid()} on node7, SLURM_JOB_ID=4711, since {other.since}" in str(raised.value)
    assert os.listdir(tmp_path) == [OWNER], "the failed attempt leaves nothing"
    assert token_in(tmp_path) == other.token
    hold = become_owner(tmp_path, take_over=True)
    assert token_in(tmp_path) == hold.owner.token


def test_a_process_of_this_host_is_replaced_when_it_runs_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_mark(tmp_path, host=Owner.this_process().host, pid=ended_process())
    become_owner(tmp_path).end()
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    leave_mark(tmp_path, host=Owner.this_process().host, pid=os.getppid())
    with pytest.raises(RuntimeError, match="belongs to another save"):
        become_owner(tmp_path)  # the job has the same name, but the process runs


def test_a_process_number_says_nothing_about_another_host(tmp_path: Path) -> None:
    leave_mark(tmp_path, pid=ended_process())
    with pytest.raises(RuntimeError, match="belongs to another save"):
        become_owner(tmp_path)


def test_a_process_of_another_user_counts_as_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError

    leave_mark(tmp_path, host=Owner.this_process().host)
    monkeypatch.setattr(save_owner.os, "kill", refused)
    with pytest.raises(RuntimeError, match="belongs to another save"):
        become_owner(tmp_path)


@pytest.mark.parametrize("name", JOB_NAMES)
def test_a_job_that_the_launcher_started_again_on_another_host_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "12")
    for job in ("", f"{name}=13"):
        leave_mark(tmp_path, job=job)
        with pytest.raises(RuntimeError, match="belongs to another save"):
            become_owner(tmp_path)
    leave_mark(tmp_path, job=f"{name}=12")
    assert become_owner(tmp_path).owner.job == f"{name}=12"
    monkeypatch.setenv(name, "none")  # as torchrun says where the user gives no name
    leave_mark(tmp_path, job="")
    with pytest.raises(RuntimeError, match="belongs to another save"):
        become_owner(tmp_path)


def test_a_save_that_ends_meanwhile_is_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_mark(tmp_path)
    read = Owner.read

    def ends(path: Path) -> Owner:
        path.unlink(missing_ok=True)
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Owner, "read", ends)
        hold = become_owner(tmp_path)
    assert hold.is_valid()


def test_a_mark_that_cannot_be_read_is_respected_unless_it_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text('{"sha256": "half a ma')
    with pytest.raises(RuntimeError, match="a process that left no readable owner"):
        become_owner(tmp_path)
    assert become_owner(tmp_path, take_over=True).is_valid()


@pytest.mark.parametrize("take_over", [False, True])
def test_a_file_of_the_users_own_is_left_as_it_is(tmp_path: Path, take_over: bool) -> None:
    path = tmp_path / OWNER
    path.write_text('{"owner": "Ada"}')
    with pytest.raises(RuntimeError, match="is no mark of a job that saves, so it is left as it is"):
        become_owner(tmp_path, take_over)
    assert os.listdir(tmp_path) == [OWNER]
    assert path.read_text() == '{"owner": "Ada"}'


def test_an_owner_that_was_replaced_does_not_remove_the_file_of_the_next_one(tmp_path: Path) -> None:
    hold = become_owner(tmp_path)
    other = leave_mark(tmp_path)
    assert not hold.is_valid()
    hold.end()
    assert token_in(tmp_path) == other.token


def test_a_process_that_was_forked_neither_owns_nor_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = become_owner(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(save_owner.os, "getpid", lambda: -1)
        assert not hold.is_valid()
        save_owner._release(hold.path, hold.owner)
    assert hold.is_valid()
