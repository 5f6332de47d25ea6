"""One scenario under DDP, each stage and the hybrid of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.stages import STRATEGY_OF_STAGE, has_hybrid, runs_by_stage

GPT2 = Scenario(MODELS["gpt2"], cluster("h100-ib"), 16)


def test_each_run_is_the_scenarios_own_under_the_strategy_of_its_name() -> None:
    for name, run in runs_by_stage(GPT2).items():
        group = {"shard_group": 8} if name == "hybrid" else {}
        alone = replace(GPT2, **group).run(STRATEGY_OF_STAGE[name])
        assert (run.iteration_ms, run.peak_bytes, run.sent_bytes, run.exposed_ms) == (
            alone.iteration_ms, alone.peak_bytes, alone.sent_bytes, alone.exposed_ms
        )  # fmt: skip


@pytest.mark.parametrize(("ranks", "expected"), [(1, False), (8, False), (12, False), (16, True), (64, True)])
def test_there_is_a_hybrid_where_the_ranks_fill_several_nodes(ranks: int, expected: bool) -> None:
    scenario = replace(GPT2, world_size=ranks)
    assert has_hybrid(scenario) == expected
    assert ("hybrid" in runs_by_stage(scenario)) == expected


def test_a_shard_group_of_the_scenario_does_not_reach_the_stages() -> None:
    grouped = replace(GPT2, shard_group=4)
    grouped.run("zero-2")  # plans for groups of 4, and keeps the plan
    runs, usual = runs_by_stage(grouped), runs_by_stage(GPT2)
    assert {name: run.peak_bytes for name, run in runs.items()} == {
        name: run.peak_bytes for name, run in usual.items()
    }
