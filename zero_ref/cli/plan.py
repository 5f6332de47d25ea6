"""`zero-ref plan`: who would own what of a published model, and what it costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from zero_ref.cli._common import Subparsers, need, planning
from zero_ref.lab._arguments import simulated_ranks
from zero_ref.plan.choice import RULES as PARTITIONS, loads_under, plan_partition
from zero_ref.plan.layout import ITEMSIZE, lay_out
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.plan.rules import newton_schulz_operations
from zero_ref.simulator.ledger import STATE_RULES, format_bytes, state_bytes_of_rank
from zero_ref.simulator.models import MODELS, matrices_whole, shapes, specs


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
    parser.add_argument("--ranks", required=True, type=simulated_ranks, metavar="N", help="how many ranks")
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
    with planning(arguments.ranks):
        plan = plan_of(
            arguments.model, arguments.ranks, arguments.partition, arguments.dtype, arguments.optimizer
        )
    if arguments.json:
        print(json.dumps(plan, indent=2, allow_nan=False))
    else:
        print_plan(plan)
    return 0


def plan_of(model: str, ranks: int, partition: str, dtype: str, optimizer: str) -> dict[str, Any]:
    """Return the values that `zero-ref plan --json` prints: plain numbers, bytes and elements."""
    shapes_of_model = shapes(model)
    params = specs(shapes_of_model, dtype)
    if muon := STATE_RULES[optimizer].of_whole is not None:
        params = matrices_whole(params)
    owned = plan_partition(partition, params, ranks)
    state_bytes = state_bytes_of_rank(owned, params, optimizer)
    unsharded_bytes = sum(state_bytes_of_rank(plan_partition(partition, params, 1), params, optimizer))
    elements = sum(owned.loads)
    by_load = list(zip(owned.loads, state_bytes))
    fullest, emptiest = by_load.index(max(by_load)), by_load.index(min(by_load))
    largest = max(shapes_of_model, key=lambda param: param.numel)

    # They are counted, not listed: of a million ranks each may own a part of every parameter.
    as_parameters = sum(owned.totals([0] * len(params), of_slice=[1] * len(params)))
    as_buckets = sum(len(flat.buckets) for flat in lay_out(owned, params).flats)
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
        "messages_per_step": {
            "parameters": as_parameters if ranks > 1 else 0,
            "buckets": as_buckets if ranks > 1 else 0,
        },
        "elements_of_rank": owned.loads,
        "orthogonalization": _operations(owned, params) if muon else None,
    }


def _operations(owned: Partition, params: Sequence[ParamSpec]) -> dict[str, Any]:
    """The floating-point operations of Muon's step on each rank, and the least that the fullest can have."""
    loads, ranks = loads_under("balanced", owned, params), owned.world_size
    costs = sorted((newton_schulz_operations(param) for param in params if param.whole), reverse=True)
    mean = sum(loads) / ranks
    return {
        "fullest": {"rank": loads.index(max(loads)), "operations": max(loads)},
        "emptiest": {"rank": loads.index(min(loads)), "operations": min(loads)},
        "mean": mean,
        # A matrix is not divided, and of one matrix more than there are ranks, two have the same owner.
        "lower_bound": max([mean, *costs[:1], sum(costs[ranks - 1 : ranks + 1])]),
        "operations_of_rank": loads,
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
    if operations := plan["orthogonalization"]:
        fullest, mean = operations["fullest"], operations["mean"]
        of_bound = fullest["operations"] / max(operations["lower_bound"], 1)
        if console.encoding.startswith("utf"):
            of_rank = operations["operations_of_rank"]
            console.print(f"Muon's operations {_bars(of_rank, min(64, console.width - 18))}")
        console.print(
            f"most of Muon's operations: rank {fullest['rank']:,}, "
            f"{fullest['operations'] / max(mean, 1):.2f}x the mean, {of_bound:.2f}x the bound"
        )
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


def _bars(loads: Sequence[float], columns: int) -> str:
    """Loads as a line of bars, the fullest full height; where ranks share a column, the fullest of them.

    >>> _bars([80, 40, 10, 0], columns=64)
    '█▄▁·'
    """
    per_column = -(-len(loads) // max(columns, 1))
    tallest = [max(loads[i : i + per_column]) for i in range(0, len(loads), per_column)]
    top = max(*tallest, 1)
    return "".join("·▁▂▃▄▅▆▇█"[int(-(-8 * load // top))] for load in tallest)
