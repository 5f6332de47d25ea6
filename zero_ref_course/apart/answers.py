"""The processes of answers, each forked from one that has imported what it needs.

The nursery has imported torch. For each connection to its socket it forks a room, which imports the copy of
`zero_ref` that one exercise allows. For each connection to a room's socket the room forks an answer, which
confines itself, runs the student's cells and serves calls. Whoever closes a connection ends its process.

Nursery and rooms run no code of a student and never had the course or the whole package in memory. So an
answer inherits its connection and nothing else: no environment, no other file, nothing of the grader.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zero_ref_course.apart import ASKED_FOR, Forbidden, confine, wire

DISTRIBUTED = 0
"""The number by which both sides know torch.distributed on the grader's rank."""

FORWARDED = (
    "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
    "all_gather_object", "gather", "scatter", "send", "recv", "isend", "irecv", "barrier", "get_rank",
    "get_world_size", "is_initialized", "get_backend",
)  # fmt: skip
"""Functions of torch.distributed that an answer calls in its process and the grader's rank makes."""

ITS_CELL, SETUP = "<its cell>", "<the setup cell>"

Serve = Callable[[socket.socket, Path], None]


# ------------------------------------------------------------------------------- the nursery and its rooms


def main(folder: str, modules: list[str], readable: list[tuple[str, int]]) -> None:
    """Serve connections until stdin is closed.

    Args:
        folder: for the socket, and for folders of rooms.
        modules: what answers import beside `zero_ref`.
        readable: files and folders that an answer may read, with Landlock's rights.
    """
    _import(modules)
    torch.set_num_threads(1)  # and no thread of OpenMP's, which would not be in a child
    torch.ones(64, 64) @ torch.ones(64, 64)  # now torch reads /proc/cpuinfo, and chooses kernels by it

    def room(connection: socket.socket, scratch: Path) -> None:
        asked = wire.receive(connection)
        sys.path.insert(0, asked["package"])
        _import(asked["modules"])
        may_read = [*readable, (asked["package"], confine.READ)]

        def answer(link: socket.socket, its_folder: Path) -> None:
            _serve_answer(_Link(link), its_folder, may_read)

        _serve(scratch, connection.fileno(), answer, lambda: wire.send(connection, {"ready": True}))

    _serve(Path(folder), sys.stdin.fileno(), room, lambda: print("ready", flush=True))


def _import(modules: list[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception, Forbidden):  # not installed, or removed: the answer hears of it
            import_module(module)


def _serve(folder: Path, until: int, child: Serve, ready: Callable[[], object]) -> None:
    """Fork a child for each connection to `folder/socket`, until the file `until` is closed elsewhere."""
    gc.freeze()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/socket")
        listening.listen(64)
        ready()
        _serve_connections(folder, until, child, listening, wake)


def _serve_connections(
    folder: Path, until: int, child: Serve, listening: socket.socket, wake: socket.socket
) -> None:
    living: dict[int, tuple[socket.socket, Path]] = {}  # by process
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(wake, select.POLLIN)
    poll.register(until, 0)
    process_of: dict[int, int] = {}
    while True:
        for number, event in poll.poll():
            if number == until:
                signal.set_wakeup_fd(-1)
                for process in living:
                    _kill(process)
                shutil.rmtree(folder, ignore_errors=True)  # who started us may have been killed
                return
            if number == listening.fileno():
                connection, _ = listening.accept()
                scratch = Path(tempfile.mkdtemp(prefix="in-", dir=folder))
                process = _fork(
                    child, connection, scratch, [listening, wake, *(one for one, _ in living.values())]
                )
                living[process] = connection, scratch
                process_of[connection.fileno()] = process
                poll.register(connection, 0)  # only whether the grader has closed it
            elif number in process_of and event & (select.POLLHUP | select.POLLERR):
                _kill(process_of[number])
                poll.unregister(number)
            elif number == wake.fileno():
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
        for process in _ended(living):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)  # what is left of its session
            connection, scratch = living.pop(process)
            del process_of[connection.fileno()]
            with contextlib.suppress(KeyError):
                poll.unregister(connection)
            connection.close()  # the grader hears of it
            shutil.rmtree(scratch, ignore_errors=True)


def _ended(living: dict[int, Any]) -> Iterator[int]:
    for process in list(living):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(process, os.WNOHANG) == (0, 0):
                continue
        yield process


def _kill(process: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have its session yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _fork(child: Serve, connection: socket.socket, scratch: Path, others: list[socket.socket]) -> int:
    wire.send(connection, {"scratch": str(scratch)})
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        confine.end_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in others:
            other.detach()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.dup2(connection.fileno(), 3)
        os.closerange(4, 4096)
        connection.detach()
        os.environ.clear()
        os.environ.update(HOME=str(scratch), PATH="/usr/bin:/bin", TMPDIR=str(scratch))
        tempfile.tempdir = str(scratch)
        os.chdir(scratch)
        child(socket.socket(fileno=3), scratch)
        code = 0
    except (EOFError, ConnectionError):  # the grader has heard enough
        code = 0
    finally:
        os._exit(code)


# ------------------------------------------------------------------------------------------- one answer


class _Proxy:
    """An object of the grader's: each method of it is called there."""

    def __init__(
        self, link: _Link, number: int, name: str, methods: list[str], values: dict[str, Any]
    ) -> None:
        self.__dict__.update(values)
        self._link, self._number, self._name, self._methods = link, number, name, methods

    def __getattr__(self, method: str) -> Any:
        if method not in self._methods:
            raise AttributeError(f"{self._name} has no {method!r}; it has {', '.join(self._methods)}")
        return lambda *args, **kwargs: self._link.callback(self._number, method, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "__call__" not in self._methods:
            raise TypeError(f"{self._name!r} object is not callable")
        return self._link.callback(self._number, "__call__", args, kwargs)

    def __repr__(self) -> str:
        return self._name


class _Link:
    """The answer's end of the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.table = sock, wire.Table(-1)

    def receive(self) -> Any:
        return wire.receive(self.sock)

    def send(self, message: Any) -> None:
        wire.send(self.sock, message)

    def writer(self) -> wire.Writer:
        return wire.Writer(self.table, trusted=False)

    def read(self, node: Any) -> Any:
        return wire.Reader(self.table, True, lambda *proxy: _Proxy(self, *proxy)).read(node)

    def callback(self, number: int, method: str, args: Any, kwargs: Any) -> Any:
        """Call a method of an object of the grader's, and raise what it raises."""
        writer = self.writer()
        message = {"callback": [number, method, writer.write(list(args)), writer.write(dict(kwargs))]}
        self.send(message)
        reply = self.receive()
        if "raised" in reply:
            raise _as_raised(*reply["raised"])
        _, value = self.read(reply["value"])
        return value


def _as_raised(token: int, name: str, text: str, is_exception: bool) -> BaseException:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        kind = type(name, (Exception if is_exception else BaseException,), {})
    error = kind(text)
    error._of_the_grader = token
    return error


def _serve_answer(link: _Link, scratch: Path, readable: list[tuple[str, int]]) -> None:
    asked = link.receive()
    _forward_distributed(link)
    confine.confine(scratch, confine.Limits(*asked["limits"]), readable)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    for name, source in ((SETUP, text) for text in asked["setup"]):
        if said := _run_cell(name, source, namespace):
            return link.send({"failed": said})
    if said := _run_cell(ITS_CELL, asked["source"], namespace):
        return link.send({"failed": said})
    if asked["function"] not in namespace:
        return link.send({"failed": f"its cell does not define {asked['function']}."})
    function = namespace[asked["function"]]
    if not callable(function):
        return link.send({"value": repr(function)[:200]})
    link.send({"name": str(getattr(function, "__name__", type(function).__name__))})
    while True:
        outcome = _outcome(link, function, link.receive()["call"])
        try:
            link.send(outcome)
        except wire.WireError as error:
            link.send({"raised": {**_said_of(error), "text": f"what it returns: {error}"}})
        link.table.forget_containers()


def _outcome(link: _Link, function: Callable[..., Any], call: Any) -> Any:
    args, kwargs = link.read(call)
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        said = {"raised": _said_of(error)}
    else:
        writer = link.writer()
        try:
            return {"value": writer.write(value), "arguments": writer.write([args, kwargs])}
        except Exception as error:
            said = {
                "raised": {
                    **_said_of(error),
                    "name": "TypeError",
                    "text": f"what it returns: {error}",
                }
            }
    with contextlib.suppress(Exception):
        said["arguments"] = link.writer().write([args, kwargs])
    return said


def _said_of(error: BaseException) -> dict[str, Any]:
    frames = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno) for trace in _frames(error.__traceback__)]
    return {
        "name": type(error).__name__,
        "text": str(error),
        "token": getattr(error, "_of_the_grader", None),
        "line": next((line for name, line in reversed(frames) if name == ITS_CELL), 0),
        "itself": bool(frames) and frames[-1][0] == ITS_CELL and isinstance(error, NotImplementedError),
        "forbidden": isinstance(error, Forbidden),
    }


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace:
        yield trace
        trace = trace.tb_next


def _run_cell(name: str, source: str, namespace: dict[str, Any]) -> str:
    """Run a cell; what to say if it fails."""
    text = "".join(line for line in source.splitlines(keepends=True) if not line.startswith(("%", "!")))
    try:
        exec(compile(text, name, "exec", dont_inherit=True), namespace)
    except Forbidden as error:
        return f"{name.strip('<>')} calls {error}, {ASKED_FOR}."
    except BaseException as error:
        more = ""
        if isinstance(error, NameError) and name == ITS_CELL:
            more = " Besides this cell only the notebook's cell of imports is run."
        return f"{name.strip('<>')} raises {type(error).__name__}: {error}.{more}"
    return ""


def _forward_distributed(link: _Link) -> None:
    for name in FORWARDED:
        ahead = _Proxy(link, DISTRIBUTED, "torch.distributed", list(FORWARDED), {})
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, getattr(ahead, name))
