"""`python -m benchmarks`: what it answers to mistakes, what it reads and writes, and where it says it was."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from library.bench_results import report, step_result

from benchmarks import machine
from benchmarks.__main__ import main
from zero_ref import cli

# ------------------------------------------------------------------------------------------- where and when


def test_the_machine_is_described_without_being_named() -> None:
    found = machine.read_machine()
    assert found.cores is not None
    assert found.cores >= 1
    assert found.kernel
    assert socket.gethostname() not in json.dumps(report().as_json())
    versions = machine.read_versions()
    assert versions["torch"]
    assert "fairscale" in versions


# ----------------------------------------------------------------------------------------------- the command


def test_the_installed_command_says_where_the_benchmarks_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--ranks", "2"]) == 2
    said = capsys.readouterr().err
    assert "python -m benchmarks" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["stepp"], ["stepp", "step, sync, iteration"]),
        (["step", "--ranks", "1"], ["--ranks must be at least 2"]),
        (["step", "--json", "no/such/folder/x.json"], ["there is no such folder"]),
        (["step", "--from", "x.json"], ["leave the suites out"]),
        (["--from", "no-such-file.json"], ["no-such-file.json"]),
    ],
)
def test_a_mistake_ends_with_code_2_before_anything_runs(
    capsys: pytest.CaptureFixture[str], words: list[str], answers: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    printed = capsys.readouterr()
    assert printed.out == ""
    for answer in answers:
        assert answer in printed.err


def test_reports_are_printed_and_merged_without_running_anything(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one, other, both = (tmp_path / name for name in ("one.json", "other.json", "both.json"))
    one.write_text(json.dumps(report(step_result()).as_json()))
    other.write_text(json.dumps(report(replace(step_result(), suite="sync")).as_json()))
    assert main(["--from", str(one), "--from", str(other), "--json", str(both)]) == 0
    printed = capsys.readouterr().out
    assert "step, gpt: 2 ranks" in printed
    assert "sync, gpt: 2 ranks" in printed
    merged: dict[str, Any] = json.loads(both.read_text())
    assert len(merged["sessions"]) == 2


@pytest.mark.parametrize(
    ("where", "value", "answer"),
    [
        (("results", 0, "taken", "torch", "wall_ms", 1), 0, "step, gpt: a time in milliseconds is above 0"),
        (("results", 0, "taken", "torch", "wall_ms"), [1.0], "step, gpt: .* some have more rounds"),
        (("results", 0, "taken", "torch", "wall_ms", 0), "9", r'wall_ms\[0\] must be a number, not "9"'),
        (("results", 0, "suite"), None, r"results\[0\].suite must be text, not null"),
        (("results", 0, "taken"), [], r"results\[0\].taken must be an object, not a list of 0"),
        (("sessions", 0, "load_average"), [1, 2, 3], "load_average must have 2 items, not 3"),
        (("machine", "extra"), 1, r'report.machine has no "extra"; it has processor, cores'),
        (("sessions",), "left out", "report has no sessions"),
    ],
)
def test_an_altered_report_hears_what_is_wrong_in_it(
    where: tuple[Any, ...], value: Any, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    altered: Any = json.loads(json.dumps(report(step_result()).as_json()))
    place = altered
    for key in where[:-1]:
        place = place[key]
    if value == "left out":
        del place[where[-1]]
    else:
        place[where[-1]] = value
    file = tmp_path / "report.json"
    file.write_text(json.dumps(altered))
    with pytest.raises(SystemExit, match="2"):
        main(["--from", str(file)])
    said = capsys.readouterr().err
    assert f"--from {file}: no report that --json wrote: " in said
    assert re.search(answer, said), said
