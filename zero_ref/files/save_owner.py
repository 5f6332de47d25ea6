"""The owner of a directory while a save is under way: `owner.json` names the process that saves.

This module adds to `stairs/owners.py`, which saves nothing, that two jobs never save into one directory at
the same time: each would remove what the other one writes. The usual case is a requeued job whose predecessor
still runs.

- A save creates `owner.json` exclusively, and removes it when it ends, also with an error. So between saves
  there is no such file.
- A process that dies while it saves leaves the file behind. The next save replaces it if that process is
  surely gone: it was on this host and runs no longer, or the launcher gives this job the same name, since a
  launcher ends all ranks before it starts them again elsewhere.
- Otherwise the save raises an error that names the process. With `take_over=True` it replaces the file.

A process whose file was replaced goes on writing its own save, and removes no other one. Network file systems
may have no reliable locks, and none is needed: it is enough that one of two processes that create the same
file fails. Standard library only.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import weakref
from pathlib import Path
from typing import NamedTuple

from zero_ref.files.durable import sync_folder, writing
from zero_ref.files.saves import DamagedError, begins_as_sealed, damage_in, read_sealed, sealed

OWNER = "owner.json"
JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""The environment variables that may name this job. The first that is set is used."""


class Owner(NamedTuple):
    """A process that saves into a directory.

    Args:
        token: unique to this save.
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

    def is_gone(self, me: Owner) -> bool:
        """Whether this process surely saves no longer, as the process `me` sees it."""
        if self.host == me.host:
            return not _is_alive(self.pid)
        return bool(self.job) and self.job == me.job

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class Ownership:
    """The ownership of a directory by this process, for one save.

    Args:
        path: the directory's `owner.json`.
        owner: this process, as the file names it.
    Attributes:
        end: a function that ends the ownership. The last reference to this object, and the exit of Python,
            end it too, as for a background save that nobody waits for.
    """

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self.end = weakref.finalize(self, _release, path, owner)

    def is_valid(self) -> bool:
        """Whether the directory still belongs to this process."""
        return _is_of(self.path, self.owner)


def become_owner(directory: Path, take_over: bool = False) -> Ownership:
    """Make this process the owner of a directory, which exists, until the ownership ends.

    Args:
        take_over: replace any other owner.
    Raises:
        OSError: `owner.json` cannot be written or read.
        RuntimeError: another process may be saving there, and is named; or no job has written that
            `owner.json`.
    """
    path, me = directory / OWNER, Owner.this_process()
    while not _create(path, me):
        # The file may have been removed meanwhile, if the other save has ended: create it then.
        with contextlib.suppress(FileNotFoundError):
            _check_may_replace(path, me, take_over)
            path.unlink()
    sync_folder(directory)
    return Ownership(path, me)


def _create(path: Path, me: Owner) -> bool:
    """Create the file of an owner; return False if the file exists."""
    try:
        with writing(path) as file:
            file.write(sealed(me._asdict()))
    except FileExistsError:
        return False
    return True


def _check_may_replace(path: Path, me: Owner, take_over: bool) -> None:
    """Raise RuntimeError if another process may be saving, or no job has written that file."""
    try:
        other = Owner.read(path)
        who, gone = str(other), other.is_gone(me)
    except DamagedError:
        if not begins_as_sealed(path):
            raise RuntimeError(
                f"{path} is no mark of a job that saves, so it is left as it is: move it away, or save into "
                "another directory."
            ) from None
        # The file is half written, by a process that may be alive.
        who, gone = f"a process that left no readable {OWNER}", False
    if not (gone or take_over):
        raise RuntimeError(
            f"{path.parent} belongs to another save, which is under way or was interrupted: {who}. Two saves "
            "at a time would remove each other's files: wait for that one, save into another directory, or, "
            "if you know that the process is gone, pass take_over=True once."
        )


def _is_alive(pid: int) -> bool:
    """Whether a process of this host runs. Where that cannot be asked, as on Windows, it counts as such."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # The process is another user's.
    return True


def _is_of(path: Path, owner: Owner) -> bool:
    """Whether this process is that owner, and its file is there. A forked process is not the owner."""
    try:
        return owner.pid == os.getpid() and Owner.read(path).token == owner.token
    except (OSError, DamagedError):
        return False


def _release(path: Path, owner: Owner) -> None:
    """Remove the file unless it is another owner's by now."""
    if _is_of(path, owner):
        with contextlib.suppress(OSError):
            path.unlink()
