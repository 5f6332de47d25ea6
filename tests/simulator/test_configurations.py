"""Configurations as published: each is counted as the model's checkpoint says, or refused for a reason."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks import counts
from zero_ref.lab.simulated import as_json, print_runs
from zero_ref.simulator.architectures import trained
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.configuration import described, from_config, quantized
from zero_ref.simulator.decoders import Decoder
from zero_ref.simulator.models import blocks, from_module
from zero_ref.simulator.scenario import Scenario

FILES = sorted(path.name for path in counts.KEPT.glob("*.json"))


def config_of(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((counts.KEPT / file).read_text())
    return found


@pytest.fixture(scope="module")
def table() -> dict[str, counts.Row]:
    return {row.file: row for row in counts.rows()}


def test_all_are_read_but_one_whose_decoder_has_parts_that_are_not_known(
    table: dict[str, counts.Row],
) -> None:
    assert len(table) == len(FILES) == 46
    refused = {file: row.refused for file, row in table.items() if row.refused}
    assert list(refused) == ["moonshotai__Kimi-K3.json"]
    said = "attn_res_block_size 12, routed_expert_hidden_size 3584, mla_use_output_gate True, linear_attn"
    assert said in refused.popitem()[1]


def test_every_published_number_is_counted_or_what_it_counts_more_is_named(
    table: dict[str, counts.Row],
) -> None:
    differences = {file: row.difference for file, row in table.items() if row.published is not None}
    assert len(differences) == 41
    assert set(differences.values()) == {0}
    for row in table.values():
        assert row.source.startswith("https://") is (row.published is not None)
    named = {name for row in table.values() for name in row.named or {}}
    assert named == set(counts.DIFFERENCES)


@pytest.mark.parametrize(
    ("file", "active"),
    [
        # As names and papers say: 3B, 35B, 17B, 37B (arXiv:2412.19437), 3.6B, 13B, 3.6B and 12.9B.
        ("Qwen__Qwen3-30B-A3B.json", 3.4e9),
        ("Qwen__Qwen3-Coder-480B-A35B-Instruct.json", 35.5e9),
        ("Qwen__Qwen3.5-397B-A17B.json", 17.3e9),
        ("deepseek-ai__DeepSeek-V3.json", 37.6e9),
        ("openai__gpt-oss-20b.json", 4.2e9),  # 3.6B without the embedding
        ("deepseek-ai__DeepSeek-V4-Flash.json", 13.8e9),
        ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json", 3.6e9),
        ("mistralai__Mixtral-8x7B-v0.1.json", 12.9e9),
    ],
)
def test_a_token_goes_through_the_active_parameters(
    table: dict[str, counts.Row], file: str, active: float
) -> None:
    assert round(table[file].active / 1e8) * 1e8 == active


def test_the_lines_say_what_is_stored_in_few_bits_and_what_is_not_known(table: dict[str, counts.Row]) -> None:
    said = list(counts.lines([table[file] for file in FILES if "V4" in file or "gpt-oss" in file]))
    assert "    training is refused: quantization_config (quant_method 'mxfp4')" in said
    assert ["not", "known", "multi-token", "prediction"] in [line.split() for line in said]
    stored = [file for file in FILES if quantized(config_of(file))]
    assert len(stored) == 6
    for file in stored:
        with pytest.raises(ValueError, match="the weights are quantized"):
            from_config(config_of(file))


def test_a_file_of_ones_own_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    own = tmp_path / "config.json"
    own.write_text((counts.KEPT / "Qwen__Qwen3-30B-A3B.json").read_text())
    monkeypatch.setattr("sys.argv", ["counts", str(own)])
    counts.main()
    printed = capsys.readouterr().out
    assert "30,532,122,624, 3,353,032,704 for a token" in printed
    assert "1 of 1 read, 0 of them with a published number" in printed


BUILT = [
    "Qwen__Qwen3-VL-4B-Instruct.json",
    "Qwen__Qwen3.5-27B.json",
    "Qwen__Qwen3.5-122B-A10B.json",
    "mistralai__Ministral-3-3B-2512.json",
    "nvidia__Gemma-4-31B-IT-NVFP4.json",
    "deepseek-ai__DeepSeek-V4-Flash.json",
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json",
]


@pytest.mark.parametrize("file", BUILT)
def test_a_published_model_has_the_names_and_shapes_of_transformers(file: str) -> None:
    config = config_of(file)
    model = described(config)
    assert [tuple(param) for param in model.shapes()] == of_transformers(config)
    assert len(blocks(trained(model))) == 1 + model.depth


def of_transformers(config: dict[str, Any]) -> list[Any]:
    said = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    if "text_config" in said and said["model_type"] == "ministral3":
        said["model_type"] = "mistral3"
    made = CONFIG_MAPPING[said["model_type"]].from_dict(said)
    several = "vision_config" in said
    with torch.device("meta"):
        built = AutoModelForImageTextToText if several else AutoModelForCausalLM
        return [(param.name, param.shape) for param in from_module(built.from_config(made))]


_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}


def sizes(model_type: str, width: int, hidden: int, depth: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        **others,
    }


@pytest.mark.parametrize(
    ("name", "config", "numel"),
    [
        (
            "google/gemma-3-4b-it, whose configuration leaves heads and vocabulary out",
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "num_hidden_layers": 34,
                },
                "vision_config": _SIGLIP,
            },
            4_300_079_472,
        ),
        (
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            {
                "model_type": "llama4",
                "text_config": sizes(
                    *("llama4_text", 5120, 8192, 48, 40),
                    intermediate_size_mlp=16384,
                    num_key_value_heads=8,
                    head_dim=128,
                    vocab_size=202048,
                    num_local_experts=16,
                    num_experts_per_tok=1,
                    interleave_moe_layer_step=1,
                ),
                "vision_config": sizes(
                    *("llama4_vision_model", 1408, 5632, 34, 16),
                    image_size=336,
                    patch_size=14,
                    projector_input_dim=4096,
                    projector_output_dim=4096,
                    vision_output_dim=4096,
                ),
            },
            108_641_793_536,
        ),
        (
            "Qwen/Qwen2.5-VL-7B-Instruct, whose configuration is flat",
            {
                **sizes("qwen2_5_vl", 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
                "vision_config": {
                    "depth": 32,
                    "hidden_size": 1280,
                    "intermediate_size": 3420,
                    "in_chans": 3,
                    "out_hidden_size": 3584,
                    "patch_size": 14,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                },
            },
            8_292_166_656,
        ),
        (
            "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
            {
                "model_type": "mistral3",
                "spatial_merge_size": 2,
                "text_config": sizes(
                    *("mistral", 5120, 32768, 40, 32),
                    num_key_value_heads=8,
                    head_dim=128,
                    vocab_size=131072,
                ),
                "vision_config": sizes("pixtral", 1024, 4096, 24, 16, patch_size=14),
            },
            24_011_361_280,
        ),
        (
            "deepseek-ai/DeepSeek-V2-Lite, whose queries are not compressed",
            sizes(
                *("deepseek_v2", 2048, 10944, 27, 16),
                num_key_value_heads=16,
                vocab_size=102400,
                n_routed_experts=64,
                n_shared_experts=2,
                num_experts_per_tok=6,
                moe_intermediate_size=1408,
                first_k_dense_replace=1,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
            ),
            15_706_484_224,
        ),
        (
            "moonshotai/Kimi-Linear-48B-A3B-Instruct, without the corrections of 26 x 256 experts' scores",
            sizes(
                *("kimi_linear", 2304, 9216, 27, 32),
                num_key_value_heads=32,
                vocab_size=163840,
                num_experts=256,
                num_shared_experts=1,
                num_experts_per_token=8,
                moe_intermediate_size=1024,
                first_k_dense_replace=1,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                linear_attn_config={
                    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                    "head_dim": 128,
                    "num_heads": 32,
                    "short_conv_kernel_size": 4,
                },
            ),
            49_122_681_728 - 26 * 256,
        ),
    ],
    ids=lambda value: value.partition(",")[0] if isinstance(value, str) else "",
)
def test_further_models_have_their_published_numbers(name: str, config: dict[str, Any], numel: int) -> None:
    """The numbers of https://huggingface.co/api/models/NAME?expand[]=safetensors."""
    assert sum(param.numel for param in from_config(config).shapes()) == numel, name


TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_channels": 3,
    "image_size": 28,
    "patch_size": 14,
}
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({}, {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}),
    "llama4": (
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 40},
        {
            **TOWER,
            "model_type": "llama4_vision_model",
            "projector_input_dim": 12,
            "projector_output_dim": 12,
            "vision_output_dim": 12,
        },
    ),
    "qwen2_5_vl": (
        {},
        {
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_heads": 2,
            "in_channels": 3,
            "out_hidden_size": 32,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    ),
    "qwen3_vl_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
        {
            "model_type": "qwen3_vl_moe",
            "depth": 3,
            "deepstack_visual_indexes": [1],
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_heads": 2,
            "in_channels": 3,
            "out_hidden_size": 32,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 9,
        },
    ),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_a_model_with_a_vision_tower_is_that_of_transformers(kind: str) -> None:
    text, tower = TOWERS[kind]
    made = CONFIG_MAPPING[kind](text_config={**TEXT, **text}, vision_config=tower)
    said = made.to_dict()
    config = {**said, "text_config": {**said["text_config"], **text}, "vision_config": tower}
    config["text_config"]["model_type"] = f"{kind}_text"
    model = described(config)
    with torch.device("meta"):
        built = from_module(AutoModelForImageTextToText.from_config(made))
    assert [tuple(param) for param in model.shapes()] == [(param.name, param.shape) for param in built]
    assert isinstance(model, Decoder)
    assert sum(numel or 0 for numel in model.parts().values()) == sum(param.numel for param in built)


def test_a_tower_that_is_not_known_is_said_and_the_language_model_is_counted() -> None:
    config = config_of("Qwen__Qwen3-VL-4B-Instruct.json")
    config["vision_config"]["model_type"] = "somebodys_own"
    model = described(config)
    assert isinstance(model, Decoder)
    assert model.parts() == {"language model": 4_022_468_096, "vision tower": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nobodys"}, "model_type 'nobodys' in text_config is not known"),
        (
            {"layer_types": ["linear_attention"] * 3},
            "layer_types must have an entry for each of the 64 blocks",
        ),
        (
            {"layer_types": ["odd"] * 64},
            "layer_types has 'odd', which is not known here; known are 'full_att",
        ),
        (
            {"linear_num_key_heads": None},
            "of model_type 'qwen3_5_text' needs linear_num_key_heads, an integer",
        ),
        (
            {"linear_key_head_dim": "128"},
            "linear_key_head_dim is '128', and must be an integer of at least 1",
        ),
    ],
)
def test_what_is_missing_or_strange_inside_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = config_of("Qwen__Qwen3.5-27B.json")
    config["text_config"] |= changes
    with pytest.raises(ValueError, match=message):
        from_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3_5ForSequenceClassification"]}, "Of a model with a language model inside"),
        ({"model_type": "mllama"}, "its decoder has blocks that attend to the image"),
        ({"vision_config": {"model_type": "qwen3_5", "depth": 2}}, "needs hidden_size, an integer"),
    ],
)
def test_what_is_strange_around_the_language_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config({**config_of("Qwen__Qwen3.5-27B.json"), **changes})


def test_a_simulation_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = Scenario(
        from_config(config_of("Qwen__Qwen3.5-27B.json")), cluster("h100-ib"), 64, sequence=2048
    )
    runs = [scenario.run("zero-3")]
    printed = as_json("qwen", scenario, runs)
    assert printed["elements"] == printed["active_elements"] == printed["parts"]["language model"]
    assert printed["parts"]["vision tower"] == 460_730_096
    assert printed["not_counted"] == [
        "the time of the gated delta rule's recurrence, beside its matrix products"
    ]
    print_runs("qwen", scenario, runs, width=200)
    said = capsys.readouterr().out
    assert "not simulated: vision tower, 460,730,096 parameters" in said
    assert "not simulated: multi-token prediction, 424,699,392 parameters" in said
    assert "jobs' traffic; the time of the gated delta rule's recurrence" in said


def test_a_simulation_of_experts_says_how_many_parameters_a_token_goes_through(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = Scenario(
        from_config(config_of("Qwen__Qwen3-30B-A3B.json")), cluster("h100-ib"), 64, sequence=2048
    )
    run = scenario.run("zero-3")
    print_runs("qwen", scenario, [run], width=200)
    said = capsys.readouterr().out
    assert "30,532,122,624 bfloat16 parameters, 3,353,032,704 for a token" in said
    assert "supposed: experts get as many tokens as others" in said
    operations = 6 * 3_353_032_704 * 2048 * (1 + scenario.attention_share)
    assert run.utilisation == pytest.approx(operations / run.iteration_ms / 989e9)


def test_a_trillion_parameters_with_experts_on_1024_ranks_take_less_than_a_second() -> None:
    config = config_of("deepseek-ai__DeepSeek-V3.json")
    del config["quantization_config"]
    wider = {**config, "n_routed_experts": 400, "n_shared_experts": 1, "num_attention_heads": 64}
    begin = time.process_time()
    model = from_config({**wider, "num_key_value_heads": 64})
    run = Scenario(model, cluster("h100-ib"), 1024, sequence=4096).run("zero-3")
    seconds = time.process_time() - begin
    assert run.scenario.numel > 1e12
    assert run.iteration_ms > 0
    assert seconds < 1


JUNK: list[Any] = [None, "x", "", -1, 0, 1, 2, 1.5, [], {}, True, False, 2**31, float("nan"), ["a"], {"a": 1}]
JUNK += [[0] * 70, "M" * 70, ["full_attention"] * 70]


def entries(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    inside = [pair for value in config.values() if isinstance(value, dict) for pair in entries(value)]
    return [*((config, key) for key in config), *inside]


@pytest.mark.parametrize("seed", range(10))
def test_a_configuration_with_junk_in_it_is_read_or_refused(seed: int) -> None:
    drawn, read = random.Random(seed), 0
    for _ in range(100):
        config = config_of(drawn.choice(FILES))
        for at, key in drawn.sample(entries(config), 2):
            at[key] = drawn.choice(JUNK)
        try:
            model = described(config)
        except ValueError:
            continue
        read += 1
        assert model.shapes()
        assert model.layers
        assert not isinstance(model, Decoder) or model.parts()
    assert read > 20


def test_a_tower_of_more_blocks_than_can_be_listed_is_refused() -> None:
    config = config_of("Qwen__Qwen3.5-27B.json")
    config["vision_config"]["depth"] = 10**6
    with pytest.raises(ValueError, match="a vision tower has at most 10,000 blocks, not 1,000,000"):
        from_config(config)


def test_a_block_that_a_family_has_no_table_for_is_refused() -> None:
    config = config_of("deepseek-ai__DeepSeek-V3.2.json") | {"q_lora_rank": None}
    with pytest.raises(ValueError, match="a block of latent, whole query and dense is not known of"):
        described(config)
