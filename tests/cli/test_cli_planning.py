"""Four tasks of a planner: one command each ends with a way that fits, its price, or what to change."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from zero_ref import cli

BILL = ["--train-tokens", "1e12", "--price", "2.5"]
TASKS = {
    "8B on 16 H100": ["--model", "llama3-8b", "--ranks", "16", "--tokens", "1048576"],
    "70B on 64 H100": ["--model", "llama3-70b", "--ranks", "64", "--tokens", "2097152"],
    "235B mixture on 128 H200": [
        *("--model", "qwen3-235b-a22b", "--cluster", "h200-ib", "--ranks", "128"),
        *("--sequence", "4096", "--tokens", "2097152"),
    ],
}
ALONE = ["--model", "gpt2-xl", "--cluster", "rtx4090-10gbe", "--ranks", "1", "--tokens", "16384"]


def as_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.parametrize("task", TASKS)
def test_the_first_way_of_the_list_surely_fits_and_has_a_price(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, "search", *TASKS[task], *BILL)
    first = found["best"][0]
    assert first["fits"] is True
    assert first["gpu_hours"] == pytest.approx(found["ranks"] * 1e12 / first["tokens_per_second"] / 3600)
    assert first["cost"] == pytest.approx(2.5 * first["gpu_hours"])
    assert 0.1 < first["model_flops_utilisation"] < 0.6
    _, *words = shlex.split(first["simulate"])
    simulated = as_json(capsys, *words, *BILL)["strategies"][first["strategy"]]
    assert simulated["fits"] is True
    assert simulated["gpu_hours"] == pytest.approx(first["gpu_hours"], rel=1e-6)
    assert simulated["model_flops_utilisation"] == pytest.approx(first["model_flops_utilisation"], rel=1e-6)
    assert found["would_fit"] == {}


def test_where_nothing_fits_it_says_what_would_in_order_of_cost(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "search", *ALONE, *BILL, code=1)
    assert found["best"] == []
    assert set(found["would_fit"]) == {
        *("--lora 16", "--no-masters", "--ranks 2", "--offload in-backward", "--offload state"),
    }
    hours = [one["gpu_hours"] for one in found["would_fit"].values()]
    assert hours == sorted(hours), "the cheapest first"
    for one in found["would_fit"].values():
        assert one["fits"] is True
        _, *words = shlex.split(one["simulate"])
        simulated = as_json(capsys, *words, *BILL)["strategies"][one["strategy"]]
        assert simulated["memory_peak_bytes"] == one["memory_bytes"]
        assert simulated["gpu_hours"] == pytest.approx(one["gpu_hours"], rel=1e-6)
    assert cli.main(["search", *ALONE, *BILL]) == 1
    said = capsys.readouterr().out
    assert "nearest: ddp" in said
    assert "1. fits with --lora 16 (adapters alone are trained): ddp" in said
    assert "5. fits with --offload state: ddp" in said
    assert "published ones took 2 to 4 times as long" in " ".join(said.split())
    assert "GPU-hours" in said


def test_one_rank_is_one_program(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "search", "--model", "gpt2", "--ranks", "1", "--tokens", "8192")
    assert {one["strategy"] for one in found["listed"]} == {"ddp"}


def test_what_fits_stands_before_what_may(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "search", *TASKS["8B on 16 H100"])
    verdicts = [one["fits"] for one in found["best"]]
    assert verdicts == sorted(verdicts, key=lambda fits: fits is None)
    assert {True, None} == set(verdicts)
    assert cli.main(["search", *TASKS["8B on 16 H100"]]) == 0
    said = capsys.readouterr().out
    assert "??  unlikely" in said
    memory_gb = 81_559 * 2**20 / 1e9
    above = [one for one in found["best"] if one["memory_bytes"] > 1e9 * memory_gb]
    assert above
    assert sum(" ??" in line for line in said.splitlines() if "zero-" in line) == len(above)
