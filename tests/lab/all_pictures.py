"""A table of all pictures of `zero_ref.lab.plots`, for what `test_pictures` holds them all to.

A name begins with that of the function which draws the picture. Beside a small example there are odd ones:
nothing to draw, one rank, many, long names. Those of matplotlib are listed where one of them is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import test_plots
import test_plots_buckets
import test_plots_drift
import test_plots_norms
import test_plots_ownership
import test_plots_reads
import test_plots_reshard
import test_plots_sharded
import test_plots_simulated
import test_plots_wire
from library.pictures import Plot
from test_plots_simulated import played

from zero_ref.lab import plots
from zero_ref.live.palette import ITEM_COLOURS
from zero_ref.live.svg import Drawing
from zero_ref.plan.rules import even, sorted_greedy
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref.simulator.stages import plays_of_equal_blocks, runs_by_stage
from zero_ref.simulator.timeline import WAYS_OF_DDP, BucketTimes, Event, Timeline, simulate
from zero_ref.simulator.tree import Advice, Question

NUMELS = [600, 500, 400, 100, 0, 30]
NAMES = ["wte.weight", "h.0.qkv.weight", "h.0.fc.weight", "h.0.proj.weight", "none", "ln_f.bias"]

# ---------------------------------------------------------------------------------------------- timelines

FOUR = [BucketTimes(4, 3, 1, 1.5)] * 4
MEASURED = Timeline(
    (
        Event("compute", "backward", 0, 0.0, 8.0),
        Event("network", "reduce", 0, 8.5, 20.0),
        Event("network", "broadcast", 0, 10.0, 12.0),
        Event("network", "reduce", 1, 11.0, 18.0),
        Event("compute", "step", 0, 19.0, 21.0),
    )
)


def many(count: int, labels: tuple[str, ...] = ("reduce", "broadcast")) -> Timeline:
    """So many network calls of 1 ms, one after another, while nothing is computed."""
    calls = [Event("network", labels[i % len(labels)], i, float(i), i + 1.0) for i in range(count)]
    return Timeline((*calls, Event("compute", "step", None, float(count), count + 300.0)))


@cache
def runs_of(ranks: int, accumulation: int = 1) -> dict[str, SimulatedRun]:
    """GPT-2 small under DDP and each stage."""
    scenario = Scenario(
        MODELS["gpt2"], cluster("h100-ib"), ranks, accumulation=accumulation, bucket_view=True
    )
    return runs_by_stage(scenario)


HELD_ITEMS = {
    f"stage {stage}": dict.fromkeys((*list(ITEM_COLOURS)[:-1], "scalars"), 1e9 * (4 - stage))
    for stage in range(4)
}
SHORT_TREE = Question("Does it fit?", yes=Advice("DDP", "It sends least."), no=Advice("stage 1"))
TREE = Question(
    "Does everything fit on one GPU, with the batch that you need?",
    threshold="16 bytes · Ψ + activations ≤ memory",
    answered="161 GB of 85.5 GB",
    yes=Advice("DDP", "Nothing is sharded: least traffic, simplest code."),
    no=Question(
        "Do parameters and gradients fit whole?",
        answered="46.2 GB of 85.5 GB",
        yes=Question(
            "Are gradients accumulated?", yes=Advice("stage 1"), no=Advice("stage 2", "2 bytes <&> Ψ")
        ),
        no=Question(
            "Does a shard fit?", yes=Advice("stage 3", "Gathers hide behind computing."), no=Advice("beyond")
        ),
    ),
)
"""The second question has a tree at both sides."""

POWERS = [2**power for power in range(11)]

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "timeline, three ways": lambda: plots.timeline({way: simulate(FOUR, way) for way in WAYS_OF_DDP}),
    "timeline, longest title": lambda: plots.timeline(
        {"hook_with_zero_step_interleaved": simulate([BucketTimes(400, 313, 11, 187)] * 4, "interleaved")}
    ),
    "timeline, on a side stream": lambda: plots.timeline(
        {"GPU": simulate(FOUR, "interleaved", side_stream=True)}
    ),
    "timeline, 100 buckets": lambda: plots.timeline({"many": simulate(FOUR * 25, "interleaved")}),
    "timeline, measured": lambda: plots.timeline({"measured": MEASURED}),
    "timeline, nothing takes time": lambda: plots.timeline(
        {"none": simulate([BucketTimes(1, 0, 0, 0)], "plain")}
    ),
    "timeline, plays": lambda: plots.timeline(
        {name: played(name).timeline() for name in ("ddp", "zero-3", "local-sgd")}
    ),
    "timeline, many events": lambda: plots.timeline({"many": many(3000)}),
    "stages_timeline, hybrid too": lambda: plots.stages_timeline(runs_of(16)),
    "stages_timeline, accumulated": lambda: plots.stages_timeline(runs_of(8, accumulation=4)),
    "stages_timeline, 1 rank": lambda: plots.stages_timeline({"a rank <&> no others": runs_of(1)["DDP"]}),
    "pieces_over_time": lambda: plots.pieces_over_time(plays_of_equal_blocks(3, 4)),
    "pieces_over_time, 8 ranks": lambda: plots.pieces_over_time(plays_of_equal_blocks(5, 8)),
    "pieces_over_time, 1 block": lambda: plots.pieces_over_time(plays_of_equal_blocks(1, 2)),
    "pieces_over_time, 1 rank": lambda: plots.pieces_over_time(
        {"1 rank &c": plays_of_equal_blocks(2, 1)["DDP"]}
    ),
    "step_diagram": lambda: plots.step_diagram(even(NUMELS, 4), names=NAMES),
    "step_diagram, lost": lambda: plots.step_diagram(sorted_greedy(NUMELS, 3), names=NAMES, lost=[0, 5]),
    "step_diagram, 8 ranks": lambda: plots.step_diagram(even(NUMELS, 8), lost=[1]),
    "step_diagram, 1 rank": lambda: plots.step_diagram(sorted_greedy(NUMELS, 1)),
    "step_diagram, nothing": lambda: plots.step_diagram(sorted_greedy([0], 2)),
    "step_diagram, stage 2": lambda: plots.step_diagram(even(NUMELS, 4), names=NAMES, stage=2, lost=[1]),
    "step_diagram, stage 2 in buckets": lambda: plots.step_diagram(
        sorted_greedy(NUMELS, 3), names=NAMES, stage=2, blocks=[[0], [1, 2, 3], [4, 5]]
    ),
    "step_diagram, stage 2 of nothing": lambda: plots.step_diagram(sorted_greedy([0], 2), stage=2),
    "ring_rounds, 2 ranks": lambda: plots.ring_rounds(2),
    "ring_rounds, 3 ranks": lambda: plots.ring_rounds(3),
    "ring_rounds, 4 ranks": lambda: plots.ring_rounds(4),
    "memory_items": lambda: plots.memory_items(HELD_ITEMS, device_bytes=80e9, chosen="stage 2"),
    "memory_items, too small a device": lambda: plots.memory_items(HELD_ITEMS, device_bytes=10e9),
    "memory_items, nothing": lambda: plots.memory_items({"a rank <&> others": {}}),
    "memory_over_time, hybrid too": lambda: plots.memory_over_time(runs_of(16)),
    "memory_over_time, accumulated": lambda: plots.memory_over_time(runs_of(8, accumulation=4)),
    "memory_over_time, 1 rank": lambda: plots.memory_over_time({"a rank <&> no others": runs_of(1)["DDP"]}),
    "memory_over_time, too small a device": lambda: plots.memory_over_time(
        {"DDP": Scenario(MODELS["gpt2-xl"], cluster("rtx4090-10gbe"), 8).run("ddp")}
    ),
    "decision_tree": lambda: plots.decision_tree(TREE),
    "decision_tree, a model's way": lambda: plots.decision_tree(TREE, path=[False, True, False]),
    "decision_tree, not yet at an advice": lambda: plots.decision_tree(TREE, path=[False]),
    "decision_tree, one question": lambda: plots.decision_tree(SHORT_TREE, path=[True]),
    "loads": lambda: plots.loads(sorted_greedy(NUMELS, 4)),
    "loads, bytes": lambda: plots.loads(even([10**6], 64), bytes_per_element=8, fullest_first=True),
    "loads, nothing": lambda: plots.loads(sorted_greedy([0], 3)),
    "loads, 1,024 ranks": lambda: plots.loads(even([10**6], 1024), bytes_per_element=8),
    "loads, most own nothing": lambda: plots.loads(sorted_greedy(NUMELS, 1024), fullest_first=True),
    "loads_compared": lambda: plots.loads_compared({"yours": [1100, 530], "right": [815, 815]}),
    "loads_compared, long titles": lambda: plots.loads_compared(
        {"your model, packed largest first": [700_000] * 3 + [1], "your model at best": [525_000] * 4}
    ),
    "loads_compared, nothing": lambda: plots.loads_compared({"yours": [0, 0], "right": [0, 0]}),
    "loads_compared, 1,024 ranks": lambda: plots.loads_compared(
        {"yours": range(1024), "right": [512] * 1024}
    ),
    "balance_against_ranks": lambda: plots.balance_against_ranks(NUMELS, [1, 2, 4, 8]),
    "balance_against_ranks, bytes": lambda: plots.balance_against_ranks(
        [10**8, 10**6], POWERS, bytes_per_element=8
    ),
    "balance_against_ranks, 1 rank": lambda: plots.balance_against_ranks(NUMELS, [1]),
}

# -------------------------------------------------------------------------------------------- by matplotlib

HEIGHTS = {
    test_plots: (4.0,),
    test_plots_drift: (3.4,),
    test_plots_norms: (3.4, 4.0),
    test_plots_ownership: (4.6,),
    test_plots_reads: (3.2,),
    test_plots_reshard: (3.2,),
    test_plots_sharded: (3.2,),
    test_plots_simulated: (5.0,),
    test_plots_wire: (2.9, 4.2),
}
"""Inches in which a file's pictures have to be readable."""

PLOTS: dict[str, tuple[Plot, tuple[float, ...]]] = {
    name: (plot, heights) for file, heights in HEIGHTS.items() for name, plot in file.PICTURES.items()
} | {name: (plot, (height,)) for name, (plot, height) in test_plots_buckets.PICTURES.items()}
