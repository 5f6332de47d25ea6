"""Another user of the machine, who knows every port: what he can join, read and have done."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import internal

from zero_ref.lab import _sockets, _worker, ranks
from zero_ref.lab._worker import Seat
from zero_ref.lab.ranks import Pool

pytestmark = pytest.mark.ranks

only_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc, asks the kernel who somebody is"
)
as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can be another user for a while"
)
NOBODY = 65534


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Make this process act as another user: with that user's rights, and as owner of the files it makes."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def ports_of(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens, and -1 if it has an abstract Unix socket."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    ports = set()
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
        listeners = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
        ports |= {int(row[1].rpartition(":")[2], 16) for row in listeners}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    if any(f"socket:[{row[6]}]" in own and row[-1].startswith("@") for row in rows):
        ports.add(-1)
    return ports


@contextlib.contextmanager
def stranger_at(listener: int) -> Iterator[None]:
    """Somebody else's connection to this listening socket of ours, taken in if anybody takes it in."""
    with socket.fromfd(listener, socket.AF_INET, socket.SOCK_STREAM) as copy:
        address = copy.getsockname()
    with another_user():
        visitor = socket.create_connection(address[:2])
    with visitor:
        yield


# ------------------------------------------------------------------------------------- who is a stranger


@as_root
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_stranger_is_told_from_ourselves(family: socket.AddressFamily) -> None:
    here = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((here, 0), family=family) as server:
        listener = server.fileno()
        with socket.create_connection(server.getsockname()[:2]), server.accept()[0]:
            _sockets.refuse_strangers([listener])
            with stranger_at(listener):
                with (
                    server.accept()[0],
                    pytest.raises(RuntimeError, match=rf"another user \(number {NOBODY}\)"),
                ):
                    _sockets.refuse_strangers([listener])
                _sockets.refuse_strangers([])  # this one is nobody's


@only_linux
def test_who_has_stopped_listening_keeps_the_connections_it_has() -> None:
    before = _sockets.listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert _sockets.listening() - before == {server.fileno()}
        address = server.getsockname()
        with socket.create_connection(address) as visitor, server.accept()[0] as connection:
            _sockets.stop_listening([server.fileno()])
            assert _sockets.listening() == before
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            visitor.sendall(b"still here")
            assert connection.recv(100) == b"still here"


@as_root
def test_a_call_ends_if_a_stranger_is_among_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    visits = contextlib.ExitStack()
    join = dist.init_process_group

    def join_and_be_visited(*args: Any, **options: Any) -> None:
        before, open_before = _sockets.listening(), len(os.listdir("/proc/self/fd"))
        join(*args, **options)
        (listener,) = _sockets.listening() - before
        opened = len(os.listdir("/proc/self/fd")) - open_before
        visits.enter_context(stranger_at(listener))
        while len(os.listdir("/proc/self/fd")) < open_before + opened + 2:  # his end, and ours
            time.sleep(0.01)

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "init_process_group", join_and_be_visited)
    try:
        with (
            visits,
            pytest.raises(RuntimeError, match="has connected to this rank, as if it were one of the ranks"),
        ):
            _worker._join_group(Seat(0, 1, "gloo", str(tmp_path)), dist.HashStore(), timedelta(seconds=60))
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------- what there is to join


@only_linux
def test_ranks_find_each_other_where_only_their_user_can_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old_umask = os.umask(0)
    try:
        with Pool(2, "gloo") as pool:
            assert pool.run(dist.get_rank) == [0, 1]
            assert ports_of(os.getpid()) == set(), "nothing to join them by"
            (folder,) = tmp_path.glob("zero_ref-ranks-*")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert folder.stat().st_uid == os.geteuid()
            store = folder / _worker.STORE
            assert store.stat().st_size > 0
            tmp_path.chmod(0o755)
            if os.geteuid() == 0:
                with another_user():
                    for file in (store, folder / "0.stdout"):
                        with pytest.raises(PermissionError):
                            file.open("rb")
                        with pytest.raises(PermissionError):
                            file.open("ab")
    finally:
        os.umask(old_umask)


@only_linux
def test_a_pool_whose_folder_was_cleared_away_is_replaced() -> None:
    ranks.run(dist.get_rank, 2, backend="gloo")
    key = os.getpid(), ranks.place_ranks(2, "gloo"), False
    pool = ranks._kept_pools[key]
    Path(pool._folder.name, _worker.STORE).unlink()
    assert not pool.usable
    assert ranks.run(dist.get_rank, 2, backend="gloo") == [0, 1]
    assert pool.closed


# ------------------------------------------------------------------------------------- RPC


def unsealed() -> bytes:
    """Return torch's message for a call, made without the secret."""
    pickler = internal._internal_rpc_pickler
    return type(pickler).serialize(pickler, internal.PythonUDF(os.getpid, (), {}))[0]


def what_a_worker_makes_of_an_unsealed_message() -> list[str]:
    told = []
    for message in (unsealed(), bytes(16) + unsealed(), b""):
        try:
            internal.deserialize(message, [])
            told.append("unpickled")
        except PermissionError as error:
            told.append(str(error))
    return told


def what_a_worker_answers_to_an_unsealed_call() -> str:
    if dist.get_rank() == 0:
        message = pickle.dumps(internal.PythonUDF(os.getpid, (), {}))
        future = rpc._invoke_rpc_python_udf(rpc.get_worker_info("worker1"), message, [], 60.0, False)
        try:
            return f"did it: {future.wait()}"
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.skipif(not rpc.is_available(), reason="this torch has no RPC")
def test_a_worker_unpickles_nothing_without_the_pools_secret() -> None:
    told = "this message is not from a rank of this pool"
    with Pool(2, "gloo") as pool:
        for messages in pool.run(what_a_worker_makes_of_an_unsealed_message, rpc=True):
            assert all(told in message for message in messages), messages
        assert told in pool.run(what_a_worker_answers_to_an_unsealed_call, rpc=True)[0]


@only_linux
@pytest.mark.skipif(not rpc.is_available(), reason="this torch has no RPC")
def test_nobody_can_connect_to_a_worker() -> None:
    pids = ranks.run(os.getpid, 2, backend="gloo", rpc=True)
    assert [ports_of(pid) for pid in pids] == [set(), set()]
    # Gloo's port is for the time of a call.
    assert all(len(ports) == 1 for ports in ranks.run(own_ports, 2, backend="gloo", rpc=True))
    assert ranks.run(ask_everybody, 2, backend="gloo", rpc=True) == [pids, pids]


def own_ports() -> set[int]:
    return ports_of(os.getpid())


def ask_everybody() -> list[int]:
    return [rpc.rpc_sync(f"worker{rank}", os.getpid) for rank in range(dist.get_world_size())]
