"""Dense decoders of Hugging Face: every family as transformers builds it, name by name and shape by shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config

from zero_ref.simulator.decoders import FAMILIES, MIXTURES, Decoder
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


def of_transformers(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
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
