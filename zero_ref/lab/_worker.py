"""The program of a rank's own process; `zero_ref.lab.ranks` is the side that starts it.

`main` waits for calls on a pipe. For each one it joins the ranks in a new process group, runs the function,
reports a value or a `Failure`, and leaves the group when the pool says that every rank has reported.
"""

from __future__ import annotations

import contextlib
import copyreg
import faulthandler
import gc
import importlib
import io
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from zero_ref.lab._failure import Failure
from zero_ref.lab.placement import Placement, own_device, settle

READY = "ready"
STORE = "store"
"""The file of a pool's folder in which ranks find each other. Only the user can write it, and so join."""


class Seat(NamedTuple):
    """A rank's place in its pool: all that a new process is told.

    Args:
        folder: of its pool.
        server_folder: of the server that forks the ranks, which multiprocessing removes as its process ends.
        device: "cpu", or an accelerator with its number.
        is_default: whether the device is also the one of tensors for which none is named.
    """

    rank: int
    world_size: int
    backend: str
    folder: str
    server_folder: str
    device: str = "cpu"
    is_default: bool = False

    @classmethod
    def of(cls, placement: Placement, rank: int, folder: str) -> Seat:
        """The seat of one of the ranks that are placed so."""
        of_ranks = placement.devices
        is_default = placement.is_default
        return cls(rank, len(of_ranks), placement.backend, folder, get_temp_dir(), of_ranks[rank], is_default)

    def output(self, kind: str) -> Path:
        """The file that collects this rank's "stdout", "stderr" or "stacks"; the pool reads it."""
        return Path(self.folder, f"{self.rank}.{kind}")


class Surroundings(NamedTuple):
    """The environment, paths and cells of the process that calls a function, sent to ranks with each call.

    The server process that forks the workers keeps the environment of its own start, so nothing is inherited.
    """

    environ: dict[str, str]
    sys_path: list[str]
    working_folder: str
    cell_lines: dict[str, list[str]]

    @classmethod
    def of_this_process(cls) -> Surroundings:
        """Record the surroundings of the process that makes the call."""
        # A notebook cell is no file: its lines are in linecache alone, and tracebacks are to show them.
        entries = [(name, entry[2]) for name, entry in list(linecache.cache.items()) if len(entry) == 4]
        cell_lines = {name: lines for name, lines in entries if not os.path.exists(name)}
        return cls(dict(os.environ), list(sys.path), os.getcwd(), cell_lines)

    def adopt(self, seat: Seat) -> None:
        """Make the surroundings this process's own, with the variables that torchrun would have set.

        The variables for the address and port of the rendezvous are missing: no port is open for it.
        """
        os.environ.clear()
        os.environ.update(self.environ)
        os.environ.update(RANK=str(seat.rank), LOCAL_RANK=str(seat.rank))
        os.environ.update(WORLD_SIZE=str(seat.world_size), LOCAL_WORLD_SIZE=str(seat.world_size))
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # those of a launcher; the ranks have a file
            os.environ.pop(name, None)
        if sys.platform != "win32":  # there Gloo does not choose by name
            os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        sys.path[:] = self.sys_path
        importlib.invalidate_caches()  # the caller may have written a module since the last call
        os.chdir(self.working_folder)
        for name, lines in self.cell_lines.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        torch.set_num_threads(1)
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]


class RankCall(NamedTuple):
    """One call, as packed and sent to every rank."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    collective_timeout: timedelta
    warning_filters: list[Any]
    rpc: bool


def _import_again(module: types.ModuleType) -> tuple[Callable[[str], Any], tuple[str]]:
    return importlib.import_module, (module.__name__,)


def _send_modules_by_name() -> None:
    """Let pickle send by name the modules whose class is another than ModuleType, as it sends all others.

    cloudpickle sends along what may be a submodule that a function names: `torch.ops`, or for `dist` and any
    name `config` torch.distributed.config. It takes those of another class for values.
    """
    for kind in {type(module) for module in list(sys.modules.values())} - {types.ModuleType}:
        if issubclass(kind, types.ModuleType) and kind.__reduce__ is object.__reduce__:
            copyreg.pickle(kind, _import_again)


def pack(value: object) -> bytes:
    """Any value as bytes: functions and classes of a cell by value, each tensor storage once.

    Plain pickling writes a storage again for each view into it: 100 views of a flat bucket would travel as
    100 buckets and come back as separate tensors.
    """
    _send_modules_by_name()
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=cloudpickle, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def unpack(packed: bytes, map_location: str | None = None) -> Any:
    """The value that `pack` was given. Runs code that is in `packed`: for bytes of our own processes only."""
    return torch.load(io.BytesIO(packed), map_location, pickle_module=pickle, weights_only=False)


def main(seat: Seat, pipe: Connection) -> None:
    """Serve calls until the pool sends None or is gone."""
    if sys.platform != "win32":
        # Whoever kills a kernel kills all processes of its group. Ranks outlive that, to remove the folders.
        os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(seat,), daemon=True).start()
    # On Windows Ctrl-C reaches every process of a terminal; what becomes of ranks is for the pool to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(seat)
    store = FileStore(
        str(Path(seat.folder, STORE)), -1
    )  # -1: no number of ranks after which it would remove the file
    gc.freeze()  # what is alive now stays alive, and collecting after each call need not look at it
    main_module = sys.modules["__main__"]
    pipe.send(READY)
    calls = 0
    try:
        while surroundings := pipe.recv():
            calls += 1
            outcome = perform(seat, surroundings, pipe.recv_bytes(), PrefixStore(f"call {calls}", store))
            if isinstance(outcome, Failure):
                pipe.send(outcome)
            else:
                pipe.send(None)
                pipe.send_bytes(outcome)
            # All leave together: NCCL closes a group collectively, and hangs where a rank is missing.
            pipe.recv()
            _leave_groups()
            rpc_worker = sys.modules.get("zero_ref.lab._rpc_worker")
            if rpc_worker and not rpc_worker.is_running():
                return  # the function has shut RPC down, which a process can have once: others will start
            sys.modules["__main__"] = main_module  # _rpc_worker puts the caller's names there
            pipe.send(READY)
    except EOFError:
        # Usually the parent is gone, and this may end before the thread that waits for that.
        if not _parent_lives(seconds=1):
            _remove_folders(seat)


def perform(seat: Seat, surroundings: Surroundings, packed_call: bytes, store: Store) -> bytes | Failure:
    """Make one call, in a process group of its own: what an earlier one broke or left there is gone."""
    os.ftruncate(1, 0)
    os.ftruncate(2, 0)
    try:
        surroundings.adopt(seat)
        settle(seat.device, seat.is_default)
        call = _load_call(packed_call, seat.device if seat.is_default else None)
        warnings.resetwarnings()
        warnings.filters[:] = call.warning_filters  # type: ignore[index]
        _join_group(seat, store, call.collective_timeout)
        if call.rpc:
            from zero_ref.lab import _rpc_worker  # not on a platform whose torch has no RPC

            _rpc_worker.start(call.fn, seat.rank, seat.world_size, store, call.collective_timeout)
        return _pack_value(call.fn(*call.args, **call.kwargs))
    except BaseException as error:  # SystemExit too: a rank that ended without a word would tell less
        return Failure.of_exception(error, skip_file=__file__)


def _load_call(packed_call: bytes, device: str | None) -> RankCall:
    try:
        return unpack(packed_call, device)
    except ModuleNotFoundError as error:
        error.add_note(
            "A rank imports what was not defined in a notebook or script, along the caller's sys.path. "
            "Add the module's folder to it, or define the function in the notebook."
        )
        raise


def _join_group(seat: Seat, store: Store, timeout: timedelta) -> None:
    dist.init_process_group(
        seat.backend,
        store=store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timeout,
        device_id=own_device(seat.backend, seat.device),
    )


def _pack_value(value: object) -> bytes:
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be sent back "
            f"({type(error).__name__}: {error}). Return numbers, strings, tensors, or containers of them."
        ) from None


def _leave_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()  # every subgroup with it
    gc.collect()  # a model under DDP is a reference cycle: free it before the next call makes its own


def _redirect_output(seat: Seat) -> None:
    """Write to files from now on: they take what C++ prints too, and outlive a rank that is killed."""
    for fd, kind in ((1, "stdout"), (2, "stderr")):
        file = os.open(seat.output(kind), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, kind, stream)
    faulthandler.enable(all_threads=False)
    if hasattr(faulthandler, "register"):  # not on Windows: there a time-out cannot show where ranks stood
        faulthandler.register(signal.SIGUSR1, open(seat.output("stacks"), "w"))  # noqa: SIM115


def _end_with_parent(seat: Seat) -> None:
    """End this process when the one that started it is gone, even from within a collective."""
    while _parent_lives():
        pass
    _remove_folders(seat)
    os._exit(1)


def _parent_lives(seconds: float | None = None) -> bool:
    """Whether the process that started this one is still there after so many seconds, or at its end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join(seconds)
    return parent.is_alive()


def _remove_folders(seat: Seat) -> None:
    """Remove the folders in the parent's place; the pool's is renamed before, so that no rank adds files."""
    with contextlib.suppress(OSError):
        os.rename(seat.folder, f"{seat.folder}.gone")
    for folder in (f"{seat.folder}.gone", seat.server_folder):
        shutil.rmtree(folder, ignore_errors=True)
