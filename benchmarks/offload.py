"""What offload costs and saves, as published in `published_offload.json`, beside the simulator's answer.

Some of these programs divide a model in ways that are not simulated. What offload adds to their iterations,
and what it takes off the device, does not depend on that, but for what is hidden behind a backward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tables import aligned
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.configuration import from_config
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario

PLACE = Path(__file__).with_name("published_offload.json")


@dataclass(frozen=True)
class Offloaded:
    """A published run with offload, beside the same one without it.

    Args:
        sequence: tokens; None where the source varies the fraction, and not the length.
        added_ms: by offload, to an iteration: published and predicted.
        saved_gb: on the device: published and predicted, 10^9 bytes.
    """

    source: str
    offload: str
    fraction: float
    sequence: int | None
    added_ms: tuple[float, float]
    saved_gb: tuple[float, float]


@cache
def offloaded() -> tuple[Offloaded, ...]:
    """Simulate every published run with offload and without it."""
    data = json.loads(PLACE.read_text("utf-8"))
    models = MODELS | {name: from_config(config) for name, config in data["models"].items()}
    found = []
    for run in data["runs"]:
        source = data["sources"][run["source"]]
        given: dict[str, Any] = {**source["scenario"]}
        model, cluster = models[given.pop("model")], CLUSTERS[given.pop("cluster")]
        strategy, ranks = given.pop("strategy"), given.pop("ranks")
        if "sequence" in run:
            given["sequence"] = run["sequence"]
        here = Scenario(model, cluster, ranks, **given).run(strategy)
        there = Scenario(
            model, cluster, ranks, **given, offload=run["offload"], offload_fraction=run["fraction"]
        ).run(strategy)
        (ms, ms_with), (held, held_with) = run["ms"], run["memory"]
        found.append(
            Offloaded(
                run["source"],
                run["offload"],
                run["fraction"],
                run.get("sequence"),
                (ms_with - ms, there.iteration_ms - here.iteration_ms),
                (
                    (held - held_with) * source["unit"] / 1e9,
                    (here.memory.allocated_bytes - there.memory.allocated_bytes) / 1e9,
                ),
            )
        )
    return tuple(found)


def offload(_folder: Path) -> Iterator[str]:
    """Show what offload adds to an iteration and takes off the device, published and predicted."""
    rows = [
        [
            f"`{one.source}`",
            one.offload.replace("_", "-"),
            f"{one.fraction:.0%}",
            "" if one.sequence is None else f"{one.sequence:,}",
            *(f"{ms:,.0f}" for ms in one.added_ms),
            *(f"{gb:.1f}" for gb in one.saved_gb),
        ]
        for one in offloaded()
    ]
    header = ["source", "offload", "part", "sequence", "ms added", "predicted", "GB saved", "predicted GB"]
    yield aligned(header, rows)
    sources = json.loads(PLACE.read_text("utf-8"))["sources"]
    yield ""
    for name, one in sources.items():
        yield f"- `{name}`: [{one['title']}]({one['url']}). {one['read']}"
