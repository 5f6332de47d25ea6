"""A rank as a worker of torch.distributed.rpc: it finds the others, and can be asked for what a cell has.

A worker does what it is asked to, and torch asks nobody who they are. Any user of the machine could have a
command run: over TCP, and over TensorPipe's shared memory, which listens on abstract Unix sockets. So each
message that is pickled carries a secret that only the pool's ranks know, and no worker listens once they are
connected.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc import backend_registry, internal

from zero_ref.lab import _sockets

_SECRET_BYTES = 16


def start(fn: Callable[..., Any], rank: int, world_size: int, store: Store, timeout: timedelta) -> None:
    """Let other ranks call this one by RPC, as "worker{rank}"; return once all ranks can be called.

    The worker outlives the call: a process that has left RPC can join it again, but its RRefs no longer work
    (they go on using the first agent).
    """
    _name_in_main(fn)
    if is_running():
        rpc._set_rpc_timeout(timeout.total_seconds())  # type: ignore[attr-defined]
    else:
        _init(rank, world_size, store, timeout)
    dist.barrier()  # before anything is asked for, all have named what may be


def is_running() -> bool:
    """Whether this rank is a worker, from an earlier call too."""
    return rpc._is_current_rpc_agent_set()  # type: ignore[attr-defined]


def _init(rank: int, world_size: int, store: Store, timeout: timedelta) -> None:
    # No other machine is to reach it, and no port of its own be opened for workers to find each other: they
    # have the pool's store.
    os.environ["TP_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    register_rendezvous_handler("zero-ref-pool", lambda url, **options: _members(store, rank, world_size))
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=timeout.total_seconds(),
        init_method="zero-ref-pool://",
        # Over TCP alone, where the kernel counts what is sent: within one machine TensorPipe would choose
        # shared memory, and lab.meter.sent_bytes would see nothing.
        _transports=["uv"],
        _channels=["basic"],
    )
    _keep_to_ourselves(
        bytes.fromhex(store.compare_set("secret", "", secrets.token_hex(_SECRET_BYTES)).decode())
    )
    # RPC would unpickle what comes from a group of its own, and nobody has looked at who is in that.
    backend_registry._init_process_group = lambda *_: dist.group.WORLD
    before = _sockets.listening()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    for other in range(world_size):  # a worker connects when it first asks; itself too
        rpc.rpc_sync(f"worker{other}", int)
    dist.barrier()
    opened = _sockets.listening() - before
    _sockets.refuse_strangers(opened)
    _sockets.stop_listening(opened)


def _keep_to_ourselves(secret: bytes) -> None:
    """Put the secret before each pickled message, and unpickle none without it: to unpickle is to run."""
    pickler: Any = internal._internal_rpc_pickler
    serialize, deserialize = pickler.serialize, pickler.deserialize

    def serialize_with_secret(value: object) -> tuple[bytes, list[Any]]:
        pickled, tensors = serialize(value)
        return secret + pickled, tensors

    def deserialize_with_secret(message: bytes, tensors: list[Any]) -> Any:
        if not hmac.compare_digest(message[:_SECRET_BYTES], secret):
            raise PermissionError("this message is not from a rank of this pool: it has another secret")
        return deserialize(message[_SECRET_BYTES:], tensors)

    pickler.serialize, pickler.deserialize = serialize_with_secret, deserialize_with_secret


def _members(store: Store, rank: int, world_size: int) -> Iterator[tuple[Store, int, int]]:
    yield store.clone(), rank, world_size  # type: ignore[attr-defined]  # another thread may wait on this one


def _name_in_main(fn: Callable[..., Any]) -> None:
    """Let `__main__` have the names that came along with a cell's or a script's `fn`.

    rpc sends a function or a class as the name of its module and its own, for the other end to look up. What
    a cell defines came here by value, and is in no module.
    """
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    fn = getattr(fn, "__func__", fn)  # a method's function
    if getattr(fn, "__module__", None) == "__main__":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        vars(main).update(getattr(fn, "__globals__", {}))
        vars(main)[getattr(fn, "__name__", "")] = fn
