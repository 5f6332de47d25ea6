"""`zero-ref simulate`: the numbers are the simulator's, mistakes are answered, nothing heavy is imported."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import zero_ref
from zero_ref import cli
from zero_ref.cli import _common, simulate
from zero_ref.lab.simulated import print_runs
from zero_ref.simulator.cluster import CLUSTERS, cluster
from zero_ref.simulator.held import PORTIONS
from zero_ref.simulator.like import LIKE
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.operations import shared_out
from zero_ref.simulator.options import OptionField, options_of
from zero_ref.simulator.recipe import RECIPES
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.spread import DEFAULT, KINDS, interval_of_memory, interval_of_time
from zero_ref.simulator.trace import timelines_of

SIMULATE = ["simulate", "--model", "gpt2", "--ranks", "8"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 131072,
}


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


# ----------------------------------------------------------------------------------------------- example


def test_the_numbers_are_those_of_the_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--strategy", "zero-even", "--compare", "ddp", "--compare", "zero-3", "--cluster", "a100-ib"]
    printed = as_json(capsys, *SIMULATE, *words)
    assert list(printed["strategies"]) == ["zero-even", "ddp", "zero-3"]
    assert (printed["elements"], printed["ranks"], printed["device_memory_bytes"]) == (
        124439808,
        8,
        81_920 * 2**20,
    )
    scenario = Scenario(MODELS["gpt2"], cluster("a100-ib"), 8)
    for strategy, values in printed["strategies"].items():
        run = scenario.run(strategy)
        assert values["iteration_ms"] == run.iteration_ms
        assert values["memory_total_bytes"] == sum(values["memory_bytes"].values())
        assert values["memory_peak_bytes"] == sum(values["memory_peak_items_bytes"].values())
        assert values["memory_peak_bytes"] == max(values["memory_peak_bytes_of_rank"])
        assert values["memory_peak_bytes_of_rank"][values["fullest_rank"]] == values["memory_peak_bytes"]
        assert values["memory_allocated_bytes"] == max(values["memory_phase_bytes"].values())
        assert values["memory_phase_bytes"][values["memory_peak_phase"]] == values["memory_allocated_bytes"]
        assert values["fits"] is True
        assert values["sent_bytes_per_rank"] == run.sent_bytes
        assert values["calls"] == len(run.schedule.calls_of(run.fullest))
        assert sum(values["critical_path_ms"].values()) == pytest.approx(run.iteration_ms)
        assert min(values["iteration_ms_if"].values()) < run.iteration_ms
        assert values["tokens_per_second"] == pytest.approx(8 * 1024 / run.iteration_ms * 1e3)


UNFUSED = {"attention": "unfused", "checkpointing": "selective"}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--batch", "3", "--sequence", "100"], {"batch": 3, "sequence": 100}),
        (["--dtype", "float32", "--optimizer", "SGD"], {"dtype": "float32", "optimizer": "SGD"}),
        (["--overlap", "after-backward"], {"way": "after_backward"}),
        (["--overlap", "interleaved"], {"way": "interleaved"}),
        (["--strategy", "zero-2", "--overlap", "in-forward"], {"way": "in_forward"}),
        (["--compare", "zero-2", "--overlap", "in-forward"], {"way": "in_forward"}),
        (["--compare", "zero-2", "--shard-group", "4"], {"shard_group": 4}),
        (["--bucket-mib", "0.5"], {"bucket_bytes": 2**19}),
        (["--checkpointing", "full"], {"checkpointing": "full"}),
        (["--checkpointing", "every-other-block"], {"checkpointing": "every-other-block"}),
        (["--checkpointing", "by-operation"], {"checkpointing": "by-operation"}),
        (["--accumulation", "3"], {"accumulation": 3}),
        (
            ["--compare", "zero-3", "--accumulation", "2", "--no-sync"],
            {"accumulation": 2, "no_sync": True},
        ),
        (["--compare", "zero-3", "--shard-group", "4"], {"shard_group": 4}),
        (
            ["--compare", "zero-3", "--shard-group", "4", "--accumulation", "2", "--all-reduce-last"],
            {"shard_group": 4, "accumulation": 2, "all_reduce_last": True},
        ),
        (["--reduce-dtype", "float32"], {"reduce_dtype": "float32"}),
        (["--bucket-view"], {"bucket_view": True}),
        (["--offload", "state"], {"offload": "state"}),
        (
            ["--strategy", "zero-3", "--offload", "in-backward", "--offload-fraction", "0.5"],
            {"offload": "in_backward", "offload_fraction": 0.5},
        ),
        (["--no-masters"], {"masters": False}),
        (["--masters-16"], {"masters_16": True}),
        (["--states-8"], {"states_8": True}),
        (["--compiled"], {"compiled": True}),
        (["--attention", "unfused"], {"attention": "unfused"}),
        (["--attention", "unfused", "--checkpointing", "selective"], UNFUSED),
        (["--dtype", "float32", "--autocast", "bfloat16"], {"dtype": "float32", "autocast": "bfloat16"}),
        (["--gradient-dtype", "float32"], {"gradient_dtype": "float32"}),
        (["--fp8"], {"fp8": True}),
        (["--update", "foreach"], {"update": "foreach"}),
        (["--update", "for-loop"], {"update": "for-loop"}),
        (["--lora", "8", "--lora-on", "attention"], {"lora": 8, "lora_on": "attention"}),
        (["--fused-loss"], {"fused_loss": True}),
        (["--loss-dtype", "bfloat16"], {"loss_dtype": "bfloat16"}),
        (["--kept-logits"], {"kept_logits": True}),
        (["--compare", "zero-3", "--live-parameters", "1000000000"], {"live_parameters": 10**9}),
        (["--compare", "zero-3", "--gather-modules"], {"gather_modules": True}),
        (["--compare", "zero-3", "--prefetch", "0"], {"prefetch": 0}),
        (["--compare", "local-sgd", "--period", "3"], {"period": 3}),
        (["--compare", "local-sgd", "--gradient-group", "4"], {"gradient_group": 4}),
    ],
)
def test_every_option_reaches_the_simulator(
    capsys: pytest.CaptureFixture[str], words: list[str], options: dict[str, Any]
) -> None:
    printed = as_json(capsys, *SIMULATE, *words)["strategies"]
    of_strategies = words[:2] if words[0] in ("--strategy", "--compare") else []
    usual = as_json(capsys, *SIMULATE, *of_strategies)
    assert list(usual["strategies"]) == list(printed)
    for strategy, values in printed.items():
        run = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8, **options).run(strategy)
        assert values["iteration_ms"] == run.iteration_ms
        assert values["memory_bytes"] == run.memory.items
    assert printed != usual["strategies"]


@pytest.mark.parametrize("program", LIKE)
def test_options_as_suit_a_program_are_taken_where_they_are_not_said(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = as_json(capsys, *SIMULATE, "--strategy", "zero-3", "--like", program)
    run = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8, **LIKE[program]).run("zero-3")
    assert printed["strategies"]["zero-3"]["memory_bytes"] == run.memory.items
    assert printed["strategies"]["zero-3"]["iteration_ms"] == run.iteration_ms


BOOLEANS = [one for one in options_of(Scenario) if one.type is bool]


@pytest.mark.parametrize("program", LIKE)
@pytest.mark.parametrize("one", BOOLEANS, ids=lambda one: one.name)
def test_a_switch_of_a_program_can_be_set_and_switched_off(program: str, one: OptionField) -> None:
    parser = cli.make_parser()[1]["simulate"]

    def made(*words: str) -> Scenario:
        return simulate.scenario_of(parser.parse_args([*SIMULATE[1:], "--like", program, *words]))

    usual = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8, **LIKE[program])
    assert made() == usual
    for word, value in ((one.flag, not one.default), (one.opposite, one.default)):
        if word == "--tf32":  # of float32 alone, which no program computes in
            continue
        if word == "--masters-16" and usual.dtype == "float32":  # nor has it copies
            continue
        assert made(word) == replace(usual, **{one.path[0]: value})
        assert made(one.flag, one.opposite, word) == made(word)  # the last word wins


def test_what_a_program_casts_to_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SIMULATE, "--like", "nanogpt", "--no-compile", "--autocast", "none", "--dtype", "bfloat16"]
    printed = as_json(capsys, *words)
    assert (printed["autocast"], printed["compiled"], printed["dtype"]) == (None, False, "bfloat16")
    with pytest.raises(SystemExit):
        cli.main([*SIMULATE, "--norms", "none"])
    assert "invalid choice: 'none'" in capsys.readouterr().err


def test_each_program_has_the_interval_of_its_kind() -> None:
    kinds = {name: options.get("program", DEFAULT) for name, options in LIKE.items()}
    assert [name for name, kind in kinds.items() if kind == DEFAULT] == [
        "plain",
        "torchtitan",
        "transformers",
    ]
    for name, kind in kinds.items():
        run = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8, **LIKE[name]).run("zero-3")
        assert run.time_interval == interval_of_time(kind).around(run.iteration_ms)


def test_an_option_that_is_said_goes_before_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--model", "llama3-8b", "--ranks", "8", "--strategy", "zero-3", "--sequence", "2048"]
    for said in ("fused", "by-hand"):
        printed = as_json(capsys, *words, "--like", "transformers", "--norms", said)
        assert (printed["norms"], printed["kept_logits"]) == (said, True)
    assert as_json(capsys, *words, "--like", "transformers")["norms"] == "by-hand"
    assert as_json(capsys, *words)["norms"] == "fused"


def test_stragglers_and_jitter_reach_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--straggler", "3:1.5", "--straggler", "4:2", "--jitter", "0.1", "--seed", "7"]
    printed = as_json(capsys, *SIMULATE, *words)["strategies"]["zero-even"]
    scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8)
    run = scenario.run("zero-even", slow={3: 1.5, 4: 2.0}, jitter=0.1, seed=7)
    assert printed["iteration_ms"] == run.iteration_ms > 1.5 * scenario.run("zero-even").iteration_ms


@pytest.mark.parametrize("command", [["plan"], ["simulate"], ["search", "--tokens", "200000"]])
def test_of_very_many_ranks_it_says_beforehand_that_they_take_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(_common, "MANY_RANKS", 10)
    said = "zero-ref: each of 11 ranks is planned, which may take a minute or more\n"
    for ranks, expected in (("10", ""), ("11", said)):
        cli.main([*command, "--model", "mlp-tiny", "--ranks", ranks])
        assert capsys.readouterr().err == expected


def test_a_configuration_in_place_of_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    printed = as_json(capsys, "simulate", "--config", str(path), "--ranks", "2")
    # Two embeddings, and in each block four square matrices, three of the MLP and two norms; a last norm.
    assert printed["elements"] == 2 * 6400 + 2 * (4 * 4096 + 3 * 8192 + 128) + 64
    assert printed["sequence"] == 8192, "not the 131,072 of its context"


def test_without_transformers_few_models_are_read_and_the_others_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ["simulate", "--config", str(path), "--ranks", "2", "--sequence", "64"]
    traced = as_json(capsys, *words)
    monkeypatch.setattr("zero_ref.cli.simulate.find_spec", lambda name: None)
    read = as_json(capsys, *words)
    assert read["elements"] == traced["elements"]
    # A norm of transformers keeps its input in 32 bits too, and its result before the weight.
    kept = [one["strategies"]["zero-even"]["memory_bytes"] for one in (traced, read)]
    assert kept[0]["activations"] > kept[1]["activations"]
    path.write_text(json.dumps(LLAMA | {"model_type": "gemma2"}))
    assert 'install it (pip install "zero_ref[models]")' in refused(capsys, words)


def test_weights_of_few_bits_can_be_trained_as_if_they_were_of_16(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    words = ["simulate", "--config", str(path), "--ranks", "2", "--sequence", "64"]
    path.write_text(json.dumps(LLAMA))
    whole = as_json(capsys, *words)
    path.write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert "--as-16-bit" in refused(capsys, words)
    printed = as_json(capsys, *words, "--as-16-bit")
    assert printed == whole


def test_adapters_are_added_to_the_model_of_a_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    given = ["--config", str(path), "--ranks", "2", "--lora", "8", "--lora-on", "attention"]
    words = [*given, "--sequence", "64"]
    found = as_json(capsys, "search", *words, "--tokens", "128")
    assert found["model"] == str(path)
    first = found["listed"][0]
    _, *again = shlex.split(first["simulate"])
    run = as_json(capsys, *again)["strategies"][first["strategy"]]
    assert run["memory_peak_bytes"] == first["memory_bytes"]
    traced = as_json(capsys, "simulate", *words)
    monkeypatch.setattr("zero_ref.cli.simulate.find_spec", lambda name: None)
    read = as_json(capsys, "simulate", *words)
    counted = ("elements", "trained_elements")
    assert [traced[name] for name in counted] == [read[name] for name in counted]
    assert traced["trained_elements"] < traced["elements"] / 4
    assert capsys.readouterr().err == ""


def test_a_module_of_ones_own_is_traced_with_its_frozen_parts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "sizes.py").write_text("WIDTH = 8")
    own = tmp_path / "train.py"
    own.write_text(
        "import torch\n"
        "from sizes import WIDTH\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Linear(16, 3))\n"
        "    model[0].requires_grad_(False)\n"
        "    return model, lambda batch, sequence: torch.zeros(batch, WIDTH, dtype=torch.bfloat16)\n"
    )
    printed = as_json(capsys, "simulate", "--module", f"{own}:build", "--ranks", "2", "--batch", "4")
    assert (printed["elements"], printed["trained_elements"]) == (8 * 16 + 16 + 16 * 3 + 3, 16 * 3 + 3)
    assert printed["sequence"] == 1
    assert "has no function other" in refused(
        capsys, ["simulate", "--module", f"{own}:other", "--ranks", "2"]
    )


def test_the_trace_has_rank_0_the_fullest_rank_and_stragglers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    words = ["--compare", "ddp", "--straggler", "5:2", "--trace", str(path)]
    printed = as_json(capsys, *SIMULATE, *words)["strategies"]
    fullest = printed["zero-even"]["fullest_rank"]
    trace = json.loads(path.read_text())
    lines = timelines_of(trace)
    of_zero = [f"zero-even, rank {rank}" for rank in sorted({0, fullest, 5})]
    assert list(lines) == [*of_zero, "ddp, rank 0", "ddp, rank 5"]
    assert lines["ddp, rank 5"].makespan_ms == pytest.approx(printed["ddp"]["iteration_ms"], abs=1e-5)
    # Memory begins with what is held between iterations, and forward adds its activations in equal portions.
    scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8)
    run = scenario.run("ddp")
    events = (e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == len(of_zero) + 1)
    counted = {e["ts"]: e["args"]["bytes"] for e in events}
    (forward,) = [one for one in lines["ddp, rank 0"].events if one.label == "forward"]
    added = [held - run.memory.state_bytes for us, held in counted.items() if us < 999.9 * forward.stop_ms]
    assert added == list(accumulate(shared_out(run.scenario.activations.blocks, [1] * PORTIONS)))


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    words = ["simulate", "--model", "llama3-8b", "--ranks", "8", "--strategy", "zero-3", "--compare", "ddp"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "llama3-8b on 8 ranks of h100-ib (H100 80 GB)" in rows
    assert "8,030,261,248 bfloat16 parameters, AdamW; on each rank 1 x 8,192 tokens" in rows
    assert "one iteration zero-3 ddp" in rows
    assert "memory on rank 0 rank 0" in rows
    assert "parameters 2.01 GB 16.06 GB" in rows
    assert "moments 8.03 GB 64.24 GB" in rows
    assert "peak 86.70 GB 193.20 GB" in rows
    assert "which is at the loss at the loss" in rows
    assert "in 85.5 GB unlikely does not fit" in rows
    assert "sent a rank 40.32 GB 28.11 GB" in rows
    assert any(row.startswith("faster under zero-3: computing twice as fast -") for row in rows)
    assert "attention adds 27% to what the parameters' products take" in rows
    order = [
        row.split()[0]
        for row in rows[rows.index("critical path") :]
        if row.split() and row.split()[0] in ("forward", "gather", "step")
    ]
    assert order == ["forward", "gather", "step"]
    busy = rows[rows.index("busy") + 1 : rows.index("critical path")]
    assert [re.sub(r" [\d,.]+ ms, \d+%", "", row) for row in busy] == ["computing", "the step", "network"]


def test_each_link_has_a_row_where_there_are_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    words = ["simulate", "--model", "llama3-8b", "--ranks", "64", "--strategy", "zero-3"]
    busy = as_json(capsys, *words)["strategies"]["zero-3"]["busy_ms"]
    assert cli.main(words) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(row.startswith(f"between nodes {busy['between nodes']:.1f} ms, ") for row in rows)


def test_each_prediction_has_the_interval_of_its_kind_of_program(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        words = [] if kind == "pytorch" else ["--program", kind]
        of_kind = as_json(capsys, *SIMULATE, *words)["strategies"]["zero-even"]
        for value, interval, spread in (
            ("iteration_ms", "iteration_interval_ms", interval_of_time(kind)),
            ("memory_peak_bytes", "memory_peak_interval_bytes", interval_of_memory(kind)),
        ):
            assert of_kind[interval] == [of_kind[value] * spread.low, of_kind[value] * spread.high], kind
    assert cli.main([*SIMULATE, "--program", "vendor"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^  interval +[\d.,]+ to [\d.,]+$", printed, re.M)) == 2
    assert "of programs of the kind vendor" in printed


@pytest.mark.parametrize(("sequence", "beyond"), [("8192", False), ("16384", True)])
def test_sequences_beyond_the_model_s_positions_are_said(
    sequence: str, beyond: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    assert cli.main(["simulate", "--model", "llama3-8b", "--ranks", "8", "--sequence", sequence]) == 0
    said = "supposed: sequences go beyond the model's 8,192 positions"
    assert (said in capsys.readouterr().out) == beyond


def test_the_first_line_says_what_is_not_modelled_only_if_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("rich")
    words = ["simulate", "--model", "llama3-8b", "--ranks", "64", "--strategy", "ddp"]
    for others, said in (([], True), (["--compare", "zero-3"], False), (["--cluster", "loopback"], False)):
        assert cli.main([*words, *others]) == 0
        assert capsys.readouterr().out.startswith("does not fit, and tensor, pipeline and context") == said


def test_the_table_says_where_one_rank_receives_from_all(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    said = []
    muon = ["--strategy", "zero-2", "--optimizer", "Muon+AdamW"]
    in_groups = [[*muon, "--shard-group", size] for size in ("4", "2")]
    for words in (muon, *in_groups, muon[:2], muon[2:]):
        assert cli.main([*SIMULATE, *words]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        said.append(
            re.findall(r"(\S+): the owner of a whole matrix receives its gradient from (\d+)", printed)
        )
    assert said == [[("zero-2", "7")], [("zero-2", "3")], [], [], []]


@pytest.mark.parametrize(("width", "strategies"), [(80, ["zero", "zero-2", "ddp"]), (200, list(RECIPES))])
def test_a_table_stays_within_its_width(
    capsys: pytest.CaptureFixture[str], width: int, strategies: list[str]
) -> None:
    pytest.importorskip("rich")
    scenario = Scenario(MODELS["gpt2"], cluster("h100-ib"), 8)
    print_runs("gpt2", scenario, [scenario.run(strategy) for strategy in strategies], width=width)
    printed = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= width for line in printed)


def test_of_a_machine_in_a_file_it_says_where_the_times_are_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("rich")
    path = tmp_path / "machine.json"
    path.write_text(replace(cluster("loopback"), name="this machine", source="made up").to_json())
    printed = {}
    for name in ("loopback", str(path)):
        assert cli.main(["simulate", "--model", "gpt2", "--ranks", "2", "--cluster", name]) == 0
        printed[name] = " ".join(capsys.readouterr().out.split())
    assert "times from: made up" in printed[str(path)]
    assert "supposed: products at 50% of 0.1 TFLOPS" in printed["loopback"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["gpt2", "--cluster", "v100-ib"],
            "supposed: V100 32 GB multiplies bfloat16 at 125 TFLOPS; a peak is known in float16, float32",
        ),
        (["gpt2", "--fp8"], "at 68% of 1979 TFLOPS in FP8 and, in the head, of 989 TFLOPS"),
        (["gpt2", "--fp8"], "MFU: of 989 TFLOPS, the peak in 16 bits"),
    ],
)
def test_it_says_which_peak_it_counts_with(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    assert cli.main(["simulate", "--ranks", "2", "--model", *words]) == 0
    assert says in " ".join(capsys.readouterr().out.split())
    assert cli.main(["simulate", "--ranks", "2", "--model", "gpt2", "--dtype", "float16"]) == 0
    assert says not in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------------------------------------- mistakes


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Run a command that must end with code 2, and return its text on standard error."""
    try:
        code: Any = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["simulate", "--ranks", "2"], ["one of the arguments --model --config --module is required"]),
        ([*SIMULATE, "--config", "x"], ["--config: not allowed with argument --model"]),
        (["simulate", "--model", "gpt5", "--ranks", "2"], ["gpt5", "gpt2", "llama3-8b"]),
        (["simulate", "--model", "gpt2", "--ranks", "0"], ["--ranks: it must be at least 1, got 0"]),
        ([*SIMULATE, "--cluster", "h200"], ["--cluster h200: choose one of h100-ib", "a cluster in JSON"]),
        ([*SIMULATE, "--strategy", "zero-4"], ["zero-4", "zero-even", "local-sgd"]),
        ([*SIMULATE, "--dtype", "int8"], ["int8", "bfloat16", "float32"]),
        ([*SIMULATE, "--overlap", "all"], ["'all'", "plain", "after-backward", "interleaved"]),
        ([*SIMULATE, "--straggler", "8:2"], ["--straggler 8: there are ranks 0 to 7"]),
        ([*SIMULATE, "--straggler", "2"], ["'2' is no RANK:FACTOR, such as 3:1.5"]),
        ([*SIMULATE, "--straggler", "1.5:2"], ["'1.5' is not a whole number"]),
        ([*SIMULATE, "--straggler", "2:0"], ["it must be above 0, got 0"]),
        ([*SIMULATE, "--straggler", "2:fast"], ["'fast' is not a number"]),
        ([*SIMULATE, "--jitter", "-1"], ["--jitter: it must be 0 or more, got -1"]),
        ([*SIMULATE, "--jitter", "nan"], ["--jitter: it must be finite, got nan"]),
        ([*SIMULATE, "--bucket-mib", "0"], ["--bucket-mib: it must be above 0, got 0"]),
        (
            [*SIMULATE, "--shard-group", "4"],
            ["--shard-group means nothing to zero-even; it is for zero-2, zero-3"],
        ),
        (
            [*SIMULATE, "--strategy", "zero-2", "--shard-group", "3"],
            ["8 ranks cannot be divided into groups of 3 that share the state"],
        ),
        ([*SIMULATE, "--strategy", "zero-2", "--shard-group", "0"], ["it must be at least 1, got 0"]),
        ([*SIMULATE, "--messages", "library"], ["unrecognized arguments: --messages library"]),
        ([*SIMULATE, "--strategy", "zero-3", "--bucket-mib", "2"], ["--bucket-mib means nothing to zero-3"]),
        (
            [*SIMULATE, "--strategy", "ddp", "--overlap", "interleaved"],
            ["--overlap interleaved means nothing to ddp; it is for zero, zero-bucket, zero-even."],
        ),
        (
            [*SIMULATE, "--overlap", "in-forward"],
            ["--overlap in-forward means nothing to zero-even; it is for zero-2."],
        ),
        ([*SIMULATE, "--no-sync"], ["--no-sync means nothing to zero-even; it is for zero-2, zero-3"]),
        ([*SIMULATE, "--accumulation", "0"], ["--accumulation: it must be at least 1, got 0"]),
        ([*SIMULATE, "--reduce-dtype", "int8"], ["int8", "bfloat16", "float32"]),
        (
            [*SIMULATE, "--strategy", "local-sgd", "--reduce-dtype", "float32"],
            ["--reduce-dtype float32 means nothing to local-sgd; it is for ddp"],
        ),
        (
            [*SIMULATE, "--strategy", "local-sgd", "--offload", "state"],
            ["--offload state means nothing to local-sgd"],
        ),
        ([*SIMULATE, "--offload-fraction", "0.5"], ["offload_fraction is the share", "with offload None"]),
        (
            [*SIMULATE, "--offload", "gradients"],
            ["offload gradients: the gradients of zero-even lie in DDP's buckets"],
        ),
        (
            [*SIMULATE, "--strategy", "zero-2", "--compare", "local-sgd", "--offload", "state"],
            ["offload means nothing to local-sgd; it is for ddp, zero, zero-bucket, zero-even, zero-2,"],
        ),
        ([*SIMULATE, "--strategy", "zero-2", "--bucket-view"], ["--bucket-view means nothing to zero-2"]),
        (
            [*SIMULATE, "--offload", "state", "--optimizer", "Muon+AdamW"],
            ["offload is for elementwise optimizers; Muon+AdamW multiplies matrices"],
        ),
        (
            [*SIMULATE, "--offload", "state", "--cluster", "loopback"],
            ["one CPU core: nothing can be offloaded, since host_link_gb_per_s"],
        ),
        ([*SIMULATE, "--prefetch", "2"], ["--prefetch means nothing to zero-even; it is for zero-3"]),
        ([*SIMULATE, "--sequence", "4096"], ["--sequence 4,096: the model has learned 1,024 positions"]),
        ([*SIMULATE, "--lora-on", "attention"], ["lora_on attention says where adapters are, and lora"]),
        ([*SIMULATE, "--period", "2"], ["--period means nothing to zero-even; it is for local-sgd"]),
        ([*SIMULATE, "--gradient-group", "2"], ["--gradient-group means nothing to zero-even"]),
        (
            [*SIMULATE, "--strategy", "local-sgd", "--gradient-group", "3"],
            ["8 ranks cannot be divided into groups of 3"],
        ),
        (
            [*SIMULATE, "--trace", "/no/such/folder/t.json"],
            ["--trace /no/such/folder/t.json cannot be written"],
        ),
    ],
)
def test_a_mistake_ends_with_code_2_and_says_what_is_accepted(
    capsys: pytest.CaptureFixture[str], words: list[str], answers: list[str]
) -> None:
    said = refused(capsys, words)
    for answer in answers:
        assert answer in said


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold an object"),
        ('{"model_type": "nobodys"}', "model_type 'nobodys' is not known to transformers 5."),
        (json.dumps(LLAMA | {"num_hidden_layers": "x"}), "cannot build this llama"),
        (None, "cannot be read"),
        (
            json.dumps(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "quantization_config (quant_method 'gptq', bits 4) says that the weights are quantized",
        ),
        (json.dumps(LLAMA | {"architectures": ["LlamaForRewardModel"]}), "which is no class of it"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, answer: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    said = refused(capsys, ["simulate", "--config", str(path), "--ranks", "2"])
    assert f"--config {path}" in said
    assert answer in said


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("{}", "this is no cluster"),
        ('{"device": 3}', "this is no cluster"),
        (
            replace(CLUSTERS["h100-ib"], name="\x1b[2J").to_json(),
            r'name has a control character: "\u001b[2J"',
        ),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, answer: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    said = refused(capsys, [*SIMULATE, "--cluster", str(path)])
    assert f"--cluster {path}: " in said
    assert answer in said


def test_json_needs_neither_torch_nor_extras(tmp_path: Path) -> None:
    root = Path(zero_ref.__file__).parents[1]
    script = f"import sys; sys.path.insert(0, {str(root)!r}); from zero_ref.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", script, *SIMULATE, "--trace", str(tmp_path / "t"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["elements"] == 124439808
