"""Shapes: published counts, and modules read without importing torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.configuration import LLAMAS
from zero_ref.simulator.models import (
    GPT2,
    MODELS,
    TRANSFORMERS,
    Llama,
    ParamShape,
    blocks,
    from_config,
    from_module,
    ready_order,
    shapes,
    specs,
)

# ----------------------------------------------------------------------------------------------- example


@pytest.mark.parametrize(
    ("name", "elements", "tensors", "largest"),
    [
        # The GPT-2 counts are those of the released checkpoints; a block has 12 tensors, and 4 are outside.
        ("gpt2", 124_439_808, 12 * 12 + 4, 50257 * 768),
        ("gpt2-medium", 354_823_168, 24 * 12 + 4, 50257 * 1024),
        ("gpt2-large", 774_030_080, 36 * 12 + 4, 50257 * 1280),
        ("gpt2-xl", 1_557_611_200, 48 * 12 + 4, 50257 * 1600),
        # The Llama 3 counts are those of the safetensors that Meta published; a block has 9 tensors.
        ("llama3-8b", 8_030_261_248, 291, 525_336_576),
        ("llama3-70b", 70_553_706_496, 80 * 9 + 3, 128256 * 8192),
        ("llama3-405b", 405_853_388_800, 126 * 9 + 3, 128256 * 16384),
    ],
)
def test_published_counts(name: str, elements: int, tensors: int, largest: int) -> None:
    listed = shapes(name)
    assert sum(param.numel for param in listed) == elements
    assert len(listed) == tensors
    assert max(param.numel for param in listed) == largest


@pytest.mark.parametrize(
    ("name", "unit", "printed"),
    [
        (
            "gpt3-175b",
            1e9,
            "174.6",
        ),  # "175B", Brown et al. (arXiv:2005.14165, table 2.1): 174,600M in table D.1
        ("zero-7.5b", 1e9, "7.5"),  # Megatron-LM (arXiv:2104.04473, table 1): 7.5 billion
        ("zero-1t", 1e9, "1008.0"),  # ibid.: 1008.0 billion
        ("deepseek-v3", 1e9, "671"),  # arXiv:2412.19437: 671B
        ("kimi-k2", 1e12, "1"),  # github.com/MoonshotAI/Kimi-K2: 1T, of which 32B for a token
        ("zero-128b", 1e9, "128"),  # ZeRO (arXiv:1910.02054, table 1): 128B, to the billion
    ],
)
def test_published_counts_to_their_printed_digits(name: str, unit: float, printed: str) -> None:
    digits = len(printed.partition(".")[2])
    assert f"{sum(param.numel for param in shapes(name)) / unit:.{digits}f}" == printed


@pytest.mark.parametrize("name", ["zero-7.5b", "zero-1t", "gpt3-175b"])
def test_the_counts_are_those_of_megatrons_formula(name: str) -> None:
    # arXiv:2104.04473, equation 2: 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), without the last norm's 2 h.
    model = TRANSFORMERS[name]
    h, depth = model.width, model.depth
    formula = 12 * depth * h**2 + 13 * depth * h + (model.vocabulary + model.positions) * h
    assert sum(param.numel for param in shapes(name)) == formula + 2 * h


def test_no_other_depth_comes_nearer_to_128_billion() -> None:
    def miss(depth: int) -> int:
        model = GPT2(width=8192, depth=depth, heads=64, vocabulary=51200, positions=2048)
        return abs(sum(param.numel for param in model.shapes()) - 128 * 10**9)

    assert min(range(150, 170), key=miss) == TRANSFORMERS["zero-128b"].depth


def test_blocks_are_the_units_of_stage_3() -> None:
    units = blocks(shapes("llama3-8b"))
    named = shapes("llama3-8b")
    assert [named[i].name for i in units[0]] == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert [len(unit) for unit in units[1:]] == [9] * 32
    assert {named[i].name.split(".")[2] for i in units[11]} == {"10"}
    assert blocks(specs(named)) == units


def test_blocks_go_by_the_first_number_and_by_what_stands_before_it() -> None:
    names = ["encoder.0.mlp.1.weight", "encoder.0.mlp.2.weight", "decoder.0.weight", "norm2.weight", ""]
    assert blocks([ParamSpec(1, name=name) for name in names]) == [[3, 4], [0, 1], [2]]
    assert blocks([]) == [[]]


CONFIGS: dict[str, dict[str, Any]] = {
    # As published: openai-community/gpt2, meta-llama/Meta-Llama-3-8B, mistralai/Mistral-7B-v0.1.
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "vocab_size": 32000,
    },
}


def test_a_configuration_gives_the_preset() -> None:
    assert from_config(CONFIGS["gpt2"]) == MODELS["gpt2"]
    assert from_config(CONFIGS["llama"]) == MODELS["llama3-8b"]
    mistral = from_config(CONFIGS["mistral"])
    assert sum(param.numel for param in mistral.shapes()) == 7_241_732_096  # its safetensors'


def test_what_a_configuration_may_leave_out() -> None:
    llama = {
        key: value
        for key, value in CONFIGS["llama"].items()
        if key not in ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
    }
    assert from_config(llama) == Llama(4096, 32, 14336, 32, 32, 128256, positions=2048)
    tied = from_config(llama | {"tie_word_embeddings": True, "head_dim": 64, "num_key_value_heads": None})
    assert tied.shapes()[1] == ParamShape("model.layers.0.self_attn.q_proj.weight", (32 * 64, 4096))
    assert tied.shapes()[4] == ParamShape("model.layers.0.self_attn.o_proj.weight", (4096, 32 * 64))
    assert tied.shapes()[-1].name == "model.norm.weight"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "gpt2",
            {"model_type": "bert"},
            "model_type 'bert' is not known without transformers; known are 'gpt2', 'llama', 'mis",
        ),
        ("gpt2", {"model_type": None}, "model_type None is not known"),
        ("gpt2", {"n_embd": None, "n_layer": 0}, "needs n_embd, .*; n_embd is missing, n_layer is 0"),
        ("gpt2", {"n_layer": True}, "n_layer is True"),
        ("gpt2", {"n_head": 7}, "n_embd 768 is no multiple of n_head 7"),
        ("gpt2", {"n_inner": 1000}, "n_inner 1000 changes the model .* accepted: 3072"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings False changes"),
        ("llama", {"hidden_size": "4096"}, "integers of at least 1; hidden_size is '4096'"),
        ("llama", {"vocab_size": -1}, "vocab_size is -1"),
        (
            "llama",
            {"num_key_value_heads": 5},
            "num_attention_heads 32 is no multiple of num_key_value_heads 5",
        ),
        ("llama", {"num_attention_heads": 24}, "hidden_size 4096 is no multiple of num_attention_heads 24"),
        ("llama", {"mlp_bias": True}, "mlp_bias True changes the model"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, and must be true or false"),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            "only causal language models are read",
        ),
        ("llama", {"model_type": "qwen3_moe"}, "num_experts_per_tok is missing"),
    ],
)
def test_a_configuration_without_sizes_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(CONFIGS[kind] | changes)


# ------------------------------------------------------------------------------------------------ parity

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_KIND: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
}


@pytest.mark.parametrize("kind", [*LLAMAS, "qwen3_moe", "deepseek_v3"])
def test_what_is_read_without_transformers_is_what_transformers_builds(kind: str) -> None:
    config = {"model_type": kind, **SMALL, **OF_KIND.get(kind, {}), "tie_word_embeddings": False}
    model = from_config(config)
    with torch.device("meta"):
        built = from_module(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config, **NO_TOKENS)))
    assert [tuple(param) for param in model.shapes()] == [(param.name, param.shape) for param in built]
    assert len(blocks(model.shapes())) == 1 + model.depth == 1 + sum(layer.number for layer in model.layers)


NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""Special tokens beyond so small a vocabulary would be warned of."""


def test_a_module_is_read_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    assert from_module(model) == [
        ParamSpec(6, name="0.weight", shape=(2, 3)),
        ParamSpec(2, trainable=False, name="0.bias", shape=(2,)),
        ParamSpec(4, "bfloat16", name="1.weight", shape=(2, 2)),
    ]


def test_a_tied_weight_is_listed_once() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert [param.name for param in from_module(model)] == ["embedding.weight"]


def test_gradients_become_ready_nearly_in_reverse() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    order = ready_order(model, lambda: model(torch.randn(3, 2)).sum().backward())
    # The last linear layer's bias then weight, the norm's weight then bias, the first layer's bias, weight.
    assert order == [5, 4, 2, 3, 1, 0]


def test_a_tied_embedding_is_ready_last_and_frozen_parameters_never() -> None:
    embedding, norm, head = nn.Embedding(5, 2), nn.LayerNorm(2), nn.Linear(2, 5)
    head.weight = embedding.weight
    norm.bias.requires_grad_(False)
    model = nn.Sequential(embedding, norm, head)  # embedding.weight, norm.weight, norm.bias, head.bias
    order = ready_order(model, lambda: model(torch.tensor([1, 2])).sum().backward())
    assert order == [3, 1, 0]
