"""Commands and programs of a way to train: each runs, and is that way."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.lab.commands import program, simulate_command, train_command
from zero_ref.lab.config import config_for, strategies_of
from zero_ref.lab.train import make_parser
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.search import SEARCHED, search

GPT = Scenario(MODELS["gpt2"], CLUSTERS["h100-ib"], 16, sequence=512)


def printed(capsys: pytest.CaptureFixture[str], words: list[str] | None) -> dict[str, Any]:
    assert words is not None
    assert cli.main([*words[1:], "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ------------------------------------------------------------------------------------------- the simulator


def test_the_command_gives_the_numbers_of_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    found = search(GPT, 16 * 512 * 4)
    assert len({one.scenario.checkpointing for one in found.listed}) > 1
    for one in found.listed[::7]:
        words = simulate_command(one.scenario, one.strategy, ["--model", "gpt2"], "h100-ib")
        said = printed(capsys, words)["strategies"][one.strategy]
        assert said["iteration_ms"] == pytest.approx(
            one.update_ms, rel=1e-9
        )  # batches are added up otherwise
        assert sum(said["memory_bytes"].values()) == one.memory.total_bytes


@pytest.mark.parametrize("strategy", SEARCHED)
def test_what_means_nothing_to_a_strategy_is_left_out(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = replace(
        GPT, bucket_view=True, reduce_dtype="float32", compiled=True, fused_loss=True, masters=False,
        accumulation=2, no_sync=True, shard_group=8, bucket_bytes=2**24,
    )  # fmt: skip
    words = simulate_command(scenario, strategy, ["--model", "gpt2"], "h100-ib")
    said = printed(capsys, words)["strategies"][strategy]
    run = scenario.run(strategy)
    assert said["iteration_ms"] == run.iteration_ms
    assert sum(said["memory_bytes"].values()) == run.memory.total_bytes


def test_an_accumulation_that_takes_too_long_to_play_has_no_command() -> None:
    large = replace(GPT, architecture=MODELS["llama3-8b"])
    for scenario, strategy, most in ((GPT, "ddp", 1024), (large, "zero-3", 2**20 // (4 * 291))):
        fits, not_any_more = (
            simulate_command(replace(scenario, accumulation=count), strategy, ["--model", "X"], "h100-ib")
            for count in (most, most + 1)
        )
        assert fits is not None
        assert not_any_more is None


# ------------------------------------------------------------------------------------------------- the lab


@pytest.mark.parametrize("strategy", SEARCHED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", [None, 8])
def test_a_training_command_is_read_by_the_job_and_is_the_same_recipe(
    strategy: str, dtype: str, group: int | None
) -> None:
    scenario = replace(GPT, dtype=dtype, shard_group=group, batch=2)
    words = train_command(scenario, strategy)
    if (strategy, dtype) == ("zero-3", "bfloat16") or (group and strategy != "zero-2"):
        assert words is None, "the job keeps no masters there, and has no groups"
        return
    assert words is not None
    begin = words.index("zero_ref.lab.train") + 1
    assert words[:3] == ["torchrun", "--nnodes=2", "--nproc-per-node=8"]
    arguments = make_parser().parse_args(words[begin:])
    config = config_for(arguments, strategies_of(arguments), 16)
    trained = config.recipe
    planned = scenario.recipe(strategy, partition=config.recipe.partition)
    assert (trained.name, trained.shard_group, trained.stage) == (strategy, group, planned.stage)
    assert (trained.flat, trained.without_ddp) == (planned.flat, planned.without_ddp)
    assert trained.optimizer == ("AdamW" if dtype == "float32" else scenario.state)
    assert (config.batch_size, config.model.context, config.model.dtype) == (2, 512, dtype)
    assert (config.model.layers, config.model.width, config.model.heads) == (12, 768, 12)


@pytest.mark.parametrize(
    "scenario",
    [
        replace(GPT, architecture=MODELS["llama3-8b"]),
        replace(GPT, checkpointing="full"),
        replace(GPT, optimizer="SGD"),
        replace(GPT, dtype="float16"),
        replace(GPT, world_size=12),
    ],
)
def test_what_the_job_cannot_do_has_no_command(scenario: Scenario) -> None:
    assert train_command(GPT, "zero-2") is not None
    assert train_command(scenario, "zero-2") is None


# ---------------------------------------------------------------------------------------------- a program

START = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", init_method="file://{file}", rank={rank}, world_size=2)
"""

TRAIN = """
torch.manual_seed(0)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
model = nn.Sequential(*blocks, nn.Linear(8, 1)).to(torch.{dtype})
before = [param.detach().clone() for param in model.parameters()]
{lines}
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 8, dtype=torch.{dtype})).float().sum().backward()
    optimizer.step()
after = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
assert all(not torch.equal(old, new.detach()) for old, new in zip(before, after)), {name!r}
"""


@pytest.mark.ranks
def test_programs_of_these_lines_train(tmp_path: Path) -> None:
    cluster = replace(CLUSTERS["h100-ib"], backend="gloo")
    programs = []
    for strategy, dtype, group in itertools.product(SEARCHED, ("bfloat16", "float32"), (None, 1)):
        usual = Scenario(MODELS["gpt2"], cluster, 2, dtype=dtype, shard_group=group)
        scenario = replace(
            usual,
            accumulation=2,
            no_sync=True,
            offload="state" if group is None and strategy != "zero-3" else None,
        )
        scenario = replace(scenario, bucket_bytes=None if group is None else 2**20)
        lines = program(scenario, strategy)
        assert lines is not None
        held = "float32" if strategy == "zero-3" else dtype
        programs.append(
            TRAIN.format(dtype=held, lines="\n".join(lines), name=f"{strategy}, {dtype}, {group}")
        )
    texts = [START.format(file=tmp_path / "meeting", rank=rank) + "".join(programs) for rank in range(2)]
    words = [sys.executable, "-c"]
    ranks = [subprocess.Popen([*words, text], stderr=subprocess.PIPE, text=True) for text in texts]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=240)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()


def test_what_the_classes_cannot_do_has_no_program() -> None:
    assert program(GPT, "zero-bucket") is None
    assert program(replace(GPT, optimizer="SGD+momentum"), "ddp") is None
