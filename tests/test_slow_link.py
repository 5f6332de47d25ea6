"""The script that slows a loopback: what it refuses, what it computes, and what the book says of its run."""

from __future__ import annotations

import importlib
import json
import math
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zero_ref.simulator.cluster import Link, cluster

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("benchmarks.slow_link")


@pytest.fixture(scope="module")
def run() -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "slow_link.json").read_text())


# ----------------------------------------------------------------------------------------- where it can run


def test_it_says_why_it_cannot_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "only Linux" in script.refusal()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(script.os, "geteuid", lambda: 1000, raising=False)
    assert "only root" in script.refusal()
    monkeypatch.setattr(script.os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert script.refusal() == "tc and unshare not found: install the packages iproute2 and util-linux"
    monkeypatch.setattr(script.shutil, "which", lambda name: name)
    assert script.refusal() == ""


def test_the_loopback_of_the_machine_is_left_alone(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.meter, "raise_loopback", lambda: False)
    monkeypatch.setattr(script.meter, "loopback_is_private", lambda: False)
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: pytest.fail("tc was called"))
    with pytest.raises(SystemExit, match="the machine's own"):
        script.slow_down(400, 0)


def test_a_kernel_without_netem_is_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = script.subprocess.CompletedProcess([], 2, "", "Error: Specified qdisc kind is unknown.")
    monkeypatch.setattr(script.meter, "raise_loopback", lambda: False)
    monkeypatch.setattr(script.meter, "loopback_is_private", lambda: True)
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: refused)
    with pytest.raises(SystemExit, match=r"kind is unknown\. A delay needs netem"):
        script.slow_down(400, 5)


# --------------------------------------------------------------------------------------------- what it says


def test_ratios_are_those_of_single_rounds(script: ModuleType) -> None:
    ms = {
        "alone": [[10, 10, 99], [10], [10], [10]],
        "plain": [[20], [14], [30], [12]],
        "interleaved": [[15], [12], [9], [12]],
    }
    found = script.exposed(ms)
    assert (found.plain, found.interleaved) == (7, 2)
    assert found.ratio == statistics.median([2.0, 2.0, math.inf, 1.0]) == 2.0


def test_a_round_in_which_the_hook_is_slower_counts_against_it(script: ModuleType) -> None:
    found = script.exposed({"alone": [[10]], "plain": [[8]], "interleaved": [[9]]})
    assert found.ratio == 0


def test_the_prediction_gains_where_backward_is_longer_than_the_sending(script: ModuleType) -> None:
    def ratio(gb_per_s: float) -> float:
        base, link = cluster("loopback"), Link(100, gb_per_s)
        device = replace(base.device, tflops=0.04, reached=1.0)
        made = replace(base, overlaps=True, device=device, within=link, between=link, link_of_op={})
        return float(script.predicted(made).ratio)

    assert ratio(0.1) > 2
    assert ratio(0.01) == pytest.approx(1, abs=0.05)


# --------------------------------------------------------------------------------------------- what it found


def test_in_the_committed_run_the_hook_leaves_less_exposed(script: ModuleType, run: Any) -> None:
    found = script.exposed(run["iteration_ms"])
    assert found.ratio == pytest.approx(run["exposed_ms"]["measured"]["ratio"], rel=1e-3)
    assert found.ratio >= 1.2
    assert run["exposed_ms"]["predicted"]["ratio"] >= 1.2


def test_chapter_6_has_the_numbers_of_the_committed_run(run: Any) -> None:
    notebook = json.loads((ROOT / "notebooks" / "06_overlap.ipynb").read_text(encoding="utf-8"))
    (cell,) = (cell for cell in notebook["cells"] if cell["id"] == "compare-times-seen")
    text = " ".join("".join(cell["source"]).split()).partition("benchmarks/results/slow_link.json")[2]
    expected = []
    for name in ("predicted", "measured"):
        plain, interleaved = (round(run["exposed_ms"][name][way]) for way in ("plain", "interleaved"))
        ratio = run["exposed_ms"][name]["ratio"]  # measured: the median of the rounds' ratios
        expected += [str(plain), str(interleaved), f"{ratio:.1f}"]
    expected += [f"{end:.1f}" for end in run["exposed_ms"]["measured"]["quartiles"]]
    assert re.findall(r"\d+(?:\.\d)?", text) == expected
    assert len(run["iteration_ms"]["plain"]) == 8
    assert "tbf rate 400mbit" in run["discipline"]
