"""One scenario under every stage: the runs that "which stage?" chooses among, in the order of the book."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import equal_shares
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.ledger import MIXED_ADAMW
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario, SimulatedRun
from zero_ref.simulator.schedule import schedule

STRATEGY_OF_STAGE = {
    "DDP": "ddp",
    "stage 1": "zero-even",
    "stage 2": "zero-2",
    "stage 3": "zero-3",
    "hybrid": "zero-3",
}
"""The strategy of `recipe.RECIPES` behind each name.

Stage 1 is on top of DDP, which all-reduces gradients. It sends half as much again as a stage 1 that reduces
them to their owners, such as Megatron-LM's. The hybrid is stage 3 within each node; every node has a replica
of the model. Of several passes the last alone is all-reduced between nodes.
"""


def has_hybrid(scenario: Scenario) -> bool:
    """Whether the ranks fill several whole nodes, so that a node can be a shard group.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> [has_hybrid(Scenario(MODELS["gpt2"], cluster("h100-ib"), ranks)) for ranks in (8, 12, 16)]
    [False, False, True]
    """
    of_node, ranks = scenario.cluster.ranks_per_node, scenario.world_size
    return 1 < of_node < ranks and ranks % of_node == 0


def runs_by_stage(scenario: Scenario) -> dict[str, SimulatedRun]:
    """Simulate the scenario under DDP, the three stages and the hybrid of them.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> llama = Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 64, checkpointing="full")
    >>> for name, run in runs_by_stage(llama).items():
    ...     print(f"{name}: {run.peak_bytes / 1e9:.0f} GB, {run.exposed_ms:.0f} ms exposed")
    DDP: 184 GB, 6 ms exposed
    stage 1: 53 GB, 51 ms exposed
    stage 2: 35 GB, 86 ms exposed
    stage 3: 25 GB, 13 ms exposed
    hybrid: 40 GB, 21 ms exposed

    Args:
        scenario: a `shard_group` of its own is not used: stages 2 and 3 share among all ranks, the hybrid
            within a node.
    Returns:
        The run of each name in STRATEGY_OF_STAGE; without a hybrid where the ranks do not fill several nodes.
    Raises:
        ValueError: as `Scenario.run`.
    """
    among_all = scenario if scenario.shard_group is None else replace(scenario, shard_group=None)
    runs = {name: among_all.run(strategy) for name, strategy in STRATEGY_OF_STAGE.items() if name != "hybrid"}
    if has_hybrid(scenario):
        within_node = replace(
            scenario, shard_group=scenario.cluster.ranks_per_node, all_reduce_last=scenario.accumulation > 1
        )
        runs["hybrid"] = within_node.run(STRATEGY_OF_STAGE["hybrid"])
    return runs


def plays_of_equal_blocks(blocks: int, world_size: int) -> dict[str, Played]:
    """Play DDP and the three stages on a model of equal blocks, with the same pieces in all of them.

    The model is in bfloat16 under `MIXED_ADAMW`, and each rank has an equal piece of each block. Each block
    is a bucket of gradients too, and under stage 3 a unit, gathered when it is needed. Nothing overlaps.

    >>> for title, played in plays_of_equal_blocks(3, world_size=4).items():
    ...     print(title, round(max(nbytes for _, nbytes in played.memory()) / (3 * 2**20), 2))
    DDP 16.0
    stage 1 7.0
    stage 2 6.17
    stage 3 5.17
    """
    params = [ParamSpec(2**20, "bfloat16")] * blocks
    each = [[number] for number in range(blocks)]
    own_pieces: dict[str, Any] = {"partition": partial(equal_shares, range_numel=2**20)}
    changes: dict[str, dict[str, Any]] = {
        "DDP": {},
        "stage 1": own_pieces,
        "stage 2": own_pieces,
        "stage 3": {"prefetch": 0},
    }
    plays = {}
    for title, of_stage in changes.items():
        how = recipe(STRATEGY_OF_STAGE[title], optimizer=MIXED_ADAMW, **of_stage)
        plan = schedule(how, params, world_size, ddp_buckets=each[::-1], blocks=[[], *each])
        plays[title] = play(plan, cluster("loopback"), Workload(tokens=1024))
    return plays
