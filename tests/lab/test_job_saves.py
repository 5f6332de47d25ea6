"""The saves of the training job, as far as no rank has to be started for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_ref.cli import main
from zero_ref.files.saves import sealed
from zero_ref.lab.checkpoints import NothingLeftError, check_notes
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.train import main as torchrun_main
from zero_ref.simulator.recipe import RECIPES

CONFIG = TrainConfig("zero-even", 100, checkpoint_dir="run7", checkpoint_every=10, resume=True)
NOTES = {
    "step": 30,
    "losses": [1.0] * 30,
    "model": {"layers": 4, "heads": 4, "width": 128, "context": 64, "dtype": "float32"},
    "master_dtype": None,
    "seed": 0,
}


# -------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "ddp"}, "keeps the whole state on every rank.*choose zero, .*or checkpoint, one file"),
        ({"strategy": "zero-3"}, "is PyTorch's fully_shard"),
        ({"strategy": "local-sgd"}, r"trains another model on each rank.*zero-2\.$"),
        ({"strategy": "zero-2", "shard_group": 2}, "several groups of ranks"),
        ({"checkpoint": "run.pt"}, "two places for one state"),
        ({"checkpoint_dir": None}, "need the name of a checkpoint file, or of a checkpoint_dir"),
    ],
)
def test_what_cannot_be_saved_in_shards_is_refused_with_the_reason(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


def test_all_other_strategies_can_save_in_shards() -> None:
    able = [name for name, one in RECIPES.items() if one.stage in (1, 2)]
    assert able == ["zero", "zero-bucket", "zero-even", "zero-2"]
    for name in able:
        for way in RECIPES[name].ways:
            assert replace(CONFIG, strategy=name, way=way).checkpoint_dir == "run7"


@pytest.mark.parametrize("command", ["zero-ref", "torchrun"])
def test_the_command_line_refuses_before_anything_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")  # and nothing else: to meet would fail
    monkeypatch.chdir(tmp_path)
    save = tmp_path / "used" / "save-00000001"
    save.mkdir(parents=True)
    mark = {"number": 1, "id": "0", "ranks": 1, "began": "", "owner": {}}
    (save / "save.json").write_bytes(sealed({"format": "zero_ref sharded checkpoint 2", **mark}))
    (save / "shard-0-of-1.json").write_text("")
    for words, message in (
        ("--strategy ddp --checkpoint-dir new", "choose zero, zero-bucket"),
        ("--checkpoint-dir used", "add --resume to go on"),
        ("--checkpoint-dir new --checkpoint run.pt", "two places"),
    ):
        run: Callable[[list[str]], int] = torchrun_main if command == "torchrun" else main
        before = ["train"] if command == "zero-ref" else []
        assert run([*before, *words.split()]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------------------------------- when is saved


def test_saves_leave_two_steps_to_do_or_none() -> None:
    def saves(steps: int, every: int) -> list[int]:
        config = replace(CONFIG, steps=steps, checkpoint_every=every)
        return [step for step in range(1, steps + 1) if config.saves_after(step)]

    assert saves(20, 5) == [5, 10, 15]
    assert saves(21, 5) == [5, 10, 15], "of 20 only one step would be left"
    assert saves(7, 1) == [1, 2, 3, 4, 5]
    assert saves(50, 0) == [], "one at the end alone"


# ------------------------------------------------------------------------------------------ what is in a save


def test_a_run_goes_on_from_its_own_saves() -> None:
    check_notes(CONFIG, NOTES)


@pytest.mark.parametrize(
    ("changes", "notes", "message"),
    [
        ({"model": GPTConfig(3)}, {}, "of a run with model .*'layers': 4.* not .*'layers': 3"),
        ({"model": GPTConfig(dtype="bfloat16")}, {}, "'dtype': 'float32'.* not .*'dtype': 'bfloat16'"),
        ({}, {"master_dtype": "float32"}, "with master_dtype float32, not None"),
        ({"seed": 1}, {}, "with seed 0, not 1"),
        ({"steps": 20}, {}, "trained for 30 steps; 20 were asked for.* ask for 32 or more"),
        ({"steps": 31}, {}, "ask for 32 or more"),
    ],
)
def test_a_save_of_another_run_is_refused(
    changes: dict[str, Any], notes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_notes(replace(CONFIG, **changes), NOTES | notes)


def test_a_save_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="of another program: its notes have no 'model'"):
        check_notes(CONFIG, {"iteration": 30})


def test_a_save_of_all_steps_leaves_nothing_to_do() -> None:
    with pytest.raises(NothingLeftError, match="trained for 30 steps: nothing is left"):
        check_notes(replace(CONFIG, steps=30), NOTES)
