"""Who saves into a directory: one job at a time, which leaves its mark there, `owner.json`.

Two jobs would remove each other's saves, and whoever loads would find now this one's, now that one's. A
requeued job whose predecessor still runs is the usual case. The mark is made with the first save and removed
when the optimizers that saved are gone, or the process ends. After a crash it is left behind, and stale:

- On the same machine since the same boot: as soon as that process is gone.
- Anywhere else nobody can look whether it lives, so the owner renews the mark every 30 s, and after 5
  minutes without that it is stale. Slurm and torchrun count their restarts: to a later one of the same job
  the mark of an earlier one is stale at once.
- `take_over=True` declares it stale.

This may go wrong, as for a process that was stopped for 5 minutes and goes on. Nothing is lost then: a job
removes only what it has written itself or found when it became the owner, so never what the next one writes,
and its own next save raises an error that names the new owner.

It needs no locks of the file system, which network file systems lack or do not mean: only that one of two
processes that create the same file fails, and that a rename is all or nothing. Standard library only.
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
"""Where a scheduler says which job this is, and how often it was restarted."""


class Owner(NamedTuple):
    """A process that saves.

    Args:
        token: of this process's hold on this directory, and of no other.
        machine: it and its boot, and the processes that can be seen; two processes that say the same can
            look whether the other lives.
        started: by the machine's clock, since a process's number is given again.
        job, restart: the scheduler's name for it, empty where there is none.
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
        """Read a mark.

        Raises:
            OSError: there is none, or it cannot be read.
            DamagedError: it is damaged.
        """
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
        """Whether this owner's mark is stale.

        Args:
            me: who asks.
            age: seconds for which the mark has not been renewed.
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
    """The start of a process in the machine's clock ticks; empty where it is gone, or cannot be known."""
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


class Hold:
    """This process's ownership of a directory. It ends when nobody refers to it any more.

    Attributes:
        first: the number of the first save that was made under it.
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
        """Whether a save is one of ours, or was there before us."""
        ours = mark.owner.get("token") == self.owner.token
        return ours or (self.first is not None and mark.number < self.first)


_ADVICE = (
    "Two jobs would remove each other's saves: save into another directory, or end that job. If you know "
    "that it is gone, pass take_over=True once; the mark of a job on another machine counts until it has not "
    f"been renewed for {STALE_SECONDS:.0f} s."
)

_HOLDS: weakref.WeakValueDictionary[Path, Hold] = weakref.WeakValueDictionary()


def take(directory: Path, take_over: bool = False) -> Hold:
    """Become the owner of a directory, which exists, or stay it.

    Args:
        take_over: whoever the owner is.
    Raises:
        OSError: the mark cannot be written or read.
        RuntimeError: it is another process's; names it. There is a file of that name that no job has written.
    """
    path = directory / OWNER
    hold = _HOLDS.get(path)
    if hold is not None and hold.is_valid():
        return hold
    me = Owner.this_process()
    if hold is not None:
        hold.end()  # nothing is removed: the mark is not ours
        theirs = [
            save.path.name for save in saves_in(directory) if save.mark and not hold.may_remove(save.mark)
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
        _replace(path, me, take_over, lost=hold is not None)
    sync_folder(directory)
    hold = _HOLDS[path] = Hold(path, me)
    return hold


def _replace(path: Path, me: Owner, take_over: bool, lost: bool) -> None:
    """Put our mark in the place of another's, if that one is gone, or is to be taken over.

    Args:
        lost: the mark was ours before, so whoever has it is alive.
    """
    mine = path.with_name(f"{OWNER}.{me.token}.part")
    with writing(mine) as file:
        file.write(sealed(me._asdict()))
    try:
        # By the clock of the file system, which need not be ours.
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
            # Perhaps it is just being written.
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
    """Renew the mark now and then, until it ends or is another's."""
    while not stop.wait(RENEW_SECONDS):
        with contextlib.suppress(OSError, DamagedError):
            if Owner.read(path).token != owner.token:
                return
            os.utime(path)


def _release(path: Path, owner: Owner, stop: threading.Event) -> None:
    stop.set()
    if owner.pid == os.getpid() and _is_of(path, owner):  # not in a process forked from the owner
        with contextlib.suppress(OSError):
            path.unlink()
