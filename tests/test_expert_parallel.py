"""Expert parallelism: who has which experts, what travels to them, and what is left on each rank."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario

QWEN = Scenario(MODELS["qwen3-30b-a3b"], cluster("h100-ib"), world_size=64, sequence=4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_parallel": 3, "world_size": 66}, "3 ranks cannot share 128 experts, whole ones each"),
        ({"expert_parallel": 128}, "64 ranks cannot be divided into groups of 128 that share the experts"),
        ({"expert_parallel": 0}, "expert_parallel must be at least 1, got 0"),
        ({"expert_parallel": 8, "expert_load": 0.5}, "expert_load must be at least 1, got 0.5"),
        ({"expert_parallel": 8, "expert_load": 9}, "from 1 to 8 times the average; got expert_load=9"),
        ({"expert_load": 1.5}, "from 1 to 1 times the average; got expert_load=1.5"),
        (
            {"expert_parallel": 8, "architecture": MODELS["llama3-8b"]},
            "expert_parallel=8: the model has no experts",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_with_its_values(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(QWEN, **changes)  # type: ignore[arg-type]
