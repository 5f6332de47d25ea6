"""One model, one seed, several strategies: trained on real ranks, each beside its prediction.

What `zero-ref train` runs and prints; `zero_ref.lab.demo` adds pictures and a page.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from zero_ref.lab import elastic, ranks
from zero_ref.lab.checkpoints import NothingLeftError
from zero_ref.lab.config import TrainConfig
from zero_ref.lab.meter import HeldBytes
from zero_ref.lab.train import Measured, Outcome, outcome, predict, train
from zero_ref.simulator.recipe import LOCAL_SGD

ROW_NAMES = {
    "state_bytes_max": "optimizer state",
    "parameter_bytes_max": "parameters",
    "gradient_bytes_max": "gradients",
    "collectives": "calls",
    "payload_bytes": "payload",
}
"""How the quantities of an Outcome are called on the demo's page and in its pictures."""

CYCLE = f"{LOCAL_SGD}: calls and payload of the last 8 steps"


@dataclass(frozen=True)
class StrategyRun:
    """One strategy's outcome, and what each rank held."""

    outcome: Outcome
    held: list[HeldBytes]


def compare(
    strategies: Sequence[str], config: TrainConfig, world_size: int, console: Console, timeout: float = 3600.0
) -> list[StrategyRun]:
    """Train under each strategy in turn, from the same seed, on `world_size` ranks of this machine.

    Args:
        config: trained `under` each strategy.
        console: shows a progress bar for each.
        timeout: seconds for each strategy.
    Raises:
        RankError: a rank failed.
        NothingLeftError: all steps are in `config.checkpoint_dir` already.
        ValueError: as `TrainConfig.under`, before the first strategy is run.
    """
    runs = []
    for of_strategy in [config.under(strategy) for strategy in strategies]:
        plan = predict(of_strategy, world_size)  # before anything runs
        with _progress_bar(f"{of_strategy.recipe.title:<12}", config.steps, console) as report:
            measured = _train_on_ranks(of_strategy, world_size, report, console, timeout)
        if len(measured) != world_size:
            plan = predict(of_strategy, len(measured))  # of the ranks that were left at the end
        runs.append(StrategyRun(outcome(of_strategy, plan, measured), [rank.held for rank in measured]))
    return runs


def _train_on_ranks(
    config: TrainConfig, world_size: int, report: ProgressFile, console: Console, timeout: float
) -> list[Measured]:
    try:
        if config.elastic:
            return elastic.run(
                train, world_size, config, report, say=partial(console.print, soft_wrap=True), timeout=timeout
            )
        return ranks.run(train, world_size, config, report, timeout=timeout)
    except ranks.RankError as error:
        if isinstance(error.__cause__, NothingLeftError):
            raise error.__cause__ from None
        raise


class ProgressFile:
    """What rank 0 calls after each step: it is in another process, so it leaves a line in a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, step: int, loss: float) -> None:
        with open(self.path, "a") as file:
            file.write(f"{step} {loss}\n")


@contextlib.contextmanager
def _progress_bar(name: str, steps: int, console: Console) -> Iterator[ProgressFile]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )
    with tempfile.TemporaryDirectory() as folder, bar:
        report = ProgressFile(os.path.join(folder, "progress"))
        task = bar.add_task(name, total=steps, loss="    -")
        done = threading.Event()

        def show() -> None:
            with contextlib.suppress(OSError, IndexError, ValueError):  # nothing there yet
                step, loss = Path(report.path).read_text().splitlines()[-1].split()
                bar.update(task, completed=int(step), loss=f"{float(loss):.3f}")

        def watch() -> None:
            while not done.wait(0.2):
                show()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield report
        finally:
            done.set()
            watcher.join()
            show()


# ------------------------------------------------------------------------------------------ what is shown


def table(outcomes: Sequence[Outcome]) -> Table:
    """What each strategy took, on the rank that took most; "predicted | measured" where these differ."""
    shown = Table(
        title="on the fullest rank, MB and calls of a step; predicted | measured if not equal",
        caption=CYCLE if any(result.loss_tolerance is None for result in outcomes) else None,
        caption_justify="left",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    shown.add_column("")
    for name in ("state", "parameters", "gradients", "calls", "payload", "step, ms", "loss"):
        shown.add_column(name, justify="right", no_wrap=True)
    for result in outcomes:
        cells = []
        for quantity, pair in result.pairs().items():
            scale, digits = (1, 0) if quantity == "collectives" else (1e6, 3)
            predicted, measured = (f"{value / scale:.{digits}f}" for value in pair)
            cells.append(
                measured if pair.predicted == pair.measured else f"[bold red]{predicted} | {measured}[/]"
            )
        shown.add_row(result.strategy, *cells, f"{result.step_ms:.0f}", f"{result.final_loss:.6f}")
    return shown


def bytes_table(outcomes: Sequence[Outcome]) -> Table:
    """Bytes held for each parameter, beside the ledger's; "predicted | measured" where these differ."""
    shown = Table(
        title="all of it, bytes a parameter",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    shown.add_column("")
    for name in ("ledger", "fullest rank", "emptiest rank"):
        shown.add_column(name, justify="right", no_wrap=True)
    for result in outcomes:
        cells = [f"{result.ledger_bytes / result.numel:g}"]
        for extreme in (max, min):
            pair = extreme(result.held_bytes, key=lambda of_rank: of_rank.measured)
            predicted, measured = (f"{nbytes / result.numel:.3f}" for nbytes in pair)
            cells.append(
                measured if pair.predicted == pair.measured else f"[bold red]{predicted} | {measured}[/]"
            )
        shown.add_row(result.strategy, *cells)
    return shown


def as_json(outcomes: Sequence[Outcome], config: TrainConfig) -> dict[str, Any]:
    """Everything that was predicted and measured, as plain values."""
    return {
        "ranks": outcomes[0].ranks,
        "steps": config.steps,
        "environment": environment(outcomes[0].ranks),
        "strategies": {result.strategy: result.as_json() for result in outcomes},
    }


def environment(world_size: int) -> dict[str, str]:
    """What numbers such as step times depend on."""
    placement = ranks.place_ranks(world_size)
    device = f"{os.cpu_count()} CPU cores" if placement.on_cpu else placement.names()
    return {
        "ranks": f"{world_size}, {placement.backend}",
        "machine": f"{device}, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _tolerance(result: Outcome) -> float:
    return math.inf if result.loss_tolerance is None else result.loss_tolerance


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """What is not as it must be, in words; empty if predictions hold and losses agree."""
    found = []
    for result in outcomes:
        if not all(map(math.isfinite, (*result.losses, result.final_loss))):
            found.append(
                f"{result.strategy}: the loss became infinite or no number: a smaller learning rate may help"
            )
        for quantity, pair in result.pairs().items():
            if pair.predicted != pair.measured:
                found.append(
                    f"{result.strategy}: {quantity} predicted {pair.predicted}, measured {pair.measured}"
                )
        for rank, pair in enumerate(result.held_bytes):
            if pair.predicted != pair.measured:
                found.append(
                    f"{result.strategy}: bytes held on rank {rank} predicted {pair.predicted}, measured "
                    f"{pair.measured}"
                )
        if not result.calls_equal:
            found.append(
                f"{result.strategy}: the calls of a step are not those predicted, or not in their order"
            )
    reference = min(outcomes, key=_tolerance)
    for result in outcomes:
        off = abs(result.final_loss - reference.final_loss)
        tolerance = max(_tolerance(result), _tolerance(reference))
        if off > tolerance * abs(reference.final_loss):  # false for what is no number: told above
            found.append(
                f"{result.strategy}: final loss {result.final_loss!r}, "
                f"{reference.strategy}: {reference.final_loss!r}"
            )
    return found
