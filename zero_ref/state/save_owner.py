"""Which job saves into a directory: one at a time, the one that `owner.json` there names.

This module adds to `minimal.py`, which saves nothing, that two jobs never save into one directory: they would
remove each other's saves, and a load would find those of either. The usual case is a requeued job whose
predecessor still runs.

- The first save of a job creates `owner.json` exclusively, with a token that no other job has.
- The owner renews the file's time every 10 s, and removes the file when the optimizers that saved are gone.
- A crashed job leaves the file behind. A job that finds another's file waits. If the file is renewed, its
  owner is alive, and the save is an error. 5 minutes after the last renewal the file is stale, and replaced.
- With `take_over=True` the file is replaced at once.

A file may become stale while its owner lives, as when a process is stopped for 5 minutes and then continued.
Nothing is lost then: a job removes only saves that it has written itself or found when it became the owner,
never those of the next owner, and its own next save raises an error that names the new owner.

Network file systems may have no reliable locks, and none is needed: only that one of two processes that
create the same file fails, and that a rename is atomic. Standard library only.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import warnings
import weakref
from pathlib import Path
from time import sleep
from typing import NamedTuple

from zero_ref.state.durable import sync_folder, writing
from zero_ref.state.saves import (
    DamagedError,
    Mark,
    begins_as_sealed,
    damage_in,
    read_sealed,
    saves_in,
    sealed,
)

OWNER = "owner.json"
RENEW_SECONDS = 10.0
STALE_SECONDS = 300.0
JOB_NAMES = ("ZERO_REF_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""The environment variables that may name this job. The first that is set counts."""


class Owner(NamedTuple):
    """A process that saves into a directory.

    Args:
        token: unique to this process and this directory.
        job: the launcher's name of the job, empty where it has none.
        since: ISO 8601, UTC.
    """

    token: str
    host: str
    pid: int
    job: str
    since: str

    @classmethod
    def this_process(cls) -> Owner:
        """This process as an owner, with a new token."""
        names = {name: os.environ.get(name, "none") for name in JOB_NAMES}
        job = next((f"{name}={value}" for name, value in names.items() if value != "none"), "")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(secrets.token_hex(8), socket.gethostname(), os.getpid(), job, now)

    @classmethod
    def read(cls, path: Path) -> Owner:
        """Read `owner.json`; OSError if it is missing or unreadable, DamagedError if it is damaged."""
        entries = read_sealed(path, 2**16)
        with damage_in(path):
            owner = cls(*(entries[name] for name in cls._fields))
            if [type(value) for value in owner] != [str, str, int, str, str]:
                raise ValueError(f"it says {owner}")
        return owner

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class Ownership:
    """This process's ownership of a directory. It ends with the last reference to this object.

    Args:
        found: the number of the newest save that was there when it began.
    Attributes:
        end: a function that ends it now.
    """

    def __init__(self, path: Path, owner: Owner, found: int) -> None:
        self.path, self.owner, self.found = path, owner, found
        stop = threading.Event()
        threading.Thread(target=_renew, args=(path, owner, stop), daemon=True, name="save owner").start()
        self.end = weakref.finalize(self, _release, path, owner, stop)

    def is_valid(self) -> bool:
        """Whether the directory is still this process's."""
        return _is_of(self.path, self.owner)

    def may_remove(self, mark: Mark) -> bool:
        """Whether this process wrote the save of that mark, or found it when it became the owner."""
        return mark.number <= self.found or mark.owner.get("token") == self.owner.token


_OWNERSHIPS: weakref.WeakValueDictionary[Path, Ownership] = weakref.WeakValueDictionary()

_ADVICE = (
    "Two jobs would remove each other's saves: save into another directory, or end that job. If you know "
    "that it is gone, pass take_over=True once."
)


def is_of_this_job(directory: Path) -> bool:
    """Whether the owner of a directory is of the same job, by the name that the launcher gives the job.

    Where a launcher starts the ranks of a job again, each round ends the one before. What an earlier rank has
    left there may then be taken over at once.
    """
    try:
        owner = Owner.read(directory / OWNER)
    except (OSError, DamagedError):
        return False
    return bool(owner.job) and owner.job == Owner.this_process().job


def become_owner(directory: Path, take_over: bool = False) -> Ownership:
    """Become the owner of a directory, which exists; if this process is the owner, it remains so.

    Args:
        take_over: replace any other owner.
    Raises:
        OSError: `owner.json` cannot be written or read.
        RuntimeError: another process is the owner, and is named; or no job has written that `owner.json`.
    Warns:
        UserWarning: this process waits until the file of another one is renewed or stale.
    """
    path = directory / OWNER
    held = _OWNERSHIPS.get(path)
    if held is not None and held.is_valid():
        return held
    if held is not None:
        held.end()  # Stop renewing. The file stays, as it is another's.
        if not take_over:
            _check_is_unused(held)
    me = Owner.this_process()
    while not (_create(path, me) or _replace(path, me, take_over)):
        pass  # The other owner has removed its file meanwhile.
    sync_folder(directory)
    found = max((save.number for save in saves_in(directory) if save.mark), default=0)
    ownership = _OWNERSHIPS[path] = Ownership(path, me, found)
    return ownership


def _check_is_unused(lost: Ownership) -> None:
    """Raise RuntimeError if a job has saved or wants to save since this process lost the directory."""
    directory = lost.path.parent
    theirs = [save.path.name for save in saves_in(directory) if save.mark and not lost.may_remove(save.mark)]
    if theirs or lost.path.exists():
        who = f", which has saved {theirs[-1]}" if theirs else f": {_name_of_owner(lost.path)}"
        raise RuntimeError(
            f"{directory} belongs to another job by now{who}; this one was stopped for a while. {_ADVICE}"
        )


def _create(path: Path, me: Owner) -> bool:
    """Write a file that does not exist; False if it does."""
    try:
        with writing(path) as file:
            file.write(sealed(me._asdict()))
    except FileExistsError:
        return False
    return True


def _replace(path: Path, me: Owner, take_over: bool) -> bool:
    """Replace the file of another owner when it is stale, or at once to take over; False if it is gone."""
    mine = path.with_name(f"{OWNER}.{me.token}.part")
    _create(mine, me)
    try:
        other, renewed = _name_of_owner(path), path.stat().st_mtime
        while not take_over and time_at(mine) - path.stat().st_mtime <= STALE_SECONDS:
            if path.stat().st_mtime != renewed:
                raise RuntimeError(
                    f"{path.parent} belongs to another job, which is alive: {other}. {_ADVICE}"
                )
            warnings.warn(  # The text is always the same, so that Python shows it once.
                f"{path.parent} belongs to another job: {other}. To see whether that job is alive, this save "
                f"waits until {OWNER} is renewed, or has not been for {STALE_SECONDS:.0f} s.",
                stacklevel=2,
            )
            sleep(RENEW_SECONDS)
        mine.replace(path)
    except FileNotFoundError:
        return False
    finally:
        mine.unlink(missing_ok=True)
    return True


def time_at(probe: Path) -> float:
    """The time by the clock of the file system, which may differ from the machine's."""
    os.utime(probe)
    return probe.stat().st_mtime


def _name_of_owner(path: Path) -> str:
    try:
        return str(Owner.read(path))
    except DamagedError:
        if begins_as_sealed(path):  # half written, by a process that may be alive
            return f"a process that left no readable {OWNER}"
        raise RuntimeError(
            f"{path} is no mark of a job that saves, so it is left as it is: move it away, or save into "
            "another directory."
        ) from None


def _is_of(path: Path, owner: Owner) -> bool:
    """Whether this process is that owner, and its file is there. A forked process is not the owner."""
    try:
        return owner.pid == os.getpid() and Owner.read(path).token == owner.token
    except (OSError, DamagedError):
        return False


def _renew(path: Path, owner: Owner, stop: threading.Event) -> None:
    """Renew the file's time until `stop` is set, or another process is the owner."""
    while not stop.wait(RENEW_SECONDS):
        with contextlib.suppress(OSError, DamagedError):
            if Owner.read(path).token != owner.token:
                return
            os.utime(path)


def _release(path: Path, owner: Owner, stop: threading.Event) -> None:
    stop.set()
    if _is_of(path, owner):
        with contextlib.suppress(OSError):
            path.unlink()
