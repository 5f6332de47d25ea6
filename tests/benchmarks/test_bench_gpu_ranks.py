"""The speed of `python -m benchmarks gpu`, on two ranks of a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import contenders, tables
from benchmarks.gpu import speed
from benchmarks.gpu.budget import Budget
from benchmarks.results import SuiteResult
from benchmarks.suites import SUITES
from zero_ref.lab import ranks

pytestmark = pytest.mark.ranks


def small_step(set_name: str, rounds: int) -> SuiteResult:
    """The suite "step" on a model of a few tensors."""
    small = contenders.SETS[set_name]._replace(make=lambda: contenders.chain([64] * 5).to(ranks.device()))
    contenders.SETS[set_name] = small
    return SUITES["step"](set_name, rounds)


def test_all_contenders_are_timed_on_the_ranks_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SUITES", {"step": small_step})
    found = speed.speed(
        torch.device("cpu"), Budget(600), world_size=2, suites=["step"], sets=["tiny"], rounds=2
    )
    (result,) = found["results"]
    assert (result["suite"], result["ranks"], result["tensors"]) == ("step", 2, 8)
    assert {contenders.OURS, contenders.TORCH_BEST} <= result["taken"].keys()
    assert "step, tiny: 2 ranks, 8 tensors" in "".join(tables.SECTIONS["speed"](found))
