"""The published runs: complete, each with its source, and of models of the published sizes."""

from __future__ import annotations

import json
import re
from collections import Counter
from hashlib import sha256

import pytest

from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.published import PLACE, SHARED, Run, operations_of_token, published, with_source
from zero_ref.simulator.recipe import RECIPES

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


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_run_has_a_figure_or_did_not_run(run: Run) -> None:
    assert (run.time is not None or run.memory_gib is not None) == run.ran
    assert run.ranks % run.options.get("shard_group", 1) == 0


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
        assert source.url.startswith("https://"), name
        assert source.commit is None or re.fullmatch("[0-9a-f]{40}", source.commit), name
        if "/blob/" in source.url or "/tree/" in source.url:
            assert source.commit is not None, name
            assert source.commit in source.url, name


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
    assert [run.options.get("no_sync", False) for run in kempner.values()] == [False, True, True, True]
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


KEMPNER = json.loads((PLACE / "kempner.json").read_text(encoding="utf-8"))
RUN = {**KEMPNER["runs"][0], "id": "mine", "cluster": "h100-ib"}
SIZES = {"width": 8, "depth": 1, "heads": 1, "vocabulary": 9, "positions": 8}


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (
            {"use": "fit it"},
            "unknown use of run mine: 'fit it'; choose one of fit time, fit mem",
        ),
        (
            {"time": {"s": 1}},
            "unknown unit of time of run mine: 's'; choose one of tokens",
        ),
        ({"time": {"ms": 1, "tflops": 1}}, "run mine: a time has one of tokens_per_s_gpu, ms, tflops, got 2"),
        ({"memory_gib": -1}, "run mine: a time and a memory are above 0, got -1"),
        ({"ran": False}, "run mine did not run, so it has no time and no memory_gib"),
        ({"time": None, "memory_gib": None}, "run mine must have a time, or memory_gib, or both"),
        (
            {"memory_of": "used"},
            "unknown memory_of of run mine: 'used'; choose one of allocated",
        ),
        ({"id": "kempner-8b-1"}, "mine: there is a run 'kempner-8b-1' already"),
        ({"bacth": 3}, r"mine.runs\[0\] has no 'bacth' \(did you mean 'batch'\?\)"),
        ({"compiled": 3}, r"mine.runs\[0\].compiled must be true or false, not 3"),
        ({"model": "llama9"}, "unknown model of run mine: 'llama9'; choose one of llama3-8b"),
        ({"cluster": "h100"}, "unknown cluster of run mine: 'h100'; choose one of a100-80"),
    ],
)
def test_a_mistake_in_a_run_is_named(changed: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        with_source(published(), "mine", {"source": KEMPNER["source"], "runs": [{**RUN, **changed}]})


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"source": {"title": "a"}}, "mine.source has no url, read"),
        ({"runs": {}}, "mine.runs must be a list, not an object of 0"),
        ({"run": []}, 'mine has no "run" \\(did you mean "runs"\\?\\)'),
        (
            {"models": {"m": SIZES}},
            "mine.models.m must have a config, or a family that is one of GPT2, Llama",
        ),
        ({"models": {"m": {"family": "GPT2", **SIZES, "width": "8"}}}, "mine.models.m.width must be a whole"),
        ({"models": {"m": {"config": {"model_type": "x"}}}}, "mine.models.m: model_type 'x' is not known"),
        ({"models": {"gpt2": {"family": "GPT2", **SIZES}}}, "mine: there is a model 'gpt2' already"),
        (
            {"clusters": {"a100-80": {"preset": "a100-ib", "source": ""}}},
            "there is a cluster 'a100-80' already",
        ),
    ],
)
def test_a_mistake_in_the_file_of_a_source_is_named(changed: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        with_source(published(), "mine", {"source": KEMPNER["source"], "runs": [RUN], **changed})
    with pytest.raises(ValueError, match="there is a source 'kempner' already"):
        with_source(published(), "kempner", KEMPNER)
    with pytest.raises(ValueError, match="unknown run 'x'"):
        published().run("x")


def test_a_run_may_name_presets_a_configuration_and_any_option_of_a_scenario() -> None:
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16}
    file = {
        "source": KEMPNER["source"],
        "models": {"small": {"config": {**config, "max_position_embeddings": 64}}},
        "runs": [{**RUN, "model": "small", "prefetch": 2}, {**RUN, "id": "other", "model": "gpt2-xl"}],
    }
    data = with_source(published(), "mine", file)
    assert data.models["small"].depth == 2
    assert data.models["gpt2-xl"] == MODELS["gpt2-xl"]
    assert data.clusters["h100-ib"].cluster("h100-ib").device == CLUSTERS["h100-ib"].device
    assert data.run("mine").options == {
        "masters": False,
        "bucket_view": True,
        "compiled": True,
        "prefetch": 2,
    }
    assert data.run("mine").source == "mine"
