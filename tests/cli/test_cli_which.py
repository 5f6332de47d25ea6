"""`zero-ref which`: the advice is that of the tree, what it costs is arithmetic, mistakes are answered."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest

from zero_ref import cli
from zero_ref.simulator import spread
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.which import compared

WHICH = ["which", "--model", "gpt2-xl", "--ranks", "8", "--batch", "16", "--checkpointing", "full"]


def as_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_the_advice_and_the_numbers_are_those_of_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    printed = as_json(capsys, *WHICH)
    found = compared(Scenario(MODELS["gpt2-xl"], cluster("h100-ib"), 8, 16, checkpointing="full"))
    assert printed["advice"] == found.advice.name == "stage 3"
    assert [one["yes"] for one in printed["questions"]] == list(found.path)
    assert list(printed["ways"]) == list(found.runs)
    for name, said in printed["ways"].items():
        run = found.runs[name]
        assert (said["memory_bytes"], said["fits"]) == (run.peak_bytes, run.fits)
        assert (said["update_ms"], said["tokens_per_second"]) == (run.iteration_ms, run.tokens_per_second)


def test_a_way_that_needs_more_than_there_is_is_unlikely(capsys: pytest.CaptureFixture[str]) -> None:
    usual = Scenario(MODELS["gpt2-xl"], cluster("h100-ib"), 8, checkpointing="full")
    scenarios = (usual.like(batch=batch) for batch in range(16, 400))
    batch, run = next(
        (one.batch, run) for one in scenarios if (run := one.run("zero-3")).fits is None and run.is_unlikely
    )
    assert run.memory_interval[0] < 1e9 * (run.scenario.cluster.device.memory_gb or 0) < run.peak_bytes
    words = [*WHICH[:-4], "--batch", str(batch), "--checkpointing", "full"]
    ways = as_json(capsys, *words, code=int(compared(run.scenario).fastest is None))["ways"]
    assert ways["stage 3"]["unlikely"] is True
    assert ways["stage 3"]["fits"] is None


def test_people_read_the_advice_first_and_its_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    printed = as_json(capsys, *WHICH)
    assert cli.main(WHICH) == 0
    said = capsys.readouterr().out
    assert said.startswith("stage 3: the least memory")
    assert "Does a pass hide what all ranks gather? Yes: 16,384 tokens" in said
    assert f"    {printed['simulate']}\n" in said
    assert "fully_shard(model" in said
    program, *words = shlex.split(printed["simulate"])
    assert program == "zero-ref"
    simulated = as_json(capsys, *words)["strategies"]["zero-3"]
    assert simulated["memory_peak_bytes"] == printed["ways"]["stage 3"]["memory_bytes"]


def test_close_to_the_rule_the_first_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["which", "--model", "qwen3-30b-a3b", "--cluster", "h200-ib", "--ranks", "32"]
    words += ["--sequence", "4096", "--checkpointing", "full", "--accumulation", "4"]
    printed = as_json(capsys, *words)
    assert (printed["advice"], printed["questions"][-1]["yes"]) == ("stage 3", True)
    assert "--strategy zero-3" in printed["simulate"]
    assert cli.main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("stage 3: nearly: 4,096 tokens, ")
    assert " needed; simulated, stage 3 takes " in said
    assert "is stage 3 better than stage 2? Yes: stage 3 takes " in said


def test_where_nothing_surely_fits_it_computes_activations_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["which", "--model", "llama3-8b", "--ranks", "16"]
    kept = compared(Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 16))
    printed = as_json(capsys, *words)
    assert kept.fastest is None
    assert printed["checkpointing"] == "every-other-block"
    assert printed["ways"][printed["advice"]]["fits"] is True
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "with --checkpointing every-other-block: with none no way surely fits" in said
    assert "--checkpointing every-other-block\n" in said


def test_nothing_fits_is_said_in_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["which", "--model", "llama3-70b", "--ranks", "8"]
    assert as_json(capsys, *words, code=1)["simulate"] is None
    assert cli.main(words) == 1
    said = capsys.readouterr().out
    assert said.startswith("beyond ZeRO: no way fits.")
    assert "zero-ref search tries other batches" in said


BILL = ["--train-tokens", "3e9", "--price", "2"]


def test_a_training_takes_its_tokens_over_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    said = as_json(capsys, *WHICH, *BILL)["ways"]["stage 3"]
    seconds = 3e9 / said["tokens_per_second"]
    assert said["days"] == pytest.approx(seconds / 86_400)
    assert said["gpu_hours"] == pytest.approx(8 * seconds / 3600)
    assert said["cost"] == pytest.approx(2 * said["gpu_hours"])
    assert said["gpu_hours_interval"] == pytest.approx(
        [said["gpu_hours"] * spread.TIME.low, said["gpu_hours"] * spread.TIME.high]
    )
    assert cli.main([*WHICH, *BILL]) == 0
    printed = capsys.readouterr().out
    assert "3B tokens take" in printed
    assert f"{said['gpu_hours']:.3g}" in printed


def test_simulate_prints_the_same_bill_and_the_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--model", "gpt2", "--ranks", "8", "--strategy", "zero-3"]
    said = as_json(capsys, *words, *BILL)["strategies"]["zero-3"]
    assert said["gpu_hours"] == pytest.approx(8 * 3e9 / said["tokens_per_second"] / 3600)
    assert said["memory_peak_interval_bytes"] == list(spread.MEMORY.around(said["memory_peak_bytes"]))
    assert said["iteration_interval_ms"] == list(spread.TIME.around(said["iteration_ms"]))
    assert cli.main([*words, *BILL]) == 0
    printed = capsys.readouterr().out
    low, high = said["iteration_interval_ms"]
    assert f"{low:.3g} to {high:.3g}" in printed
    assert "cost, at 2" in printed
    assert "days" not in as_json(capsys, *words)["strategies"]["zero-3"]


def test_intervals_are_those_of_the_kind_of_program(capsys: pytest.CaptureFixture[str]) -> None:
    kind = ["--program", "deepspeed"]
    memory, time = spread.interval_of_memory("deepspeed"), spread.interval_of_time("deepspeed")
    advised = as_json(capsys, *WHICH, *kind, *BILL)["ways"]["stage 3"]
    assert advised["memory_interval_bytes"] == list(memory.around(advised["memory_bytes"]))
    assert advised["gpu_hours_interval"] == list(time.around(advised["gpu_hours"]))
    assert cli.main([*WHICH, *kind]) == 0
    said = f"{memory.low:.2f} to {memory.high:.2f} times the memory predicted for them, and "
    assert f"{said}{time.low:.2f} to {time.high:.2f}" in " ".join(capsys.readouterr().out.split())
    words = ["search", "--model", "gpt2", "--ranks", "8", "--tokens", "65536"]
    found = as_json(capsys, *words, *kind, *BILL)["best"][0]
    assert found["gpu_hours_interval"] == list(time.around(found["gpu_hours"]))


@pytest.mark.parametrize("command", [WHICH, ["simulate", "--model", "gpt2", "--ranks", "8"]])
def test_a_price_of_nothing_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--price", "2"]) == 2
    assert "say with --train-tokens how much is trained" in capsys.readouterr().err.replace("\n", " ")


def test_the_advice_loads_no_torch() -> None:
    words = ["which", "--model", "gpt2", "--ranks", "8", "--json"]
    program = f"import sys; from zero_ref import cli; cli.main({words!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600, stdout=subprocess.DEVNULL)
