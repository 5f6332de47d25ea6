"""Every path of the package on the pretend device: no wait, race or use after free, and the CPU's values."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import paths
import pretend_group
import pytest
import torch
from pretend_ranks import Ranks, on_both, on_cpu, on_device, train_on_device

from zero_ref.comm import pairwise
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.outcome import outcome, predict
from zero_ref.simulator.recipe import RECIPES

pytestmark = pytest.mark.ranks

VIEWS = {"parameters_as_bucket_view": True}
STEPS_BY = {
    "each": {},
    "views": VIEWS,
    "even": {"partition": "even"},
    "even views": {**VIEWS, "partition": "even"},
    "shares": {"partition": "equal_shares"},
    "shares views": {**VIEWS, "partition": "equal_shares"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {}
for name, how in STEPS_BY.items():
    CASES[f"step, {name}"] = ("step", how)
    CASES[f"step, {name}, fused"] = ("step", {**how, "fused": True})
for name in ("views", "even views"):
    how = STEPS_BY[name]
    CASES[f"DDP, {name}"] = ("after_ddp", how)
    for hook in ("none", "owners", "scaled"):
        CASES[f"DDP, {name}, {hook}, clip"] = ("after_ddp", {**how, "hook": hook, "clip": True})
    CASES[f"DDP, {name}, to owners"] = ("after_ddp", {**how, "hook": "owners"})
    CASES[f"DDP, {name}, to owners in pairs"] = ("after_ddp", {**how, "hook": "pairs"})
    for interleaved in (False, True):
        place = f"in backward, {name}{', interleaved' * interleaved}, to owners in pairs"
        CASES[place] = ("in_backward", {**how, "interleaved": interleaved, "owners": True, "by": "pairs"})
        for owners in (False, True):
            place = f"in backward, {name}{', interleaved' * interleaved}{', to owners' * owners}"
            CASES[place] = ("in_backward", {**how, "interleaved": interleaved, "owners": owners})
    CASES[f"offload, {name}"] = ("offload", how)
    CASES[f"state, {name}"] = ("state", how)
    CASES[f"Join, {name}"] = ("uneven", how)
for by in ("pairs", "reduce"):
    runs = {"partition": paths.alternating, "by": by, "owners": True, "interleaved": True}
    CASES[f"in backward, interleaved, to owners of several runs, {by}"] = ("in_backward", runs)
for name in ("even views", "shares", "shares views"):
    how = STEPS_BY[name]
    CASES[f"sharded, {name}"] = ("sharded", how)
    CASES[f"sharded, {name}, two backwards"] = ("sharded", {**how, "backwards": 2})
    CASES[f"sharded, {name}, no_sync"] = ("sharded", {**how, "backwards": 4})
    CASES[f"sharded, {name}, scaled"] = ("sharded", {**how, "scaled": True, "backwards": 2})
    CASES[f"sharded, {name}, in forward"] = ("sharded", {**how, "in_forward": True})
    CASES[f"masters, {name}"] = ("masters", how)
    CASES[f"two optimizers, {name}"] = ("two_optimizers", how)
CASES["local SGD"] = ("averaged", {})
CASES["step, rounded"] = ("step", {"rounded": True})
BETWEEN_BOTH = {"step, each", "DDP, views, owners, clip", "sharded, shares"}
ALWAYS = BETWEEN_BOTH | {
    "step, even views",
    "step, shares views, fused",
    "step, rounded",
    "DDP, even views, scaled, clip",
    "DDP, views, to owners in pairs",
    "in backward, even views, interleaved, to owners",
    "in backward, views, to owners in pairs",
    "in backward, even views",
    "in backward, interleaved, to owners of several runs, reduce",
    "offload, even views",
    "state, even views",
    "Join, views",
    "sharded, even views, two backwards",
    "sharded, shares views, no_sync",
    "sharded, shares views, scaled",
    "sharded, shares views, in forward",
    "masters, shares views, nearest",
    "two optimizers, shares",
    "local SGD",
}
"""One case of each path. The others, and most groups of both backends, are thorough."""
BOTH = BETWEEN_BOTH | {case for case in CASES if "even views" in case}
"""A group of both backends takes each path under one partition."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("case", "mixed"),
    [
        pytest.param(
            *(case, mixed),
            marks=() if case in (BETWEEN_BOTH if mixed else ALWAYS) else pytest.mark.thorough,
            id=f"{case}, {'gloo and nccl' if mixed else 'nccl'}",
        )
        for case in CASES
        for mixed in ((False, True) if case in BOTH else (False,))
    ],
)
def test_nothing_goes_wrong_on_the_device(pool: Ranks, case: str, mixed: bool) -> None:
    name, options = CASES[case]
    for found, values, expected in pool.run(partial(on_both, name, options, mixed)):
        assert found == {}
        for value, wanted in zip(values, expected, strict=True):
            # Sums are in another order, and 16 bits may round to the other neighbour.
            torch.testing.assert_close(value, wanted, rtol=1e-2 if name == "masters" else 1e-5, atol=1e-5)


def functions_of_pairwise(name: str, options: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The functions of `pairwise.py` that the path passes on a group of NCCL, and on one of Gloo."""
    pretend_group.register()
    passed: tuple[set[str], set[str]] = (set(), set())

    def note(frame: Any, event: str, _: Any, functions: set[str]) -> None:
        if event == "call" and frame.f_code.co_filename == pairwise.__file__:
            functions.add(frame.f_code.co_qualname)

    for functions, run in zip(passed, (on_device, on_cpu), strict=True):
        following = partial(note, functions=functions)
        threading.setprofile(following)
        sys.setprofile(following)
        try:
            run(name, options)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return passed


@pytest.mark.parametrize(
    "case", ["step, each", "sharded, shares", "DDP, views, owners, clip", "state, views"]
)
def test_a_group_of_nccl_passes_no_line_of_what_gloo_needs(pool: Ranks, case: str) -> None:
    for of_nccl, of_gloo in pool.run(partial(functions_of_pairwise, *CASES[case])):
        assert of_nccl == set()
        assert "PairwiseCollectives.broadcast" in of_gloo or "PairwiseCollectives.gather_on_wire" in of_gloo


@pytest.mark.parametrize("in_forward", [False, True])
def test_groups_that_share_the_state_and_their_replicas(pool: Ranks, in_forward: bool) -> None:
    options = {**STEPS_BY["shares views"], "replicas": True, "in_forward": in_forward}
    for found, values, expected in pool.run(partial(on_both, "sharded", options, False), world_size=4):
        assert found == {}
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)


SMALL = TrainConfig(steps=5, batch_size=2, model=GPTConfig(layers=2, heads=2, width=32, context=16))
RUNS = [
    (name, way, master_dtype)
    for name, recipe in RECIPES.items()
    if recipe.stage < 3
    for way in recipe.ways
    for master_dtype in ([None, "float32"] if recipe.averaging is None else [None])
]


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "way", "master_dtype"), RUNS)
def test_calls_and_bytes_are_the_plan_s(
    pool: Ranks, strategy: str, way: str, master_dtype: str | None
) -> None:
    dtype = "float32" if master_dtype is None else "bfloat16"
    config = replace(
        SMALL, model=replace(SMALL.model, dtype=dtype), strategy=strategy, way=way, master_dtype=master_dtype
    )
    result = outcome(config, predict(config, 2), pool.run(partial(train_on_device, config)))
    assert result.as_predicted, result


def test_a_group_of_four_that_shares_by_two_makes_the_plan_s_calls(pool: Ranks) -> None:
    config = replace(SMALL, strategy="zero-2", shard_group=2)
    result = outcome(config, predict(config, 4), pool.run(partial(train_on_device, config), world_size=4))
    assert result.as_predicted, result
