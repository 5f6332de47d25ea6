"""The demo: a small GPT under every strategy, one table, a few pictures and a page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from zero_ref.lab import plots, ranks
from zero_ref.lab._arguments import json_text
from zero_ref.lab.compare import ROW_NAMES, StrategyRun, compare, table
from zero_ref.lab.config import TrainConfig
from zero_ref.lab.model import GPT
from zero_ref.lab.outcome import as_json, environment, problems
from zero_ref.lab.report import Check, write_report
from zero_ref.plan.choice import plan_partition
from zero_ref.simulator.models import from_module
from zero_ref.simulator.recipe import TRAINED


def run_demo(folder: Path, config: TrainConfig, world_size: int, console: Console) -> int:
    """Train under every strategy; print the table, write pictures and a page.

    Returns:
        The exit code: 0, or 1 where a prediction or a loss is off.
    """
    total = sum(param.numel() for param in GPT(config.model).parameters())
    console.print(
        f"A GPT of {total:,} {config.precision} learns Python's language reference on {world_size} ranks "
        f"({ranks.choose_backend(world_size)}), {config.steps} steps under each strategy.\n"
    )
    runs = compare(list(TRAINED), config, world_size, console)
    outcomes = [run.outcome for run in runs]
    console.print()
    console.print(table(outcomes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outcome.json").write_text(
        json_text(as_json(outcomes, config, ranks.place_ranks(world_size))) + "\n"
    )
    page = write_page(folder, runs, config)
    found = problems(outcomes)
    for problem in found:
        console.print(f"[bold red]{problem}[/]")
    if not found:
        count = sum(len(result.pairs()) for result in outcomes)
        console.print(
            f"\nAll {count} predictions equal their measurement, and the losses agree but for local SGD's."
        )
    console.print(f"Pictures and page: {page}", soft_wrap=True)
    return 1 if found else 0


def write_page(folder: Path, runs: Sequence[StrategyRun], config: TrainConfig) -> Path:
    """Draw what was measured as PNG files, and one HTML page that holds them all."""
    outcomes = [run.outcome for run in runs]
    world_size = outcomes[0].ranks
    pictures = [
        (
            "memory",
            memory_picture(runs),
            "What each rank held after the last step, measured. Stage 1 divides the optimizer state, stage 2 "
            "the gradients too, stage 3 the parameters too.",
            f"Stacked bars for {world_size} ranks under each strategy: optimizer state is whole under DDP and"
            " local SGD and divided under ZeRO; zero-2 holds fewer gradients, and stage 3 fewer parameters"
            " too.",
        ),
        *(
            (
                f"shards-{rule.replace('_', '-')}",
                shards_picture(rule, config, world_size),
                f"Who owns what under the partition {rule}, to scale.",
                f"The model's parameters end to end, coloured by the rank that owns them under {rule}.",
            )
            for rule in ("sorted_greedy", "even")
        ),
        (
            "losses",
            losses_picture(runs),
            "Training loss at each step, the mean over ranks.",
            "One loss curve for each strategy; all but that of local SGD lie on each other.",
        ),
        (
            "predicted-measured",
            predictions_picture(runs),
            "Each prediction, made before the run, and what was measured.",
            "A ring for each prediction and a dot for its measurement, all dots inside their rings "
            "if the predictions hold.",
        ),
    ]
    for name, picture, _, _ in pictures:
        plots.save(picture, folder / f"{name}.png")
    page = folder / "index.html"
    write_report(
        page,
        title=f"One model, {len(outcomes)} ways to train it",
        lead=f"A small GPT of {config.precision} trained for {outcomes[0].steps} steps on {world_size} real "
        "ranks under each strategy. Bytes and calls are those of the rank that has most; calls and payload "
        "are of one step, under local-sgd of the last 8 steps.",
        columns=["on the fullest rank", *ROW_NAMES.values(), "step time", "held-out loss"],
        rows=[
            [
                result.strategy,
                *(
                    Check(*pair.both, "" if quantity == "collectives" else "bytes")
                    for quantity, pair in result.pairs().items()
                ),
                f"{result.step_ms:.0f} ms",
                f"{result.final_loss:.6f}",
            ]
            for result in outcomes
        ],
        figures=[(picture, caption, alt) for _, picture, caption, alt in pictures],
        environment=environment(world_size, ranks.place_ranks(world_size)),
    )
    return page


# --------------------------------------------------------------- the pictures, of the book's tour as well


def memory_picture(runs: Sequence[StrategyRun], width: float = 7) -> plots.Picture:
    """Draw what each rank held after the last step, under each strategy. The width is in inches."""
    figure, ax = plots.figure(width, 3.6)
    plots.memory_by_rank({run.outcome.strategy: run.held for run in runs}, ax)
    return figure


def shards_picture(rule: str, config: TrainConfig, world_size: int, width: float = 7) -> plots.Picture:
    """Draw who owns what of the model under a partition: `rule` is a name that `partition=` takes."""
    params = from_module(GPT(config.model))
    figure, ax = plots.figure(width, 3.2)
    plots.shard_map(plan_partition(rule, params, world_size), ax, names=[param.name for param in params])
    return figure


def losses_picture(runs: Sequence[StrategyRun], width: float = 7) -> plots.Picture:
    """Training loss at each step, the mean over ranks, a curve for each strategy."""
    figure, ax = plots.figure(width, 3.2)
    # Sums in another order differ in their last bits, which is nothing that could be drawn.
    losses = {run.outcome.strategy: run.outcome.losses for run in runs}
    plots.loss_curves(losses, ax, rtol=1e-5)
    return figure


def predictions_picture(runs: Sequence[StrategyRun], width: float = 7) -> plots.Picture:
    """Draw each prediction with its measurement."""
    rows = [
        (run.outcome.strategy, ROW_NAMES[quantity], *pair.both)
        for run in runs
        for quantity, pair in run.outcome.pairs().items()
    ]
    figure, ax = plots.figure(width, 1.75 * len(runs))
    plots.predicted_against_measured(rows, ax)
    return figure
