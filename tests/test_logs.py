"""Logs of a run: what is written, what a resumed run drops, and what happens when nothing can be written."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.lab.logs import JsonLines, Logs, RunLog, StepDone

SETTINGS = {"steps": 6, "strategy": ["zero"]}


def done(step: int, loss: float = 5.0, world_size: int = 2) -> StepDone:
    return StepDone(step, loss, 1e-3, 12.5, world_size, 1e9 + step)


def write(folder: Path, *steps: StepDone, kinds: tuple[str, ...] = ("json",), outcome: Any = None) -> RunLog:
    with Logs(kinds, str(folder), SETTINGS).run("zero") as log:
        for step in steps:
            log.step(step)
        if outcome:
            log.finish(outcome)
    return log


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / "zero.jsonl").read_text().splitlines()
    ]


def steps_in(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder) if line["event"] == "step"]


def test_json_lines_are_the_settings_the_steps_and_the_outcome(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    write(folder, done(1), done(2, math.nan), outcome={"final_loss": 4.5})
    first, step, odd, last = lines(folder)
    assert first == {
        "event": "settings",
        "strategy": "zero",
        "world_size": 2,
        "first_step": 1,
        "settings": SETTINGS,
    }
    assert step == {"event": "step", "strategy": "zero", **done(1)._asdict()}
    assert (odd["step"], odd["loss"]) == (2, None)
    assert last == {"event": "outcome", "strategy": "zero", "final_loss": 4.5}


def test_a_resumed_run_goes_on_in_the_log_without_what_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, *map(done, range(1, 7)), outcome={"final_loss": 4.5})
    write(tmp_path, *(done(step, world_size=3) for step in (5, 6, 7)))
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    events = [(line["event"], line.get("world_size")) for line in lines(tmp_path)]
    assert events == [("settings", 2), *[("step", 2)] * 4, ("settings", 3), *[("step", 3)] * 3]


def test_an_outcome_that_a_resumed_run_passes_is_no_longer_there(tmp_path: Path) -> None:
    write(tmp_path, done(1), done(2), outcome={"final_loss": 4.5})
    write(tmp_path, done(3), outcome={"final_loss": 4.0})
    assert [line.get("final_loss") for line in lines(tmp_path) if line["event"] == "outcome"] == [4.0]
    assert lines(tmp_path)[-1]["event"] == "outcome"


def test_a_run_from_the_beginning_begins_its_log_anew(tmp_path: Path) -> None:
    write(tmp_path, done(1), done(2))
    write(tmp_path, done(1))
    assert [line["event"] for line in lines(tmp_path)] == ["settings", "step"]


def test_ranks_that_start_again_in_one_run_double_no_step(tmp_path: Path) -> None:
    write(tmp_path, done(1), done(2), done(3), done(2, world_size=1), done(3, world_size=1))
    assert steps_in(tmp_path) == [1, 2, 3]
    assert [line["world_size"] for line in lines(tmp_path) if line["event"] == "step"] == [2, 1, 1]


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, done(1), done(2))
    with open(tmp_path / "zero.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    Logs(("json",), str(tmp_path)).check(["zero"])
    write(tmp_path, done(3))
    assert steps_in(tmp_path) == [1, 2, 3]


def test_an_error_is_the_outcome_of_a_run_that_it_ends(tmp_path: Path) -> None:
    def lose_a_rank(log: RunLog) -> None:
        with log:
            log.step(done(1))
            raise RuntimeError("a rank was lost")

    with pytest.raises(RuntimeError, match="lost"):
        lose_a_rank(Logs(("json",), str(tmp_path)).run("zero"))
    assert lines(tmp_path)[-1] == {
        "event": "outcome",
        "strategy": "zero",
        "failed": "RuntimeError: a rank was lost",
    }


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "zero.jsonl").write_text('{"event": 3}\n')
    with pytest.raises(ValueError, match=r"zero\.jsonl is there, and is no log of this program"):
        Logs(("json",), str(tmp_path)).check(["ddp", "zero"])
    assert (tmp_path / "zero.jsonl").read_text() == '{"event": 3}\n'


def test_plain_lines_are_the_first_step_and_each_twentieth(capsys: pytest.CaptureFixture[str]) -> None:
    with Logs(("plain",)).run("zero") as log:
        for step in range(1, 45):
            log.step(done(step))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"step {step}: training loss 5.000" for step in (1, 20, 40)]


# ---------------------------------------------------------------------------------- what cannot be written


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(JsonLines):
        def start(self, done: StepDone) -> None:
            self.name = "/dev/full"

    log = RunLog([Full("there", "zero", {}), JsonLines(str(tmp_path / "zero.jsonl"), "zero", {})])
    for step in (1, 2):
        log.step(done(step))
    log.finish({"final_loss": 4.0})
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "/dev/full can no longer be written, and training goes on without it: No space left on device"
    )
    assert [each["event"] for each in lines(tmp_path)] == ["settings", "step", "step", "outcome"]


@pytest.mark.parametrize("kind", ["json", "tensorboard"])
def test_a_place_that_cannot_be_written_is_told_before_the_run(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--log-to", kind, "--log-dir"]
    assert cli.main([*words, "/proc/none"]) == 2
    assert "--log-dir /proc/none cannot be written: " in capsys.readouterr().err
    there = tmp_path / ("zero-bucket.jsonl" if kind == "json" else "zero-bucket")
    there.mkdir() if kind == "json" else there.touch()
    assert cli.main([*words, str(tmp_path)]) == 2
    assert f"--log-dir: {there} cannot be written: " in capsys.readouterr().err
    assert os.listdir(tmp_path) == [there.name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-to", "json"], "--log-to json needs --log-dir, the folder to write to"),
        (["--log-to", "plain", "--log-dir", "x"], "--log-dir is for --log-to json and --log-to tensorboard"),
        (["--log-dir", "x"], "--log-dir is for --log-to json"),
    ],
)
def test_logs_without_a_place_and_a_place_without_logs_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words]) == 2
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- TensorBoard


def test_without_tensorboard_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["train", "--log-to", "tensorboard", "--log-dir", str(tmp_path)]) == 1
    assert "tensorboard, which is not installed: pip install tensorboard" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in tensorboard's own modules
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, *map(done, range(1, 7)), kinds=("tensorboard",), outcome={"final_loss": 4.5})
    write(
        tmp_path,
        *(done(step, 4.0) for step in (5, 6, 7)),
        kinds=("tensorboard",),
        outcome={"final_loss": 3.5},
    )
    shown = EventAccumulator(str(tmp_path / "zero"))
    shown.Reload()
    assert set(shown.Tags()["scalars"]) == {"loss", "learning_rate", "step_ms", "world_size", "held_out_loss"}
    loss = [(event.step, event.value) for event in shown.Scalars("loss")]
    assert loss == [(1, 5.0), (2, 5.0), (3, 5.0), (4, 5.0), (5, 4.0), (6, 4.0), (7, 4.0)]
    assert [event.wall_time for event in shown.Scalars("loss")] == [1e9 + step for step in range(1, 8)]
    assert [(event.step, event.value) for event in shown.Scalars("held_out_loss")] == [(7, 3.5)]
