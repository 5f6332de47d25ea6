"""`zero-ref train` and `zero-ref demo`: a small GPT on real ranks, each run beside its prediction."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_ref.cli._common import CommandError, Subparsers, need, write_text
from zero_ref.lab._arguments import OutputFile, OutputFolder, json_text, rank_processes
from zero_ref.lab.config import TrainConfig, add_training_arguments, config_from, least_bytes
from zero_ref.simulator.ledger import format_bytes
from zero_ref.simulator.recipe import RECIPES


def register_train(subparsers: Subparsers) -> None:
    """Add `zero-ref train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT on real ranks under one or more strategies, each beside its prediction",
        description="Train a small GPT on this machine: NCCL if there is a GPU for each rank, else Gloo. "
        "Under torchrun, on any number of machines: torchrun ... -m zero_ref.lab.train",
    )
    parser.add_argument("--ranks", type=rank_processes, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--strategy",
        action="append",
        choices=list(RECIPES),
        help="give it several times to compare (default: zero-bucket)",
    )
    add_training_arguments(parser)
    parser.add_argument(
        "--json", type=OutputFile, metavar="FILE", help="write what was predicted and measured here"
    )
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    """Train, print the table, and write JSON if asked to; return 1 if a prediction or a loss is wrong."""
    strategies = list(dict.fromkeys(arguments.strategy or ["zero-bucket"]))
    config = training_config(arguments, strategies)
    if len(strategies) > 1 and (config.checkpoint or config.checkpoint_dir):
        raise CommandError("--checkpoint and --checkpoint-dir hold one model: give one --strategy with them.")
    console = need("rich.console").Console(highlight=False)
    compare = need("zero_ref.lab.compare")
    try:
        outcomes = [run.outcome for run in compare.compare(strategies, config, arguments.ranks, console)]
    except need("zero_ref.lab.ranks").RankError as error:
        raise CommandError(str(error), code=1) from None
    except need("zero_ref.lab.checkpoints").NothingLeftError as nothing:
        print(nothing)
        return 0
    console.print(compare.table(outcomes))
    console.print()
    console.print(compare.bytes_table(outcomes))
    for outcome in outcomes:
        if outcome.ran:
            console.print(f"\n{need('zero_ref.lab.checkpoints').in_words(outcome.ran)}", soft_wrap=True)
    if arguments.json:
        write_text("--json", arguments.json, json_text(compare.as_json(outcomes, config)) + "\n")
    problems = compare.problems(outcomes)
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
    add_training_arguments(parser)
    parser.set_defaults(run=run_demo, steps=120)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; return 1 if a prediction or a loss is wrong."""
    config = training_config(arguments, list(RECIPES))
    if config.checkpoint or config.checkpoint_dir:
        raise CommandError("the demo writes no checkpoint; use `zero-ref train --checkpoint FILE`.")
    console = need("rich.console").Console(highlight=False)
    demo = need("zero_ref.lab.demo")
    try:
        return int(demo.run_demo(Path(arguments.out), config, arguments.ranks, console))
    except need("zero_ref.lab.ranks").RankError as error:
        raise CommandError(str(error), code=1) from None


def training_config(arguments: argparse.Namespace, strategies: Sequence[str]) -> TrainConfig:
    """The options as a TrainConfig, which can be trained under each of these strategies.

    Raises:
        CommandError: a value makes no sense, or a strategy cannot do it; this machine has too little memory;
            only one step is asked for. (DDP builds its buckets in the first step, so the prediction holds
            from the second step on.)
    """
    # --overlap and --shard-group are for some strategies, and an error if none of them is there.
    way = arguments.overlap.replace("-", "_")
    able = [
        name
        for name in strategies
        if way in RECIPES[name].ways and (arguments.shard_group is None or RECIPES[name].without_ddp)
    ]
    try:
        config = config_from(arguments, (able or strategies)[0])
        config.recipe.group_of(arguments.ranks)
        for strategy in strategies:
            config.under(strategy)
    except ValueError as error:
        raise CommandError(str(error)) from None
    needed, memory = least_bytes(config, arguments.ranks), _memory_bytes()
    if memory is not None and needed > memory and _on_processors(arguments.ranks):
        raise CommandError(
            f"{arguments.ranks} ranks with a model of {config.model.numel:,} parameters and "
            f"{config.batch_size:,} passages of {config.model.context:,} bytes each need at least "
            f"{format_bytes(needed)}, and this machine has {format_bytes(memory)}: make them smaller."
        )
    return config


def _memory_bytes() -> int | None:
    """The memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _on_processors(ranks: int) -> bool:
    """The ranks compute on this machine's processor and in its memory."""
    return bool(need("zero_ref.lab.ranks").place_ranks(ranks).on_cpu)
