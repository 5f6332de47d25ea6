"""The page that says how fast it is: its pieces hold what the results hold, and all of them are on it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.contenders import ADDED, FORMS
from benchmarks.gpu.report import Accelerator, GpuReport, SectionResult
from benchmarks.machine import Commit, Machine
from benchmarks.results import Report, Session, SuiteResult, Taken

ROOT = Path(__file__).resolve().parents[2]


def loaded() -> ModuleType:
    sys.path.insert(0, str(ROOT / "book"))
    try:
        return importlib.import_module("findings")
    finally:
        sys.path.remove(str(ROOT / "book"))


findings = loaded()
PAGE, OPTIMIZERS = (
    (ROOT / "book" / f"{name}.md").read_text(encoding="utf-8") for name in ("speed", "optimizers")
)

Build = Callable[..., str]


def taken(*wall_ms: float, cpu: float = 1.0) -> Taken:
    return Taken(list(wall_ms), [cpu * ms for ms in wall_ms])


STEP = {
    "zero_ref, fused": taken(30.0, 30.0, 35.0),
    "zero_ref, best": taken(10.0, 10.0, 10.0),
    "torch": taken(40.0, 42.0, 44.0),
    "torch, best": taken(8.0, 9.0, 9.0),
    "fairscale": taken(9.0, 10.0, 11.0, cpu=0.5),
    "limit: copy": taken(7.0, 7.0, 7.0),
}
REPORT = Report(
    Machine("a processor", 2, 16 * 10**9, "Linux 6.1", True),
    {"python": "3.11", "fairscale": None},
    Commit("0123456789abcdef" * 2, True),
    [Session("2026-01-02T03:04:05+00:00", 3, False, "nowhere", (0.25, None))],
    [SuiteResult("step", "gpt", ranks, 148, 31, STEP) for ranks in (2, 4)],
)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    monkeypatch.setattr(findings, "report", lambda name: REPORT)
    return lambda view, *arguments: "\n\n".join(findings.VIEWS[view](tmp_path, *arguments))


# ------------------------------------------------------------------------------------------------- the pieces


def test_pictures_come_with_their_numbers_in_words(build: Build) -> None:
    text = build("against_peers", "step")
    (file,) = re.findall(r"```\{figure\} (\S+)", text)
    assert Path(file).read_text(encoding="utf-8").startswith("<?xml")
    assert text.startswith("Ours here is *zero_ref, best*.")
    assert "2 ranks: torch 4.2; torch, best 0.9; fairscale 1; copy 0.7." in text
    assert text.count("step, gpt: ") == 2  # a table for each number of ranks


def test_what_was_lost_is_listed_the_worst_first_and_nothing_else(build: Build) -> None:
    rows = [line for line in build("lost").splitlines() if "ranks" in line]
    assert [re.findall(r"(\d ranks|torch, best|torch|fairscale)", row) for row in rows] == [
        ["2 ranks", "fairscale"], ["4 ranks", "fairscale"],
        ["2 ranks", "torch, best"], ["4 ranks", "torch, best"],
    ]  # fmt: skip
    assert "**0.5 (0.45 to 0.55)**" in rows[0]  # processor time; in wall time it was even
    assert "| 1 (0.9 to 1.1) |" in re.sub(" +", " ", rows[0])


def test_forms_have_their_rule_and_what_they_cost(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"ddp, fused": 8000.0, "zero_ref, best": 4000.0}
    iteration = SuiteResult(
        *("iteration", "gpt", 2, 148, 100),
        {
            name: Taken([ms], [ms], wire_bytes=800, figures={"state_bytes": state[name]})
            for name, ms in (("ddp, fused", 10.0), ("zero_ref, best", 12.0))
        },
    )
    monkeypatch.setattr(REPORT, "results", [iteration])
    rows = [re.sub(" +", " ", row) for row in build("forms", "2").splitlines()]
    assert rows[0] == "| form | choose it if | time, gpt | state, gpt | sent, gpt |"
    assert rows[2].endswith("fit on every rank | 1 | 1 | 2.00 |")
    assert rows[3].endswith("DDP stays as it is | 0.833 | 0.5 | 2.00 |")
    assert rows[4].endswith("a communication hook | - | - | - |")
    assert len(rows) == 2 + len(FORMS)
    assert build("forms", "4") == findings.NOT_YET


def test_what_a_keyword_adds_is_the_time_without_it_over_the_time_with_it(build: Build) -> None:
    rows = {
        cells[1].strip(): cells[2:-1]
        for cells in (row.split("|") for row in build("added", "4").splitlines())
    }
    assert list(rows)[2:] == list(ADDED)
    assert [cell.strip() for cell in rows["`parameters_as_bucket_view=True`"]] == [
        "*zero_ref, fused*", "the step", "3 (3 to 3.5)",
    ]  # fmt: skip
    assert rows["`fused=True`"][-1].strip() == "-"


def test_where_and_when_is_printed(build: Build) -> None:
    text = build("machine")
    commit = "`0123456789ab`, with changes"
    for said in ("a processor, 2 cores, 16 GB", "virtual", commit, "python 3.11", "2026-01-02"):
        assert said in text
    assert "fairscale" not in text, "it is not installed"


# --------------------------------------------------------------------------------------------------- the page


def test_every_view_on_the_page_is_there_and_every_view_is_on_it() -> None:
    used = re.findall(r"^```\{measured\} (\w+)", PAGE + OPTIMIZERS, flags=re.M)
    assert {*used} == findings.VIEWS.keys()


def test_the_page_says_what_each_contender_is() -> None:
    named = {
        name.partition(": ")[0]
        for one in findings.results()
        for name in one.taken
        if not name.startswith("limit: ")
    }
    said = {name for line in re.findall(r"^\| ([^|]+) \|", PAGE, flags=re.M) for name in line.split("; ")}
    assert len(named) > 10
    assert named <= said


def test_tiny_has_as_many_tensors_as_the_page_says() -> None:
    assert {one.tensors for one in findings.results() if one.set == "tiny"} == {2000}


def test_the_page_shows_everything_that_is_timed() -> None:
    assert re.findall(r"\{measured\} against_peers (\w+)", PAGE) == list(findings.SAID)


@pytest.mark.parametrize("name", ["benchmarks", "sharded", "step"])
def test_the_files_are_reports_and_the_page_says_how_they_are_made(name: str) -> None:
    file = findings.RESULTS / f"{name}.json"
    (recipe,) = re.findall(r"^bench:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert f"{file.relative_to(ROOT)}" in recipe
    assert "make bench" in PAGE
    found = Report.from_json(json.loads(file.read_text(encoding="utf-8")))
    assert found.results


def test_a_gpu_that_nobody_measured_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    (said,) = findings.gpu(tmp_path)
    assert said.startswith("No GPU has been measured yet.")
    assert "`make gpu`" in said
    row = asdict(REPORT.results[0])
    made = GpuReport(
        Accelerator("kind", "a GPU", 1, 80 * 10**9, {"driver": "1.2", "nccl": None}),
        *(REPORT.machine, REPORT.versions, REPORT.commit, "2026-01-02T03:04:05+00:00", False),
        sections=[
            SectionResult("speed", "measured", 9.5, found={"results": [row]}),
            SectionResult("memory", "skipped", 0.0, "there is no time left"),
        ],
    )
    (tmp_path / "gpu.json").write_text(json.dumps(made.as_json()))
    text = "\n\n".join(findings.gpu(tmp_path))
    assert "- device: 1 of a GPU with 80 GB" in text
    assert "driver 1.2" in text
    assert "commit: `0123456789ab`, with changes" in text
    assert "step, gpt: 2 ranks" in text
    assert "memory: skipped in 0 s: there is no time left" in text
