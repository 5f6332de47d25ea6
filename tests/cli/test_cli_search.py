"""`zero-ref search`: the list is the search's, each command on it runs, mistakes are answered."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.simulator import spread
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.search import search
from zero_ref.simulator.spread import Spread

SEARCH = ["search", "--model", "gpt2", "--ranks", "8", "--tokens", "16384"]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "MEMORY", Spread(0.9, 1.1))
    monkeypatch.setattr(spread, "TIME", Spread(0.8, 1.25))


def as_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_the_numbers_are_those_of_the_search(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    printed = as_json(capsys, *SEARCH, "--cluster", "a100-ib", "--dtype", "float32", "--optimizer", "SGD")
    scenario = Scenario(MODELS["gpt2"], CLUSTERS["a100-ib"], 8, dtype="float32", optimizer="SGD")
    found = search(scenario, 16384)
    assert (printed["tried"], printed["timed"], printed["tokens"]) == (found.tried, len(found.listed), 16384)
    assert len(printed["best"]) == len(found.best)
    for said, one in zip(printed["listed"], found.listed, strict=True):
        assert one.update_ms is not None
        assert said["update_ms"] == one.update_ms
        assert said["memory_bytes"] == one.peak_bytes
        assert said["tokens_per_second"] == 16384 * 1e3 / one.update_ms
        assert said["memory_interval_bytes"] == pytest.approx(
            [0.9 * said["memory_bytes"], 1.1 * said["memory_bytes"]]
        )
        assert said["tokens_per_second_interval"] == pytest.approx(
            [said["tokens_per_second"] / 1.25, said["tokens_per_second"] / 0.8]
        )


def test_each_command_runs_and_says_the_same(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    for one in as_json(capsys, *SEARCH)["best"]:
        program, *words = shlex.split(one["simulate"])
        assert program == "zero-ref"
        said = as_json(capsys, *words)["strategies"][one["strategy"]]
        assert (said["fits"], said["memory_peak_bytes"]) == (one["fits"], one["memory_bytes"])
        assert said["iteration_ms"] == pytest.approx(one["update_ms"], rel=1e-9)  # added up in another order


def test_people_get_a_table_and_the_reasons(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "--model", "gpt2-xl", "--cluster", "rtx4090-10gbe", "--ranks", "8", "--tokens", "9000"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "8,192 (the nearest to 9,000) tokens an update" in said
    assert re.search(r"^1 +zero-\d", said, re.MULTILINE)
    assert re.search(r"^1  zero-ref simulate --model gpt2-xl ", said, re.MULTILINE)
    assert re.search(r"\d+ tried: \d+ fit, \d+ undecided, \d+ do not fit", said)
    assert re.search(r"^ddp: \d+ too large; the least of them needs \d+", said, re.MULTILINE)
    assert "--all lists them" in said
    assert cli.main([*words, "--all"]) == 0
    assert len(capsys.readouterr().out) > len(said)


def test_nothing_that_fits_is_said_in_the_first_line(
    narrow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["search", "--model", "zero-1t", "--cluster", "v100-ib", "--ranks", "16", "--tokens", "32768"]
    assert cli.main(words) == 1
    said = capsys.readouterr().out
    assert said.startswith("nothing of what was tried fits, and tensor, pipeline and context")
    assert as_json(capsys, *words, code=1)["best"] == []


def test_a_search_loads_no_torch() -> None:
    words = [*SEARCH, "--json"]
    program = f"import sys; from zero_ref import cli; cli.main({words!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "0"], "--tokens: it must be at least 1, got 0"),
        (["--tokens", "1", "--cluster", "nowhere"], "--cluster nowhere: choose one of"),
        ([], "the following arguments are required: --tokens"),
    ],
)
def test_a_mistake_is_answered(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main([*SEARCH[:-2], *words])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
