"""One model, one seed, several strategies: trained on real ranks, each beside its prediction.

What `zero-ref train` runs and prints; `zero_ref.lab.demo` adds pictures and a page.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from zero_ref.lab import ranks
from zero_ref.lab.checkpoints import NothingLeftError
from zero_ref.lab.config import TrainConfig
from zero_ref.lab.meter import HeldBytes
from zero_ref.lab.outcome import Measured, Outcome, Pair, outcome, predict
from zero_ref.lab.train import StepDone, train
from zero_ref.simulator.recipe import LOCAL_SGD

ROW_NAMES = {
    "state_bytes_max": "optimizer state",
    "parameter_bytes_max": "parameters",
    "gradient_bytes_max": "gradients",
    "collectives": "calls",
    "payload_bytes": "payload",
}
"""The names of an Outcome's quantities on the demo's page and in its pictures."""

CYCLE = f"{LOCAL_SGD}: calls and payload of the last 8 steps"


@dataclass(frozen=True)
class StrategyRun:
    """One strategy's outcome, and the bytes that each rank held."""

    outcome: Outcome
    held: list[HeldBytes]


def compare(
    strategies: Sequence[str],
    config: TrainConfig,
    world_size: int,
    console: Console,
    timeout: float = 3600.0,
) -> list[StrategyRun]:
    """Train under each strategy in turn, from the same seed, on `world_size` ranks of this machine.

    Args:
        config: trained `under` each strategy.
        console: shows a progress bar for each, unless it is quiet.
        timeout: seconds for each strategy.
    Raises:
        RankError: a rank failed.
        NothingLeftError: all steps are in `config.checkpoint_dir` already.
        ValueError: as `TrainConfig.under`, before the first strategy is run.
    """
    runs = []
    for of_strategy in [config.under(strategy) for strategy in strategies]:
        plan = predict(of_strategy, world_size)  # before anything runs
        with _following(f"{of_strategy.title:<12}", config.steps, console) as report:
            measured = _train_on_ranks(of_strategy, world_size, report, timeout)
        result = outcome(of_strategy, plan, measured)
        runs.append(StrategyRun(result, [rank.held for rank in measured]))
    return runs


def _train_on_ranks(
    config: TrainConfig, world_size: int, report: ProgressFile, timeout: float
) -> list[Measured]:
    try:
        return ranks.run(train, world_size, config, report, timeout=timeout)
    except ranks.RankError as error:
        if isinstance(error.__cause__, NothingLeftError):
            raise error.__cause__ from None
        raise


class ProgressFile:
    """Writes a line to a file after each step, on rank 0; the process that shows the progress reads it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes_read = 0

    def __call__(self, done: StepDone) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(done) + "\n")

    def read(self) -> list[StepDone]:
        """The steps whose lines were written since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.nbytes_read)
                lines, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.nbytes_read += len(lines + newline)
        return [StepDone(*json.loads(line)) for line in lines.splitlines()]


@contextlib.contextmanager
def _following(name: str, steps: int, console: Console) -> Iterator[ProgressFile]:
    """Show a progress bar while the ranks train."""
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet,  # in a notebook a quiet console shows an empty bar, again and again
    )
    with tempfile.TemporaryDirectory() as folder, shown:
        report = ProgressFile(os.path.join(folder, "progress"))
        task = shown.add_task(name, total=steps, loss="    -")
        ended = threading.Event()

        def follow() -> None:
            for done in report.read():
                shown.update(task, completed=done.step, loss=f"{done.loss:.3f}")

        def watch() -> None:
            while not ended.wait(0.2):
                follow()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield report
        finally:
            ended.set()
            watcher.join()
            follow()


# ------------------------------------------------------------------------------------------ what is shown


def table(outcomes: Sequence[Outcome], times: bool = True) -> Table:
    """A table of each strategy's bytes and calls on the fullest rank; "predicted | measured" if these differ.

    Args:
        times: with the milliseconds of a step. A few steps on a busy machine say little about them.
    """
    step_ms = ["step, ms"] if times else []
    shown = _of_numbers(
        "on the fullest rank, MB and calls of a step; predicted | measured if not equal",
        ["state", "parameters", "gradients", "calls", "payload", *step_ms, "loss"],
    )
    if any(result.loss_tolerance is None for result in outcomes):
        shown.caption = CYCLE
    for result in outcomes:
        cells = []
        for quantity, pair in result.pairs().items():
            scale, digits = (1, 0) if quantity == "collectives" else (1e6, 3)
            cells.append(_cell(pair, scale, digits))
        cells += [f"{result.step_ms:.0f}"] if times else []
        shown.add_row(result.strategy, *cells, f"{result.final_loss:.6f}")
    return shown


def _cell(pair: Pair, scale: float, digits: int) -> str:
    measured = f"{pair.measured / scale:.{digits}f}"
    if pair.predicted is None or pair.agrees:
        return measured
    return f"[bold red]{pair.predicted / scale:.{digits}f} | {measured}[/]"


def bytes_table(outcomes: Sequence[Outcome]) -> Table:
    """Bytes held for each parameter, beside the ledger's; "predicted | measured" where these differ."""
    shown = _of_numbers("all of it, bytes a parameter", ("ledger", "fullest rank", "emptiest rank"))
    for result in outcomes:
        cells = [f"{result.ledger_bytes / result.numel:g}"]
        for extreme in (max, min):
            pair = extreme(result.held_bytes, key=lambda of_rank: of_rank.measured)
            cells.append(_cell(pair, result.numel, 3))
        shown.add_row(result.strategy, *cells)
    return shown


def _of_numbers(title: str, columns: Sequence[str]) -> Table:
    """An empty table of a name and numbers."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
