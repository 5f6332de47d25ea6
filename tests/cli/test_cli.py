"""The command line: what it prints, and what it answers to mistakes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zero_ref
from zero_ref import cli
from zero_ref.cli.plan import plan_of, print_plan
from zero_ref.lab.outcome import Outcome, Pair

PLAN = ["plan", "--model", "gpt2-xl", "--ranks", "64"]


def plan_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "--model", "gpt2-xl", "--ranks", "64")
    assert plan["elements"] == 1_557_611_200
    assert plan["tensors"] == 580
    assert plan["partition"] == "sorted-greedy"
    assert plan["fullest"] == {"rank": 0, "elements": 80_411_200, "state_bytes": 80_411_200 * 8 + 4}
    assert plan["largest_tensor"]["elements"] == 80_411_200
    assert plan["mean"]["elements"] == 1_557_611_200 / 64
    assert plan["max_over_mean"] == pytest.approx(80_411_200 * 64 / 1_557_611_200)
    assert plan["unsharded"]["state_bytes"] == 1_557_611_200 * 8 + 580 * 4
    assert plan["mean"]["state_bytes"] == plan["unsharded"]["state_bytes"] / 64
    assert plan["messages_per_step"] == {"parameters": 580, "buckets": 64}
    assert sum(plan["elements_of_rank"]) == plan["elements"]
    assert min(plan["elements_of_rank"]) == plan["emptiest"]["elements"]


def test_plan_shows_the_operations_of_muon_beside_the_elements(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "gpt2-xl", "--ranks", "64", "--optimizer", "Muon+AdamW"]
    balanced = plan_json(capsys, *words, "--partition", "balanced")["orthogonalization"]
    # 48 blocks, each with matrices of 1,600 x 4,800, 1,600 and 6,400 (twice); 5 iterations
    assert balanced["mean"] == 5 * 1600**3 * 48 * (14 + 6 + 18 + 18) / 64
    assert balanced["fullest"]["operations"] == balanced["lower_bound"] == balanced["mean"]
    medium = ["--model", "gpt2-medium", "--partition", "balanced", *words[2:]]
    two_on_a_rank = plan_json(capsys, *medium)["orthogonalization"]  # there are 96 matrices
    assert two_on_a_rank["fullest"]["operations"] == two_on_a_rank["lower_bound"] > two_on_a_rank["mean"]
    greedy = plan_json(capsys, *words)["orthogonalization"]
    assert greedy["fullest"]["operations"] > 1.09 * balanced["mean"] == 1.09 * greedy["mean"]
    assert plan_json(capsys, *words[:4])["orthogonalization"] is None
    cli.main(["plan", *words])
    assert "1.10x the mean, 1.10x the bound" in capsys.readouterr().out


def test_plan_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert cli.main(PLAN) == 0
    printed = capsys.readouterr().out
    for line in (
        "gpt2-xl on 64 ranks, sorted-greedy",
        "1,557,611,200 float32 elements in 580 tensors",
        "largest: transformer.wte.weight, 50,257 x 1,600 = 80,411,200",
        "ranks that own nothing: 0",
        "messages a step: 580 as parameters, 64 as buckets",
    ):
        assert line in printed.splitlines()
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "fullest: rank 0 80,411,200 3.30x 643.29 MB" in rows
    assert "an even share: 1/64 24,337,675 1.00x 194.70 MB" in rows
    assert "without ZeRO: everything 1,557,611,200 64.00x 12.46 GB" in rows


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_table_stays_within_its_width(capsys: pytest.CaptureFixture[str], width: int) -> None:
    pytest.importorskip("rich")
    print_plan(plan_of("gpt2", 500, "even", "float32", "Adam"), width=width)
    printed = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= width for line in printed)
    bars = next(line for line in printed if line.startswith("elements by rank"))
    assert bars.endswith("█"), "the bars went on to a line of their own"


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["plan", "--model", "gpt5", "--ranks", "2"], ["gpt5", "gpt2", "gpt2-medium", "llama3-8b"]),
        ([*PLAN, "--partition", "evne"], ["evne", "sorted-greedy", "registration-greedy", "even"]),
        ([*PLAN, "--dtype", "int3"], ["int3", "float32", "bfloat16"]),
        ([*PLAN, "--optimizer", "adam"], ["adam", "AdamW", "SGD+momentum"]),
        (["plan", "--model", "gpt2", "--ranks", "0"], ["--ranks: it must be at least 1, got 0"]),
        (["plan", "--model", "gpt2", "--ranks", "-3"], ["--ranks: it must be at least 1, got -3"]),
        (["plan", "--model", "gpt2", "--ranks", "four"], ["--ranks: 'four' is not a whole number"]),
        (["plan", "--model", "gpt2"], ["required: --ranks"]),
        (["plann"], ["plann", "plan"]),
        ([], ["required: command"]),
    ],
)
def test_a_mistake_ends_with_code_2_and_the_choices(
    capsys: pytest.CaptureFixture[str], words: list[str], answers: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for answer in answers:
        assert answer in printed.err


def test_without_rich_it_says_which_extra_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # an import of it then fails
    assert cli.main(PLAN) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "rich" in printed.err
    assert 'pip install "zero_ref[lab]"' in printed.err


def run_bare(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """In an interpreter without site-packages: neither torch nor any extra can be imported."""
    root = Path(zero_ref.__file__).parents[1]
    script = f"import sys; sys.path.insert(0, {str(root)!r}); from zero_ref.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", script, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **options)


def test_json_needs_neither_torch_nor_extras() -> None:
    done = run_bare(*PLAN, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["elements"] == 1_557_611_200


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    root = Path(zero_ref.__file__).parents[1]
    command = [sys.executable, "-m", "zero_ref.cli", "plan", "--model", "gpt2", "--ranks", "20000", "--json"]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    _, complaints = process.communicate(timeout=600)
    assert complaints == ""


@pytest.mark.parametrize(("loss", "code"), [(2.5, 0), (math.nan, 1), (math.inf, 1)])
def test_a_loss_that_is_no_number_fails_the_command_and_is_null_in_json(
    loss: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compare = pytest.importorskip("zero_ref.lab.compare")
    pairs = [Pair(1, 1)] * 5
    outcome = Outcome(
        *("zero", 2, 2, *pairs, True),
        step_ms=1.0,
        final_loss=loss,
        losses=[5.5, loss],
        dtype="float32",
        master_dtype=None,
        numel=1,
        held_bytes=[Pair(3, 3)] * 2,
        ledger_bytes=3.0,
    )
    monkeypatch.setattr(compare, "compare", lambda *_: [compare.StrategyRun(outcome, [])])
    file = tmp_path / "out.json"
    assert cli.main(["train", "--strategy", "zero", "--json", str(file)]) == code
    printed = capsys.readouterr()
    assert ("zero: the loss became infinite or no number" in printed.err) == bool(code)
    (written,) = json.loads(file.read_text(), parse_constant=pytest.fail)["strategies"].values()
    assert written["losses"] == [5.5, None if code else 2.5]


def test_a_full_disk_under_what_is_printed_is_told(tmp_path: Path) -> None:
    root = Path(zero_ref.__file__).parents[1]
    command = [sys.executable, "-m", "zero_ref.cli", *PLAN, "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "zero-ref plan: what it printed could not be written: No space left on device.\n"


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.plan, "plan_of", interrupted)
    assert cli.main([*PLAN, "--json"]) == 130
    assert capsys.readouterr().err == "zero-ref plan: interrupted\n"
