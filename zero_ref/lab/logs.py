"""What a training run says of its steps: lines on standard error, JSON lines, TensorBoard.

One process writes: rank 0 under torchrun, else the process that started the ranks. A run that goes on from a
checkpoint goes on in the log of the run before: what that one wrote of steps that are repeated is dropped. A
log that cannot be written any longer ends with a warning, and the run goes on.

TensorBoard is imported only where it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol

from zero_ref.lab._arguments import OutputFolder, ReplacedFile, json_text
from zero_ref.lab.settings import as_toml, settings_of

KINDS = {
    "plain": "a line on standard error now and then",
    "json": "a JSON object a step, in LOG_DIR/STRATEGY.jsonl",
    "tensorboard": "event files in LOG_DIR/STRATEGY",
}

EVERY = 20
"""Steps from one plain line to the next: what the log file of a cluster's job can take."""


class StepDone(NamedTuple):
    """A step of training.

    Args:
        step: how many are done, those before a resumed checkpoint included.
        loss: on the passages of rank 0.
        learning_rate: in this step.
        step_ms: on rank 0.
        world_size: the number of ranks.
        time: seconds since 1970, when it was done.
    """

    step: int
    loss: float
    learning_rate: float
    step_ms: float
    world_size: int
    time: float


class Log(Protocol):
    """One kind of log of one strategy."""

    @property
    def name(self) -> str:
        """Where it is written, in warnings."""

    def start(self, done: StepDone) -> None:
        """Drop what was written of this step and later ones, by an earlier run or before a restart."""

    def step(self, done: StepDone) -> None:
        """Write a step."""

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Write how it ended."""


@dataclass(frozen=True)
class Plain:
    """Progress lines on standard error."""

    name: str = "standard error"

    def start(self, done: StepDone) -> None:
        """Nothing: what was printed stays."""

    def step(self, done: StepDone) -> None:
        """Print the first step and each twentieth."""
        if done.step == 1 or done.step % EVERY == 0:
            print(f"step {done.step}: training loss {done.loss:.3f}", file=sys.stderr, flush=True)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Nothing: the outcome is printed on standard output."""


@dataclass
class JsonLines:
    """A file of JSON objects, a line each: settings, every step, the outcome. `event` says which.

    Args:
        name: the path.
    """

    name: str
    strategy: str
    settings: Mapping[str, Any]

    def start(self, done: StepDone) -> None:
        """Cut the file off before the first line that is not of an earlier step; write the settings."""
        os.makedirs(os.path.dirname(self.name), exist_ok=True)
        with open(self.name, "a+b") as file:
            file.truncate(_length_before(file, done.step))
        self._write("settings", done, first_step=done.step, settings=dict(self.settings))

    def step(self, done: StepDone) -> None:
        """Append the step."""
        self._write("step", done, **done._asdict())

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Append the outcome."""
        self._write("outcome", None, **outcome)

    def _write(self, event: str, done: StepDone | None, **values: Any) -> None:
        ranks = {} if done is None else {"world_size": done.world_size}
        line = json_text({"event": event, "strategy": self.strategy, **ranks, **values}, indent=None)
        with open(
            self.name, "ab"
        ) as file:  # closed after each line: all are there when the process is killed
            file.write(line.encode() + b"\n")


def _length_before(file: IO[bytes], step: int) -> int:
    """The bytes of a log of JSON lines that tell of earlier steps than this one."""
    file.seek(0)
    length = 0
    for line in file:
        told = _event(line)
        if told is None or told["event"] == "outcome" or told.get("step", told.get("first_step", 0)) >= step:
            break
        length += len(line)
    return length


def _event(line: bytes) -> dict[str, Any] | None:
    """The object in a line of such a log; None for another line, or one that was not written to its end."""
    with contextlib.suppress(ValueError):
        told = json.loads(line)
        if (
            line.endswith(b"\n")
            and isinstance(told, dict)
            and told.get("event") in ("settings", "step", "outcome")
        ):
            return told
    return None


@dataclass
class TensorBoard:
    """Event files for TensorBoard: loss, learning rate and milliseconds of each step.

    Args:
        name: the folder.
    """

    name: str
    settings: Mapping[str, Any]
    writer: Any = None
    last: int = 0

    def start(self, done: StepDone) -> None:
        """Begin a file from whose first step on TensorBoard hides what earlier files say."""
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is not None:
            self.writer.close()
        self.writer = SummaryWriter(self.name, purge_step=done.step, flush_secs=10)
        self.writer.add_text("settings", f"```\n{as_toml(self.settings)}\n```", done.step)

    def step(self, done: StepDone) -> None:
        """Add the step."""
        for tag in ("loss", "learning_rate", "step_ms", "world_size"):
            self.writer.add_scalar(tag, getattr(done, tag), done.step, walltime=done.time)
        self.last = done.step

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Add the held-out loss, and close the file."""
        if "final_loss" in outcome:
            self.writer.add_scalar("held_out_loss", outcome["final_loss"], self.last)
        self.writer.close()


class RunLog:
    """The logs of one strategy's run. A context: an error that ends it is written as the outcome.

    Args:
        logs: of each kind that was asked for.
    """

    def __init__(self, logs: Sequence[Log]) -> None:
        self.logs = list(logs)
        self.last: int | None = None

    def step(self, done: StepDone) -> None:
        """Write a step. One that is not after the last one written is that of a run that goes on."""
        starts = self.last is None or done.step <= self.last
        self.last = done.step
        for log in list(self.logs):
            with self._without_it(log):
                if starts:
                    log.start(done)
                log.step(done)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Write the outcome; nothing if there was no step."""
        for log in list(self.logs if self.last is not None else []):
            with self._without_it(log):
                log.finish(outcome)
        self.logs = []

    @contextlib.contextmanager
    def _without_it(self, log: Log) -> Iterator[None]:
        """Go on without a log that cannot be written: a full disk must not end the run."""
        try:
            yield
        except Exception as error:  # TensorBoard's writer raises what its thread met, whatever it is
            self.logs.remove(log)
            said = getattr(error, "strerror", None) or error
            print(
                f"{log.name} can no longer be written, and training goes on without it: {said}",
                file=sys.stderr,
            )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.finish({"failed": f"{type(error).__name__}: {error}"})


@dataclass(frozen=True)
class Logs:
    """Which logs to write, and where.

    Args:
        kinds: of KINDS.
        folder: for all kinds but "plain".
        settings: what they say of the run, first.
    Raises:
        ValueError: files are asked for and no folder is given, or the other way round.
    """

    kinds: Sequence[str] = ()
    folder: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        in_files = [kind for kind in self.kinds if kind != "plain"]
        if in_files and self.folder is None:
            raise ValueError(f"--log-to {in_files[0]} needs --log-dir, the folder to write to.")
        if self.folder is not None and not in_files:
            raise ValueError(
                "--log-dir is for --log-to json and --log-to tensorboard: give one of them, or leave it out."
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, default: Sequence[str]) -> Logs:
        """As the options `--log-to` and `--log-dir` say; `default` where no kind is given."""
        kinds = tuple(dict.fromkeys(arguments.log_to or default))
        return cls(kinds, arguments.log_dir, settings_of(arguments))

    def check(self, strategies: Sequence[str]) -> None:
        """Find out beforehand whether they can be written; leaves no trace.

        Raises:
            ModuleNotFoundError: TensorBoard is asked for, and is not installed.
            ValueError: a file or folder cannot be written, or there is a file that is no such log.
        """
        if "tensorboard" in self.kinds and importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "--log-to tensorboard needs the package tensorboard, which is not installed: pip install "
                "tensorboard",
                name="tensorboard",
            )
        for log in (log for strategy in strategies for log in self._of(strategy)):
            try:
                if isinstance(log, JsonLines):
                    _check_lines(log.name)
                elif isinstance(log, TensorBoard):
                    OutputFolder(log.name).check()
            except OSError as error:
                raise ValueError(
                    f"--log-dir: {log.name} cannot be written: {error.strerror or error}."
                ) from None

    def run(self, strategy: str) -> RunLog:
        """The logs of one strategy's run."""
        return RunLog(self._of(strategy))

    def _of(self, strategy: str) -> list[Log]:
        path = os.path.join(self.folder or "", strategy)
        made: dict[str, Log] = {
            "plain": Plain(),
            "json": JsonLines(f"{path}.jsonl", strategy, self.settings),
            "tensorboard": TensorBoard(path, self.settings),
        }
        return [made[kind] for kind in self.kinds]


def _check_lines(path: str) -> None:
    """Raise an OSError if a log of JSON lines cannot be written, a ValueError if something else is there."""
    ReplacedFile(path).check()
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        begun = b'{"event": "'
        if not begun.startswith(file.read(len(begun))):  # less of it where a disk was full
            raise ValueError(
                f"--log-dir: {path} is there, and is no log of this program: choose another folder."
            )
