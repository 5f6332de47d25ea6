"""Which job saves into a directory: one at a time, the one that `owner.json` there names.

This module adds to `minimal.py`, which saves nothing, that two jobs never save into one directory: they would
remove each other's saves, and a load would find those of either. The usual case is a requeued job whose
predecessor still runs. A job writes `owner.json` with its first save, and removes it when the optimizers that
saved are gone, or the process ends. A crashed job leaves the file behind, which becomes stale:

- On the same machine since the same boot, as soon as that process is gone.
- Elsewhere nobody can see whether the process lives. So the owner renews the file every 30 s, and 5 minutes
  after the last renewal it is stale. Slurm and torchrun count restarts: for a later restart of the same job,
  the file of an earlier one is stale at once.
- With `take_over=True`, always.

The file may become stale too early, as when a process is stopped for 5 minutes and then continued. Nothing is
lost then: a job removes only saves that it has written itself or found when it became the owner, never those
of the next owner, and its own next save raises an error that names the new owner.

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
import weakref
from pathlib import Path
from typing import Any, NamedTuple

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
RENEW_SECONDS = 30.0
STALE_SECONDS = 300.0
RESTARTS = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT"}
"""The environment variables with a scheduler's name of this job, each with that of its number of restarts."""


class Owner(NamedTuple):
    """A process that saves into a directory.

    Args:
        token: unique to this process and this directory.
        machine: the boot of the machine and the PID namespace; two processes with equal ones can see whether
            the other lives.
        started: the process's start by the machine's clock, since a pid is used again.
        job, restart: the scheduler's name of the job, empty where there is none.
        since: ISO 8601, UTC.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: str
    job: str
    restart: int
    since: str

    @classmethod
    def this_process(cls) -> Owner:
        """This process as an owner, with a new token."""
        job, restart = "", 0
        for variable, count in RESTARTS.items():
            if (name := os.environ.get(variable, "none")) != "none":
                job, restart = f"{variable}={name}", int(os.environ.get(count) or 0)
                break
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(
            secrets.token_hex(8), socket.gethostname(), _machine(), pid, _started(pid), job, restart, now
        )

    @classmethod
    def read(cls, path: Path) -> Owner:
        """Read `owner.json`; OSError if it is missing or unreadable, DamagedError if it is damaged."""
        entries = read_sealed(path, 2**16)
        with damage_in(path):
            owner = cls(*(entries[name] for name in cls._fields))
            if [type(value) for value in owner] != [str, str, str, int, str, str, int, str]:
                raise ValueError(f"it says {owner}")
        return owner

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def is_gone(self, me: Owner, age: float) -> bool:
        """Whether this owner's `owner.json` is stale.

        Args:
            me: the process that asks.
            age: seconds since the file was renewed.
        """
        if self.machine == me.machine and os.name == "posix":
            return self.pid == me.pid or not _is_alive(self.pid, self.started)
        if self.job and self.job == me.job and self.restart < me.restart:
            return True
        return age > STALE_SECONDS


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """The start of a process in the machine's clock ticks; empty if it is gone, or if this is not Linux."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def _is_alive(pid: int, started: str) -> bool:
    if started:
        return _started(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Ownership:
    """This process's ownership of a directory. It ends with the last reference to this object.

    Attributes:
        first: the number of the first save that was made during it.
        end: a function that ends it now.
    """

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self.first: int | None = None
        stop = threading.Event()
        threading.Thread(target=_renew, args=(path, owner, stop), daemon=True, name="save owner").start()
        self.end = weakref.finalize(self, _release, path, owner, stop)

    def is_valid(self) -> bool:
        """Whether the directory is still this process's."""
        return self.owner.pid == os.getpid() and _is_of(self.path, self.owner)

    def may_remove(self, mark: Mark) -> bool:
        """Whether this process wrote the save of that mark, or found it when it became the owner."""
        ours = mark.owner.get("token") == self.owner.token
        return ours or (self.first is not None and mark.number < self.first)


_ADVICE = (
    "Two jobs would remove each other's saves: save into another directory, or end that job. If you know "
    "that it is gone, pass take_over=True once; the mark of a job on another machine counts until it has not "
    f"been renewed for {STALE_SECONDS:.0f} s."
)

_OWNERSHIPS: weakref.WeakValueDictionary[Path, Ownership] = weakref.WeakValueDictionary()


def is_of_this_job(directory: Path) -> bool:
    """Whether the owner of a directory is a process of the same job, by the name that the scheduler gives it.

    Where torchrun starts the ranks of a job again, each round ends the one before. What an earlier rank left
    there may then be taken over, though nobody can see from another machine that this rank is gone.
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
    """
    path = directory / OWNER
    ownership = _OWNERSHIPS.get(path)
    if ownership is not None and ownership.is_valid():
        return ownership
    me = Owner.this_process()
    if ownership is not None:
        ownership.end()  # Stop renewing. The file stays, as it is another's.
        theirs = [
            save.path.name
            for save in saves_in(directory)
            if save.mark and not ownership.may_remove(save.mark)
        ]
        if theirs and not take_over:
            raise RuntimeError(
                f"{directory} belongs to another job by now, which has saved {theirs[-1]} after this one was "
                f"stopped for a while. {_ADVICE}"
            )
    try:
        with writing(path) as file:
            file.write(sealed(me._asdict()))
    except FileExistsError:
        _replace(path, me, take_over, lost=ownership is not None)
    sync_folder(directory)
    ownership = _OWNERSHIPS[path] = Ownership(path, me)
    return ownership


def _replace(path: Path, me: Owner, take_over: bool, lost: bool) -> None:
    """Replace the `owner.json` of another process, if that one is gone, or is to be taken over.

    Args:
        lost: the directory was this process's before, so the other one took it over and is alive.
    """
    mine = path.with_name(f"{OWNER}.{me.token}.part")
    with writing(mine) as file:
        file.write(sealed(me._asdict()))
    try:
        # Both times are by the file system's clock, which may differ from the machine's.
        age = mine.stat().st_mtime - path.stat().st_mtime
        try:
            other: Any = Owner.read(path)
            gone = other.is_gone(me, age)
        except DamagedError:
            if not begins_as_sealed(path):
                raise RuntimeError(
                    f"{path} is no mark of a job that saves, so it is left as it is: move it away, or save "
                    "into another directory."
                ) from None
            # It may be half written, by a process that is alive.
            other, gone = f"a process that left no readable {OWNER}", age > STALE_SECONDS
        if not (take_over or (gone and not lost)):
            raise RuntimeError(
                f"{path.parent} belongs to another job{' by now' if lost else ''}: {other}; its mark {OWNER} "
                f"was renewed {max(age, 0):.0f} s ago. {_ADVICE}"
            )
        mine.replace(path)
    finally:
        mine.unlink(missing_ok=True)


def _is_of(path: Path, owner: Owner) -> bool:
    try:
        return Owner.read(path).token == owner.token
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
    if owner.pid == os.getpid() and _is_of(path, owner):  # A forked process is not the owner.
        with contextlib.suppress(OSError):
            path.unlink()
