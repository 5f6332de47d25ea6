"""`zero-ref train` and `zero-ref demo`: a small GPT on real ranks, each run beside its prediction."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_ref.cli._common import CommandError, Subparsers, need, write_text
from zero_ref.lab._arguments import OutputFolder, json_text, rank_processes
from zero_ref.lab.config import (
    TrainConfig,
    add_demo_arguments,
    add_run_arguments,
    check_memory,
    config_for,
    strategies_of,
)
from zero_ref.lab.settings import as_toml, settings_of
from zero_ref.lab.simulated import cluster_named
from zero_ref.simulator.recipe import TRAINED


def register_train(subparsers: Subparsers) -> None:
    """Add `zero-ref train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT on real ranks under one or more strategies, each beside its prediction",
        description="Train a small GPT on this machine: NCCL if there is a GPU for each rank, else Gloo. "
        "Under torchrun, on any number of machines: torchrun ... -m zero_ref.lab.train",
    )
    parser.add_argument("--ranks", type=rank_processes, default=2, metavar="N", help="default: %(default)s")
    add_run_arguments(parser)
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    """Train, print the table, and write JSON if asked to; return 1 if a prediction or a loss is wrong."""
    try:
        strategies = strategies_of(arguments)
        config = training_config(arguments, strategies)
        cluster = cluster_named(arguments.cluster)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if arguments.show_config:
        print(as_toml(settings_of(arguments)))
        return 0
    console = need("rich.console").Console(highlight=False)
    if arguments.dry_run:
        need("zero_ref.lab.dry_run").print_prediction(config, strategies, arguments.ranks, cluster)
        return 0
    compare, measured = need("zero_ref.lab.compare"), need("zero_ref.lab.outcome")
    try:
        runs = compare.compare(strategies, config, arguments.ranks, console)
    except need("zero_ref.lab.ranks").RankError as error:
        raise CommandError(str(error), code=1) from None
    except need("zero_ref.lab.checkpoints").NothingLeftError as nothing:
        print(nothing)
        return 0
    outcomes = [run.outcome for run in runs]
    console.print(compare.table(outcomes))
    console.print()
    console.print(compare.bytes_table(outcomes))
    if config.own:
        console.print(
            f"\n{strategies[-1]}: its state, parameters and loss are held against what is predicted and "
            "against the others; gradients, calls and payload are what it did.",
            soft_wrap=True,
        )
    if arguments.json:
        placement = need("zero_ref.lab.ranks").place_ranks(arguments.ranks)
        text = json_text(measured.as_json(outcomes, config, placement))
        write_text("--json", arguments.json, text + "\n")
    problems = measured.problems(outcomes)
    for problem in problems:
        print(f"zero-ref: {problem}", file=sys.stderr)
    return 1 if problems else 0


def register_demo(subparsers: Subparsers) -> None:
    """Add `zero-ref demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="train the same small GPT under every strategy; a table, pictures and a page",
        description="Train the same small GPT from the same seed under DDP, each stage of ZeRO, local SGD.",
    )
    parser.add_argument("--ranks", type=rank_processes, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--out", type=OutputFolder, default="demo-out", metavar="FOLDER", help="default: %(default)s"
    )
    add_demo_arguments(parser)
    parser.set_defaults(run=run_demo, steps=120)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; return 1 if a prediction or a loss is wrong."""
    try:
        config = training_config(arguments, list(TRAINED))
    except ValueError as error:
        raise CommandError(str(error)) from None
    if config.checkpoint or config.checkpoint_dir:
        raise CommandError("the demo writes no checkpoint; use `zero-ref train --checkpoint FILE`.")
    console = need("rich.console").Console(highlight=False)
    demo = need("zero_ref.lab.demo")
    try:
        return int(demo.run_demo(Path(arguments.out), config, arguments.ranks, console))
    except need("zero_ref.lab.ranks").RankError as error:
        raise CommandError(str(error), code=1) from None


def training_config(arguments: argparse.Namespace, strategies: Sequence[str]) -> TrainConfig:
    """The options as a TrainConfig that can be trained under each of these strategies.

    Raises:
        ValueError: as `config_for` and `check_memory`.
    """
    config = config_for(arguments, strategies, arguments.ranks)
    if need("zero_ref.lab.ranks").place_ranks(arguments.ranks).on_cpu:
        check_memory(config, arguments.ranks)
    return config
