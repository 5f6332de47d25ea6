"""The rows of the README's table "What it does" run as they are written."""

from __future__ import annotations

import re
import shlex
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from zero_ref import DistributedOptimizer
from zero_ref.cli import main, make_parser
from zero_ref.lab import ranks
from zero_ref.lab.train import main as train_main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

ROWS = {
    goal: re.findall(r"`([^`]+)`", codes)
    for goal, codes in re.findall(
        r"^\| ([^|]+) \| ([^|]*`[^|]*) \| ", README.partition("## What it does")[2], re.M
    )
}
COMMANDS = [code for codes in ROWS.values() for code in codes if code.startswith("zero-ref ")]
PYTHON = {
    goal: codes
    for goal, codes in ROWS.items()
    if not codes[0].startswith(("zero-ref ", "torchrun ", "DistributedOptimizer"))
}

NAMES = """
import torch
import zero_ref
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from zero_ref import *

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
"""
"""What a row may name: the package, a model, and the imports of the README's training loop."""

BUILD = """
from torch import nn


def build():
    return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.Linear(64, 256))
"""
"""A reader's train.py: a function that makes a model."""


def run_row(codes: list[str], folder: str) -> None:
    """On a rank: run a row's code in its order, then train two iterations."""
    import os

    names: dict[str, Any] = {}
    exec(NAMES, names)
    model = names["model"]
    needs_ddp = any("ddp" in code for code in codes)
    wrapped = names["ddp"] = names["DDP"](model) if needs_ddp else model
    zero = names["ZeroRedundancyOptimizer"]
    optimizer = names["optimizer"] = zero(model.parameters(), names["AdamW"], lr=1e-3)
    # Each takes half of the parameters, as a model's matrices and the rest of it are given to two optimizers.
    halves = [list(layer.parameters()) for layer in (model[0], model[2])]
    names["muon"], names["adamw"] = (zero(half, names["AdamW"]) for half in halves)
    os.chdir(folder)
    for code in codes:
        if re.match(r"\w+=", code):
            code = f"ZeroRedundancyOptimizer(model.parameters(), AdamW, {code})"
        if re.match(r"(from|with) ", code):
            exec(code, names)
            continue
        value = eval(code, names)
        if isinstance(value, zero):
            optimizer = names["optimizer"] = value
        if isinstance(value, names["ShardedDataParallel"]):
            wrapped = value
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(names["torch"].ones(4, 8)).square().mean().backward()
        if wrapped is model:  # no one else averages
            for param in model.parameters():
                names["torch"].distributed.all_reduce(param.grad)
        optimizer.step()


@pytest.mark.parametrize("goal", PYTHON)
def test_python_of_a_row_runs_on_two_ranks(goal: str, tmp_path: Path) -> None:
    ranks.run(run_row, 2, PYTHON[goal], str(tmp_path), backend="gloo", timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted_and_a_simulation_runs(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(BUILD, encoding="utf-8")
    words = shlex.split(command)[1:]
    if words[0] in ("simulate", "search", "which"):
        assert main(words) == 0
        assert capsys.readouterr().out
    else:  # these take more files of the reader's
        parser, _ = make_parser()
        assert parser.parse_args(words).command == words[0]


def test_the_optimizer_over_rpc_takes_the_arguments_of_its_row() -> None:
    (code,) = (code for codes in ROWS.values() for code in codes if code.startswith("DistributedOptimizer"))
    assert code == "DistributedOptimizer(torch.optim.Adagrad, rrefs)"
    signature(DistributedOptimizer).bind("torch.optim.Adagrad", "rrefs")


def test_the_training_command_has_the_options_of_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (code for codes in ROWS.values() for code in codes if code.startswith("torchrun"))
    words = shlex.split(code)
    options = words[words.index("zero_ref.lab.train") + 1 :]
    with pytest.raises(SystemExit) as ended:
        train_main([*options, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert [option for option in options if option.startswith("--") and option not in said] == []


def test_rows_are_found() -> None:
    assert len(ROWS) >= 20
    assert len(COMMANDS) >= 6
