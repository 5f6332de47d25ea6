"""A run that somebody submits: the form on the page, its score, and an error for each mistake."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.simulator import submission
from zero_ref.simulator.published import OPTIONS, published
from zero_ref.simulator.runs import Run, Source
from zero_ref.simulator.spread import MEMORY, TIME
from zero_ref.simulator.submission import CONSTANTS, read_submission, score

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "submit_run.md").read_text(encoding="utf-8")
FORM, FURTHER = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)


def written(folder: Path, text: str = FORM, name: str = "report.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_form_on_the_page_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--run", str(written(tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("report-8b-16, of source report, which would be for testing only\n")
    assert re.search(r"time, tokens/s a GPU: reported 5,700, predicted [\d,]+, interval [\d,]+ to ", printed)
    assert re.search(r"memory, GiB: reported 66.0, predicted [\d.]+, .*\), error [+-]\d+%", printed)
    of_time, of_memory = re.findall(r"these changes nothing: (.*)", printed)
    assert "device.allocator_share" in of_time
    assert "device.reached" in of_memory
    assert "device.allocator_share" not in of_memory


def test_a_file_in_json_says_the_same_as_one_in_toml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        written(tmp_path),
        written(tmp_path, json.dumps(tomllib.loads(FORM)), "report.json"),
    ]
    said: list[Any] = []
    for path in paths:
        assert cli.main(["validate", "--run", str(path), "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]
    (run,) = said[0]["runs"]
    assert [one["figure"] for one in run["figures"]] == ["time", "memory"]
    memory = run["figures"][1]
    assert memory["interval"] == pytest.approx(
        [memory["predicted"] * end for end in (MEMORY.low, MEMORY.high)]
    )
    assert memory["error"] == pytest.approx(memory["predicted"] / 66.0 - 1)
    time = run["figures"][0]
    assert time["interval"] == pytest.approx([time["predicted"] / end for end in (TIME.high, TIME.low)])
    assert memory["effects"].keys() == time["effects"].keys() == set(CONSTANTS)


def test_a_constant_without_an_effect_can_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    run = published().run("titan-8b-128")
    few, half = score(run, published()), None
    monkeypatch.setattr(submission, "LESS", 0.5)
    half = score(run, published())
    for figure, effects in few.effects.items():
        for name, effect in effects.items():
            assert bool(effect) == bool(half.effects[figure][name]), (figure, name)
            assert abs(half.effects[figure][name]) >= abs(effect)


def test_the_page_names_every_field_that_a_run_or_a_source_may_have() -> None:
    table = PAGE.partition("## What the fields mean")[2].partition("Every other option")[0]
    named = set(
        re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line))
    )
    named |= {"commit"} if "`commit`" in table else set()
    assert named == {each.name for cls in (Run, Source) for each in fields(cls)} - {
        "source",
        "use",
        "options",
    }
    others = PAGE.partition("Every other option")[2].partition("A model that")[0]
    assert set(re.findall(r"`(\w+)`", others)) <= set(OPTIONS)


def test_models_and_machines_of_its_own_are_taken(tmp_path: Path) -> None:
    text = FORM.replace('"llama3-8b"', '"small"').replace('"h100-ib"', '"ours"') + FURTHER
    key, data = read_submission(written(tmp_path, text))
    (run,) = (run for run in data.runs if run.source == key)
    assert sum(shape.numel for shape in data.models["small"].shapes()) == 596_049_920  # Qwen/Qwen3-0.6B
    assert data.clusters["ours"].cluster("ours").between.gb_per_s == 12.5
    assert score(run, data).said.gib > 0


def test_a_run_that_ended_out_of_memory_has_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = re.sub("time = .*\nmemory_gib = .*", "ran = false", FORM)
    assert cli.main(["validate", "--run", str(written(tmp_path, text))]) == 0
    printed = capsys.readouterr().out
    assert "  undecided whether it fits; reported that it ended out of memory\n" in printed


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("[source]", "[source", "it is not TOML: "),
        ("[[runs]]", "[[run]]", 'report has no "run" (did you mean "runs"?)'),
        ("url = ", "uri = ", 'report.source has no "uri" (did you mean "url"?)'),
        ("ranks = 16", "", "report.runs[0] has no ranks"),
        ("ranks = 16", "ranks = 0", "run report-8b-16: world_size must be at least 1 rank, got 0"),
        ("ranks = 16", 'ranks = "16"', 'report.runs[0].ranks must be a whole number below 2**63, not "16"'),
        ("batch = 2", "bacth = 2", "report.runs[0] has no 'bacth' (did you mean 'batch'?)"),
        ("batch = 2", "batch = 0", "run report-8b-16: batch and sequence must be at least 1, got 0 and 8192"),
        ('"by-operation"', '"some"', "run report-8b-16: unknown checkpointing 'some'; choose one of none"),
        ('"llama3-8b"', '"llama9"', "unknown model of run report-8b-16: 'llama9'; choose one of "),
        ('"h100-ib"', '"h101"', "unknown cluster of run report-8b-16: 'h101'; choose one of "),
        ("tokens_per_s_gpu = 5700", "seconds = 3", "unknown unit of time of run report-8b-16: 'seconds'"),
        ("memory_gib = 66.0", "memory_gib = -1", "a time and a memory are above 0, got -1"),
        ("memory_gib = 66.0", "ran = false", "run report-8b-16 did not run, so it has no time"),
        ('reduce_dtype = "float32"', "reduce_dtype = 32", "report.runs[0].reduce_dtype must be text, not 32"),
        ('"zero-3"', '"zero-9"', "unknown strategy 'zero-9'"),
    ],
)
def test_a_mistake_in_the_file_is_told(
    old: str, new: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = FORM.replace("batch = 2", 'batch = 2\nstrategy = "zero-3"')
    assert form.count(old) == 1
    path = written(tmp_path, form.replace(old, new))
    assert cli.main(["validate", "--run", str(path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"zero-ref validate: --run {path}: ")
    assert error in printed


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"h100-ib"', '"h101"', "unknown cluster 'h101'"),
        ("12.5", "-1", "a link's gb_per_s must be above 0, got -1"),
        ("12.5", "inf", "Infinity is no number"),
        ("between_gb_per_s", "device.foo", "unknown field of a device 'foo'; choose one of name, tflops"),
        ("between_gb_per_s = 12.5", 'device.tflops = "a lot"', 'device.tflops must be a number, not "a lot"'),
        ('"qwen3"', "2026-05-01", "report.models.small: model_type '2026-05-01' is not known"),
        ("hidden_size = 1024", "hidden_size = -8", "report.models.small: "),
    ],
)
def test_a_mistake_in_a_model_or_a_machine_is_told(
    old: str, new: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, FORM + FURTHER.replace(old, new))
    assert cli.main(["validate", "--run", str(path)]) == 2
    assert error in capsys.readouterr().err


def test_a_file_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_runs = FORM.partition("[[runs]]")[0] + "\n"
    for path, error in (
        (tmp_path / "missing.toml", "No such file"),
        (tmp_path, f"--run {tmp_path} cannot be read: Is a directory."),
        (written(tmp_path, "runs = []\n" + no_runs), "it has no run: runs is an empty list"),
        (written(tmp_path, "{", "cut.json"), "it is not JSON"),
        (written(tmp_path, FORM, "kempner.toml"), "kempner: there is a source 'kempner' already"),
    ):
        assert cli.main(["validate", "--run", str(path)]) == 2
        assert error in capsys.readouterr().err
    assert cli.main(["validate", "--run", str(written(tmp_path)), "--figure", "time"]) == 2
    assert "leave out --source and --figure" in capsys.readouterr().err


def test_the_issue_form_holds_a_file_that_is_read_once_its_blanks_are_filled(tmp_path: Path) -> None:
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "run.yml").read_text(encoding="utf-8")
    value = form.partition("value: |\n")[2].partition("    validations:")[0]
    text = re.sub("^ {8}", "", value, flags=re.M).replace("= 0", "= 1").replace('""', '"x"')
    key, data = read_submission(written(tmp_path, text))
    assert [run.id for run in data.runs if run.source == key] == ["x"]
