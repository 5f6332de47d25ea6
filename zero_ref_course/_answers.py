"""The processes of answers: a nursery that has imported what they need, and forks one for each.

The nursery runs no code of a student. Each connection to its socket is one answer: it forks, the child
confines itself, runs the student's cells and serves calls, and is killed when the connection is closed.
A child inherits the connection and nothing else: no environment, no other file, no memory of the grader.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
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

from zero_ref_course import _wire
from zero_ref_course._confine import Limits, confine

DISTRIBUTED = 0
"""The number by which both sides know torch.distributed on the grader's rank."""

FORWARDED = (
    "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
    "gather", "scatter", "send", "recv", "isend", "irecv", "barrier", "get_rank", "get_world_size",
    "is_initialized", "get_backend",
)  # fmt: skip
"""Functions of torch.distributed that an answer calls in its process and the grader's rank makes."""

ITS_CELL, SETUP = "<its cell>", "<the setup cell>"


class Forbidden(BaseException):
    """The answer calls what its task asks for. Not an Exception, for the sake of `except Exception`."""


# ------------------------------------------------------------------------------------------- the nursery


def main() -> None:
    """Serve connections until stdin is closed. Arguments: a folder for the socket and scratch, modules."""
    folder, *modules = sys.argv[1:]
    for module in modules:
        with contextlib.suppress(Exception):  # an extra that is not installed: the answer will hear of it
            import_module(module)
    torch.set_num_threads(1)  # and no thread of OpenMP's, which would not be in a child
    torch.ones(64, 64) @ torch.ones(64, 64)  # now torch reads /proc/cpuinfo, and chooses kernels by it
    gc.freeze()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/socket")
        listening.listen(64)
        print("ready", flush=True)
        _serve_connections(Path(folder), listening, wake)


def _serve_connections(folder: Path, listening: socket.socket, wake: socket.socket) -> None:
    living: dict[int, tuple[socket.socket, Path]] = {}  # by process
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(wake, select.POLLIN)
    poll.register(sys.stdin, 0)
    process_of: dict[int, int] = {}
    while True:
        for number, event in poll.poll():
            if number == sys.stdin.fileno():
                signal.set_wakeup_fd(-1)
                for process in living:
                    _kill(process)
                shutil.rmtree(folder, ignore_errors=True)  # who started us may have been killed
                return
            if number == listening.fileno():
                connection, _ = listening.accept()
                scratch = Path(tempfile.mkdtemp(prefix="answer-", dir=folder))
                process = _fork(connection, scratch, [listening, wake, *(one for one, _ in living.values())])
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


def _fork(connection: socket.socket, scratch: Path, others: list[socket.socket]) -> int:
    _wire.send(connection, {"scratch": str(scratch)})
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
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
        _serve_answer(socket.socket(fileno=3), scratch)
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
        self.sock, self.table = sock, _wire.Table(-1)

    def receive(self) -> Any:
        return _wire.receive(self.sock)

    def send(self, message: Any) -> None:
        _wire.send(self.sock, message)

    def writer(self) -> _wire.Writer:
        return _wire.Writer(self.table, trusted=False)

    def read(self, node: Any) -> Any:
        return _wire.Reader(self.table, True, lambda *proxy: _Proxy(self, *proxy)).read(node)

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


def _serve_answer(sock: socket.socket, scratch: Path) -> None:
    link = _Link(sock)
    asked = link.receive()
    _disable(asked["forbids"])
    _forward_distributed(link)
    confine(scratch, Limits(*asked["limits"]))
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
        except _wire.WireError as error:
            link.send({"raised": {**_said_of(error, function), "text": f"what it returns: {error}"}})
        link.table.forget_containers()


def _outcome(link: _Link, function: Callable[..., Any], call: Any) -> Any:
    args, kwargs = link.read(call)
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        said = {"raised": _said_of(error, function)}
    else:
        writer = link.writer()
        try:
            return {"value": writer.write(value), "arguments": writer.write([args, kwargs])}
        except Exception as error:
            said = {
                "raised": {
                    **_said_of(error, function),
                    "name": "TypeError",
                    "text": f"what it returns: {error}",
                }
            }
    with contextlib.suppress(Exception):
        said["arguments"] = link.writer().write([args, kwargs])
    return said


def _said_of(error: BaseException, function: Callable[..., Any]) -> dict[str, Any]:
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    frames = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno) for trace in _frames(error.__traceback__)]
    return {
        "name": type(error).__name__,
        "text": str(error),
        "token": getattr(error, "_of_the_grader", None),
        "line": next((line for name, line in reversed(frames) if name == file), 0),
        "itself": bool(frames) and frames[-1][0] == file and isinstance(error, NotImplementedError),
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
        return f"{name.strip('<>')} calls {error}, which this exercise asks you to write."
    except BaseException as error:
        more = ""
        if isinstance(error, NameError) and name == ITS_CELL:
            more = " Besides this cell only the notebook's cell of imports is run."
        return f"{name.strip('<>')} raises {type(error).__name__}: {error}.{more}"
    return ""


def _disable(names: list[str]) -> None:
    """Make functions raise `Forbidden` whoever calls them, and by whichever name."""
    for full in names:
        module, _, name = full.rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:  # a method: module.Class.method
            above, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(above), kind)
        function = getattr(owner, name)
        inner = getattr(function, "__wrapped__", function)
        namespace: dict[str, Any] = {}
        exec(
            f"def {name}(*args, **kwargs):\n"
            "    from zero_ref_course._answers import Forbidden\n"
            f"    raise Forbidden({json.dumps(name)})\n",
            namespace,
        )
        for one in {id(function): function, id(inner): inner}.values():
            if hasattr(one, "__code__") and not one.__code__.co_freevars:
                one.__code__ = namespace[name].__code__
        setattr(owner, name, namespace[name])


def _forward_distributed(link: _Link) -> None:
    for name in FORWARDED:
        ahead = _Proxy(link, DISTRIBUTED, "torch.distributed", list(FORWARDED), {})
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, getattr(ahead, name))


if __name__ == "__main__":
    import_module("zero_ref_course._answers").main()  # not this copy, whose Forbidden would be another class
