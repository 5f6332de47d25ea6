"""Dense decoders of Hugging Face: every family as transformers builds it, name by name and shape by shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
)

from zero_ref.simulator.activations import activations
from zero_ref.simulator.decoders import FAMILIES, MIXTURES, Decoder
from zero_ref.simulator.kernels import kernels
from zero_ref.simulator.models import Llama, blocks, from_config, from_module, specs

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


def of_transformers(config: Any, built: Any = AutoModelForCausalLM.from_config) -> list[Any]:
    with torch.device("meta"):
        model = built(config)
    return [(param.name, param.shape) for param in from_module(model)]


def made(kind: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[kind](**(SIZES | NO_TOKENS | changes))


def described(config: Any, *without: str) -> dict[str, Any]:
    """What its config.json says."""
    return {key: value for key, value in config.to_dict().items() if key not in without}


@pytest.mark.parametrize("kind", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(kind: str) -> None:
    for tied in (False, True):
        config = made(kind, tie_word_embeddings=tied)
        model = from_config(described(config))
        assert [tuple(param) for param in model.shapes()] == of_transformers(config)
        assert len(blocks(model.shapes())) == 1 + SIZES["num_hidden_layers"]
        assert isinstance(model, Llama if kind in ("llama", "mistral") else Decoder)


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind, family in FAMILIES.items() for option in family.options]
)
def test_options_add_the_biases_that_transformers_adds(kind: str, option: str) -> None:
    counts = set()
    for value in (False, True):
        config = made(kind, **{option: value})
        shapes = [tuple(param) for param in from_config(described(config)).shapes()]
        assert shapes == of_transformers(config)
        counts.add(len(shapes))
    assert len(counts) == 2


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_absent_is_what_transformers_takes(kind: str) -> None:
    """Of the usual configuration, whose sizes are always written, nothing else need be."""
    must_be_said = FAMILIES[kind].key_value_heads == 0
    config = CONFIG_MAPPING[kind](num_hidden_layers=1, **({"num_key_value_heads": 8} if must_be_said else {}))
    options = [*FAMILIES[kind].options, *FAMILIES[kind].fixed]
    optional = ["tie_word_embeddings", "max_position_embeddings", *options]
    if not must_be_said:
        optional.append("num_key_value_heads")
    if kind not in ("cohere2", "nemotron", "arcee", "mistral", "llama"):  # which have one of their own
        optional.append("head_dim")
    model = from_config(described(config, *optional))
    assert [tuple(param) for param in model.shapes()] == of_transformers(config)
    assert model.positions == config.max_position_embeddings


@pytest.mark.parametrize(
    ("kind", "changes", "numel"),
    [
        # As published by their authors: Qwen/Qwen3-8B, google/gemma-2-9b, microsoft/phi-4, allenai/OLMo-2-7B.
        (
            "qwen3",
            {
                "hidden_size": 4096,
                "num_hidden_layers": 36,
                "intermediate_size": 12288,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 151936,
            },
            8_190_735_360,
        ),
        (
            "gemma2",
            {
                "hidden_size": 3584,
                "num_hidden_layers": 42,
                "intermediate_size": 14336,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "vocab_size": 256000,
            },
            9_241_705_984,
        ),
        (
            "phi3",
            {
                "hidden_size": 5120,
                "num_hidden_layers": 40,
                "intermediate_size": 17920,
                "num_attention_heads": 40,
                "num_key_value_heads": 10,
                "vocab_size": 100352,
            },
            14_659_507_200,
        ),
    ],
)
def test_published_models_have_their_published_counts(kind: str, changes: dict[str, Any], numel: int) -> None:
    model = from_config({"model_type": kind, **changes})
    assert sum(param.numel for param in specs(model.shapes())) == numel


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match="is a mixture of experts, whose routing and expert parallelism"):
        from_config({"model_type": kind, **SIZES})


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba", "qwen3_next", None, 3, ["llama"]])
def test_any_other_model_is_refused_with_the_choices(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"is not known; known are 'gpt2', 'llama', .*'gemma3_text'"):
        from_config({"model_type": kind, **SIZES})


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind, family in FAMILIES.items() for option in family.fixed]
)
def test_an_option_that_changes_the_parameters_otherwise_is_refused(kind: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} True changes the parameters"):
        from_config({"model_type": kind, **SIZES, option: True})


def test_gpt_2_is_transformers_too() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, **NO_TOKENS)
    assert [tuple(param) for param in from_config(described(config)).shapes()] == of_transformers(config)


SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}


@pytest.mark.parametrize("kind", ["gpt2", *FAMILIES])
def test_the_class_in_architectures_says_which_output_head_there_is(kind: str) -> None:
    sizes = SMALL_GPT2 if kind == "gpt2" else SIZES
    config = CONFIG_MAPPING[kind](**sizes, **NO_TOKENS, num_labels=3)
    classifiers = (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)
    for mapping in (MODEL_MAPPING, *classifiers):
        if type(config) not in mapping:  # transformers has no such class
            continue
        built = mapping[type(config)]
        said = {**described(config), "architectures": [built.__name__]}
        model = from_config(said)
        assert [tuple(param) for param in model.shapes()] == of_transformers(config, built)
        assert len(blocks(model.shapes())) == 3
    named = type(AutoModelForCausalLM.from_config(config)).__name__
    assert from_config({**described(config), "architectures": [named]}) == from_config(described(config))


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


def test_a_reward_model_and_an_embedding_model_have_no_vocabulary_head() -> None:
    """As published: a reward model of Llama 3.1 8B with one label, an embedding model of Mistral 7B."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    }
    llama = {"model_type": "llama", **sizes, "vocab_size": 128256, "id2label": {"0": "LABEL_0"}}
    reward = from_config({**llama, "architectures": ["LlamaForSequenceClassification"]})
    mistral = {"model_type": "mistral", **sizes, "vocab_size": 32000, "architectures": ["MistralModel"]}
    embedding = from_config(mistral)
    counts = [sum(param.numel for param in model.shapes()) for model in (reward, embedding)]
    assert counts == [7_504_928_768, 7_110_660_096]


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
