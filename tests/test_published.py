"""The published runs: complete, each with its source, and of models of the published sizes."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from zero_ref.simulator._records import record
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.published import PLACE, Run, operations_of_token, published
from zero_ref.simulator.recipe import RECIPES

RUNS = published().runs


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


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_run_has_a_figure_or_did_not_run(run: Run) -> None:
    assert (run.time is not None or run.memory_gib is not None) == run.ran
    assert run.shard_group is None or run.ranks % run.shard_group == 0


@pytest.mark.parametrize("name", published().params)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    numel = sum(shape.numel for shape in published().models[name].shapes())
    stated = published().params[name]
    if stated % 10_000_000:
        assert numel == stated
    else:  # in billions, with one or two decimals
        assert numel == pytest.approx(stated, rel=5e-4)


def test_every_source_can_be_found_again() -> None:
    for name, source in published().sources.items():
        assert re.match(r"https://(github\.com|arxiv\.org)/", source.url), name
        assert source.commit is None or re.fullmatch("[0-9a-f]{40}", source.commit), name
        if "/blob/" in source.url or "/tree/" in source.url:
            assert source.commit is not None, name
            assert source.commit in source.url, name


def test_one_source_is_for_fitting_times_and_one_for_fitting_memory() -> None:
    """The rule of published.json, in code: a run cannot change sides without this test."""
    for run in RUNS:
        one_node = run.source == "llm-foundry" and (run.ranks, run.sequence) == (8, 2048)
        table_1 = run.source == "torchtitan-h100" and (run.ranks, run.sequence) == (8, 8192)
        assert run.use == ("fit time" if one_node else "fit memory" if table_1 else "test"), run.id
        assert run.tests("time") is not one_node
        assert run.tests("memory") is not table_1
    assert Counter(run.use for run in RUNS)["test"] > 0.8 * len(RUNS)


def test_a_run_is_not_the_default_where_its_source_says_so() -> None:
    kempner = {run.id: run for run in RUNS if run.source == "kempner"}
    assert not any(run.masters for run in kempner.values())
    assert [run.no_sync for run in kempner.values()] == [False, True, True, True]
    assert all(run.fused_loss for run in RUNS if run.source == "llm-foundry")
    assert {run.dtype for run in RUNS if run.source == "narayanan"} == {"float16"}
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


def test_a_mistake_in_the_file_is_named() -> None:
    values = json.loads(PLACE.read_text(encoding="utf-8"))["runs"][0]
    with pytest.raises(ValueError, match="unknown use 'fit'; choose one of fit time, fit memory, test"):
        record(Run, {**values, "use": "fit"}, "run")
    with pytest.raises(ValueError, match="unknown unit of time 's'"):
        record(Run, {**values, "time": {"s": 1}}, "run")
    with pytest.raises(ValueError, match="unknown run 'x'"):
        published().run("x")
