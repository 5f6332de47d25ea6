"""Updates: what torch's own kernels need and move, and what that makes of a scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from library.living import Touching

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.ledger import STATE_RULES, StateRule
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.updates import FOR_LOOP, FOREACH, UPDATES, update_kernels

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "amsgrad": {"amsgrad": True},
    "centered": {"centered": True},
}
MANY, NUMEL = 20, 1000
"""Tensors of so many elements."""


def a_step(name: str, **how: bool) -> Touching:
    """The eighth step of an optimizer: RAdam's first five are shorter, and the first step makes the state."""
    params = [torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(MANY)]
    for param in params:
        param.grad = torch.randn(NUMEL)
    of, *options = name.split("+")
    chosen = {key: value for option in options for key, value in OPTIONS[option].items()}
    optimizer = getattr(torch.optim, of)(params, **chosen, **how)
    for _ in range(7):
        optimizer.step()
    with Touching() as step:
        optimizer.step()
    return step


@pytest.mark.parametrize("name", FOREACH)
def test_the_kernels_are_those_that_torch_calls(name: str) -> None:
    foreach, one_by_one = a_step(name, foreach=True), a_step(name, foreach=False)
    whole = 4 * NUMEL * MANY
    assert foreach.touched / whole == FOREACH[name].touched
    assert one_by_one.touched / whole == FOR_LOOP[name].touched
    # Beside the copies: scalars, and of Rprop masks of single tensors.
    assert 0 <= foreach.peak - FOREACH[name].copies * whole <= 2 * 4 * NUMEL
    assert one_by_one.peak == pytest.approx(FOR_LOOP[name].copies * 4 * NUMEL, abs=16)


def test_a_fused_update_needs_nothing_and_touches_each_tensor_once() -> None:
    step = a_step("AdamW", fused=True)
    assert step.peak == 0
    assert update_kernels("AdamW", "fused") == (0, 7)


def test_every_elementwise_optimizer_was_counted() -> None:
    assert {*FOREACH} == {*FOR_LOOP} == {*STATE_RULES} - {"Muon+AdamW"}
    for name in STATE_RULES:
        assert update_kernels(name, "fused").touched == 3 + 2 * STATE_RULES[name].tensors
    with pytest.raises(ValueError, match=r"foreach: the kernels of Muon\+AdamW were not counted. Leave"):
        Scenario(MODELS["gpt2"], cluster("h100-ib"), 2, optimizer="Muon+AdamW", update="foreach")
    with pytest.raises(ValueError, match="update for-loop: the kernels of StateRule"):
        update_kernels(StateRule(2, 4), "for-loop")
    with pytest.raises(ValueError, match="unknown update 'for_each'; choose one of fused, foreach, for-loop"):
        Scenario(MODELS["gpt2"], cluster("h100-ib"), 2, update="for_each")


def test_a_step_holds_the_copies_of_what_a_rank_updates() -> None:
    scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), 4, dtype="float32", bucket_view=True)
    numel, largest = scenario.numel, 50_257 * 768

    def held(strategy: str, update: str) -> float:
        """Bytes that a step of rank 0 holds more than a fused one."""
        fused, found = (replace(scenario, update=one).run(strategy).memories[0] for one in ("fused", update))
        return found.phase_bytes["step"] - fused.phase_bytes["step"]

    assert [held(name, "foreach") for name in ("ddp", "zero-even")] == [4 * numel, 4 * numel / 4]
    assert held("zero-3", "foreach") == pytest.approx(4 * numel / 4, rel=0.01)
    # One tensor at a time, or the whole of a smaller share.
    assert held("ddp", "for-loop") == 3 * 4 * largest
    assert held("zero-even", "for-loop") == 3 * 4 * min(largest, numel / 4)
    assert held("zero-3", "for-loop") == pytest.approx(3 * 4 * largest / 4, rel=0.01)


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({"dtype": "float32"}, [28, 80, 80]),
        ({"dtype": "float32", "optimizer": "SGD+momentum"}, [20, 32, 32]),
        ({"masters": False}, [14, 40, 40]),
        # 16-bit gradients are read, 32-bit ones written; and parameters the other way.
        ({}, [28, 80 + 12, 80 + 12]),
    ],
)
def test_a_step_touches_what_its_kernels_do(options: dict[str, Any], nbytes: list[int]) -> None:
    found = [
        Scenario(MODELS["gpt2"], cluster("h100-ib"), 1, update=update, **options).workload.step_bytes
        for update in UPDATES
    ]
    assert found == nbytes
