"""Benchmarks on real ranks, the smallest there are: that all of it comes back, never how long it took."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.__main__ import main
from benchmarks.contenders import OURS, TORCH
from benchmarks.results import Report, SuiteResult, Taken
from benchmarks.rounds import COUNTS, WARM_UP, Case, take_turns
from benchmarks.suites import SUITES
from zero_ref.lab import ranks

pytestmark = pytest.mark.ranks

NUMEL = 4096


def turns_of_three() -> tuple[list[str], dict[str, Taken]]:
    """Return the calls on this rank, in order, and the samples; each rank first seeds its random numbers."""
    random.seed(dist.get_rank())
    ran: list[str] = []
    flat = torch.ones(NUMEL)

    def send() -> None:
        ran.append("send")
        if dist.get_rank() == 0:
            dist.send(flat, 1)
        else:
            dist.recv(flat, 0)

    cases = {
        "send": Case(send),
        "first": Case(lambda: ran.append("first")),
        "second": Case(lambda: ran.append("second")),
    }
    return ran, take_turns(cases, rounds=3)


def test_ranks_take_the_same_turns_and_bring_home_the_same() -> None:
    (ran, taken), (ran_there, taken_there) = ranks.run(turns_of_three, 2)
    assert ran == ran_there
    assert taken == taken_there
    assert all(ran.count(name) == WARM_UP + 3 + COUNTS for name in taken), "each round once, and to count"
    assert all(len(one.wall_ms) == 3 for one in taken.values())
    if taken["send"].wire_bytes is not None:
        # Gloo's header and, on a private loopback, those of a few packets.
        assert 4 * NUMEL <= taken["send"].wire_bytes <= 4 * NUMEL + 1000
        assert abs(taken["first"].wire_bytes or 0) <= 1000


def in_miniature(suite: Callable[[str, int], SuiteResult]) -> Callable[[str, int], SuiteResult]:
    """The suite on a model of a few tensors, and without touching all memory first."""

    def run(set_name: str, rounds: int) -> SuiteResult:
        from benchmarks import contenders, state

        contenders.SETS[set_name] = contenders.SETS[set_name]._replace(
            make=lambda: contenders.chain([64] * 5)
        )
        state.touch_memory = lambda: None
        return suite(set_name, rounds)

    return run


@pytest.mark.thorough
def test_the_command_measures_every_suite(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "shutdown", lambda: None)  # new ranks for each suite take most of the time
    for name in SUITES:
        monkeypatch.setitem(SUITES, name, in_miniature(SUITES[name]))
    file = tmp_path / "report.json"
    words = [*SUITES, "--set", "tiny", "--rounds", "2", "--quick", "--json", str(file)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for suite in SUITES:
        assert f"{suite}, tiny: 2 ranks, 8 tensors" in printed
    report = Report.from_json(json.loads(file.read_text()))
    assert [result.suite for result in report.results] == list(SUITES)
    assert {OURS, TORCH} <= set(report.results[0].taken)
    assert {len(taken.wall_ms) for taken in report.results[0].taken.values()} == {2}
    assert report.sessions[0].quick


def test_a_suite_that_fails_is_said_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(set_name: str, rounds: int) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setitem(SUITES, "step", broken)
    monkeypatch.setitem(SUITES, "construction", in_miniature(SUITES["construction"]))
    assert main(["step", "construction", "--set", "tiny", "--quick"]) == 1
    printed = capsys.readouterr()
    assert "step, tiny, 2 ranks" in printed.err
    assert "no such luck" in printed.err
    assert "construction, tiny: 2 ranks, 8 tensors" in printed.out
