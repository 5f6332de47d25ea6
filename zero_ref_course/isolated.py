"""An answer in a process of its own: graders call it as they call any `Answer`.

    with Nursery(["torch"]) as nursery:
        answer = nursery.answer(Cells((), "def double(n): return 2 * n", "double"))
        answer(2)

What the answer's process gets is the arguments of each call, and what it can do with them is to compute. The
grader, what is right, and the code that compares are in another process, so nothing that the answer does to
its own changes the verdict. `_stage` says what of the packages is there, `apart.confine` what an answer may
not do to the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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

import torch
import torch.distributed as dist

from zero_ref.lab.patience import patience
from zero_ref.lab.ranks import RankError
from zero_ref_course import Answer, ExerciseFailed, StillTheStub, _stage, call_text
from zero_ref_course._disk import Disk
from zero_ref_course._rehearsal import ACTIONS, HookBucket
from zero_ref_course.apart import ASKED_FOR, wire
from zero_ref_course.apart.answers import DISTRIBUTED, FORWARDED
from zero_ref_course.apart.confine import Limits

OURS = ("zero_ref", "zero_ref_course")

COMM_METHODS = (
    "broadcast", "all_reduce", "all_gather", "gather_shares", "reduce_shares", "send", "recv", "exchange",
)  # fmt: skip
DISK_METHODS = ("names", "read", "write", "rename", "remove")

DRAWN_WITH = ("matplotlib.pyplot", "ipywidgets")
"""What the notebooks' cells of imports load through `zero_ref`, so that each room need not."""

START = """
import json, sys
asked = json.loads(sys.argv[1])
sys.path[:0] = asked.pop("path")
from types import ModuleType
def hide(name):
    def __getattr__(attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        from zero_ref_course.apart import refuse
        return type(attribute, (), {"__init__": lambda *_, **__: refuse(f"{name}.{attribute}")})
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__getattr__ = __getattr__
for name in asked.pop("hidden"):
    hide(name)
from zero_ref_course.apart.answers import main
main(**asked)
"""
"""What the nursery runs. A hidden module of torch has classes that cannot be made."""

TRIES_TO_READ = """
def read(paths):
    found = []
    for path in paths:
        try:
            open(path).close()
            found.append(path)
        except IsADirectoryError:
            found.append(path)
        except OSError:
            pass
    return found
"""


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
        folder = self._folder.name
        self.path = f"{folder}/socket"
        self._room: _Room | None = None
        stage = Path(folder, "course")
        stage.mkdir()
        _stage.write_course(stage)
        asked = {
            "path": [str(stage), *_stage.libraries()],
            "hidden": _stage.OF_TORCH,
            "folder": folder,
            "modules": [name for name in (*modules, *DRAWN_WITH) if not name.startswith(OURS)],
            "readable": _stage.readable(stage),
        }
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
            "MPLCONFIGDIR": folder,
        }
        # -I and -S: no path to an installed or editable package of ours, whose files it then never opens.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
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
        nursery.path, nursery._room = path, None
        return nursery

    def answer(self, cells: Cells) -> IsolatedAnswer:
        """The function of these cells.

        Raises:
            ExerciseFailed: a cell raises, or does not define the function.
        """
        answer = IsolatedAnswer(self.room(cells.forbids, cells.setup[0] if cells.setup else ""), cells)
        answer.start()
        return answer

    def room(self, forbids: tuple[str, ...], imports: str = "") -> str:
        """Where answers are started that may not use these functions; the room before is left.

        Args:
            imports: the book's cell of imports, of which those of the package are made beforehand.
        """
        wanted = forbids, tuple(name for name in modules_in(imports) if name.startswith(OURS))
        if self._room is None or self._room.wanted != wanted:
            self.leave_room()
            self._room = _Room(self.path, *wanted)
        return self._room.path

    def leave_room(self) -> None:
        """End the process that has imported what the last exercise allows, and its answers."""
        if self._room:
            self._room.close()
            self._room = None

    def readable_originals(self) -> list[str]:
        """What an answer can open of what it must not: nothing, where the system keeps files apart."""
        answer = self.answer(Cells((), TRIES_TO_READ, "read"))
        try:
            return list(answer([str(path) for path in _stage.originals()]))
        finally:
            answer.end()

    def close(self) -> None:
        """End all answers, and what starts them."""
        self.leave_room()
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


class _Room:
    """A process that has imported the `zero_ref` which an exercise allows, and forks answers."""

    def __init__(self, path: str, forbids: tuple[str, ...], modules: tuple[str, ...]) -> None:
        self.wanted = forbids, modules
        self._sock, folder = _connected(path)
        package = folder / "package"
        _stage.write_package(package, forbids)
        wire.send(self._sock, {"package": str(package), "modules": modules})
        try:
            wire.receive(self._sock)
        except (EOFError, ConnectionError, TimeoutError):
            self._sock.close()
            raise RuntimeError("the process from which answers are started did not start.") from None
        self.path = f"{folder}/socket"

    def close(self) -> None:
        self._sock.close()


def modules_in(cell: str) -> list[str]:
    """What a cell imports.

    >>> modules_in("import math\\nfrom torch import nn\\n%load_ext x")
    ['math', 'torch']
    """
    return sorted(set(re.findall(r"^(?:from|import) ([\w.]+)", cell, re.MULTILINE)))


def _connected(path: str) -> tuple[socket.socket, Path]:
    """A connection for which a process is forked, and the folder that this process may write in."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60 * patience())
    sock.connect(path)
    return sock, Path(wire.receive(sock)["scratch"])


class IsolatedAnswer(Answer):
    """An answer in another process, one for each thread that calls it; can be sent to ranks."""

    def __init__(self, path: str, cells: Cells, seconds: float = 5.0, may_return_none: bool = False) -> None:
        self.path, self.cells = path, cells
        self.seconds, self.may_return_none, self.name = seconds, may_return_none, cells.function
        self.seed, self.shown = 0, []
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
        call, seconds = self.text_of(args, kwargs), self.seconds * patience()
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
            if isinstance(error, wire.WireError):
                raise ExerciseFailed(f"what {call} returned cannot be read: {error}.") from None
            raise
        if isinstance(said, _Raised):
            self._raise(call, said)
        if said is None and not self.may_return_none:
            raise ExerciseFailed(f"{call} returned None. Does the function end in a `return`?")
        return said

    def text_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A call as messages say it."""
        return call_text(self.name, *args, **kwargs)

    def _raise(self, call: str, said: _Raised) -> None:
        ours = (ExerciseFailed, StillTheStub, RankError)
        if said.error is not None and (isinstance(said.error, ours) or not isinstance(said.error, Exception)):
            raise said.error  # of an object that the grader has lent
        if said.itself:
            raise StillTheStub(
                f"{self.name} is still the stub: write its body, run its cell, then check again."
            )
        if said.forbidden:
            raise ExerciseFailed(f"{call} calls {said.text}, {ASKED_FOR}.")
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
        self.sock, self.scratch = _connected(path)
        self._close = weakref.finalize(self, self.sock.close)
        self.table = wire.Table(1)
        self._methods: dict[int, list[str]] = {DISTRIBUTED: list(FORWARDED)}
        self._folders: dict[Path, Path] = {}
        self._started_with: dict[int, tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def close(self) -> None:
        self._close()

    def define(self, cells: Cells) -> str:
        wire.send(
            self.sock,
            {
                "setup": list(cells.setup),
                "source": cells.source,
                "function": cells.function,
                "limits": list(cells.limits),
            },
        )
        try:
            said = wire.receive(self.sock)
        except TimeoutError:
            raise ExerciseFailed("its cell did not end.") from None
        except (EOFError, ConnectionError):
            raise ExerciseFailed("its cell ended the process before it defined the function.") from None
        except wire.WireError as error:
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
        self._folders.clear()
        arguments = [self._lent(list(args)), self._lent(dict(kwargs))]
        raised: list[BaseException] = []
        self._send({"call": self._writer().write(arguments)}, deadline)
        while True:
            said = self._receive(deadline)
            if "callback" not in said:
                break
            self._answer_callback(said["callback"], raised, deadline)
        reader = wire.Reader(self.table, trusted=False)
        value = self._returned(reader.read(said.get("value")))
        reader.read(said.get("arguments"))
        for here, there in self._folders.items():
            _copy_back(there, here)
        if "raised" in said:
            value = self._raised(said["raised"], raised)
        elif "value" not in said:
            raise wire.WireError("it neither returned nor raised")
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
            raise wire.WireError(f"what it raised: {unreadable}") from None

    def _answer_callback(self, said: Any, raised: list[BaseException], deadline: float) -> None:
        try:
            number, method, args, kwargs = said
            thing = dist if number == DISTRIBUTED else self.table.objects[number]
            if method not in self._methods[number]:
                raise KeyError(method)
        except (KeyError, TypeError, ValueError):
            raise wire.WireError("it asks for what it was not lent") from None
        reader = wire.Reader(self.table, trusted=False)
        given, named = reader.read(args), reader.read(kwargs)
        if not (isinstance(given, list) and isinstance(named, dict)):
            raise wire.WireError("a call without arguments")
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        passed = (given, named)
        if number == DISTRIBUTED and (named.get("async_op") or method in ("isend", "irecv")):
            # What is on its way has memory of its own: the answer goes on, and its messages overwrite ours.
            passed = _copied(given, copies), _copied(named, copies)
        try:
            value = getattr(thing, method)(*passed[0], **passed[1])
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raised.append(error)
            said = [len(raised) - 1, type(error).__name__, str(error), isinstance(error, Exception)]
            self._send({"raised": said}, deadline)
        else:
            touched = [*given, *named.values()]
            if number in self._started_with:
                started, arrived = self._started_with[number]
                touched += started
                while arrived and method == "wait":
                    tensor, copy = arrived.pop()
                    tensor.data.copy_(copy)
            if _can_wait(value):  # its tensors change until somebody waits, if need be in a later call
                self._started_with[self.table.number(value)] = touched, copies
            self._send({"value": self._writer().write([touched, value])}, deadline)

    def _send(self, message: Any, deadline: float) -> None:
        self.sock.settimeout(_left(deadline))
        wire.send(self.sock, message)

    def _receive(self, deadline: float) -> Any:
        self.sock.settimeout(_left(deadline))
        said = wire.receive(self.sock)
        if not isinstance(said, dict):
            raise wire.WireError("it is no message of an answer")
        return said

    def _writer(self) -> wire.Writer:
        return wire.Writer(self.table, trusted=True, expose=self._expose)

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


def _copied(value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The value with copies in place of its tensors; each tensor and its copy are added to `copies`."""
    if isinstance(value, list):
        return [_copied(item, copies) for item in value]
    if isinstance(value, dict):
        return {key: _copied(item, copies) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        copies.append((value, value.detach().clone()))
        return copies[-1][1]
    return value


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
