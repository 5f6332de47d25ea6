"""What the process of an answer may not do, as far as an ordinary user can forbid it.

Everywhere that Python can fork: little memory, time and disk, and no environment. On Linux also: no file but
those named and a folder of its own (Landlock), and on x86-64 no network, no other process and no signal to
one (seccomp). All of it is inherited and cannot be undone. `protections` says what this machine has.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

if sys.platform != "win32":
    import resource


class Limits(NamedTuple):
    """What one answer may use.

    Args:
        memory: bytes beside what Python and torch have when they are imported.
        cpu_s: seconds of all its calls together.
        file: bytes of one file.
    """

    memory: int = 2 * 2**30
    cpu_s: int = 120
    file: int = 16 * 2**20


# Of the kernel's headers: linux/landlock.h, linux/prctl.h, linux/seccomp.h, linux/audit.h, linux/filter.h.
SIGNAL_OF_PARENT, NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 1, 38, 22, 2
EXECUTE, WRITE_FILE, READ_FILE, LIST = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | LIST
LANDLOCK_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""How many rights over files there are from each version of Landlock on; each is one bit."""

X86_64 = 0xC000003E
FORBIDDEN = {
    "socket": 41, "connect": 42, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62,
    "rt_sigqueueinfo": 129, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "pidfd_open": 434, "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92,
    "fchown": 93, "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261,
    "utimensat": 280, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "shmget": 29, "semget": 64,
    "msgget": 68, "mq_open": 240, "setpriority": 141, "sched_setaffinity": 203, "ioprio_set": 251,
    "unshare": 272, "setns": 308, "mount": 165, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425,
}  # fmt: skip
"""System calls by their numbers on x86-64. They fail with EPERM."""
CLONE, CLONE_THREAD, CLONE3, PRLIMIT = 56, 0x10000, 435, 302


def protections() -> dict[str, str]:
    """What keeps an answer in its process on this machine; an empty text where nothing does.

    >>> sorted(protections())
    ['files', 'limits', 'network and processes']
    """
    x86_64 = sys.platform == "linux" and platform.machine() == "x86_64"
    return {
        "limits": "resource limits" if hasattr(os, "fork") else "",
        "files": f"Landlock {version}" if (version := landlock_version()) else "",
        "network and processes": "seccomp" if x86_64 else "",
    }


def readable(roots: Iterable[Path], hidden: Collection[Path]) -> list[tuple[str, int]]:
    """All that lies under the roots but what is hidden, as Landlock needs it: it can allow, and not forbid.

    So where something is hidden in a folder, the folder may be listed, and its other entries may be read.

    Args:
        hidden: files and folders by their real paths.
    """
    allowed, waiting = list[tuple[str, int]](), [*roots]
    while waiting:
        path = waiting.pop()
        real = path.resolve()
        if not real.exists() or any(real.is_relative_to(one) for one in hidden):
            continue
        if real.is_dir() and any(one.is_relative_to(real) for one in hidden):
            allowed.append((str(path), LIST))
            waiting += path.iterdir()
        else:
            allowed.append((str(path), READ))
    return [*dict.fromkeys(allowed)]


def end_with_parent() -> None:
    """Be killed when the parent ends, where the system has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SIGNAL_OF_PARENT, signal.SIGKILL, 0, 0, 0)


def confine(scratch: Path, limits: Limits, readable: Iterable[tuple[str, int]]) -> None:
    """Take from this process what an answer has no need of. There is no way back.

    Args:
        scratch: the only folder in which it may write.
        readable: files and folders that it may read, with their rights.
    Raises:
        OSError: the system has a protection and refuses it.
    """
    now = _address_space()
    for what, most in (
        (resource.RLIMIT_AS, now + limits.memory if now else resource.RLIM_INFINITY),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    has = protections()
    if not has["network and processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # root is exempt
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if has["files"]:
        _confine_to_files(libc, scratch, readable)
    nothing = (ctypes.c_uint32 * 6)()
    _check(libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing))  # what root may do
    if has["network and processes"]:
        _confine_to_calls(libc)


def landlock_version() -> int:
    """The version of Landlock that this kernel has; 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(444, None, 0, 1))


def _confine_to_files(libc: ctypes.CDLL, scratch: Path, readable: Iterable[tuple[str, int]]) -> None:
    version = landlock_version()
    rights = 2 ** max(count for since, count in LANDLOCK_FILE_RIGHTS.items() if since <= version) - 1
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    rules = struct.pack("QQQ", rights, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _check(libc.syscall(444, rules, len(rules), 0))
    own = [(str(scratch), rights), ("/dev/null", READ_FILE | WRITE_FILE), ("/dev/urandom", READ_FILE)]
    for path, granted in (*readable, *own):
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            granted &= EXECUTE | WRITE_FILE | READ_FILE | (1 << 14 if rights >> 14 & 1 else 0)
        _check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", granted & rights, folder), 0))
        os.close(folder)
    _check(libc.syscall(446, ruleset, 0))
    os.close(ruleset)


def _confine_to_calls(libc: ctypes.CDLL) -> None:
    """A filter of system calls, in the kernel's small language: (code, jump if true, if false, constant)."""
    load, equal, at_least, has_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000
    program = [(load, 0, 0, 4), (equal, 1, 0, X86_64), (answer, 0, 0, refuse | errno.EPERM), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse | errno.EPERM)]  # the x32 calls
    for number in sorted(FORBIDDEN.values()):
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse | errno.EPERM)]
    program += [(equal, 0, 1, CLONE3), (answer, 0, 0, refuse | errno.ENOSYS)]  # then clone is tried
    program += [
        (equal, 0, 4, CLONE), (load, 0, 0, 16), (has_bit, 0, 1, CLONE_THREAD), (answer, 0, 0, allow),
        (answer, 0, 0, refuse | errno.EPERM),
        (equal, 0, 4, PRLIMIT), (load, 0, 0, 16), (equal, 0, 1, 0), (answer, 0, 0, allow),
        (answer, 0, 0, refuse | errno.EPERM),
        (answer, 0, 0, allow),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    pointer = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    _check(libc.prctl(SET_SECCOMP, FILTER, pointer, 0, 0))


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _check(returned: int) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the answer's process cannot be confined: {os.strerror(number)}")
    return returned
