"""`zero-ref simulate`: the memory, traffic and time of a run on any cluster, before it is rented."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from zero_ref.cli._common import CommandError, Subparsers, need, planning, read_input
from zero_ref.lab._arguments import (
    MOST_SIMULATED_RANKS,
    OutputFile,
    add_options,
    number,
    seed,
    short,
    simulated_ranks,
    whole,
)
from zero_ref.lab.commands import MOST_OPERATIONS
from zero_ref.lab.simulated import MFU_COUNTS, as_json, cluster_named, print_runs
from zero_ref.lab.simulated_checkpoints import checkpoints_as_json, print_checkpoints, saved_by
from zero_ref.simulator.bill import Bill
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.configuration import quantized
from zero_ref.simulator.like import LIKE
from zero_ref.simulator.lora import Lora
from zero_ref.simulator.models import GPT2, MODELS, Architecture, from_config
from zero_ref.simulator.options import OptionField, from_options, options_of
from zero_ref.simulator.recipe import LOCAL_SGD, RECIPES
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref.simulator.trace import write_trace


def register_simulate(subparsers: Subparsers) -> None:
    """Add `zero-ref simulate`."""
    parser = subparsers.add_parser(
        "simulate",
        help="memory, traffic and time of a run, on a cluster that you do not have",
        description="Simulate one training iteration under one or several strategies: nothing is allocated "
        "or sent. Memory, exposed communication and computing are those of the rank that holds most. A link "
        "is busy for what the calls would take if only this link took any time. The critical path says what "
        "the iteration's time is spent on. MFU is model FLOPs utilisation, the share of the "
        f"device's peak that is reached by {MFU_COUNTS}.",
    )
    add_model(parser)
    add_machines(parser)
    for_all, for_some = _scenario_options()
    add_options(parser, for_all)
    _add_strategies(parser)
    add_options(parser, for_some)
    set_nothing_given(parser)
    _add_paces(parser)
    add_bill(parser)
    parser.add_argument(
        "--checkpoint", action="store_true", help="say what saving and loading a checkpoint take, in each way"
    )
    parser.add_argument(
        "--trace", type=OutputFile, metavar="FILE", help="write timelines here, for https://ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_simulate)


def add_model(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--config` or `--module`."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", choices=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    model.add_argument("--config", metavar="FILE", help="a config.json of Hugging Face, in place of --model")
    model.add_argument(
        "--module",
        metavar="FILE.py:NAME",
        help="a function in a file of yours that returns a torch.nn.Module, in place of --model; or one and "
        "a function of a batch and a length that makes its inputs. It is traced on the meta device, and "
        "frozen parameters count as frozen",
    )
    parser.add_argument(
        "--like",
        default="plain",
        choices=list(LIKE),
        metavar="PROGRAM",
        help=f"options as suit a program, where they are not said: {', '.join(LIKE)}; any of them can be "
        "switched off, as by --no-compiled or --autocast none (default: %(default)s)",
    )
    parser.add_argument(
        "--as-16-bit",
        action="store_true",
        help="of a --config whose weights are stored in few bits: train them as if they were of 16",
    )


def named_model(arguments: argparse.Namespace) -> list[str]:
    """The option that names the model, its value, and what else is said of it."""
    given = ((f"--{name}", getattr(arguments, name)) for name in ("model", "config", "module"))
    option, value = next((option, value) for option, value in given if value)
    adapters = [] if _adapters(arguments) is None else ["--lora", str(arguments.lora)]
    if adapters and arguments.lora_on:
        adapters += ["--lora-on", arguments.lora_on]
    return [option, value, *["--as-16-bit"] * arguments.as_16_bit, *adapters]


def _adapters(arguments: argparse.Namespace) -> Lora | None:
    """Return adapters that are traced with the model of a `--config`, since its matrices are not spelled."""
    if not arguments.config or not arguments.lora or find_spec("transformers") is None:
        return None
    return Lora(arguments.lora, arguments.lora_on or "all-linear")


def add_machines(parser: argparse.ArgumentParser) -> None:
    """`--ranks` and `--cluster`."""
    parser.add_argument("--ranks", required=True, type=simulated_ranks, metavar="N", help="how many ranks")
    clusters = ", ".join(CLUSTERS) + ", or a file with a cluster in JSON"
    parser.add_argument(
        "--cluster", default="h100-ib", metavar="NAME|FILE", help=f"{clusters} (default: %(default)s)"
    )


def add_bill(parser: argparse.ArgumentParser) -> None:
    """`--train-tokens` and `--price`."""
    tokens = "of the whole training, such as 15e12: days and GPU-hours are printed"
    parser.add_argument("--train-tokens", type=number(above=0, most=1e18), metavar="T", help=tokens)
    price = "of an hour of one GPU, in any currency: the cost of --train-tokens is printed"
    parser.add_argument("--price", type=number(least=0, most=1e9), metavar="P", help=price)


def bill_of(arguments: argparse.Namespace) -> Bill | None:
    """The training of `--train-tokens`, if it is asked for.

    Raises:
        CommandError: there is a price, and nothing to pay for.
    """
    if arguments.train_tokens is None and arguments.price is not None:
        raise CommandError("--price is of an hour: say with --train-tokens how much is trained.")
    return None if arguments.train_tokens is None else Bill(arguments.train_tokens, arguments.price)


def set_nothing_given(parser: argparse.ArgumentParser) -> None:
    """Let the value of a scenario's option be None unless it is given, be it the default."""
    parser.set_defaults(**dict.fromkeys(one.word for one in options_of(Scenario)))


def _scenario_options() -> tuple[list[OptionField], list[OptionField]]:
    """The options of a scenario that every strategy uses, and those that some strategies use."""
    options = options_of(Scenario)
    for_some = [one for one in options if one.option.used_by is not None]
    return [one for one in options if one not in for_some], for_some


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    """The strategies that are simulated, one beside the other."""
    add, names = parser.add_argument, list(RECIPES)
    strategies = "; ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())
    shown = f"{strategies} (default: %(default)s)"
    add("--strategy", default="zero-even", choices=names, metavar="NAME", help=shown)
    another = "another strategy beside it; may be given several times"
    add("--compare", action="append", default=[], choices=names, metavar="NAME", help=another)


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
    slow, bill = _slow(arguments.straggler, arguments.ranks), bill_of(arguments)
    with planning(arguments.ranks):
        try:
            scenario = scenario_of(arguments)
            _check_size(scenario, strategies)
            if arguments.checkpoint:
                for strategy in strategies:
                    saved_by(scenario, strategy)
            runs = [
                scenario.run(strategy, slow=slow, jitter=arguments.jitter, seed=arguments.seed)
                for strategy in strategies
            ]
        except ValueError as error:
            raise CommandError(str(error)) from None
        if arguments.trace:
            _write_trace(arguments.trace, runs)
        named = named_model(arguments)[1]
        if arguments.json:
            printed = as_json(named, scenario, runs, bill)
            if arguments.checkpoint:
                printed["checkpoints"] = checkpoints_as_json(scenario, strategies)
            print(json.dumps(printed, indent=2, allow_nan=False))
        else:
            print_runs(named, scenario, runs, bill=bill)
            if arguments.checkpoint:
                print_checkpoints(scenario, strategies)
            if arguments.trace:
                print(f"\n{arguments.trace}: open it at https://ui.perfetto.dev")
    return 0


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    """The scenario that the options describe.

    Raises:
        CommandError: the model has learned fewer positions than a sequence has tokens.
    """
    given = vars(arguments)
    if _adapters(arguments) is not None:  # they are in the model
        given = {**given, "lora": None, "lora_on": None}
    like = LIKE[arguments.like]
    scenario = from_options(
        Scenario,
        given,
        **{one.path[0]: like[one.path[0]] for one in _in_preset(like) if given.get(one.word) is None},
        architecture=architecture_of(arguments),
        cluster=cluster_named(arguments.cluster),
        world_size=arguments.ranks,
    )
    model, length = scenario.architecture, scenario.tokens_of_sequence
    if isinstance(model, GPT2) and length > model.positions:
        raise CommandError(f"--sequence {length:,}: the model has learned {model.positions:,} positions.")
    return scenario


def dtype_of(arguments: argparse.Namespace) -> str:
    """The dtype of the parameters: as it is said, as of `--like`, or the usual one."""
    usual = next(one.default for one in options_of(Scenario) if one.path == ("dtype",))
    return str(arguments.dtype or LIKE[arguments.like].get("dtype", usual))


def _in_preset(like: Mapping[str, Any]) -> list[OptionField]:
    return [one for one in options_of(Scenario) if one.path[0] in like]


def architecture_of(arguments: argparse.Namespace) -> Architecture:
    """Return the architecture that `--model`, `--config` or `--module` names.

    Raises:
        CommandError: the file cannot be read or run, or its model cannot be built or traced.
    """
    if arguments.model:
        return MODELS[arguments.model]
    option, given = named_model(arguments)[:2]
    try:
        if arguments.module:
            return _of_own(given, arguments)
        return _of_config(given, arguments)
    except ValueError as error:
        raise CommandError(f"{option} {given}: {error}") from None


def _of_own(given: str, arguments: argparse.Namespace) -> Architecture:
    """Trace a module of the reader's own file."""
    need("torch")
    from zero_ref.doctor.files import InFile
    from zero_ref.lab.built import from_factory

    build = InFile.of(given)
    sys.path.insert(0, os.path.dirname(os.path.realpath(build.path)))  # it may import its neighbours
    try:
        build.loaded()
    except (OSError, SyntaxError) as error:
        raise CommandError(f"--module {given} cannot be read: {error}") from None
    return from_factory(build, dtype_of(arguments), arguments.sequence)


def _of_config(path: str, arguments: argparse.Namespace) -> Architecture:
    """Trace what transformers builds, or read one of few tables where it is not installed."""
    config = read_input("--config", path)
    if not isinstance(config, dict):
        raise CommandError(f"--config {path} must hold an object with model_type and sizes.")
    if (stored := quantized(config)) and not arguments.as_16_bit:
        raise ValueError(
            f"{stored} says that the weights are quantized, and an optimizer such as AdamW cannot update "
            "quantized weights. Ask for --as-16-bit to simulate that model with all of its parameters "
            "trained in 16 bits; or take the config.json of the model before it was quantized."
        )
    if find_spec("transformers") is None:
        return from_config(config)
    from zero_ref.lab.built import from_config as traced

    return traced(config, dtype_of(arguments), arguments.sequence, _adapters(arguments))


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
    for one in _scenario_options()[1]:
        value = getattr(arguments, one.word)
        if value is None:
            continue
        used_by = [name for name, how in RECIPES.items() if one.is_used(how, one.kept(value))]
        if not set(used_by) & set(strategies):
            given = f"{one.flag} {value}" if isinstance(value, str) else one.flag
            if value is False:
                given = one.opposite
            raise CommandError(
                f"{given} means nothing to {', '.join(strategies)}; it is for {', '.join(used_by)}."
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
