"""`zero-ref search`: every way to train a model on a cluster, and the best of those that fit."""

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
from zero_ref.lab._arguments import add_options, whole
from zero_ref.lab.searched import as_json, print_found
from zero_ref.simulator.options import options_of
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.search import VARIED, remedies, search

NOT_ASKED = {*VARIED, "way", "bucket_bytes", "prefetch", "period", "gradient_group"}
"""Fields of a scenario that are no options here: the search sets them itself, or leaves them as usual."""


def register_search(subparsers: Subparsers) -> None:
    """Add `zero-ref search`."""
    parser = subparsers.add_parser(
        "search",
        help="every way to train a model on a cluster that fits, and the best of them, by the simulator",
        description="Simulate every recipe, batch, accumulation, checkpointing and shard group with which "
        "the ranks compute so many tokens for an update, and list those to choose from: nothing that is as "
        "fast needs as little memory. Each with its interval, and with the command that simulates it alone.",
    )
    add_model(parser)
    add_machines(parser)
    add = parser.add_argument
    tokens = whole(1, 10**12, "no update has so many")
    add("--tokens", required=True, type=tokens, metavar="T", help="of an update, over all ranks")
    add_options(parser, (one for one in options_of(Scenario) if one.path[-1] not in NOT_ASKED))
    set_nothing_given(parser)
    add_bill(parser)
    add("--all", action="store_true", help="list all that may fit, not only the best")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_search)


def run_search(arguments: argparse.Namespace) -> int:
    """Search, and print; return 1 if nothing fits."""
    if not arguments.json:
        need("rich")  # before the work, not after it
    named = named_model(arguments)
    with planning(arguments.ranks):
        try:
            scenario = scenario_of(arguments)
            found, bill = search(scenario, arguments.tokens), bill_of(arguments)
            fits = any(one.fits for one in found.listed) or scenario.cluster.device.memory_gb is None
            others = [] if fits else remedies(scenario, arguments.tokens)
        except ValueError as error:
            raise CommandError(str(error)) from None
    if arguments.json:
        printed = as_json(named, arguments.cluster, scenario, found, bill, others)
        print(json.dumps(printed, indent=2, allow_nan=False))
    else:
        print_found(named, arguments.cluster, scenario, found, every=arguments.all, bill=bill, others=others)
    return 0 if found.listed else 1
