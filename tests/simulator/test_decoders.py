"""Decoders of Hugging Face: every family as transformers builds it, name by name and shape by shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
)

from zero_ref.simulator.activations import activations
from zero_ref.simulator.decoders import FAMILIES, Decoder
from zero_ref.simulator.dense import DENSE
from zero_ref.simulator.kernels import kernels
from zero_ref.simulator.models import Llama, blocks, from_config, from_module

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""Special tokens beyond so small a vocabulary would be warned of."""


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
_DEEPSEEK = {
    **_EXPERTS,
    **_LATENT,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_INDEXED = {**_DEEPSEEK, "index_n_heads": 3, "index_head_dim": 8}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
_QWEN = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 20}
_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_head": 16, "mamba_d_conv": 3}

FURTHER: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_QWEN, "mlp_only_layers": [1]},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "decoder_sparse_step": 2},
    "qwen3_next": {**_QWEN, **_DELTA, "mlp_only_layers": [0]},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_QWEN, **_DELTA},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **_MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 20,
        "layer_types": ["mamba", "attention"],
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
    "dots1": {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "exaone_moe": {**_EXPERTS, "num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "head_dim": 8,
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "deepseek_v4": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "q_lora_rank": 12,
        "o_groups": 2,
        "o_lora_rank": 6,
        "qk_rope_head_dim": 4,
        "index_n_heads": 3,
        "index_head_dim": 8,
        "hc_mult": 4,
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128],
    },
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        "num_local_experts": 4,
        "n_shared_experts": 1,
        "linear_num_heads": 2,
        "linear_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "nemotron_h": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 20,
        "hybrid_override_pattern": "M*-E",
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 6,
        "conv_kernel": 3,
        "head_dim": 8,
    },
    "afmoe": {**_EXPERTS, "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 8},
    "hy_v3": {
        **_EXPERTS,
        "num_experts": 4,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 8,
    },
    "solar_open": {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "lfm2_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""The options of mixtures and hybrids beside SIZES."""

OF_OTHERS: tuple[str, ...] = (
    "kimi_k2",
    "nemotron-nas",
    "mimo",
    "mimo_v2_flash",
    "gemma4_text, per layer",
    "qwen3_vl_moe_text",
)
OF_OTHERS += ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "glm4v_text", "glm4v_moe_text", "mistral4")
"""Families that transformers builds under another name, inside of another model, or not at all."""

BUILT = [kind for kind in FAMILIES if kind not in OF_OTHERS]


def of_transformers(config: Any, built: Any = AutoModelForCausalLM.from_config) -> list[Any]:
    with torch.device("meta"):
        model = built(config)
    return [(param.name, param.shape) for param in from_module(model)]


def made(kind: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[kind](**(SIZES | NO_TOKENS | FURTHER.get(kind, {}) | changes))


def said_by(config: Any, *without: str) -> dict[str, Any]:
    """Return the content of a config.json, with the names that a model's author may have given."""
    said = FURTHER.get(config.model_type, {}) | config.to_dict()
    return {key: value for key, value in said.items() if key not in without}


@pytest.mark.parametrize("kind", BUILT)
def test_names_and_shapes_are_those_of_transformers(kind: str) -> None:
    for tied in (False, True)[: 1 if "tie_word_embeddings" in FAMILIES[kind].fixed else 2]:
        config = made(kind, tie_word_embeddings=tied)
        model = from_config(said_by(config))
        assert [tuple(param) for param in model.shapes()] == of_transformers(config)
        assert len(blocks(model.shapes())) == 1 + model.depth
        assert isinstance(model, Llama if kind in ("llama", "mistral") else Decoder)


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind in BUILT for option in FAMILIES[kind].options]
)
def test_options_add_the_biases_that_transformers_adds(kind: str, option: str) -> None:
    counts = set()
    for value in (False, True):
        config = made(kind, **{option: value})
        shapes = [tuple(param) for param in from_config(said_by(config)).shapes()]
        assert shapes == of_transformers(config)
        counts.add(len(shapes))
    assert len(counts) == 2


@pytest.mark.parametrize("kind", [kind for kind in BUILT if kind in DENSE])
def test_what_is_absent_is_what_transformers_takes(kind: str) -> None:
    """Nothing of the usual configuration need be written but the sizes, which always are."""
    must_be_said = FAMILIES[kind].key_value_heads == 0
    without_head = kind in ("ministral", "hunyuan_v1_dense")  # whose modules need a head_dim
    needed = {"num_key_value_heads": 8} if must_be_said else {}
    needed |= {"head_dim": 128} if without_head else {}
    config = CONFIG_MAPPING[kind](num_hidden_layers=1, **needed)
    options = [*FAMILIES[kind].options, *FAMILIES[kind].fixed]
    optional = ["tie_word_embeddings", "max_position_embeddings", *options]
    if not must_be_said:
        optional.append("num_key_value_heads")
    # These have one of their own.
    if kind not in ("cohere2", "nemotron", "arcee", "mistral", "llama") and not without_head:
        optional.append("head_dim")
    model = from_config(said_by(config, *optional))
    assert [tuple(param) for param in model.shapes()] == of_transformers(config)
    assert model.positions == config.max_position_embeddings


@pytest.mark.parametrize(
    ("kind", "missing"), [("mixtral", "num_experts_per_tok"), ("deepseek_v3", "first_k")]
)
def test_a_mixture_of_experts_is_refused_with_the_size_that_is_missing(kind: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"of model_type '{kind}' needs {missing}.*; missing"):
        from_config({"model_type": kind, **SIZES})


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba", "dbrx", None, 3, ["llama"]])
def test_any_other_model_is_refused_with_the_choices(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"is not known; known are 'gpt2', 'llama', .*'gemma3_text'"):
        from_config({"model_type": kind, **SIZES})


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind, family in FAMILIES.items() for option in family.fixed]
)
def test_an_option_that_changes_the_parameters_otherwise_is_refused(kind: str, option: str) -> None:
    outer, _, inner = option.rpartition(".")
    value = 3 if isinstance(FAMILIES[kind].fixed[option], int) else None
    value = not FAMILIES[kind].fixed[option] if isinstance(FAMILIES[kind].fixed[option], bool) else value
    entry = {outer: {inner: value}} if outer else {option: value}
    with pytest.raises(ValueError, match=f"{option} {value} changes the parameters"):
        from_config({"model_type": kind, **SIZES, **entry})


def test_gpt_2_is_transformers_too() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, **NO_TOKENS)
    assert [tuple(param) for param in from_config(said_by(config)).shapes()] == of_transformers(config)


SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}


@pytest.mark.parametrize("kind", ["gpt2", *BUILT])
def test_the_class_in_architectures_says_which_output_head_there_is(kind: str) -> None:
    sizes = SMALL_GPT2 if kind == "gpt2" else SIZES
    config = CONFIG_MAPPING[kind](**(sizes | NO_TOKENS | FURTHER.get(kind, {})), num_labels=3)
    classifiers = (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)
    for mapping in (MODEL_MAPPING, *classifiers):
        if type(config) not in mapping:  # transformers has no such class
            continue
        built = mapping[type(config)]
        said = {**said_by(config), "architectures": [built.__name__]}
        model = from_config(said)
        assert [tuple(param) for param in model.shapes()] == of_transformers(config, built)
        assert len(blocks(model.shapes())) == 1 + model.depth
    named = type(AutoModelForCausalLM.from_config(config)).__name__
    assert from_config({**said_by(config), "architectures": [named]}) == from_config(said_by(config))


REWARD = {"model_type": "llama", **SIZES, "architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        ({"id2label": {"0": "LABEL_0"}}, 1),
        ({"id2label": {"0": "A", "1": "B", "2": "C"}, "num_labels": 5}, 3),
        ({"num_labels": 5, "id2label": None}, 5),
        ({}, 1),
        ({"num_labels": None, "id2label": None}, 1),
    ],
)
def test_labels_are_counted_as_a_configuration_lists_them(labels: dict[str, Any], count: int) -> None:
    head = from_config(REWARD | labels).shapes()[-1]
    assert (head.name, head.shape) == ("score.weight", (count, 32))


@pytest.mark.parametrize(
    "labels", [{"num_labels": 0}, {"num_labels": "2"}, {"id2label": {}}, {"id2label": ["a"]}]
)
def test_labels_that_cannot_be_counted_are_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LlamaForSequenceClassification needs id2label, an object with"):
        from_config(REWARD | labels)


def test_without_a_vocabulary_head_there_are_no_logits_to_compute_and_keep() -> None:
    whole, reward, body = (
        from_config(REWARD | {"architectures": [f"Llama{ending}"]})
        for ending in ("ForCausalLM", "ForSequenceClassification", "Model")
    )
    kept = [activations(model, batch=1, sequence=10) for model in (whole, reward, body)]
    assert [one.loss for one in kept] == [10 * 64 * 8, 10 * 1 * 8, 0]
    assert [kept[0].head - one.head for one in kept] == [0, 10 * 63 * 4, 10 * 64 * 4]
    flops = [kernels(model, batch=1, sequence=10).flops for model in (whole, reward, body)]
    assert [flops[0] - one for one in flops] == [0, 6 * 10 * 32 * 63, 6 * 10 * 32 * 64]
    assert kernels(whole, 1, 10).forward.touched_bytes > kernels(body, 1, 10).forward.touched_bytes


@pytest.mark.parametrize(
    "architectures",
    [
        ["LlamaForRewardModel"],  # of somebody's own: its head may have several layers
        ["LlamaForQuestionAnswering"],
        ["MistralForCausalLM"],
        ["LlavaLlamaForCausalLM"],
        ["LlamaForCausalLM", "LlamaModel"],
        "LlamaForCausalLM",
        [7],
        {},
        0,
    ],
)
def test_a_class_whose_head_is_not_known_is_refused(architectures: Any) -> None:
    with pytest.raises(ValueError, match=r"architectures is .* Of model_type 'llama' it must be one class"):
        from_config(REWARD | {"architectures": architectures})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quant_method 'gptq', bits 4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes', load_in_8bit True"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "quant_method 'fp8'"),
        ({}, "without a quant_method"),
        ("awq", "without a quant_method"),
    ],
)
def test_quantized_weights_are_refused_with_their_method_and_a_remedy(how: Any, said: str) -> None:
    plain = {key: value for key, value in REWARD.items() if key != "architectures"}
    for key in ("quantization_config", "compression_config"):
        with pytest.raises(
            ValueError, match=rf"{key} \(.*{said}\) says .* Take the config.json of the model"
        ):
            from_config({**plain, key: how})
    assert from_config({**plain, "quantization_config": None}) == from_config(plain)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"torch_dtype": {}}, "torch_dtype is {}, which is no name of a dtype"),
        ({"dtype": [1]}, r"dtype is \[1\], which is no name of a dtype"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', and must be true or false"),
        ({"attention_bias": {}}, "attention_bias is {}, and must be true or false"),
    ],
)
def test_a_value_that_an_entry_cannot_have_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(REWARD | entry)
    assert from_config(REWARD | dict.fromkeys(entry)) == from_config(REWARD), "null is as absent"


def test_a_dropout_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resid_pdrop is \[\], which is no number"):
        from_config({"model_type": "gpt2", **SMALL_GPT2, "resid_pdrop": []})


# ------------------------------------------------------------------- families that are built another way


@pytest.mark.parametrize(
    ("kind", "further"),
    [
        ("mistral4", _DEEPSEEK),
        ("glm4v_text", {}),
        ("glm4v_moe_text", FURTHER["glm4_moe"]),
        ("qwen2_vl_text", {}),
        ("qwen2_5_vl_text", {}),
        ("qwen3_vl_text", {"head_dim": 8}),
        ("qwen3_vl_moe_text", {**_EXPERTS, "num_experts": 4}),
    ],
)
def test_a_body_without_a_class_for_its_output_head_is_that_of_transformers(
    kind: str, further: dict[str, Any]
) -> None:
    config = CONFIG_MAPPING[kind](**(SIZES | NO_TOKENS | further))
    body = [(f"model.{name}", shape) for name, shape in of_transformers(config, AutoModel.from_config)]
    model = from_config(further | config.to_dict() | {"tie_word_embeddings": True})
    assert [tuple(param) for param in model.shapes()] == body


GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 64},
        {
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 64,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ],
)
def test_gemma_4_has_embeddings_of_each_layer_keys_of_other_blocks_and_experts(
    changes: dict[str, Any],
) -> None:
    said = SIZES | NO_TOKENS | GEMMA4 | changes
    config = CONFIG_MAPPING["gemma4_text"](**said)
    assert [tuple(param) for param in from_config({"model_type": "gemma4_text", **said}).shapes()] == (
        of_transformers(config)
    )


def test_mimo_v2_has_heads_of_its_own_where_attention_sees_a_window() -> None:
    said = SIZES | NO_TOKENS | _EXPERTS
    said |= {
        "n_routed_experts": 4,
        "head_dim": 8,
        "v_head_dim": 6,
        "num_key_value_heads": 1,
        "swa_num_key_value_heads": 2,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "sliding_window": 4,
    }
    config = CONFIG_MAPPING["mimo_v2_flash"](**said, layer_types=["full_attention", "sliding_attention"])
    model = from_config({"model_type": "mimo_v2_flash", **said})
    assert [tuple(param) for param in model.shapes()] == of_transformers(config)


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    found = [
        from_config({"model_type": kind, "architectures": ["DeepseekV3ForCausalLM"], **SIZES, **_DEEPSEEK})
        for kind in ("kimi_k2", "deepseek_v3")
    ]
    assert found[0].shapes() == found[1].shapes()


def test_a_size_that_is_listed_for_each_block_counts_where_all_are_alike() -> None:
    sizes = {"model_type": "hunyuan_v1_moe", **SIZES, **FURTHER["hunyuan_v1_moe"]}
    assert from_config({**sizes, "moe_topk": [2, 2]}) == from_config(sizes)
    with pytest.raises(ValueError, match=r"moe_topk is \[2, 1\], and must be an integer"):
        from_config({**sizes, "moe_topk": [2, 1]})
