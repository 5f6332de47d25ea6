"""The cost of a checkpoint's save and load, as a table and as JSON: `zero-ref simulate --checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zero_ref.plan.partition import Partition
from zero_ref.simulator.checkpoints import LOADS, SAVES, Passage, load, save
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.ledger import format_bytes
from zero_ref.simulator.saved import Saved
from zero_ref.simulator.scenario import Scenario

MOST_PIECES = 2**20
"""Ranges have a piece for each rank. So many of them are counted in a few tens of seconds."""


def saved_by(scenario: Scenario, strategy: str) -> Saved:
    """Return the state that a run saves under a strategy.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> saved = saved_by(Scenario(MODELS["gpt2"], cluster("h100-ib"), 8), "zero-even")
    >>> saved.ranks, saved.parameter_bytes, saved.state_bytes
    (8, 248879616, 1493278288)

    Raises:
        ValueError: the strategy has no owners, or too many pieces; the state is in the host's memory.
    """
    owned = scenario.partition(strategy)
    if not isinstance(owned, Partition):
        raise ValueError(
            "--checkpoint is about one state that ranks share, each element of it with one owner. Under "
            f"{strategy}, with these options, elements have no owner. Choose zero, zero-bucket, zero-even or "
            "zero-2."
        )
    if scenario.offload:
        raise ValueError(
            "--checkpoint counts with a state on the device. Leave out --offload: then the device's part of "
            "the table is what the host takes with it."
        )
    if (pieces := owned.world_size * len(owned.ranges)) > MOST_PIECES:
        raise ValueError(
            f"--checkpoint counts every piece that ranks own. Under {strategy} these are {pieces:,} or more. "
            f"For this model give at most {MOST_PIECES // len(owned.ranges):,} ranks."
        )
    return Saved(tuple(scenario.params), owned, scenario.state)


def passages(scenario: Scenario, strategy: str) -> tuple[list[Passage], list[Passage]]:
    """Every way to save, and every way to load.

    Raises: as `saved_by`.
    """
    saved, here = saved_by(scenario, strategy), scenario.cluster
    return [save(way, saved, here) for way in SAVES], [load(way, saved, here) for way in LOADS]


def checkpoints_as_json(scenario: Scenario, strategies: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that `zero-ref simulate --checkpoint` adds: bytes and milliseconds, by strategy.

    Raises: as `saved_by`.
    """
    printed = {}
    for strategy in strategies:
        saved, (saves, loads) = saved_by(scenario, strategy), passages(scenario, strategy)
        printed[strategy] = {
            "ranks": saved.ranks,
            "parameters_bytes": saved.parameter_bytes,
            "state_bytes": saved.state_bytes,
            "save": {one.way: _as_json(one, scenario) for one in saves},
            "load": {one.way: _as_json(one, scenario) for one in loads},
        }
    return printed


def _as_json(one: Passage, scenario: Scenario) -> dict[str, Any]:
    return {
        "device_bytes": max(one.device_bytes),
        "host_bytes": max(one.host_bytes),
        "host_bytes_of_node": one.host_bytes_of_node(scenario.cluster.ranks_per_node),
        "storage_bytes": sum(one.disk_bytes),
        "received_bytes": max(one.received_bytes),
        "ms": dict(one.ms),
        "total_ms": one.total_ms,
    }


def print_checkpoints(scenario: Scenario, strategies: Sequence[str], width: int | None = None) -> None:
    """Print a table for each strategy.

    Args:
        width: columns; None for those of the terminal.
    Raises: as `saved_by`.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, highlight=False)
    for strategy in strategies:
        saved = saved_by(scenario, strategy)
        console.print(
            f"\na checkpoint under {strategy}: {format_bytes(saved.parameter_bytes)} of parameters, "
            f"{format_bytes(saved.state_bytes)} of state"
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("")
        for name in ("device", "host", "node", "storage", "time"):
            table.add_column(name, justify="right")
        for verb, ways in zip(("save", "load"), passages(scenario, strategy)):
            table.add_row(verb, style="bold")
            for one in ways:
                table.add_row(f"  {one.way}", *_cells(one, scenario.cluster.ranks_per_node))
        console.print(table)
    rate, supposed = scenario.cluster.disk_gb_per_s, scenario.cluster.name in CLUSTERS
    console.print(
        "\nmemory: the most at one time on a device (beside parameters and gradients, but a load with the "
        "state), in the host's memory for one rank, and for all ranks of a node"
    )
    storage = "with no known rate" if rate is None else f"at {rate:g} GB/s for each node"
    console.print(
        f"time: storage {storage}{', which is supposed' if supposed else ''}, then the network and the link "
        "between device and host"
    )


def _cells(one: Passage, ranks_per_node: int) -> Iterator[str]:
    for nbytes in (max(one.device_bytes), max(one.host_bytes), one.host_bytes_of_node(ranks_per_node)):
        yield format_bytes(nbytes) if nbytes else "-"
    for ms in (one.ms["storage"], one.total_ms):
        yield "?" if ms is None else "-" if not ms else f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:,.1f} s"
