"""An answer in a process of its own: graders call it as they call any `Answer`.

    with Nursery(["torch", "zero_ref.plan.rules"]) as nursery:
        answer = nursery.answer("def double(n): return 2 * n", "double")
        answer(2)

What the answer's process gets is the arguments of each call, and what it can do with them is to compute. The
grader, what is right, and the code that compares are in another process, so nothing that the answer does to
its own changes the verdict. `_confine` says what it may not do to the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch.distributed as dist

from zero_ref.lab.patience import patience
from zero_ref.lab.ranks import RankError
from zero_ref_course import Answer, ExerciseFailed, StillTheStub, _wire, call_text
from zero_ref_course._answers import DISTRIBUTED, FORWARDED
from zero_ref_course._confine import Limits
from zero_ref_course._disk import Disk
from zero_ref_course._rehearsal import ACTIONS, HookBucket
from zero_ref_course.notebook import import_path

COMM_METHODS = (
    "broadcast", "all_reduce", "all_gather", "gather_shares", "reduce_shares", "send", "recv", "exchange",
)  # fmt: skip
DISK_METHODS = ("names", "read", "write", "rename", "remove")


class Cells(NamedTuple):
    """What an answer's process runs: cells of imports, the cell of the answer; and what that defines."""

    setup: tuple[str, ...]
    source: str
    function: str
    forbids: tuple[str, ...] = ()
    limits: Limits = Limits()


class Nursery:
    """Starts the processes of answers, each in a hundredth of a second, because what they import is there.

    Args:
        modules: what answers import; modules that are missing are passed over.
    Raises:
        RuntimeError: this system cannot fork, or the imports fail.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        if not hasattr(os, "fork"):
            raise RuntimeError("answers are graded on Linux or macOS. Elsewhere use the container.")
        self._folder = tempfile.TemporaryDirectory(prefix="zero_ref-answers-", ignore_cleanup_errors=True)
        self.path = f"{self._folder.name}/socket"
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": self._folder.name,
            "PYTHONPATH": import_path(),
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
            "MPLCONFIGDIR": self._folder.name,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zero_ref_course._answers", self._folder.name, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._folder.name,
            env=environment,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError("the process from which answers are started did not start: see above.")

    @classmethod
    def at(cls, path: str) -> Nursery:
        """The nursery of another process, which that process closes."""
        nursery = cls.__new__(cls)
        nursery.path = path
        return nursery

    def answer(self, cells: Cells) -> IsolatedAnswer:
        """The function of these cells.

        Raises:
            ExerciseFailed: a cell raises, or does not define the function.
        """
        answer = IsolatedAnswer(self.path, cells)
        answer.start()
        return answer

    def close(self) -> None:
        """End all answers, and what starts them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20 * patience())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class IsolatedAnswer(Answer):
    """An answer in another process, one for each thread that calls it; can be sent to ranks."""

    def __init__(self, path: str, cells: Cells, seconds: float = 5.0, may_return_none: bool = False) -> None:
        self.path, self.cells = path, cells
        self.seconds, self.may_return_none, self.name = seconds, may_return_none, cells.function
        self.seed = 0
        self._of_thread = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_of_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of_thread=threading.local())

    def limited(self, seconds: float, may_return_none: bool, seed: int) -> IsolatedAnswer:
        self.seconds, self.may_return_none, self.seed = seconds, may_return_none, seed
        return self

    def start(self) -> None:
        """Start the process for this thread, unless there is one.

        Raises:
            ExerciseFailed: as `Nursery.answer`.
        """
        if not hasattr(self._of_thread, "link"):
            self._of_thread.link = link = _Link(self.path)
            self.name = link.define(self.cells)

    def end(self) -> None:
        """End the process for this thread; the next call starts a new one."""
        if link := self._of_thread.__dict__.pop("link", None):
            link.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self.start()
        call, seconds = call_text(self.name, *args, **kwargs), self.seconds * patience()
        try:
            said = self._of_thread.link.call(args, kwargs, seconds)
        except BaseException as error:
            self.end()
            if isinstance(error, TimeoutError):
                raise ExerciseFailed(
                    f"{call} did not return within {seconds:g} s. Is there a loop that never ends?"
                ) from None
            if isinstance(error, (EOFError, ConnectionError)):
                raise ExerciseFailed(
                    f"the answer's process ended in the call {call}. Did it exit, or use too much memory?"
                ) from None
            if isinstance(error, _wire.WireError):
                raise ExerciseFailed(f"what {call} returned cannot be read: {error}.") from None
            raise
        if isinstance(said, _Raised):
            self._raise(call, said)
        if said is None and not self.may_return_none:
            raise ExerciseFailed(f"{call} returned None. Does the function end in a `return`?")
        return said

    def _raise(self, call: str, said: _Raised) -> None:
        ours = (ExerciseFailed, StillTheStub, RankError)
        if said.error is not None and (isinstance(said.error, ours) or not isinstance(said.error, Exception)):
            raise said.error  # of an object that the grader has lent
        if said.itself:
            raise StillTheStub(
                f"{self.name} is still the stub: write its body, run its cell, then check again."
            )
        if said.forbidden:
            raise ExerciseFailed(f"{call} calls {said.text}, which this exercise asks you to write.")
        text = f"{call} raised {said.name}" + (f": {said.text}" if said.text else "")
        lines = self.cells.source.splitlines()
        source = lines[said.line - 1].strip() if 0 < said.line <= len(lines) else ""
        raise ExerciseFailed(f"{text} (line {said.line}: {source})" if source else text)


class _Raised(NamedTuple):
    """That the answer raised, and `error` if it was what the grader had raised in it."""

    name: str
    text: str
    line: int
    itself: bool
    forbidden: bool
    error: BaseException | None


class _Link:
    """The grader's end of one answer's connection."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self._close = weakref.finalize(self, self.sock.close)
        self.sock.settimeout(60 * patience())
        self.sock.connect(path)
        self.scratch = Path(_wire.receive(self.sock)["scratch"])  # the nursery says this, before it forks
        self.table = _wire.Table(1)
        self._methods: dict[int, list[str]] = {DISTRIBUTED: list(FORWARDED)}
        self._folders: dict[Path, Path] = {}
        self._started_with: dict[int, list[Any]] = {}

    def close(self) -> None:
        self._close()

    def define(self, cells: Cells) -> str:
        _wire.send(
            self.sock,
            {
                "setup": list(cells.setup),
                "source": cells.source,
                "function": cells.function,
                "forbids": list(cells.forbids),
                "limits": list(cells.limits),
            },
        )
        try:
            said = _wire.receive(self.sock)
        except TimeoutError:
            raise ExerciseFailed("its cell did not end.") from None
        except (EOFError, ConnectionError):
            raise ExerciseFailed("its cell ended the process before it defined the function.") from None
        except _wire.WireError as error:
            raise ExerciseFailed(f"what its process said cannot be read: {error}.") from None
        said = said if isinstance(said, dict) else {}
        if "value" in said:
            raise ExerciseFailed(
                f"check was given {str(said['value'])[:200]}. It takes the function itself, not a value."
            )
        if "name" not in said:
            raise ExerciseFailed(str(said.get("failed", "its process did not say what it defines."))[:2000])
        name = str(said["name"])[:60]
        return name if name.isidentifier() or name == "<lambda>" else cells.function

    def call(self, args: Any, kwargs: Any, seconds: float) -> Any:
        """What the answer returns, or a _Raised."""
        deadline = time.monotonic() + seconds
        self._started_with.clear()
        self._folders.clear()
        arguments = [self._lent(list(args)), self._lent(dict(kwargs))]
        raised: list[BaseException] = []
        self._send({"call": self._writer().write(arguments)}, deadline)
        while True:
            said = self._receive(deadline)
            if "callback" not in said:
                break
            self._answer_callback(said["callback"], raised, deadline)
        reader = _wire.Reader(self.table, trusted=False)
        value = self._returned(reader.read(said.get("value")))
        reader.read(said.get("arguments"))
        for here, there in self._folders.items():
            _copy_back(there, here)
        if "raised" in said:
            value = self._raised(said["raised"], raised)
        elif "value" not in said:
            raise _wire.WireError("it neither returned nor raised")
        self.table.forget_containers()
        return value

    def _raised(self, said: Any, raised: list[BaseException]) -> _Raised:
        try:
            token = said["token"]
            error = raised[token] if type(token) is int and 0 <= token < len(raised) else None
            return _Raised(
                str(said["name"])[:80], str(said["text"])[:2000], int(said["line"]), bool(said["itself"]),
                bool(said["forbidden"]), error,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as unreadable:
            raise _wire.WireError(f"what it raised: {unreadable}") from None

    def _answer_callback(self, said: Any, raised: list[BaseException], deadline: float) -> None:
        try:
            number, method, args, kwargs = said
            thing = dist if number == DISTRIBUTED else self.table.objects[number]
            if method not in self._methods[number]:
                raise KeyError(method)
        except (KeyError, TypeError, ValueError):
            raise _wire.WireError("it asks for what it was not lent") from None
        reader = _wire.Reader(self.table, trusted=False)
        given, named = reader.read(args), reader.read(kwargs)
        if not (isinstance(given, list) and isinstance(named, dict)):
            raise _wire.WireError("a call without arguments")
        try:
            value = getattr(thing, method)(*given, **named)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raised.append(error)
            said = [len(raised) - 1, type(error).__name__, str(error), isinstance(error, Exception)]
            self._send({"raised": said}, deadline)
        else:
            touched = [*given, *named.values(), *self._started_with.get(number, [])]
            if _can_wait(value):  # its tensors change until then
                self._started_with[self.table.number(value)] = touched
            self._send({"value": self._writer().write([touched, value])}, deadline)

    def _send(self, message: Any, deadline: float) -> None:
        self.sock.settimeout(_left(deadline))
        _wire.send(self.sock, message)

    def _receive(self, deadline: float) -> Any:
        self.sock.settimeout(_left(deadline))
        said = _wire.receive(self.sock)
        if not isinstance(said, dict):
            raise _wire.WireError("it is no message of an answer")
        return said

    def _writer(self) -> _wire.Writer:
        return _wire.Writer(self.table, trusted=True, expose=self._expose)

    def _expose(self, thing: Any) -> tuple[str, list[str], dict[str, Any]] | None:
        found = _exposed(thing)
        if found:
            self._methods[self.table.number(thing)] = list(found[1])
        return found

    def _lent(self, arguments: Any) -> Any:
        """With copies of folders, in the answer's own, in place of folders of ours."""
        items = arguments.items() if isinstance(arguments, dict) else enumerate(arguments)
        for key, value in list(items):
            if isinstance(value, Path) and value.is_dir():
                there = self._folders[value] = self.scratch / f"{len(self._folders)}-{value.name}"
                shutil.rmtree(there, ignore_errors=True)
                shutil.copytree(value, there)
                arguments[key] = there
        return arguments

    def _returned(self, value: Any) -> Any:
        if isinstance(value, Path):
            for here, there in self._folders.items():
                if value.is_relative_to(there):
                    return here / value.relative_to(there)
        return value


def _exposed(thing: Any) -> tuple[str, list[str], dict[str, Any]] | None:
    """What an answer may use of an object that it is given."""
    if isinstance(thing, (FunctionType, MethodType, BuiltinFunctionType)):
        return thing.__name__, ["__call__"], {}
    if isinstance(thing, HookBucket):
        return repr(thing), list(ACTIONS), {"number": thing.number}
    if isinstance(thing, Disk):
        return "Disk", list(DISK_METHODS), {}
    if all(hasattr(thing, name) for name in ("world_size", "rank", *COMM_METHODS)):
        return "comm", list(COMM_METHODS), {"rank": thing.rank, "world_size": thing.world_size}
    if _can_wait(thing):
        return type(thing).__name__, [name for name in ("wait", "is_completed") if hasattr(thing, name)], {}
    return None


def _can_wait(thing: Any) -> bool:
    return callable(getattr(type(thing), "wait", None))


def _copy_back(there: Path, here: Path) -> None:
    """Make the grader's folder what the answer left of its copy. A link is copied, and not followed."""
    with tempfile.TemporaryDirectory(prefix="zero_ref-folder-") as fresh:
        copied = Path(fresh, "copied")
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(there, copied, symlinks=True)
        ours = {path.relative_to(here): path.is_dir() or path.read_bytes() for path in here.rglob("*")}
        theirs = {
            path.relative_to(copied): path.is_dir() or (not path.is_symlink() and path.read_bytes())
            for path in copied.rglob("*")
        }
        if ours != theirs:
            for path in here.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if copied.exists():
                shutil.copytree(copied, here, symlinks=True, dirs_exist_ok=True)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
