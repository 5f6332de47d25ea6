"""The sockets on which a rank listens: the users who have connected to them, and how to refuse others.

Every user of the machine can reach these sockets, and Gloo and TensorPipe take any process that connects for
a rank. The kernel knows the user at the other end. So a rank asks the kernel, after its peers have connected
and before it sends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator


def listening() -> set[int]:
    """The descriptors of this process's sockets that take in connections; on Windows none are found."""
    return {fd for fd, copy in _sockets() if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def stop_listening(descriptors: Iterable[int]) -> None:
    """Take in no more connections. Those that are there stay, and each descriptor is its owner's to close."""
    for fd in descriptors:
        with socket.socket() as unconnected:
            os.dup2(unconnected.fileno(), fd, inheritable=False)


def refuse_strangers(descriptors: Iterable[int]) -> None:
    """Raise an error if another user is connected to one of these listening sockets. Only Linux tells.

    Raises:
        RuntimeError: with that user's number.
    """
    if sys.platform != "linux":
        return
    wanted = set(descriptors)
    ports = {copy.getsockname()[1] for fd, copy in _sockets() if fd in wanted}
    for fd, copy in _sockets():
        with contextlib.suppress(OSError):  # not connected
            if fd not in wanted and copy.getsockname()[1] in ports:
                user = _user_at_the_other_end(copy)
                if user not in (None, os.geteuid()):
                    raise RuntimeError(
                        f"a process of another user (number {user}) has connected to this rank, as if it "
                        "were one of the ranks. Nothing has been sent yet. Call again; if this comes back, "
                        "ask that user, or run on a machine that others do not use."
                    )


def _user_at_the_other_end(connection: socket.socket) -> int | None:
    """The user whose socket it is; None if that is not on this machine, or gone, or the kernel does not tell.

    Source: sock_diag(7), one request for the connection as its other end sees it.
    """
    here, there = connection.getsockname(), connection.getpeername()
    names = struct.pack(
        "!HH16s16s",
        there[1],
        here[1],
        socket.inet_pton(connection.family, there[0]),
        socket.inet_pton(connection.family, here[0]),
    )
    anything = 0xFFFFFFFF  # any state; any cookie
    request = struct.pack("=BBBxI", connection.family, socket.IPPROTO_TCP, 0, anything)
    request += names + struct.pack("=III", 0, anything, anything)
    header = struct.pack("=IHHII", _HEADER_BYTES + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.sendall(header + request)
        answer = kernel.recv(4096)
    if struct.unpack_from("=IH", answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # an error instead: there is no such socket
    if answer[_HEADER_BYTES + 1] != _ESTABLISHED:
        return None  # one that is being closed has no user any longer
    return int(struct.unpack_from("=I", answer, _HEADER_BYTES + _USER_OFFSET)[0])


# From linux/netlink.h, linux/sock_diag.h, net/tcp_states.h, and linux/inet_diag.h (struct inet_diag_msg).
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER_BYTES, _USER_OFFSET = 16, 64
_ESTABLISHED = 1


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Each descriptor of an internet socket, with a copy of the socket to look at."""
    if sys.platform == "win32":
        return
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # closed since it was listed
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield fd, copy
