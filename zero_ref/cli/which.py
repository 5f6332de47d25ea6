"""`zero-ref which`: DDP, a stage of ZeRO or the hybrid, for a model on so many GPUs, and the reasons."""

from __future__ import annotations

import argparse
import json

from zero_ref.cli._common import CommandError, Subparsers, need, planning
from zero_ref.cli.simulate import (
    add_bill,
    add_machines,
    add_model,
    bill_of,
    named_model,
    scenario_of,
    set_nothing_given,
)
from zero_ref.lab._arguments import add_options
from zero_ref.lab.advised import as_json, print_advice
from zero_ref.simulator.options import options_of
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.which import compared_leaner

NOT_ASKED = {
    "no_sync",
    "shard_group",
    "all_reduce_last",
    "way",
    "bucket_bytes",
    "prefetch",
    "period",
    "gradient_group",
    "offload",
    "offload_fraction",
}
"""Fields of a scenario that are no options here: a way of `ways_of` sets them, or they stay as usual."""


def register_which(subparsers: Subparsers) -> None:
    """Add `zero-ref which`."""
    parser = subparsers.add_parser(
        "which",
        help="which stage: DDP, stage 1, 2 or 3, or the hybrid, for a model on so many GPUs, and why",
        description="Compare DDP, the stages of ZeRO and the hybrid for one batch, and advise one of them by "
        "the questions of chapter 9, each with the number that decides. Where a pass has about as many "
        "tokens as the network asks for, simulated times decide. Nothing is allocated or sent.",
    )
    add_model(parser)
    add_machines(parser)
    add_options(parser, (one for one in options_of(Scenario) if one.path[-1] not in NOT_ASKED))
    set_nothing_given(parser)
    add_bill(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_which)


def run_which(arguments: argparse.Namespace) -> int:
    """Compare and print; return 1 if no way surely fits."""
    if not arguments.json:
        need("rich")  # before the work, not after it
    named = named_model(arguments)
    with planning(arguments.ranks):
        try:
            scenario, bill = scenario_of(arguments), bill_of(arguments)
            found = compared_leaner(scenario)
        except ValueError as error:
            raise CommandError(str(error)) from None
    if arguments.json:
        print(json.dumps(as_json(named, arguments.cluster, found, bill), indent=2, allow_nan=False))
    else:
        print_advice(named, arguments.cluster, found, bill, asked=scenario.checkpointing)
    return 0 if found.fastest else 1
