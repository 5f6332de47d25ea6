"""The prediction before a run: it is the one that the run is held against, and it starts nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.lab import train
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.dry_run import scenario_of
from zero_ref.lab.outcome import predict
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.recipe import RECIPES, TRAINED

SMALL = TrainConfig(steps=12, batch_size=2, model=GPTConfig(layers=2, heads=2, width=32, context=16))
IN_16 = replace(SMALL, model=replace(SMALL.model, dtype="bfloat16"))
WORDS = [
    "--steps",
    "6",
    "--batch-size",
    "2",
    "--layers",
    "1",
    "--heads",
    "2",
    "--width",
    "16",
    "--context",
    "16",
]


@pytest.mark.parametrize("strategy", list(TRAINED))
@pytest.mark.parametrize("config", [SMALL, IN_16, replace(IN_16, master_dtype="float32")])
def test_bytes_and_calls_are_those_that_the_run_is_held_against(config: TrainConfig, strategy: str) -> None:
    if config.master_dtype and TRAINED[strategy].name in ("zero-3", "zero-3-stair", "local-sgd"):
        with pytest.raises(ValueError, match="masters"):
            config.under(strategy)
        return
    run = scenario_of(config, 4, cluster("loopback")).run(strategy)
    plan = predict(config.under(strategy), 4)
    assert run.schedule == plan
    assert run.iteration_ms > 0
    for rank, memory in enumerate(run.memories if strategy in RECIPES else ()):  # not the stair's
        kept = plan.parameter_bytes[rank] + plan.state_bytes[rank] + plan.gradient_bytes[rank]
        assert memory.gradient_bucket_bytes == 0, "as the run has it: gradients are views of DDP's buckets"
        held = memory.state_bytes + memory.gradient_bytes
        assert held == pytest.approx(kept, abs=1)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> Any:
        pytest.fail("something was started")

    for place in (
        "zero_ref.lab.ranks.run",
        "zero_ref.lab.ranks.Pool",
        "torch.distributed.init_process_group",
    ):
        monkeypatch.setattr(place, started)
    monkeypatch.setattr("builtins.input", started)


@pytest.mark.usefixtures("nothing_starts")
def test_a_dry_run_prints_the_prediction_and_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "4", "--strategy", "ddp", "--strategy", "zero-2", "--overlap", "in-forward", *WORDS]
    assert cli.main(["train", *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a GPT, 6 steps on 4 ranks of loopback")
    for said in (
        "zero-2",
        "sent a rank",
        "calls",
        "peak",
        "a laptop's order of magnitude",
        "not measure",
    ):
        assert said in out
    assert cli.main(["train", *words, "--dry-run", "--cluster", "h100-ib"]) == 0
    out = capsys.readouterr().out
    assert "4 ranks of h100-ib" in out
    assert "laptop" not in out


@pytest.mark.usefixtures("nothing_starts")
def test_under_torchrun_rank_0_alone_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):  # the last one on another machine
        for name, value in (
            *(("RANK", rank), ("LOCAL_RANK", local_rank)),
            *(("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2)),
        ):
            monkeypatch.setenv(name, str(value))
        assert train.main([*WORDS, "--dry-run"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("a GPT, 6 steps on 4 ranks of loopback")
    assert printed[1:] == ["", ""]


@pytest.mark.parametrize("name", ["h1000", "pyproject.toml", "."])
def test_a_cluster_that_is_none_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--dry-run", "--cluster", name]) == 2
    assert f"--cluster {name}" in capsys.readouterr().err
