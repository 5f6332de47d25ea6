"""The ownership of a directory: one job at a time saves into it, and its `owner.json` names that job.

This module adds to `stairs/owners.py`, which saves nothing, that two jobs never save into one directory: they
would remove each other's saves, and a load would find the saves of either. The usual case is a requeued job
whose predecessor still runs.

- The first save of a job creates `owner.json` exclusively, with a token that no other job has.
- The owner renews the file's modification time every 10 s, and removes the file when the optimizers that
  saved are gone.
- A crashed job leaves the file behind. A job that finds another job's file waits. If the file is renewed, its
  owner is alive, and the save raises an error. 5 minutes after the last renewal the file is stale, and the
  waiting job replaces it.
- With `take_over=True` the file is replaced at once.

A file may become stale while its owner lives, as when a process is stopped for 5 minutes and then continued.
Nothing is lost then: a job removes only saves that it has written itself or found when it became the owner,
never the saves of the next owner, and its own next save raises an error that names the new owner.

Network file systems may have no reliable locks, and none is needed. It is enough that one of two processes
that create the same file fails, and that a rename is atomic. Standard library only.
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
    last_number,
    read_sealed,
    saves_in,
    sealed,
)

OWNER = "owner.json"
RENEW_SECONDS = 10.0
STALE_SECONDS = 300.0
JOB_NAMES = ("ZERO_REF_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""The environment variables that may name this job. The first that is set is used."""


class Owner(NamedTuple):
    """A process that saves into a directory.

    Args:
        token: unique to this process and this directory.
        job: the name that the launcher gave the job; empty if there is no launcher.
        since: the time at which the process became the owner, in ISO 8601, UTC.
    """

    token: str
    host: str
    pid: int
    job: str
    since: str

    @classmethod
    def this_process(cls) -> Owner:
        """Describe this process, with a new token."""
        # torchrun's id is "none" where the user gives none, so it names no job.
        named = [name for name in JOB_NAMES if os.environ.get(name, "none") != "none"]
        job = f"{named[0]}={os.environ[named[0]]}" if named else ""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(secrets.token_hex(8), socket.gethostname(), os.getpid(), job, now)

    @classmethod
    def read(cls, path: Path) -> Owner:
        """Read an `owner.json`, which may be of an earlier version and have more entries.

        Raises:
            OSError: the file is missing or unreadable.
            DamagedError: the file is damaged.
        """
        entries = read_sealed(path, 2**16)
        with damage_in(path):
            return cls(*map(entries.__getitem__, cls._fields))

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class Ownership:
    """The ownership of a directory by this process. It ends with the last reference to this object.

    Args:
        path: the directory's `owner.json`.
        owner: this process, as the file names it.
        found: the number of the newest save that was in the directory when the ownership began.
    Attributes:
        end: a function that ends the ownership now.
    """

    def __init__(self, path: Path, owner: Owner, found: int) -> None:
        self.path, self.owner, self.found = path, owner, found
        # The thread has no reference to this object, which could not be collected otherwise.
        stop = threading.Event()
        threading.Thread(target=_renew, args=(path, owner, stop), daemon=True, name="save owner").start()
        self.end = weakref.finalize(self, _release, path, owner, stop)

    def is_valid(self) -> bool:
        """Whether the directory still belongs to this process."""
        return _is_of(self.path, self.owner)

    def may_remove(self, mark: Mark) -> bool:
        """Whether this process wrote the save of that mark, or found it when it became the owner."""
        return mark.number <= self.found or mark.owner.get("token") == self.owner.token


_OWNERSHIPS: weakref.WeakValueDictionary[Path, Ownership] = weakref.WeakValueDictionary()
"""The ownerships of this process, by the path of `owner.json`. Several optimizers may share one."""

_ADVICE = (
    "Two jobs would remove each other's saves: save into another directory, or end that job. If you know "
    "that it is gone, pass take_over=True once."
)


def is_of_this_job(directory: Path) -> bool:
    """Whether the owner of a directory belongs to the same job, by the name that the launcher gives the job.

    A launcher that restarts the ranks of a job first ends all ranks of the round before. So the directory of
    an earlier rank may be taken over at once.
    """
    try:
        owner = Owner.read(directory / OWNER)
    except (OSError, DamagedError):
        return False
    return bool(owner.job) and owner.job == Owner.this_process().job


def become_owner(directory: Path, take_over: bool = False) -> Ownership:
    """Make this process the owner of a directory, which exists, unless it is the owner already.

    Args:
        take_over: replace any other owner.
    Raises:
        OSError: `owner.json` cannot be written or read.
        RuntimeError: another process is the owner, and is named; or no job has written that `owner.json`.
    Warns:
        UserWarning: this process waits until the file of another process is renewed or stale.
    """
    path = directory / OWNER
    # 1. After the first save, this process is the owner already.
    held = _OWNERSHIPS.get(path)
    if held is not None and held.is_valid():
        return held
    if held is not None:
        # Another job has replaced the file since, or somebody has removed it. Stop renewing it.
        held.end()
        if not take_over:
            _check_is_unused(held)

    # 2. Of several jobs one creates the file. The others find it, and wait or replace it.
    me = Owner.this_process()
    while not (_create(path, me) or _replace(path, me, take_over)):
        pass  # The file existed, and was removed before it could be replaced: create it.
    sync_folder(directory)

    # 3. This process may remove the saves that are there now. A later save with another token was written by
    # a job that has taken the directory over.
    ownership = _OWNERSHIPS[path] = Ownership(path, me, found=last_number(directory))
    return ownership


def _check_is_unused(lost: Ownership) -> None:
    """Raise RuntimeError if another job has saved, or is about to, since this process lost the directory."""
    directory = lost.path.parent
    theirs = [save.path.name for save in saves_in(directory) if save.mark and not lost.may_remove(save.mark)]
    if theirs or lost.path.exists():
        who = f", which has saved {theirs[-1]}" if theirs else f": {_name_of_owner(lost.path)}"
        raise RuntimeError(
            f"{directory} belongs to another job by now{who}; this job was stopped for a while. {_ADVICE}"
        )


def _create(path: Path, me: Owner) -> bool:
    """Create the file of an owner; return False if the file exists."""
    try:
        with writing(path) as file:
            file.write(sealed(me._asdict()))
    except FileExistsError:
        return False
    return True


def _replace(path: Path, me: Owner, take_over: bool) -> bool:
    """Replace another owner's file when it is stale, or at once to take over; return False if it is gone.

    Raises:
        RuntimeError: the other owner is alive, or no job has written that file.
    """
    # Write the new file beside the old one, so that a rename can replace it. It also tells the time.
    mine = path.with_name(f"{OWNER}.{me.token}.part")
    _create(mine, me)
    try:
        other, renewed = _name_of_owner(path), path.stat().st_mtime
        # An owner that is alive renews the file while this job waits. After a crash the file becomes stale.
        while not take_over and time_at(mine) - path.stat().st_mtime <= STALE_SECONDS:
            if path.stat().st_mtime != renewed:
                raise RuntimeError(
                    f"{path.parent} belongs to another job, which is alive: {other}. {_ADVICE}"
                )
            # The text is the same in each round, so that Python shows it once.
            warnings.warn(
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
    """Read the clock of the file system, which may differ from the machine's, by touching a file."""
    os.utime(probe)
    return probe.stat().st_mtime


def _name_of_owner(path: Path) -> str:
    """Name the owner in words. Raises RuntimeError if the file is none of a job that saves."""
    try:
        return str(Owner.read(path))
    except DamagedError:
        # The file is half written, by a process that may be alive.
        if begins_as_sealed(path):
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
        # A network file system may fail for a moment. Go on then: the file is stale only after 5 minutes.
        with contextlib.suppress(OSError, DamagedError):
            if Owner.read(path).token != owner.token:
                return
            os.utime(path)


def _release(path: Path, owner: Owner, stop: threading.Event) -> None:
    """Stop renewing the file, and remove it unless it is another owner's by now."""
    stop.set()
    if _is_of(path, owner):
        with contextlib.suppress(OSError):
            path.unlink()
