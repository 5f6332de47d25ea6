"""The official `schedulefree` package, sharded: trained, switched, saved and loaded as by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree as official
from library.schedule_free import switching
from library.training import (
    Run,
    assert_same,
    assert_state_dicts_equal,
    assert_trains_as_plain,
    snapshot,
    train,
)
from torch import nn

from zero_ref.comm.collectives import Collectives
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (official.AdamWScheduleFree, {"lr": 0.01, "warmup_steps": 3, "weight_decay": 0.1}),
    (official.SGDScheduleFree, {"lr": 0.1, "weight_decay": 0.1}),
    (official.RAdamScheduleFree, {"lr": 0.01, "silent_sgd_phase": False}),
]
FEW_MODES = [("sorted_greedy", False), ("even", True), ("equal_shares", True)]


@pytest.mark.parametrize(
    ("optimizer_class", "options"), [*CLASSES, (official.AdamWScheduleFree, {"lr": 0.01, "foreach": False})]
)
def test_it_trains_and_switches_as_plain(optimizer_class: Any, options: dict[str, Any]) -> None:
    assert_trains_as_plain(switching, optimizer_class, modes=FEW_MODES, **options)


def goes_on(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return the parameters at the start, after two more updates, and in the evaluation after them."""
    seen = [snapshot(model)]
    optimizer.train()
    seen += [snapshot(model) for _ in train(model, optimizer, range(3, 5))]
    optimizer.eval()
    return [*seen, snapshot(model)]


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
@pytest.mark.parametrize(
    ("partition", "as_view", "mode"), [("sorted_greedy", False, "train"), ("even", True, "eval")]
)
def test_a_state_saved_in_either_mode_is_the_plain_one_and_loads(
    partition: str, as_view: bool, mode: str, optimizer_class: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    case = Run(optimizer_class, **options)

    def begun(of: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
        model = case.model(None)
        optimizer = of(model)
        optimizer.train()
        list(train(model, optimizer, range(3)))
        getattr(optimizer, mode)()
        return model, optimizer

    def plain(model: nn.Module) -> Any:
        return optimizer_class(model.parameters(), **options)

    model, optimizer = begun(plain)
    values, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
    expected = goes_on(model, optimizer)

    def sharded(comm: Collectives) -> Callable[[nn.Module], Any]:
        return lambda model: ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class,
            comm,
            as_view,
            partition=partition,
            elementwise=True,
            **options,
        )

    def on_rank(comm: Collectives) -> tuple[Any, Any]:
        model, optimizer = begun(sharded(comm))
        optimizer.consolidate_state_dict("all")
        whole = optimizer.state_dict()
        save_sharded(optimizer, tmp_path)
        return whole, goes_on(model, optimizer)

    def resumed(comm: Collectives, from_files: bool) -> Any:
        model = case.model(None if from_files else values)
        optimizer = sharded(comm)(model)
        if from_files:
            load_sharded(optimizer, tmp_path)
        else:
            optimizer.load_state_dict(state)
        return goes_on(model, optimizer)

    filled = {number: of_param for number, of_param in state["state"].items() if of_param}
    for whole, ours in virtual.run(on_rank, 3):
        assert_state_dicts_equal(whole, {**state, "state": filled})
        assert_same(ours, expected, "after the saves")
    for from_files in (False, True):
        for ours in virtual.run(resumed, 2, from_files):
            assert_same(ours, expected, f"from files: {from_files}")
    model = case.model(values)
    back = plain(model)
    back.load_state_dict(copy.deepcopy(whole))
    assert_same(goes_on(model, back), expected, "the plain optimizer from the sharded one's state")
