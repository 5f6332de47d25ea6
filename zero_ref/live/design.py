"""The cluster designer: nodes, devices and links chosen freely; does a model fit, how long does it train?"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from zero_ref.live.explorer import Answer, Control, Explorer, controls_of
from zero_ref.live.lanes import lanes
from zero_ref.live.memory import DEVICES, items_bars
from zero_ref.live.numbers import short, short_bytes, short_count, short_time
from zero_ref.live.palette import ALARM, INK
from zero_ref.live.svg import LINE, MARGIN, picture, text
from zero_ref.simulator import spread
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.expert_parallel import experts_of
from zero_ref.simulator.models import TRANSFORMERS
from zero_ref.simulator.recipe import RECIPES
from zero_ref.simulator.scenario import Scenario, SimulatedRun

MS_PER_DAY = 86_400_000.0
LIKE = CLUSTERS["h100-ib"]
"""What is not chosen is as in this preset: latency inside a node, shares of the links' rates, NCCL."""


def _draw(
    kind: type[Scenario], width: float, model: str, strategy: str, device: str, per_node: int, nodes: int,
    within: float, between: float, latency: float, tokens: int, expert_parallel: int = 1, **of_scenario: Any,
) -> Answer:  # fmt: skip
    ranks = per_node * nodes
    sharing, why_none = _sharing(model, strategy, ranks, expert_parallel)
    cluster = replace(
        LIKE,
        name="designed",
        device=DEVICES[device],
        ranks_per_node=per_node,
        within=replace(LIKE.within, gb_per_s=within),
        between=replace(LIKE.between, gb_per_s=between, latency_us=latency),
    )
    scenario = kind(TRANSFORMERS[model], cluster, ranks, expert_parallel=sharing, **of_scenario)
    run = _run(scenario, strategy)
    days = tokens / run.tokens_per_second * 1e3 / MS_PER_DAY
    gpu_hours = 24 * days * ranks
    low, high = spread.around(days)
    device_bytes = 1e9 * (DEVICES[device].memory_gb or 0)
    held = f"{short_bytes(run.peak_bytes)} of {short_bytes(device_bytes)}"
    cost = f"{short(days)} days, {short_count(gpu_hours)} GPU-hours"
    interval = f"{short(low)} to {short(high)} days"
    numbers = {
        "ranks": ranks,
        "memory of the fullest rank, bytes": run.peak_bytes,
        "device, bytes": device_bytes,
        "iteration, ms": run.iteration_ms,
        "exposed, ms": run.exposed_ms,
        "tokens a second": run.tokens_per_second,
        "share of the peak": run.utilisation,
        "sent by a rank, bytes": run.sent_bytes,
        "days": days,
        "GPU-hours": gpu_hours,
    }
    fits = {True: "It fits", False: "It does not fit", None: "Whether it fits is undecided"}[run.fits]
    shared = f", {sharing} ranks share experts" if sharing > 1 else ""
    words = (
        f"{model} under {strategy} on {ranks:,} × {device}{shared}. {fits}: the fullest rank holds {held}. "
        f"An iteration takes {short_time(run.iteration_ms)}, of which {short_time(run.exposed_ms)} "
        f"are exposed communication. {TOKENS[tokens].capitalize()} tokens take {cost}, "
        f"with the error of such predictions {interval}."
    )
    rows = [
        ["", "of this cluster"],
        ["ranks", f"{ranks:,}"],
        ["ranks that share experts", "-" if why_none else f"{sharing:,}"],
        ["memory, fullest rank", held],
        ["an iteration", short_time(run.iteration_ms)],
        ["exposed communication", short_time(run.exposed_ms)],
        ["sent by a rank in an iteration", short_bytes(run.sent_bytes)],
        ["tokens a second", short_count(run.tokens_per_second)],
        ["share of the device's peak", f"{100 * run.utilisation:.1f}%"],
        [f"{short_count(tokens)} tokens", cost],
        ["with the error of predictions", interval],
    ]
    idle = {"expert_parallel": why_none} if why_none else {}
    return Answer(_picture(width, run, rows, device_bytes, words), words, rows, numbers, idle)


def _sharing(model: str, strategy: str, ranks: int, asked: int) -> tuple[int, str]:
    """How many ranks share experts, as many as are asked for if they can; and why none can, if so."""
    experts = experts_of(TRANSFORMERS[model].shapes())
    if not experts:
        return 1, f"{model} has no experts."
    if RECIPES[strategy].averaging is not None:
        return 1, f"Under {strategy} ranks share no experts."
    steps = range(1, asked + 1)
    return max(count for count in steps if experts % count == 0 and ranks % count == 0), ""


@lru_cache(maxsize=8)
def _run(scenario: Scenario, strategy: str) -> SimulatedRun:
    """Another number of tokens asks for the same run."""
    return scenario.run(strategy)


def _picture(width: float, run: SimulatedRun, rows: list[list[str]], device_bytes: float, words: str) -> str:
    left, wide = MARGIN, width - 2 * MARGIN
    parts: list[str] = []
    y = 12.0
    for name, value in rows[1:]:
        fill = ALARM if name.startswith("memory") and run.fits is False else INK
        parts += [
            text(left, y + 12, name),
            text(left + wide, y + 12, value, fill=fill, anchor="end", bold=True),
        ]
        y += LINE + 2
    memory, y = items_bars({"": run.memory.peak_items}, device_bytes, None, left, y + 12, wide)
    time, bottom = lanes({"iteration": run.timeline}, left, y + 8, wide)
    return picture(width, bottom, words, [*parts, *memory, *time])


TOKENS = {
    10**9: "1 billion", 10**11: "100 billion", 3 * 10**11: "300 billion", 10**12: "1 trillion",
    2 * 10**12: "2 trillion", 15 * 10**12: "15 trillion",
}  # fmt: skip

WITHIN = (16.0, 32.0, 64.0, 150.0, 300.0, 450.0, 900.0)
BETWEEN = (0.3125, 1.25, 3.125, 6.25, 12.5, 25.0, 50.0, 100.0)
"""From PCIe to NVLink; from a quarter of 10 Gb/s Ethernet to 800 Gb/s."""

LATENCIES = (2.0, 5.0, 14.0, 20.0, 50.0, 100.0, 500.0)


def designer(kind: type[Scenario]) -> Explorer:
    """The explorer of this kind of scenario: its options that have a label are among the controls."""
    return Explorer(
        "design",
        "Cluster designer",
        (
            Control("model", "model", "llama3-70b", tuple(TRANSFORMERS)),
            Control("strategy", "strategy", "zero-3", tuple(RECIPES)),
            Control("device", "device", "H100 80 GB", tuple(DEVICES)),
            Control("per_node", "devices in a node", 8, (1, 2, 4, 8, 16)),
            Control("nodes", "nodes", 16, (1, 2, 4, 8, 16, 32, 64, 128)),
            Control("within", "GB/s inside a node", 450.0, WITHIN),
            Control("between", "GB/s of a rank between nodes", 50.0, BETWEEN),
            Control("latency", "µs of a message between nodes", 14.0, LATENCIES),
            *controls_of(kind, checkpointing="full"),
            Control("tokens", "tokens to train on", 10**12, tuple(TOKENS), dict(TOKENS)),
        ),
        partial(_draw, kind),
    )


DESIGN = designer(Scenario)
