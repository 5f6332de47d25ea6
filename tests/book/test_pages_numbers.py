"""Numbers on the pages that have no cells: `test_<page>_...` holds those of a page, for book/unasserted.py.

The page of numbers and the one for those who are stuck have tests of their own: test_numbers.py and
test_troubleshooting.py.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.step import BYTES_OF_STEP
from benchmarks.published import published
from zero_ref import cli
from zero_ref.lab.compare import CYCLE, ROW_NAMES
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.outcome import predict
from zero_ref.lab.patience import patience
from zero_ref.lab.simulated_checkpoints import passages
from zero_ref.live.explorer import RANKS
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import equal_shares, even
from zero_ref.simulator.cluster import CLUSTERS, TREE_SHARE, cluster
from zero_ref.simulator.ledger import ledger
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.recipe import RECIPES, TRAINED, recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import Schedule, schedule
from zero_ref.simulator.stages import plays_of_equal_blocks
from zero_ref.simulator.traffic import traffic
from zero_ref_course.editions import chapters_in
from zero_ref_course.grading import grade_class
from zero_ref_course.predictions import predictions

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "book"))
import overview  # noqa: E402  # book/overview.py

sys.path.pop(0)

CHAPTERS = chapters_in(ROOT / "notebooks")


def text_of(page: str) -> str:
    """A page on one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@cache
def exercises_of(chapter: Path) -> int:
    cells = json.loads(chapter.read_text(encoding="utf-8"))["cells"]
    return sum("exercise" in cell["metadata"].get("tags", []) for cell in cells)


@cache
def planned(strategy: str) -> Schedule:
    return predict(TrainConfig(strategy), 4)


# ------------------------------------------------------------------------------------------------ README.md


def test_readme_prints_what_the_demo_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for strategy in TRAINED:
        (row,) = re.findall(rf"^{strategy} +(\d.*)$", readme, flags=re.M)
        calls = [planned(strategy).calls_of(rank) for rank in range(4)]
        values = [getattr(planned(strategy), quantity) for quantity in list(ROW_NAMES)[:3]]
        values += [max(map(len, calls)), max(sum(call.nbytes for call in of_rank) for of_rank in calls)]
        printed = [str(value) if value < 1000 else f"{value / 1e6:.3f}" for value in values]
        assert row.split() == printed, strategy
    assert CYCLE in readme


def test_readme_says_what_zero_sends_beside_ddp() -> None:
    for strategy in ("zero", "zero-bucket", "zero-even"):
        assert planned(strategy).wire_bytes() == 1.5 * planned("ddp").wire_bytes()


def test_partition_page_says_how_even_a_split_is() -> None:
    assert "1/N of the elements each, to within 64" in text_of("book/api/partition.md")
    loads = even([1000, 10, 7_000, 123], 4).loads
    assert 0 < max(abs(load - sum(loads) / 4) for load in loads) < 64
    assert even([1000], 4).loads == (256, 256, 256, 232)  # cuts are multiples of 64


def test_partition_page_says_how_long_a_range_is() -> None:
    assert round(signature(equal_shares).parameters["range_numel"].default, -6) == 4_000_000
    assert "about four million elements" in text_of("book/api/partition.md")


# -------------------------------------------------------------------------------------------------- index.md


def test_index_says_what_the_run_of_its_picture_prints() -> None:
    """As foreseen; tests/lab/test_train.py runs the page's command and holds this against it."""
    model = GPTConfig(dtype="bfloat16")
    assert round(model.numel / 1e6, 1) == 0.8
    for world_size, strategy, ledgers in ((4, "ddp", 16), (4, "zero-even", 7), (1, "zero-even", 16)):
        plan = predict(TrainConfig(strategy, model=model, master_dtype="float32"), world_size)
        assert ledgers == ledger(1, world_size, RECIPES[strategy].stage, "mixed-16").total_bytes
        for held in zip(plan.parameter_bytes, plan.gradient_bytes, plan.state_bytes, strict=True):
            assert f"{sum(held) / model.numel:.3f}" == {16: "16.000", 7: "7.000"}[ledgers]


def test_index_has_the_picture_that_is_drawn() -> None:
    for name, svg in overview.pictures().items():
        assert (ROOT / "book" / "pictures" / name).read_text(encoding="utf-8") == svg
        assert re.findall(r"sent: (\d+)", svg) == ["6", "9", "6", "9"]


def test_readme_and_index_count_the_blocks_that_are_sent() -> None:
    for page in ("README.md", "book/index.md"):
        assert "a block 6, 9, 6 and 9 times" in (ROOT / page).read_text(encoding="utf-8")
    sent = [round(one.schedule.wire_bytes() / (3 * 2**21)) for one in plays_of_equal_blocks(3, 4).values()]
    assert sent == [6, 9, 6, 9]


def test_index_says_what_a_prediction_earns() -> None:
    asked = predictions()
    assert {100 * one.close for one in asked} == {10}, "so index.md's 10% is not true of all"
    number = next(one for one in asked if not one.choices)
    answer = number.answer()
    assert isinstance(answer, float)
    assert [number.points(answer * factor) for factor in (1.1, 1.2, 2, 2.1)] == [1, 0.5, 0.5, 0]


# ----------------------------------------------------------------------------------------------- networks.md


def test_networks_times_are_the_simulators() -> None:
    page, h100, n = text_of("book/networks.md"), cluster("h100-ib"), 64
    printed = {"ring": [0.12, 0.33, 0.92, 5.9], "tree": [0.032, 0.15, 0.72, 6.0]}
    for way, row in printed.items():
        times = [h100.ms("all_reduce", nbytes, n, algorithm=way) for nbytes in (1e3, 1e7, 1e8, 1e9)]
        assert [float(f"{ms:.2g}") for ms in times] == row
        assert f"| {way} | {' | '.join(map(str, row))} |" in page
    bucket = 25e6
    of_bucket = [
        h100.ms("exchange", bucket, n, shares=[bucket]),
        h100.ms("reduce", bucket, n),
        h100.ms("exchange", bucket, n, shares=[bucket / n] * n),
        h100.ms("reduce_scatter", bucket, n),
    ]
    assert [float(f"{ms:.{1 if ms > 1 else 2}f}") for ms in of_bucket] == [29.8, 0.25, 0.49, 0.25]
    assert re.findall(r"\| (?:63|1) \| (?:63|1) \| ([\d.]+) \|", page) == ["29.8", "0.25", "0.49", "0.25"]


def test_networks_rounds_and_bytes_are_those_of_traffic() -> None:
    h100 = cluster("h100-ib")
    assert (len(h100.protocols), TREE_SHARE, h100.ranks_per_node) == (3, 0.92, 8)
    assert traffic("all_reduce", 1, 64).rounds == 126
    only_whole = replace(h100, protocols=(), call_us=0.0)
    rounds_us = (
        14 * h100.within.latency_us + 6 * h100.between.latency_us
    )  # a chain and a tree, there and back
    tree_us = 1e3 * only_whole.ms("all_reduce", 1, 64, algorithm="tree")
    assert (14 + 6, round(tree_us, 1)) == (20, round(rounds_us, 1))
    ring, switch = (traffic("all_reduce", 1, 8, algorithm=way) for way in ("ring", "nvls"))
    assert (ring.busiest_bytes, switch.busiest_bytes) == (1.75, 1.125)
    gloo, nccl = (traffic("broadcast", 1, 8, backend=on).busiest_bytes for on in ("gloo", "nccl"))
    assert (gloo, nccl) == (3, 1)
    assert traffic("exchange", 1, 64, shares=[1]).busiest_bytes == 63 == traffic("reduce", 1, 64).rounds
    rounds = [traffic("reduce_shares", 1, ranks, backend="gloo").rounds for ranks in (8, 16)]
    assert rounds == [1, 15]  # in pairs up to 8 ranks, around a ring on more


def test_networks_says_what_gathering_in_forward_saves() -> None:
    six = [ParamSpec(2 * 10**8, "bfloat16")] * 6
    lines = [
        play(schedule(recipe("zero-2", way=way), six, 64), cluster("h100-ib"), Workload(2048)).timeline()
        for way in ("plain", "in_forward")
    ]
    assert [round(line.makespan_ms, 1) for line in lines] == [31.5, 25.4]
    assert [round(line.exposed_ms, 1) for line in lines] == [9.4, 3.3]


# ------------------------------------------------------------------------------------------------- course.md


def test_course_does_an_easy_exercise_of_each_chapter_in_class() -> None:
    rows = re.findall(r"^\| \d \| .*", (ROOT / "book" / "course.md").read_text("utf-8"), re.MULTILINE)
    chosen = dict(re.findall(r"\b(\d+)\.(\d)\b", "\n".join(rows)))
    hardness = {
        number: re.findall(
            rf"### Exercise {number}\.(\d): .*?\((easy|medium|hard)\)", path.read_text("utf-8")
        )
        for number, path in enumerate(CHAPTERS, 1)
    }
    assert [int(number) for number in chosen] == list(range(1, 17))
    for number, exercise in chosen.items():
        of_chapter = dict(hardness[int(number)])
        easiest = min(of_chapter.values(), key=["easy", "medium", "hard"].index)
        assert of_chapter[exercise] == easiest, f"exercise {number}.{exercise}"


# ------------------------------------------------------------------------------------------------ grading.md


def test_grading_says_how_long_an_answer_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = signature(grade_class).parameters["seconds"].default
    monkeypatch.setenv("ZERO_REF_PATIENCE", "10")
    assert (seconds, patience()) == (120, 10)
    said = text_of("book/grading.md")
    assert "It has 120 seconds" in said
    assert "`ZERO_REF_PATIENCE=10` makes all time-outs ten times as long" in said


# ------------------------------------------------------------------------------- explorers, glossary, running


def test_explorers_go_to_the_ranks_that_the_page_names() -> None:
    assert max(RANKS) == 1024


def test_glossary_says_what_units_are() -> None:
    assert round(100 * (2**30 / 10**9 - 1), 1) == 7.4


def test_glossary_says_what_a_step_counter_takes() -> None:
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.ones(5)
    adam = torch.optim.Adam([weight])
    adam.step()
    assert adam.state[weight]["step"].nbytes == 4


def test_glossary_says_what_an_all_reduce_sends() -> None:
    assert traffic("all_reduce", 1, 8).busiest_bytes == 2 * 7 / 8


def test_glossary_says_what_mixed_precision_takes() -> None:
    assert ledger(1, 1, 0, "mixed-16").total_bytes == 16


def test_glossary_says_how_coarse_bfloat16_is() -> None:
    assert torch.finfo(torch.bfloat16).eps == 2**-7  # 8 significant bits, one of them not stored
    values = torch.linspace(1, 2, 4_001)
    assert (values.bfloat16().float() / values - 1).abs().max() <= 2**-8


def test_running_says_how_even_a_split_is() -> None:
    test_partition_page_says_how_even_a_split_is()
    assert "to within 64 elements" in text_of("book/running.md")


def test_running_names_the_port_of_its_commands() -> None:
    page = (ROOT / "book" / "running.md").read_text(encoding="utf-8")
    blocks = " ".join(re.findall(r"^```bash\n(.*?)^```", page, flags=re.M | re.S))
    assert set(re.findall(r":(\d{4,5})\b", blocks)) == {"29500", "8888"}  # torchrun's, JupyterLab's


def test_running_says_what_a_step_moves() -> None:
    (plain, _), *_, (masters, least) = BYTES_OF_STEP.values()
    assert (plain, masters, masters - least) == (28, 40, 10)
    said = text_of("book/running.md")
    assert "28 bytes a parameter in float32; with 32-bit masters of bfloat16 40, of which one" in said
    assert "one kernel could save 10" in said


def of_a_parameter(**options: Any) -> list[float]:
    """Bytes of parameters, gradients and the optimizer under DDP, and those that a step moves."""
    scenario = Scenario(MODELS["gpt2"], CLUSTERS["h100-ib"], 2, bucket_view=True, **options)
    memory = scenario.run("ddp").memory
    held = memory.parameter_bytes, memory.gradient_bytes, memory.master_bytes + memory.moment_bytes
    return [nbytes / scenario.numel for nbytes in held] + [scenario.workload_of("ddp").step_bytes]


def test_before_you_rent_says_how_many_parameters_of_a_mixture_a_token_goes_through() -> None:
    scenario = Scenario(MODELS["qwen3-30b-a3b"], CLUSTERS["h100-ib"], 64, sequence=4096)
    assert [round(numel / 1e9, 1) for numel in (scenario.numel, scenario.active)] == [30.5, 3.4]
    assert "has 30.5 billion parameters, and a token goes through 3.4 billion of them" in text_of(
        "book/before_you_rent.md"
    )


def test_before_you_rent_says_what_each_way_of_computing_changes() -> None:
    page = text_of("book/before_you_rent.md")
    autocast = of_a_parameter(dtype="float32", autocast="bfloat16")
    assert [*autocast, *of_a_parameter()[:3]] == [4, 4, 8, 28, 2, 2, 12]
    assert "4 + 4 + 8 bytes for each parameter, not 2 + 2 + 12." in page
    assert of_a_parameter(dtype="float32")[:3] == [4, 4, 8]
    assert 'set_float32_matmul_precision("high")` | 4 + 4 + 8.' in page
    assert of_a_parameter(masters=False)[:3] == [2, 2, 4]
    assert "`--no-masters` | 2 + 2 + 4 |" in page
    eight = of_a_parameter(states_8=True)[:3]
    assert [round(each, 2) for each in eight] == [2, 2, 6.03]
    assert eight[2] - 4 == 2 * (1 + 4 / 256)
    assert "2 + 2 + 6.03: each moment takes 1 byte, and 4 more for every 256 elements." in page
    without = of_a_parameter(states_8=True, masters=False)[:3]
    wide = of_a_parameter(states_8=True, dtype="float32")[:3]
    assert [round(each, 2) for each in (*without, *wide)] == [2, 2, 2.03, 4, 4, 2.03]
    assert "then 2 + 2 + 2.03. Over 32-bit parameters 4 + 4 + 2.03 |" in page
    assert of_a_parameter(gradient_dtype="float32")[:3] == [2, 4, 12]
    assert "`--gradient-dtype float32` | 2 + 4 + 12," in page
    steps = [of_a_parameter(dtype="float32", update=update)[3] for update in ("foreach", "fused")]
    assert steps == [80, 28]
    assert "of float32, 80 bytes for each parameter are read and written in place of 28" in page
    adapted = Scenario(MODELS["llama3-8b"], CLUSTERS["h100-ib"], 8, lora=16)
    assert (adapted.trained_numel, adapted.numel) == (41_943_040, 8_072_204_288)
    assert "of Llama 3 8B, 41,943,040 parameters of 8,072,204,288 are trained" in page
    assert "| LoRA | `--lora 16`," in page
    shares = [CLUSTERS["h100-ib"].device.attention_by[name] for name in ("cudnn", "flash-3", "flash-4")]
    assert [*shares, CLUSTERS["h100-ib"].device.attention_reached] == [0.56, 0.58, 0.65, 0.34]
    assert "on an H100 it reaches 0.56, 0.58 or 0.65 of the peak, and FlashAttention-2 0.34" in page


def test_before_you_rent_says_what_stored_scores_take() -> None:
    model = published().models["llama2-13b"]
    fused, unfused = (
        Scenario(model, CLUSTERS["a100-ib"], 128, sequence=4096, attention=attention).run("zero-3")
        for attention in ("fused", "unfused")
    )
    assert fused.fits
    assert [round(one.peak_bytes / 1e9) for one in (unfused, fused)] == [103, 43]
    said = "4,096 tokens of Llama 2 13B, each of 128 A100 would hold 103 GB, and 43 GB with fused attention"
    assert said in text_of("book/before_you_rent.md")


def test_running_says_the_exit_code_of_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("zero_ref.cli.plan.run_plan", interrupted)
    assert (
        cli.main(["plan", "--model", "gpt2", "--ranks", "2"]),
        "`130` for Ctrl-C" in text_of("book/running.md"),
    ) == (130, True)


@pytest.mark.parametrize("page", ["course", "explorers", "glossary", "running"])
def test_pages_named_in_tests_are_there(page: str) -> None:
    assert (ROOT / "book" / f"{page}.md").exists()


def test_before_you_rent_says_what_a_checkpoint_takes() -> None:
    scenario = Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 64)
    saves, loads = passages(scenario, "zero-even")
    rows = {
        ("save", "consolidated"): ("0.50 GB", "97.4 GB", "97.4 GB", "15.3 s"),
        ("save", "sharded"): ("0", "0.50 GB", "2.9 GB", "1.4 s"),
        ("load", "whole"): ("1.51 GB", "113.9 GB", "911.4 GB", "11.6 s"),
        ("load", "whole, mapped"): ("1.51 GB", "1.51 GB", "12.0 GB", "11.6 s"),
        ("load", "sharded"): ("17.6 GB", "1.76 GB", "14.1 GB", "1.5 s"),
    }
    page = (ROOT / "book" / "before_you_rent.md").read_text(encoding="utf-8")
    for (verb, way), shown in rows.items():
        (one,) = [one for one in (saves if verb == "save" else loads) if one.way == way]
        foreseen = (max(one.device_bytes), max(one.host_bytes), one.host_bytes_of_node(8))
        for nbytes, text in zip(foreseen, shown):
            digits = len(text.split()[0].partition(".")[2])
            assert f"{nbytes / 1e9:.{digits}f}" == text.split()[0], (way, text)
        assert f"{(one.total_ms or 0) / 1e3:.1f} s" == shown[-1]
        assert re.search(
            rf"^\| {verb} `{way}`.* \| {' [|] '.join(map(re.escape, shown))} \|$", page, flags=re.M
        )
    assert (scenario.cluster.disk_gb_per_s, scenario.cluster.ranks_per_node) == (10, 8)  # "Eight ranks"


def test_before_you_rent_lists_every_cluster_with_what_it_is_made_of() -> None:
    machines = {
        # GPUs of a node, which GPU, a rank's rate within the node, and between nodes.
        "h100-ib": (8, "H100 80 GB", "450 GB/s", "400 Gb/s"),
        "h100-96-ib": (8, "H100 96 GB", "450 GB/s", "400 Gb/s"),
        "a100-ib": (8, "A100 80 GB", "300 GB/s", "200 Gb/s"),
        "v100-ib": (16, "V100 32 GB", "150 GB/s", "50 Gb/s"),
        "a100-ethernet": (8, "A100 80 GB", "300 GB/s", "50 Gb/s"),
        "rtx4090-10gbe": (4, "RTX 4090", "16 GB/s", "2.5 Gb/s"),
        "h200-ib": (8, "H200", "450 GB/s", "400 Gb/s"),
        "b200-ib": (8, "B200", "900 GB/s", "400 Gb/s"),
        "gb200-nvl72": (72, "GB200", "900 GB/s", "400 Gb/s"),
        "gb300-nvl72": (72, "GB300", "900 GB/s", "800 Gb/s"),
        "mi300x-ib": (8, "MI300X", "448 GB/s", "400 Gb/s"),
        "l40s-ethernet": (8, "L40S", "16 GB/s", "50 Gb/s"),
        "rtx5090-10gbe": (4, "RTX 5090", "64 GB/s", "2.5 Gb/s"),
    }
    assert set(machines) == set(CLUSTERS) - {"loopback"}
    page = (ROOT / "book" / "before_you_rent.md").read_text(encoding="utf-8")
    for name, (ranks, device, within, between) in machines.items():
        here = CLUSTERS[name]
        assert (ranks, device) == (here.ranks_per_node, here.device.name)
        assert within == f"{here.within.gb_per_s:g} GB/s"
        assert between == f"{8 * here.between.gb_per_s:g} Gb/s"
        assert f"| `{name}` | {ranks} {device}, {within} each way | {between} |" in page
    reached = {name: here.within.reached for name, here in CLUSTERS.items()}
    assert [reached[gpu] for gpu in ("h100-ib", "rtx5090-10gbe")] == [0.82, 0.55]
    assert "82% for the H100, and 55% for the RTX 5090" in page
    for name in ("rtx4090-10gbe", "l40s-ethernet"):  # PCIe 4.0 x16 has 32 GB/s each way
        assert (CLUSTERS[name].within.gb_per_s, reached[name]) == (32 / 2, 1)


# --------------------------------------------------------------------------------------------- differences.md


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8)])
def test_differences_bounds_what_another_order_of_a_sum_changes(dtype: torch.dtype, rounding: float) -> None:
    assert torch.finfo(dtype).eps / 2 == rounding
    parts = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    forward, backward = parts[0].clone(), parts[-1].clone()
    for part in parts[1:]:
        forward += part
    for part in parts.flip(0)[1:]:
        backward += part
    apart = (forward.double() - backward.double()).abs()
    assert apart.max() > 0
    assert (apart <= 2 * (len(parts) - 1) * rounding * parts.double().abs().sum(dim=0)).all()
    assert torch.equal(parts[0] + parts[1], parts[1] + parts[0])
    assert "multiples of 64 elements" in text_of("book/differences.md")
    assert signature(even).parameters["alignment"].default == 64
