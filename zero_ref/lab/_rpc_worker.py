"""A rank as a worker of torch.distributed.rpc: it finds the others, and can be asked for what a cell has."""

from __future__ import annotations

import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler


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
    # On loopback: otherwise TensorPipe looks up the machine's own name, which is not known everywhere.
    # Workers find each other in the pool's store, so that no port is needed for that.
    os.environ["TP_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    register_rendezvous_handler("zero-ref-pool", lambda url, **options: _members(store, rank, world_size))
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=timeout.total_seconds(),
        init_method="zero-ref-pool://",
        # Over TCP: within one machine TensorPipe would choose shared memory, for which a worker polls without
        # a pause while it waits for the next call.
        _transports=["uv"],
    )
    with warnings.catch_warnings():
        # RPC makes its group of ranks in a way that torch itself calls deprecated.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


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
