"""The pool's side of one rank: starting its process, sending it calls, reading what it answers and prints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from traceback import StackSummary
from typing import Any

from zero_ref.lab import _worker
from zero_ref.lab._failure import Failure, stack_in
from zero_ref.lab._worker import Seat, Surroundings
from zero_ref.lab.patience import patience


class RankProcess:
    """One rank as its pool sees it: the process, the pipe to it, the files that collect its output."""

    def __init__(self, seat: Seat) -> None:
        self.number = seat.rank
        self._files = {kind: open(seat.output(kind), "w+b") for kind in ("stdout", "stderr", "stacks")}  # noqa: SIM115
        context: Any = multiprocessing.get_context(start_method())
        ends: tuple[Connection, Connection] = context.Pipe()
        self.pipe, far_end = ends
        self.process: BaseProcess = context.Process(target=_worker.main, args=(seat, far_end))
        self.process.start()
        far_end.close()  # only the worker has it now: when it is gone, reading the pipe says so

    def is_idle(self) -> bool:
        """Whether it is there to take a call; between calls, to ask is to look for the end of its pipe."""
        with contextlib.suppress(OSError):
            return self.process.is_alive() and not self.pipe.poll()
        return False

    def send(self, surroundings: Surroundings, packed_call: bytes) -> None:
        """Give it a call to make. If it is gone nothing happens: `receive` tells how it ended."""
        with contextlib.suppress(OSError):
            self.pipe.send(surroundings)
            self.pipe.send_bytes(packed_call)

    def send_word(self) -> None:
        """Tell the rank, during a call, to leave the group, as all have reported; between calls, to end."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)

    def receive(self) -> bytes | Failure:
        """Return the packed value or the failure, once one is there or the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return self.pipe.recv() or self.pipe.recv_bytes()
        return self.end()

    def end(self) -> Failure:
        """Return how the process ended, as the first failure, though other errors may be noticed before."""
        self.process.join(patience())
        return dataclasses.replace(Failure.of_exit(self.process.exitcode), seconds=-math.inf)

    def read(self, kind: str) -> str:
        """Return the rank's whole "stdout", "stderr" or "stacks" since the last call began."""
        self._files[kind].seek(0)
        return self._files[kind].read().decode(errors="replace")

    def stack(self) -> StackSummary:
        """Return the called function's frames, outermost first; empty if the process does not answer."""
        if sys.platform != "win32" and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                # faulthandler in the worker answers, whatever Python there is waiting for.
                os.kill(self.process.pid, signal.SIGUSR1)
        dump, deadline = "", time.monotonic() + patience()
        while time.monotonic() < deadline and not (dump and dump == self.read("stacks")):
            dump = self.read("stacks")
            time.sleep(0.02)
        return stack_in(dump, _worker.perform.__name__, _worker.__file__)

    def close(self) -> None:
        """Give back the pipe and the files; the process has ended."""
        self.pipe.close()
        for file in self._files.values():
            file.close()


def start_method() -> str:
    """Return the start method of processes: "forkserver" on Linux, else "spawn"; `ranks` says why."""
    # The server is called by a socket file below the temporary folder, and its path may have 107 characters.
    return "forkserver" if sys.platform == "linux" and len(tempfile.gettempdir()) <= 70 else "spawn"


@contextlib.contextmanager
def starting_processes() -> Iterator[None]:
    """Around the start of processes: they import torch without its warnings, and not the caller's script.

    multiprocessing would import the script again in each, where without an `if __name__ == "__main__":` it
    would start ranks of its own. Nothing needs that here: what a script defines travels by value.
    """
    if start_method() == "forkserver":
        # The first optimizer of a process imports torch._dynamo, which takes nearly as long as torch itself.
        multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "cloudpickle"])
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.warnoptions.append("ignore")  # put on their command line; each call then brings its caller's filters
    try:
        yield
    finally:
        sys.warnoptions.pop()
        sys.modules["__main__"] = script
