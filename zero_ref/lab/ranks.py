"""Run a function on several real ranks from a notebook cell, a script or a test.

A rank is a process of its own on this machine and a member of a torch.distributed process group: NCCL when
there is a GPU for each, Gloo when ranks share GPUs, and Gloo on the CPU where there is none. `placement.py`
chooses, and documents the variables ZERO_REF_DEVICE and ZERO_REF_BACKEND, with which a user chooses instead.
The processes are started once per world size and kept, so that later calls take hundredths of a second.

This file is what a caller uses. `_process.py` starts a rank and talks to it, `_worker.py` is what runs in it,
`_failure.py` tells what went wrong.

On Linux ranks are forked from a server process that has imported torch and done nothing else. Forked from the
notebook itself they would deadlock now and then, on a lock that one of its threads held, and could not use
a GPU once the notebook has. Elsewhere each starts from nothing ("spawn") and imports torch itself.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from zero_ref.lab import _worker
from zero_ref.lab._failure import Failure, failed, timed_out
from zero_ref.lab._process import RankProcess, starting_processes
from zero_ref.lab._rank_error import RankError
from zero_ref.lab._worker import RankCall, Seat, Surroundings
from zero_ref.lab.patience import patience
from zero_ref.lab.placement import Placement, device_here, place_ranks

__all__ = ["run", "shutdown", "describe", "place_ranks", "choose_backend", "device", "Pool", "RankError"]

T = TypeVar("T")

# A collective gives up after this share of a call's time-out: its error comes before the call is ended.
COLLECTIVE_SHARE = 0.8
# Once a rank has failed, the others have this long to report: the first to do so is not always the cause.
GRACE_SECONDS = 1.0
# After a call ranks have this long to leave its process group, and at the end to end. Then they are killed.
LEAVE_SECONDS = 5.0


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = None,
    rpc: bool = False,
    **kwargs: Any,
) -> list[T]:
    """Give the values of `fn(*args, **kwargs)` called on `world_size` ranks at once, in rank order.

    `fn` may be defined in a cell. When it is called, torch.distributed's default group is ready. What ranks
    printed is printed after the call, rank by rank. Their processes live on: each call has a new process
    group, but imported modules stay as they are. `shutdown()` after editing a module that `fn` imports.

    With `rpc`, rank 1 is also torch.distributed.rpc's "worker1", and so on; a rank whose `fn` has returned
    serves the others until all have. A worker can be asked to call what it can import and, of the notebook or
    script that defines `fn`, what `fn` and the functions it calls use by name: functions and classes defined
    at the top level, not lambdas. `fn` does not call rpc.init_rpc, and need not call rpc.shutdown.

    Ranks find each other in the temporary folder, on a local disk, where only the user can look. Gloo and RPC
    listen on loopback, and trust whoever connects there: run them on a machine whose other users you trust.

    >>> def total(x: float) -> float:
    ...     mine = torch.tensor(x + dist.get_rank())
    ...     dist.all_reduce(mine)
    ...     print("the total is", mine.item())
    ...     return mine.item()
    >>> run(total, 2, 10.0)  # doctest: +SKIP
    [rank 0] the total is 21.0
    [rank 1] the total is 21.0
    [21.0, 21.0]

    Args:
        fn: what each rank calls. Use functools.partial for arguments named timeout, backend or rpc.
        world_size: the number of ranks.
        timeout: seconds for the whole call, times `zero_ref.lab.patience.patience()`; a collective or an RPC
            inside gives up after 80% of that.
        backend: "nccl" or "gloo"; None for the choice that `describe(world_size)` tells. Gloo that is asked
            for by name is on the CPU.
        rpc: whether ranks are RPC workers as well, which talk over TCP on loopback. They are on the CPU.
    Returns:
        One value a rank; tensors are on the CPU, and those that shared memory on the rank share it here.
    Raises:
        RankError: a rank raised, ended or took too long. The next call starts new processes.
        TypeError, ValueError: an argument is not as said above, or cannot be sent; ZERO_REF_DEVICE or
            ZERO_REF_BACKEND names what is not there.
        RuntimeError: `rpc` where this torch has no RPC, as on Windows.
    Cost:
        Seconds for the first call with a world size, some 0.03 s for each later one.
    """
    __tracebackhide__ = True  # pytest leaves such frames out: the test's own line is what matters
    _check_call(fn, timeout, rpc)
    placement = place_ranks(world_size, backend, rpc=rpc)
    # Workers have ranks of their own, so that the others never have RPC's threads and connections.
    key = (os.getpid(), placement, rpc)  # a forked child must not talk to its parent's ranks
    pool = _kept_pools.get(key)
    if pool is None or not pool.usable:
        if pool is not None:
            pool.close()
        pool = _kept_pools[key] = Pool(world_size, backend, rpc=rpc)
    try:
        return pool.run(fn, *args, timeout=timeout, rpc=rpc, **kwargs)
    except RankError as error:
        raise error.with_traceback(None) from error.__cause__  # below: what happened on the ranks


def shutdown() -> None:
    """End the ranks of every pool this process has started. A later `run` starts new ones."""
    for pool in list(_open_pools):
        pool.close()
    _kept_pools.clear()


def describe(world_size: int, backend: str | None = None) -> str:
    """Describe in one line the backend and devices of `run` for so many ranks on this machine.

    >>> describe(4, "gloo")
    "4 ranks: Gloo, on this machine's CPU"
    """
    return place_ranks(world_size, backend).describe()


def choose_backend(world_size: int) -> str:
    """NCCL when there is a GPU for each rank (it does not put two ranks on one), else Gloo."""
    return place_ranks(world_size).backend


def device() -> torch.device:
    """Return the asking rank's device: an accelerator, its own or a shared one, or the CPU."""
    return device_here()


class Pool:
    """`world_size` ranks that wait for calls. `run` keeps such pools by itself; this is for one of your own.

    >>> with Pool(2, backend="gloo") as pool:  # doctest: +SKIP
    ...     pool.run(dist.get_rank)
    [0, 1]

    Args:
        world_size: the number of ranks.
        backend: as for `run`.
        start_timeout: seconds for the processes to start and import torch, times `patience()`.
        rpc: whether calls will have `rpc=True`: such ranks are on the CPU.
    """

    def __init__(
        self,
        world_size: int,
        backend: str | None = None,
        start_timeout: float = 120.0,
        *,
        rpc: bool = False,
    ) -> None:
        self.placement = place_ranks(world_size, backend, rpc=rpc)
        self.world_size = world_size
        self.closed = False
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._ranks: list[RankProcess] = []
        # Nobody else can look into it, whatever the umask. If this process is killed, its ranks remove it.
        self._folder = tempfile.TemporaryDirectory(prefix="zero_ref-ranks-", ignore_cleanup_errors=True)
        _open_pools.add(self)
        try:
            with starting_processes():
                for rank in range(world_size):
                    self._ranks.append(RankProcess(Seat.of(self.placement, rank, self._folder.name)))
            self._await_start(start_timeout * patience())
        except BaseException:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        """Whether all ranks wait for a call, and the file by which they find each other still exists."""
        # Some systems remove temporary files that are days old.
        ready = not self.closed and all(rank.is_idle() for rank in self._ranks)
        return ready and Path(self._folder.name, _worker.STORE).exists()

    def run(
        self, fn: Callable[..., T], *args: Any, timeout: float = 60.0, rpc: bool = False, **kwargs: Any
    ) -> list[T]:
        """Call a function on this pool's ranks, as `zero_ref.lab.ranks.run` does. An error ends all ranks."""
        _check_call(fn, timeout, rpc)
        if self.closed:
            raise RuntimeError(
                "this pool is closed, by close() or by an error in an earlier call: make a new Pool"
            )
        timeout *= patience()
        collective_timeout = timedelta(seconds=COLLECTIVE_SHARE * timeout)
        packed_call = _pack_call(RankCall(fn, args, kwargs, collective_timeout, list(warnings.filters), rpc))
        surroundings = Surroundings.of_this_process()
        with self._lock:
            try:
                for rank in self._ranks:
                    rank.send(surroundings, packed_call)
                packed_values = self._collect(timeout)
                self._leave_groups()
            except BaseException:  # a RankError or Ctrl-C: ranks may stand anywhere in the function
                self._kill()
                raise
            finally:
                self._show_output()
                if not self.usable:
                    self.close()
        return [_unpack_value(rank, packed) for rank, packed in enumerate(packed_values)]

    def close(self) -> None:
        """End the ranks; those that do not within seconds are killed."""
        if self._owner_pid != os.getpid():
            return
        if not self.closed:
            for rank in self._ranks:
                rank.send_word()
            deadline = time.monotonic() + LEAVE_SECONDS * patience()
            for rank in self._ranks:
                rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        self._folder.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _await_start(self, timeout: float) -> None:
        if self._all_ready(timeout):
            return
        for rank in self._ranks:
            if not rank.process.is_alive():
                end = Failure.of_exit(rank.process.exitcode).summary
                raise RankError(
                    f"rank {rank.number} {end} while it started\n{rank.read('stderr')}", rank.number, end
                )
        raise RankError(f"no start within {timeout:g} s: give Pool a longer start_timeout", 0, "no start")

    def _collect(self, timeout: float) -> list[bytes]:
        """Wait for what each rank returns, or raise the RankError that says why some do not."""
        outcomes: dict[int, bytes | Failure] = {}
        running = {rank.number: rank for rank in self._ranks}
        deadline = time.monotonic() + timeout
        while running:
            sources = [source for rank in running.values() for source in (rank.pipe, rank.process.sentinel)]
            ready = connection.wait(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for number, rank in list(running.items()):
                if rank.pipe in ready or rank.process.sentinel in ready:
                    outcomes[number] = rank.receive()
                    del running[number]
                    if isinstance(outcomes[number], Failure):
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failures = {number: outcome for number, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if running or failures:
            # One that had returned may have ended while it served the others, who notice that before we do.
            returned = [rank for rank in self._ranks if isinstance(outcomes.get(rank.number), bytes)]
            if returned and any(failure.is_consequence for failure in failures.values()):
                connection.wait([rank.process.sentinel for rank in returned], GRACE_SECONDS)
            failures |= {rank.number: rank.end() for rank in returned if not rank.process.is_alive()}
        stacks = {number: rank.stack() for number, rank in running.items()}
        if failures:
            raise failed(failures, stacks, self.world_size)
        if running:
            raise timed_out(stacks, self.world_size, timeout)
        return [cast(bytes, outcomes[number]) for number in range(self.world_size)]

    def _leave_groups(self) -> None:
        for rank in self._ranks:
            rank.send_word()
        if not self._all_ready(LEAVE_SECONDS * patience()):
            self._kill()  # such as a rank that waits for a collective it started and nobody joined

    def _all_ready(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        try:
            return all(
                rank.pipe.poll(max(0.0, deadline - time.monotonic())) and rank.pipe.recv() == _worker.READY
                for rank in self._ranks
            )
        except (EOFError, OSError):
            return False

    def _kill(self) -> None:
        self.closed = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()

    def _show_output(self) -> None:
        for rank in self._ranks:
            for kind, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                text = rank.read(kind).replace("\r\n", "\n").removesuffix("\n")
                for line in text.split("\n") if text else []:
                    # A progress bar goes back to the start of its line: show what stood there last.
                    print(f"[rank {rank.number}] {line.split(chr(13))[-1]}", file=stream)


def _pack_call(call: RankCall) -> bytes:
    try:
        return _worker.pack(call)
    except Exception as error:
        raise TypeError(
            f"{call.fn!r} or its arguments cannot be sent to the ranks ({type(error).__name__}: {error}). "
            "Make what cannot be pickled, such as a lock, a file or a process group, inside the function."
        ) from error


def _unpack_value(rank: int, packed: bytes) -> Any:
    try:
        return _worker.unpack(packed, map_location="cpu")
    except Exception as error:
        summary = f"{type(error).__name__}: {error}"
        raise RankError(
            f"rank {rank} returned a value that cannot be read here: {summary}", rank, summary
        ) from error


def _check_call(fn: object, timeout: float, rpc: bool) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be a function that each rank can call, not {fn!r}")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if rpc and not (
        torch.distributed.rpc.is_available() and hasattr(torch.distributed.rpc, "TensorPipeAgent")
    ):
        raise RuntimeError(
            f"this torch ({torch.__version__} on {sys.platform}) has no RPC: use one whose "
            "torch.distributed.rpc.is_available(), such as the builds for Linux"
        )


_kept_pools: dict[tuple[int, Placement, bool], Pool] = {}
_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
atexit.register(shutdown)
