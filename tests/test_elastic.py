"""Going on when a rank is lost, as far as nothing has to be started for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running_page import PAGE, commands

from zero_ref.cli import main
from zero_ref.files.saves import sealed
from zero_ref.lab import elastic, ranks
from zero_ref.lab.checkpoints import (
    STEPS,
    NothingLeftError,
    Stretch,
    check_notes,
    counted,
    in_words,
    newest_step,
    repeated_steps,
    stretches,
    stretches_in,
)
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.train import main as torchrun_main
from zero_ref.simulator.recipe import RECIPES

CONFIG = TrainConfig("zero-even", 100, checkpoint_dir="run7", elastic=True)
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
        ({"checkpoint_dir": None}, "elastic needs checkpoint_dir"),
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
        ("--elastic", "elastic needs checkpoint_dir"),
        ("--strategy ddp --checkpoint-dir new", "choose zero, zero-bucket"),
        ("--checkpoint-dir new --resume", "no complete save in new yet"),
        ("--checkpoint-dir used", "add --resume to go on"),
        ("--checkpoint-dir new --checkpoint run.pt", "two places"),
    ):
        run: Callable[[list[str]], int] = torchrun_main if command == "torchrun" else main
        before = ["train"] if command == "zero-ref" else []
        assert run([*before, *words.split()]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_under_torchrun_an_elastic_run_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, refused in (("none", True), (None, True), ("run7", False)):
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if name:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        assert ("--rdzv-id" in (elastic.complaint(CONFIG) or "")) == refused
        assert elastic.complaint(replace(CONFIG, elastic=False)) is None


# ---------------------------------------------------------------------------------------------- when is saved


def test_saves_leave_two_steps_to_do_or_none() -> None:
    def saves(steps: int, every: int) -> list[int]:
        config = replace(CONFIG, steps=steps, checkpoint_every=every)
        return [step for step in range(1, steps + 1) if config.saves_after(step)]

    assert saves(20, 5) == [5, 10, 15]
    assert saves(21, 5) == [5, 10, 15], "of 20 only one step would be left"
    assert saves(7, 1) == [1, 2, 3, 4, 5]
    assert saves(50, 0) == [5, 10, 15, 20, 25, 30, 35, 40, 45], "a tenth of the steps"
    assert saves(5, 0) == [1, 2, 3]
    plain = replace(CONFIG, elastic=False)
    assert (plain.save_every, plain.goes_on, replace(plain, resume=True).goes_on) == (0, False, True)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 10), (7, 10), (8, 10), (9, 20), (30, 40), (80, 90), (90, 100)]
)
def test_with_fewer_ranks_it_trains_to_the_next_save_that_two_steps_lead_to(step: int, expected: int) -> None:
    assert elastic._next_save(replace(CONFIG, checkpoint_every=10), step) == expected


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


def test_a_directory_without_a_complete_save_begins_at_step_0(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == newest_step(tmp_path / "none") == 0
    (tmp_path / "save-00000001").mkdir()
    (tmp_path / "save-00000001" / "shard-0-of-2.json").write_text("")
    assert newest_step(tmp_path) == 0


# ----------------------------------------------------------------------------------- which steps were trained

RAN = [Stretch(4, 0, 37), Stretch(3, 30, 34), Stretch(2, 30, 50), Stretch(4, 50, 90), Stretch(3, 40, 60)]
"""Two ranks are lost one after the other; at the end the save of step 80 is damaged, and so is that of 60."""


def test_each_step_counts_once() -> None:
    once = counted(RAN)
    assert once == [Stretch(4, 0, 30), Stretch(2, 30, 40), Stretch(3, 40, 60)]
    assert [step for one in once for step in range(one.done, one.until)] == list(range(60))
    assert repeated_steps(RAN) == 37 + 4 + 20 + 40 + 20 - 60
    assert in_words(RAN[:1]) == "steps 1 to 37 on 4 ranks; none was repeated"
    assert (
        in_words([Stretch(1, 0, 9), Stretch(1, 8, 9)])
        == "steps 1 to 8 on 1 rank, 9 to 9 on 1; 1 step was repeated"
    )


def test_the_log_of_steps_is_read_past_what_is_damaged(tmp_path: Path) -> None:
    def lines(ranks: int, done: int, until: int) -> list[str]:
        return [json.dumps({"step": step + 1, "ranks": ranks}) for step in range(done, until)]

    told = [line for one in RAN for line in lines(*one)]
    assert stretches_in(told) == RAN
    (tmp_path / STEPS).write_text("\n".join([*told[:3], '{"step"', "[]", "\xff", *told[3:], '{"step": 61']))
    assert stretches(tmp_path) == RAN
    assert stretches(tmp_path / "none") == []


def test_one_line_says_what_begins(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_dir=str(tmp_path))
    assert elastic.what_begins(config, 4) == f"4 ranks, a save after every 10 steps in {tmp_path}"
    (tmp_path / STEPS).write_text('{"step": 1, "ranks": 4}\n{"step": 2, "ranks": 4}\n')
    goes_on = "goes on from step 0, 4 before; 2 steps, to step 2, are repeated"
    assert elastic.what_begins(config, 1) == f"1 rank {goes_on}"
    assert elastic.what_begins(config, 3) == f"3 ranks {goes_on.replace('goes', 'go')}"


# --------------------------------------------------------------------------------------------- on one machine


class Acts:
    """In place of `ranks.run`: each call does what comes next, and notes the number of ranks and the goal."""

    def __init__(self, *acts: object) -> None:
        self.acts, self.calls = list(acts), []

    def __call__(
        self, fn: object, world_size: int, config: TrainConfig, *args: object, timeout: float
    ) -> Any:
        self.calls.append((world_size, config.steps))
        assert config.save_every == 10, "whatever the goal"
        act = self.acts.pop(0)
        if isinstance(act, Exception):
            raise act
        return act


def lost(rank: int, *others: int) -> ranks.RankError:
    killed = "was killed by signal 9 (SIGKILL)"
    more = dict.fromkeys(others, f"{killed} before it returned")
    return ranks.RankError("", rank, killed, {9: "raised RuntimeError: Connection closed by peer", **more})


def run(
    monkeypatch: pytest.MonkeyPatch, *acts: object, steps: list[int]
) -> tuple[list[tuple[int, int]], list[str]]:
    """Four ranks of 100 steps, a save after every 10; `steps` are those of the newest save at each call."""
    said: list[str] = []
    calls = Acts(*acts)
    monkeypatch.setattr(elastic.ranks, "run", calls)
    monkeypatch.setattr(elastic, "newest_step", lambda directory: steps.pop(0))
    monkeypatch.setattr(elastic, "what_begins", lambda config, world: f"{world} ranks")
    assert elastic.run(lambda: None, 4, CONFIG, say=said.append) == ["done"]
    return calls.calls, said


def test_the_others_train_to_the_next_save_and_then_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, said = run(monkeypatch, lost(2), ["saved"], ["done"], steps=[0, 30, 40])
    assert calls == [(4, 100), (3, 40), (4, 100)]
    assert said == ["4 ranks", "rank 2 lost: 3 ranks", "4 ranks"]


def test_ranks_that_are_lost_together_or_before_the_first_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, said = run(monkeypatch, lost(3, 0), lost(1), ["done"], steps=[0, 90, 90])
    assert calls == [(4, 100), (2, 100), (1, 100)], "no save comes that two steps lead away from"
    assert said == ["4 ranks", "ranks 0 and 3 lost: 2 ranks", "rank 1 lost: 1 ranks"]


def test_what_a_rank_raised_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ranks.RankError):
        run(monkeypatch, ranks.RankError("", 1, "ValueError: boom", {0: "had returned"}), steps=[0])


def test_who_is_lost_again_and_again_from_one_save_is_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ranks.RankError):
        run(monkeypatch, *[lost(0)] * elastic.RUNS_FROM_ONE_SAVE, ["done"], steps=[30] * 4)
    with pytest.raises(ranks.RankError):
        run(monkeypatch, lost(0, 1, 2, 3), steps=[0])


# --------------------------------------------------------------------------------------------- under torchrun


def test_the_page_s_command_is_the_one_that_the_script_tries() -> None:
    (words,) = [words for words in commands("torchrun") if "--elastic" in words]
    script = (PAGE.parents[1] / "tests" / "lost_ranks.py").read_text(encoding="utf-8")
    (settings,) = [word for word in words if word.startswith("--rdzv-conf=")]
    for said in (settings, "--max-restarts=100", "--rdzv-backend=c10d"):
        assert said in words
        assert f'"{said}"' in script
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in PAGE.read_text(encoding="utf-8")
    assert '["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"' in script


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        ("[/src/gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1. This is typically so", True),
        ("Timed out waiting 300000ms for recv operation to complete", True),
        ("the file is damaged", False),
    ],
)
def test_a_rank_whose_peer_is_gone_ends_with_one_line(
    message: str, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> None:
        assert code == 1
        raise Ended

    monkeypatch.setattr(elastic.os, "_exit", end)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(Ended if ends else RuntimeError), elastic.as_elastic_rank(CONFIG):
        raise RuntimeError(message)
    said = capsys.readouterr().err
    assert said.count("\n") == int(ends)
    assert not ends or said.startswith("rank 2 stops, as another is gone: RuntimeError: ")
    assert "typically" not in said
    assert "pair.cc" not in said
    with pytest.raises(RuntimeError), elastic.as_elastic_rank(replace(CONFIG, elastic=False)):
        raise RuntimeError(message)
