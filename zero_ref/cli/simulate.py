"""`zero-ref simulate`: the memory, traffic and time of a run on any cluster, before it is rented."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

from zero_ref.cli._common import CommandError, Subparsers, need, planning, read_input
from zero_ref.lab._arguments import (
    MOST_SIMULATED_RANKS,
    OutputFile,
    number,
    positive,
    seed,
    short,
    simulated_ranks,
    whole,
)
from zero_ref.lab.simulated import MFU_COUNTS, as_json, cluster_named, print_runs
from zero_ref.simulator.activations import CHECKPOINTING
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.commands import MOST_OPERATIONS, MOST_PASSES
from zero_ref.simulator.ledger import STATE_RULES
from zero_ref.simulator.models import MODELS, Architecture, from_config
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.recipe import LOCAL_SGD, RECIPES, REDUCED_IN
from zero_ref.simulator.scenario import DTYPES, Scenario, SimulatedRun
from zero_ref.simulator.schedule import MIB
from zero_ref.simulator.trace import write_trace

USED_BY: dict[str, tuple[str, ...]] = {
    "shard_group": tuple(name for name, recipe in RECIPES.items() if recipe.in_groups),
    "no_sync": tuple(name for name, recipe in RECIPES.items() if recipe.in_groups),
    "reduce_dtype": tuple(name for name, recipe in RECIPES.items() if recipe.reduces_in_any_dtype),
    "bucket_view": tuple(name for name, recipe in RECIPES.items() if recipe.stage < 2),
    "offload": tuple(name for name, recipe in RECIPES.items() if recipe.shards_by_parameter),
    "bucket_mib": tuple(name for name, recipe in RECIPES.items() if recipe.stage < 2),
    "prefetch": tuple(name for name, recipe in RECIPES.items() if recipe.stage == 3),
    "period": (LOCAL_SGD,),
    "gradient_group": (LOCAL_SGD,),
}
"""Options, and the strategies that use them."""

DEFAULT = " (default: %(default)s)"


def register_simulate(subparsers: Subparsers) -> None:
    """Add `zero-ref simulate`."""
    parser = subparsers.add_parser(
        "simulate",
        help="memory, traffic and time of a run, on a cluster that you do not have",
        description="Simulate one training iteration under one or several strategies: nothing is allocated "
        "or sent. Memory, exposed communication and idle time are those of the rank that holds most; the "
        "parts of the time are those of the critical path. MFU is model FLOPs utilisation, the share of the "
        f"device's peak that is reached by {MFU_COUNTS}.",
    )
    _add_job(parser)
    _add_strategies(parser)
    _add_paces(parser)
    parser.add_argument(
        "--why", action="store_true", help="say why the fullest rank holds more than 1/N, item by item"
    )
    parser.add_argument(
        "--trace", type=OutputFile, metavar="FILE", help="write timelines here, for https://ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_simulate)


def add_model(parser: argparse.ArgumentParser) -> None:
    """`--model` or `--config`."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", choices=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    model.add_argument("--config", metavar="FILE", help="a config.json of Hugging Face, in place of --model")


def add_machines(parser: argparse.ArgumentParser) -> None:
    """`--ranks` and `--cluster`."""
    parser.add_argument("--ranks", required=True, type=simulated_ranks, metavar="N", help="how many ranks")
    clusters = ", ".join(CLUSTERS) + ", or what `zero-ref calibrate --out FILE` wrote"
    parser.add_argument("--cluster", default="h100-ib", metavar="NAME|FILE", help=clusters + DEFAULT)


def _add_job(parser: argparse.ArgumentParser) -> None:
    """The options that say what is trained, and on which machines."""
    add_model(parser)
    add_machines(parser)
    add_numerics(parser)
    add = parser.add_argument
    add("--batch", type=positive, default=1, metavar="B", help="sequences a rank" + DEFAULT)
    ways = "; ".join(f"{name}: {what}" for name, what in CHECKPOINTING.items()) + DEFAULT
    add("--checkpointing", default="selective", choices=list(CHECKPOINTING), metavar="WHAT", help=ways)
    passes = "forwards and backwards before an update, each of --batch sequences" + DEFAULT
    add("--accumulation", type=whole(1, MOST_PASSES), default=1, metavar="N", help=passes)


def add_numerics(parser: argparse.ArgumentParser) -> None:
    """What is computed for a sequence, and kept for a parameter, whoever does it."""
    add = parser.add_argument
    sequence = "tokens in each (default: the model's, 8192 at most)"
    add("--sequence", type=positive, metavar="S", help=sequence)
    dtypes = f"of parameters and gradients: {', '.join(DTYPES)}. Of 16 bits the optimizer keeps a copy in 32"
    add("--dtype", default="bfloat16", choices=list(DTYPES), metavar="DTYPE", help=dtypes + DEFAULT)
    rules = ", ".join(STATE_RULES) + DEFAULT
    add("--optimizer", default="AdamW", choices=list(STATE_RULES), metavar="NAME", help=rules)
    masters = "no 32-bit copies of 16-bit parameters: state in the parameters' own dtype"
    add("--no-masters", action="store_true", help=masters)
    add("--compiled", action="store_true", help="blocks are compiled: fewer passes over memory, less is kept")
    loss = "the cross-entropy is one kernel, which keeps no copy of the logits in 32 bits"
    add("--fused-loss", action="store_true", help=loss)
    loss = "what a loss that is not fused is computed in" + DEFAULT
    add("--loss-dtype", default="float32", choices=list(DTYPES), metavar="DTYPE", help=loss)


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    """The options that say who holds, computes and sends what."""
    add, names = parser.add_argument, list(RECIPES)
    strategies = "; ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items()) + DEFAULT
    add("--strategy", default="zero-even", choices=names, metavar="NAME", help=strategies)
    another = "another strategy beside it; may be given several times"
    add("--compare", action="append", default=[], choices=names, metavar="NAME", help=another)
    add(
        "--overlap",
        type=lambda way: way.replace("_", "-"),
        choices=[way.replace("_", "-") for way in WAYS],
        metavar="WAY",
        help="; ".join(f"{name.replace('_', '-')}: {what}" for name, what in WAYS.items()),
    )
    size = "of DDP's buckets (default: 25, the first 1)"
    add("--bucket-mib", type=number(above=0, most=2**20), metavar="MIB", help=size)
    add_places(parser)
    kept = "of zero-2 and zero-3: accumulated gradients are whole on each rank until the last backward"
    add("--no-sync", action="store_true", help=kept)
    shards = (
        "of zero-2 and zero-3: so many consecutive ranks share what is sharded, as a node's (default: all)"
    )
    add("--shard-group", type=whole(1, MOST_SIMULATED_RANKS), metavar="N", help=shards)
    add("--prefetch", type=whole(0, 10**6), metavar="UNITS", help="of zero-3 (default: 1)")
    period = "of local-sgd: steps from one average of the parameters to the next (default: 8)"
    add("--period", type=whole(1, 10**6), metavar="H", help=period)
    group = "of local-sgd: average gradients in every step over so many ranks, as of a node (default: 1)"
    add("--gradient-group", type=whole(1, MOST_SIMULATED_RANKS), metavar="N", help=group)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where gradients and state lie, and what gradients travel in, under strategies that can."""
    add = parser.add_argument
    view = "DDP's gradient_as_bucket_view: gradients lie in DDP's buckets, and are not kept twice"
    add("--bucket-view", action="store_true", help=view)
    reduced = f"what gradients travel in: {', '.join(REDUCED_IN)} (default: --dtype)"
    add("--reduce-dtype", choices=list(REDUCED_IN), metavar="DTYPE", help=reduced)
    add("--offload", action="store_true", help="masters, moments and the update are on the CPU")


def _add_paces(parser: argparse.ArgumentParser) -> None:
    """The options that make ranks slower than others."""
    add = parser.add_argument
    slow = "this rank takes FACTOR times as long to compute; may be given several times"
    add("--straggler", action="append", default=[], type=_straggler, metavar="RANK:FACTOR", help=slow)
    jitter = "standard deviation of the ranks' computing times, as a share of them (default: 0)"
    add("--jitter", type=number(least=0, most=100), default=0.0, metavar="SHARE", help=jitter)
    add("--seed", type=seed, default=0, help="of the jitter (default: 0)")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate, write the trace if asked to, and print."""
    if not arguments.json:
        need("rich")  # before the work, not after it
    strategies = list(dict.fromkeys([arguments.strategy, *arguments.compare]))
    _check_used(arguments, strategies)
    slow = _slow(arguments.straggler, arguments.ranks)
    with planning(arguments.ranks):
        try:
            scenario = scenario_of(arguments)
            _check_size(scenario, strategies)
            runs = [
                scenario.run(strategy, slow=slow, jitter=arguments.jitter, seed=arguments.seed)
                for strategy in strategies
            ]
        except ValueError as error:
            raise CommandError(str(error)) from None
        if arguments.trace:
            _write_trace(arguments.trace, runs)
        named = arguments.model or arguments.config
        if arguments.json:
            print(json.dumps(as_json(named, scenario, runs), indent=2, allow_nan=False))
        else:
            print_runs(named, scenario, runs, why=arguments.why)
            if arguments.trace:
                print(f"\n{arguments.trace}: open it at https://ui.perfetto.dev")
    return 0


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    """The scenario that the options describe."""
    return Scenario(
        architecture_of(arguments),
        cluster_named(arguments.cluster),
        arguments.ranks,
        batch=arguments.batch,
        sequence=arguments.sequence,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        way=(arguments.overlap or "plain").replace("-", "_"),
        bucket_bytes=None if arguments.bucket_mib is None else math.ceil(arguments.bucket_mib * MIB),
        checkpointing=arguments.checkpointing,
        shard_group=arguments.shard_group,
        prefetch=1 if arguments.prefetch is None else arguments.prefetch,
        period=arguments.period or 8,
        gradient_group=arguments.gradient_group or 1,
        masters=not arguments.no_masters,
        accumulation=arguments.accumulation,
        no_sync=arguments.no_sync,
        reduce_dtype=arguments.reduce_dtype,
        bucket_view=arguments.bucket_view,
        offload=arguments.offload,
        compiled=arguments.compiled,
        fused_loss=arguments.fused_loss,
        loss_dtype=arguments.loss_dtype,
    )


def architecture_of(arguments: argparse.Namespace) -> Architecture:
    """What `--model` or `--config` names.

    Raises:
        CommandError: the configuration cannot be read, or is of no known model.
    """
    if arguments.model:
        return MODELS[arguments.model]
    path = arguments.config
    config = read_input("--config", path)
    if not isinstance(config, dict):
        raise CommandError(f"--config {path} must hold an object with model_type and sizes.")
    try:
        return from_config(config)
    except ValueError as error:
        raise CommandError(f"--config {path}: {error}") from None


def _write_trace(path: str, runs: Sequence[SimulatedRun]) -> None:
    """Write timelines of rank 0, the fullest rank and the stragglers of each strategy."""
    timelines, memory = {}, {}
    for run in runs:
        for rank in sorted({0, run.fullest, *run.played.paces.slow}):
            title = f"{run.strategy}, rank {rank}"
            timelines[title] = run.played.timeline(rank)
            memory[title] = run.memory_curve(rank)
    try:
        write_trace(path, timelines, memory)
    except OSError as error:
        raise CommandError(f"--trace {path} could not be written: {error.strerror or error}.", 1) from None


def _check_used(arguments: argparse.Namespace, strategies: Sequence[str]) -> None:
    way = (arguments.overlap or "plain").replace("-", "_")
    by_way = {"overlap": tuple(name for name, recipe in RECIPES.items() if way in recipe.ways)}
    for option, used_by in (USED_BY | by_way).items():
        if getattr(arguments, option) not in (None, False, "plain") and not set(used_by) & set(strategies):
            raise CommandError(
                f"--{option.replace('_', '-')} means nothing to {', '.join(strategies)}; it is for "
                f"{', '.join(used_by)}."
            )


def _slow(stragglers: Sequence[tuple[int, float]], ranks: int) -> dict[int, float]:
    for rank, _ in stragglers:
        if rank >= ranks:
            raise CommandError(f"--straggler {rank}: there are ranks 0 to {ranks - 1}.")
    return dict(stragglers)


def _check_size(scenario: Scenario, strategies: Sequence[str]) -> None:
    """Raise a CommandError for a period or an accumulation that would take minutes to simulate."""
    a_step = 2 * len(scenario.buckets) + 2 * scenario.accumulation + 2
    if "zero-3" in strategies or "zero-2" in strategies:
        passes, a_pass = scenario.accumulation, 4 * len(scenario.params)
        if passes * a_pass > MOST_OPERATIONS:
            raise CommandError(
                f"--accumulation {passes:,}: all of them are simulated, each with up to {a_pass:,} "
                f"operations. For this model give at most {max(1, MOST_OPERATIONS // a_pass):,}."
            )
    if LOCAL_SGD in strategies and scenario.period * a_step > MOST_OPERATIONS:
        raise CommandError(
            f"--period {scenario.period:,}: all of its steps are simulated, each with {a_step:,} operations. "
            f"For this model give a period of at most {MOST_OPERATIONS // a_step:,}."
        )


def _straggler(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    try:
        return whole(0, MOST_SIMULATED_RANKS)(rank), number(above=0, most=10**6)(factor)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{short(text)!r} is no RANK:FACTOR, such as 3:1.5: {error}"
        ) from None
