"""The command line: `zero-ref plan`, and the other commands, one `register` function each.

A command is a function that adds its parser to `subparsers` and sets `run`, the function that gets the parsed
arguments and returns the exit code. Only `run` imports what the command needs, so that `zero-ref --help` and
`zero-ref plan --json` work without torch and without extras. What the user did wrong is a CommandError.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_ref import __version__
from zero_ref.lab.config import TrainConfig, add_training_arguments, config_from
from zero_ref.layout import ITEMSIZE
from zero_ref.partition import STRATEGIES as PARTITIONS, plan_partition
from zero_ref.simulator.ledger import STATE_RULES, format_bytes, state_bytes_of_rank
from zero_ref.simulator.models import MODELS, shapes, specs
from zero_ref.simulator.schedule import STRATEGIES, schedule

Subparsers = Any  # argparse's own type for it is private


class CommandError(Exception):
    """Ends a command with a message and no traceback."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 where something is missing, 2 for a user's mistake.

    Args:
        argv: the words after `zero-ref`; None for those of this process.
    Raises:
        SystemExit: argparse prints help, or what is wrong with the arguments (code 2).
    """
    parser = argparse.ArgumentParser(
        prog="zero-ref", description="The Zero Redundancy Optimizer: plan a run, and run it."
    )
    parser.add_argument("--version", action="version", version=f"zero-ref {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="command")
    for register in COMMANDS:
        register(subparsers)
    arguments = parser.parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except CommandError as error:
        print(f"zero-ref: {error}", file=sys.stderr)
        return error.code
    except BrokenPipeError:
        # Our reader has gone (`zero-ref plan --json | head -3`). Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def need(module: str, extra: str = "lab") -> Any:
    """Import what an extra of this package installs.

    Raises:
        CommandError: it is not installed; says which extra to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("zero_ref"):
            raise  # ours is broken, not missing
        raise CommandError(
            f'this needs the package {error.name}, which is not installed: pip install "zero_ref[{extra}]"',
            code=1,
        ) from None


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, got {number}")
    return number


# --------------------------------------------------------------------------------------------------- plan


def register_plan(subparsers: Subparsers) -> None:
    """Add `zero-ref plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="who would own what, and what it costs, for a published model on any number of ranks",
        description="Partition a published model over ranks, on paper: nothing is allocated or sent.",
    )
    parser.add_argument(
        "--model", required=True, choices=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--ranks", required=True, type=positive, metavar="N", help="how many ranks")
    parser.add_argument(
        "--partition",
        default="sorted-greedy",
        type=lambda name: name.replace("_", "-"),
        choices=[name.replace("_", "-") for name in PARTITIONS],
        metavar="RULE",
        help=", ".join(name.replace("_", "-") for name in PARTITIONS) + " (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=list(ITEMSIZE),
        metavar="DTYPE",
        help="of the parameters: " + ", ".join(ITEMSIZE) + " (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        default="AdamW",
        choices=list(STATE_RULES),
        metavar="NAME",
        help=", ".join(STATE_RULES) + " (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan as JSON, or as a table where rich is installed."""
    if not arguments.json:
        need("rich")  # before the work, not after it
    plan = plan_of(
        arguments.model, arguments.ranks, arguments.partition, arguments.dtype, arguments.optimizer
    )
    if arguments.json:
        print(json.dumps(plan, indent=2))
    else:
        print_plan(plan)
    return 0


def plan_of(model: str, ranks: int, partition: str, dtype: str, optimizer: str) -> dict[str, Any]:
    """What `zero-ref plan --json` prints: plain numbers, bytes and elements."""
    shapes_of_model = shapes(model)
    params = specs(shapes_of_model, dtype)
    owned = plan_partition(partition, params, ranks)
    state_bytes = state_bytes_of_rank(owned, params, optimizer)
    unsharded_bytes = sum(state_bytes_of_rank(plan_partition(partition, params, 1), params, optimizer))
    elements = sum(owned.loads)
    by_load = list(zip(owned.loads, state_bytes))
    fullest, emptiest = by_load.index(max(by_load)), by_load.index(min(by_load))
    largest = max(shapes_of_model, key=lambda param: param.numel)

    def messages(strategy: str) -> int:
        return schedule(strategy, params, ranks, optimizer, ddp_buckets=[], partition=owned).collectives

    return {
        "model": model,
        "elements": elements,
        "tensors": len(params),
        "largest_tensor": {"name": largest.name, "shape": largest.shape, "elements": largest.numel},
        "dtype": dtype,
        "optimizer": optimizer,
        "ranks": ranks,
        "partition": partition,
        "fullest": _on_rank(fullest, owned.loads, state_bytes),
        "emptiest": _on_rank(emptiest, owned.loads, state_bytes),
        "mean": {"elements": elements / ranks, "state_bytes": unsharded_bytes / ranks},
        "unsharded": {"elements": elements, "state_bytes": unsharded_bytes},
        "max_over_mean": owned.loads[fullest] / (elements / ranks),
        "ranks_that_own_nothing": owned.loads.count(0),
        "messages_per_step": {"parameters": messages("zero"), "buckets": messages("zero-bucket")},
        "elements_of_rank": owned.loads,
    }


def _on_rank(rank: int, loads: Sequence[int], state_bytes: Sequence[int]) -> dict[str, int]:
    return {"rank": rank, "elements": loads[rank], "state_bytes": state_bytes[rank]}


def print_plan(plan: dict[str, Any], width: int | None = None) -> None:
    """The same for people, on standard output.

    Args:
        width: columns; None for those of the terminal.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, highlight=False)
    loads = plan["elements_of_rank"]
    ranks = f"{plan['ranks']:,} rank{'' if plan['ranks'] == 1 else 's'}"
    largest = plan["largest_tensor"]
    shape = " x ".join(f"{size:,}" for size in largest["shape"])
    console.print(f"[bold]{plan['model']} on {ranks}, {plan['partition']}[/]")
    console.print(f"{plan['elements']:,} {plan['dtype']} elements in {plan['tensors']:,} tensors")
    console.print(f"largest: {largest['name']}, {shape} = {largest['elements']:,}\n")

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("on one rank")
    table.add_column("elements", justify="right")
    table.add_column("of an even share", justify="right")
    table.add_column(f"{plan['optimizer']} state", justify="right")
    for label, row, style in _rows(plan):
        of_mean = row["elements"] / plan["mean"]["elements"]
        share = f"{of_mean:.2f}x" if of_mean < 100 else f"{of_mean:,.0f}x"
        table.add_row(label, f"{row['elements']:,.0f}", share, format_bytes(row["state_bytes"]), style=style)
    console.print(table)

    console.print()
    if console.encoding.startswith("utf"):
        console.print(f"elements by rank  {_bars(loads, min(64, console.width - 18))}")
    console.print(f"ranks that own nothing: {plan['ranks_that_own_nothing']:,}")
    sent = plan["messages_per_step"]
    console.print(f"messages a step: {sent['parameters']:,} as parameters, {sent['buckets']:,} as buckets")


def _rows(plan: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Label, numbers and style of each row of the table."""
    fullest, emptiest = plan["fullest"], plan["emptiest"]
    return [
        (f"fullest: rank {fullest['rank']:,}", fullest, "bold"),
        (f"emptiest: rank {emptiest['rank']:,}", emptiest, ""),
        (f"an even share: 1/{plan['ranks']:,}", plan["mean"], ""),
        ("without ZeRO: everything", plan["unsharded"], "dim"),
    ]


def _bars(loads: Sequence[int], columns: int) -> str:
    """Loads as a line of bars, the fullest full height; where ranks share a column, the fullest of them.

    >>> _bars([80, 40, 10, 0], columns=64)
    '█▄▁·'
    """
    per_column = -(-len(loads) // max(columns, 1))
    tallest = [max(loads[i : i + per_column]) for i in range(0, len(loads), per_column)]
    top = max(*tallest, 1)
    return "".join("·▁▂▃▄▅▆▇█"[-(-8 * load // top)] for load in tallest)


# ------------------------------------------------------------------------------------------- train, demo


def register_train(subparsers: Subparsers) -> None:
    """Add `zero-ref train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT on real ranks under one or more strategies, each beside its prediction",
        description="Train a small GPT on this machine: NCCL if there is a GPU for each rank, else Gloo. "
        "Under torchrun, on any number of machines: torchrun ... -m zero_ref.lab.train",
    )
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--strategy",
        action="append",
        choices=list(STRATEGIES),
        help="give it several times to compare (default: zero-bucket)",
    )
    add_training_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was predicted and measured here")
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    """Train, print the table, and write JSON if asked to; 1 if a prediction or a loss is off."""
    strategies = list(dict.fromkeys(arguments.strategy or ["zero-bucket"]))
    config = training_config(arguments, strategies[0])
    if len(strategies) > 1 and config.checkpoint:
        raise CommandError("--checkpoint is one file: give one --strategy with it.")
    console = need("rich.console").Console(highlight=False)
    compare = need("zero_ref.lab.compare")
    try:
        outcomes = [run.outcome for run in compare.compare(strategies, config, arguments.ranks, console)]
    except need("zero_ref.lab.ranks").RankError as error:
        raise CommandError(str(error), code=1) from None
    console.print(compare.table(outcomes))
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(json.dumps(compare.as_json(outcomes, config), indent=2) + "\n")
    problems = compare.problems(outcomes)
    for problem in problems:
        print(f"zero-ref: {problem}", file=sys.stderr)
    return 1 if problems else 0


def register_demo(subparsers: Subparsers) -> None:
    """Add `zero-ref demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="train the same small GPT under every strategy; a table, pictures and a page",
        description="Train the same small GPT from the same seed under DDP and three forms of ZeRO.",
    )
    parser.add_argument("--ranks", type=positive, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", default="demo-out", metavar="FOLDER", help="default: %(default)s")
    add_training_arguments(parser)
    parser.set_defaults(run=run_demo, steps=120)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; 1 if a prediction or a loss is off."""
    config = training_config(arguments, "ddp")
    if config.checkpoint:
        raise CommandError("the demo writes no checkpoint; use `zero-ref train --checkpoint FILE`.")
    console = need("rich.console").Console(highlight=False)
    demo = need("zero_ref.lab.demo")
    try:
        return int(demo.run_demo(Path(arguments.out), config, arguments.ranks, console))
    except need("zero_ref.lab.ranks").RankError as error:
        raise CommandError(str(error), code=1) from None


def training_config(arguments: argparse.Namespace, strategy: str) -> TrainConfig:
    """The options as a TrainConfig.

    Raises:
        CommandError: a value makes no sense; DDP builds its buckets in the first step, so the prediction
            holds from the second on, and one step is refused.
    """
    if arguments.steps < 2:
        raise CommandError(
            f"--steps must be at least 2, got {arguments.steps}: the first builds DDP's buckets."
        )
    try:
        return config_from(arguments, strategy)
    except ValueError as error:
        raise CommandError(str(error)) from None


# -------------------------------------------------------------------------------------------------- check


def register_check(subparsers: Subparsers) -> None:
    """Add `zero-ref check`."""
    parser = subparsers.add_parser(
        "check",
        help="grade the exercises in a notebook of the book, as they stand in its file",
        description="Grade every exercise of a notebook, each in a process of its own. This runs the "
        "notebook's code: check only what you would run. Ends with code 1 if an exercise failed.",
    )
    parser.add_argument("notebook", metavar="NOTEBOOK", help="such as notebooks/03_partition.ipynb")
    parser.add_argument("--json", action="store_true", help="print JSON, with the messages in full")
    parser.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Print for each exercise whether it passed, and what the check said; 1 if any failed."""
    check_notebook = need("zero_ref.lab.exercises.notebook").check_notebook
    try:
        results = check_notebook(arguments.notebook)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
    if not results:
        raise CommandError(f"{arguments.notebook} has no exercises.")
    if arguments.json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        width = max(len(result.exercise) for result in results)
        for exercise, passed, message in results:
            first, *rest = message.splitlines() or [""]
            print(f"{'passed' if passed else 'FAILED'}  {exercise:<{width}}  {first}")
            for line in rest:
                print(f"        {line}")
    return 0 if all(result.passed for result in results) else 1


COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    register_plan,
    register_train,
    register_demo,
    register_check,
)

if __name__ == "__main__":
    sys.exit(main())
