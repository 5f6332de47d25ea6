"""The published runs: complete, each with its source, and of models of the published sizes."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest

from benchmarks.published import PLACE, SHARED, operations_of_token, published
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.recipe import RECIPES
from zero_ref.simulator.spread import KINDS
from zero_ref_course import scale

RUNS = published().runs

FIRST = {
    *("fms-fsdp", "fms-fsdp-compiled", "kempner", "llm-foundry", "llm.c", "llm.c-309", "nanogpt"),
    *("nanogpt-4090", "narayanan", "tinyllama", "torchtitan-929", "torchtitan-996", "torchtitan-a100"),
    *("torchtitan-h100", "trainy-h200", "yafsdp"),
}
"""Sources whose runs were divided before there was the rule for later ones."""


def test_there_are_enough_runs_of_enough_sources() -> None:
    assert len({run.id for run in RUNS}) == len(RUNS)
    assert sum(run.time is not None for run in RUNS) >= 40
    assert len({run.source for run in RUNS if run.time is not None}) >= 10
    assert sum(run.memory_gib is not None for run in RUNS) >= 15


def test_every_run_names_what_is_there_and_nothing_is_there_for_no_run() -> None:
    data = published()
    for what in ("source", "model", "cluster"):
        assert {getattr(run, what) for run in RUNS} == set(getattr(data, f"{what}s")), what
    assert {run.strategy for run in RUNS} <= set(RECIPES)
    assert {machines.preset for machines in data.clusters.values()} <= set(CLUSTERS)


def test_each_run_has_figures_or_did_not_run_and_makes_a_scenario() -> None:
    data = published()
    for run in RUNS:
        assert (run.time is not None or run.memory_gib is not None) == run.ran, run.id
        assert all(number > 0 for number in [*(run.time or {"ms": 1}).values(), run.memory_gib or 1]), run.id
        scenario = data.scenario(run)
        assert (scenario.world_size, scenario.batch, scenario.tokens_of_sequence, scenario.checkpointing) == (
            run.ranks,
            run.batch,
            run.sequence,
            run.checkpointing,
        ), run.id
        assert {name: getattr(scenario, name) for name in run.options} == run.options, run.id


def test_models_have_the_published_numbers_of_parameters() -> None:
    for name, stated in published().params.items():
        numel = sum(shape.numel for shape in published().models[name].shapes())
        # Some are stated in billions, with one or two decimals.
        assert numel == (stated if stated % 10_000_000 else pytest.approx(stated, rel=5e-4)), name


def test_every_source_can_be_found_again() -> None:
    for name, source in published().sources.items():
        assert source.url.startswith("https://"), name
        assert source.commit is None or re.fullmatch("[0-9a-f]{40}", source.commit), name
        if "/blob/" in source.url or "/tree/" in source.url:
            assert source.commit is not None, name
            assert source.commit in source.url, name


def test_a_program_is_of_the_first_kind_that_its_source_says_of_it() -> None:
    """Kinds were fixed before errors were summed up by kind."""
    assert {run.kind for run in RUNS} == set(KINDS)
    of_source = {name: {run.kind for run in RUNS if run.source == name} for name in published().sources}
    assert of_source["llmq"] == of_source["llm.c"] == {"hand-written"}
    assert of_source["nemo"] == {"vendor"}
    # DDP beside DeepSpeed is PyTorch's, and an eager run beside compiled ones is not compiled.
    assert of_source["deepspeed-autotuning"] == {"deepspeed", "pytorch"}
    assert {run.id for run in RUNS if run.source == "kempner" and run.kind == "pytorch"} == {"kempner-13b-8"}
    assert all(run.options.get("compiled") for run in RUNS if run.kind == "compiled")


def test_the_sources_that_were_added_last_are_of_2025_and_2026() -> None:
    new = {name: source for name, source in published().sources.items() if source.added}
    assert len(new) >= 12
    assert all(source.title[-4:] in ("2025", "2026") for source in new.values())
    assert {source.kind for source in new.values()} == set(KINDS) - {"hand-written"}
    assert not FIRST & new.keys()


def test_one_source_is_for_fitting_times_and_one_for_fitting_memory() -> None:
    """The first rule, in code: a run cannot change sides without this test."""
    for run in [run for run in RUNS if run.source in FIRST]:
        one_node = run.source == "llm-foundry" and (run.ranks, run.sequence) == (8, 2048)
        table_1 = run.source == "torchtitan-h100" and (run.ranks, run.sequence) == (8, 8192)
        assert run.use == ("fit time" if one_node else "fit memory" if table_1 else "test"), run.id
        assert run.tests("time") is not one_node
        assert run.tests("memory") is not table_1
    first = Counter(run.use for run in RUNS if run.source in FIRST)
    assert first["test"] > 0.8 * first.total()


def test_a_later_source_is_for_fitting_or_for_testing_by_the_hash_of_its_key() -> None:
    for path in PLACE.glob("*.json"):
        if path.stem not in (*FIRST, SHARED):
            use = "fit" if sha256(path.stem.encode()).hexdigest()[0] in "0123" else "test"
            assert {run.use for run in RUNS if run.source == path.stem} == {use}, path.stem
            assert all("use" not in run for run in json.loads(path.read_text(encoding="utf-8"))["runs"])
    assert set(published().sources) >= FIRST


def test_a_run_is_not_the_default_where_its_source_says_so() -> None:
    kempner = {run.id: run for run in RUNS if run.source == "kempner"}
    assert [run.options["masters"] for run in kempner.values()] == [False] * 4
    assert [run.options["no_sync"] for run in kempner.values()] == [True] * 4
    assert all(run.options["fused_loss"] for run in RUNS if run.source == "llm-foundry")
    assert {run.options["dtype"] for run in RUNS if run.source == "narayanan"} == {"float16"}
    assert {run.memory_of for run in RUNS if run.source == "llm.c-309"} == {"unpooled"}


def test_a_time_is_a_rate_in_each_of_its_units() -> None:
    data = published()

    def rate(name: str) -> float | None:
        run = data.run(name)
        return run.tokens_per_s_gpu(data.models[run.model])

    assert rate("titan-8b-8") == 5762
    assert rate("nanogpt-8") == pytest.approx(12 * 1024 * 5 / 0.562)
    assert rate("trainy-8b-32") is None
    # "90 days" for 300 billion tokens on 384 GPUs at 144 TFLOP/s, in the same table; 74 days at 88 on 768
    assert rate("gpt-175b-384") == pytest.approx(300e9 / (90 * 86_400) / 384, rel=0.01)
    assert rate("gpt-175b-768") == pytest.approx(300e9 / (74 * 86_400) / 768, rel=0.01)
    assert rate("gpt-530b-640") == pytest.approx(300e9 / (169 * 86_400) / 640, rel=0.01)
    assert operations_of_token(data.models["megatron-175b"], 2048) == pytest.approx(8 * 174.6e9, rel=0.03)


def test_machines_differ_from_the_preset_only_where_they_say_so() -> None:
    clusters = published().clusters
    h100 = clusters["h100-96"].cluster("h100-96")
    assert (h100.device.name, h100.device.memory_gb_per_s) == ("H100 96 GB", 2400)
    assert h100.between == CLUSTERS["h100-ib"].between
    assert clusters["h100-800g"].cluster("x").between.gb_per_s == 800 / 8 / 8
    assert clusters["h200-4"].cluster("x").nodes(8) == 2
    assert published().supposed(published().run("nanogpt-8")) == ("between", "memory of the GPU")


def test_the_runs_of_chapter_16_are_those_of_the_files() -> None:
    data = published()
    for name, known in scale.RUNS.items():
        run = data.run(name)
        scenario = data.scenario(run)
        machines = replace(scenario.cluster, name=known.scenario.cluster.name, source="")
        assert replace(known.scenario.cluster, source="") == machines, name
        assert replace(known.scenario, cluster=scenario.cluster) == scenario, name
        assert known.tokens_per_s_gpu == run.tokens_per_s_gpu(data.models[run.model]), name
        assert (known.memory_gib, "zero-3") == (run.memory_gib, run.strategy), name
