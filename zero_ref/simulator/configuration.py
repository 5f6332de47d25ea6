"""Reading a configuration of Hugging Face without transformers: that of a model in `architectures`.

With transformers, `lab.built` builds any model that it knows, and this is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_ref.simulator.architectures import GPT2, Latent, Llama, Mixture

LARGEST_SIZE = 2**31 - 1
"""The largest size that a dimension may have in a configuration."""

MOST_BLOCKS = 10_000
"""The largest number of blocks in a configuration. Each is listed by tensor; presets have 158 at most."""

_GPT2_KEYS = {
    "width": "n_embd",
    "depth": "n_layer",
    "heads": "n_head",
    "vocabulary": "vocab_size",
    "positions": "n_positions",
}
_KEYS = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "hidden": "intermediate_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}
_EXPERTS = {"chosen": "num_experts_per_tok", "expert_width": "moe_intermediate_size"}
_LATENT = {
    "query_rank": "q_lora_rank",
    "key_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}

LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "granite": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norms": "head", "head_dim": 128},
    "olmo2": {"qk_norms": "all", "post_norms": True},
}
"""The models that `Llama` is, by their `model_type`, and with which options."""

MIXTURES = ("qwen3_moe", "deepseek_v3", "kimi_k2")
"""Those that `Mixture` is."""

FIXED = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1}
"""Options that change a model, and the only value that is read here."""


def from_config(config: Mapping[str, Any]) -> GPT2 | Llama | Mixture:
    """The architecture that a Hugging Face configuration describes, as read from its `config.json`.

    >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    >>> from_config({"model_type": "gpt2", **sizes})
    GPT2(width=8, depth=1, heads=2, vocabulary=10, positions=4, dropout=True)

    Args:
        config: of a causal language model whose `model_type` is "gpt2", in LLAMAS or in MIXTURES, and its
            sizes. `head_dim`, `tie_word_embeddings`, `max_position_embeddings` and `num_key_value_heads` may
            be absent.
    Raises:
        ValueError: the model type or the class is another, a size is missing or not a positive integer, sizes
            do not divide, or an option changes the model in a way that is not read here.
    Source: the configurations of transformers 5.24.
    """
    kind = config.get("model_type")
    known = ("gpt2", *LLAMAS, *MIXTURES)
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"model_type {kind!r} is not known without transformers; known are "
            f"{', '.join(map(repr, known))}. "
            'Of any other model, install it (pip install "zero_ref[models]"), or give its code as --module.'
        )
    for name in config.get("architectures") or []:
        if not str(name).endswith(("ForCausalLM", "LMHeadModel")):
            raise ValueError(
                f"architectures has {name!r}; without transformers only causal language models are read."
            )
    if kind == "gpt2":
        return _gpt2(config)
    refuse_other(config, FIXED)
    heads = config.get("num_attention_heads")
    keys = _KEYS | ({"head_dim": "head_dim"} if config.get("head_dim") is not None else {})
    # Where transformers' own classes write null, they mean the default.
    absent = {"num_key_value_heads": heads, "max_position_embeddings": 4096 if kind in MIXTURES else 2048}
    full = {**config, **{key: value for key, value in absent.items() if config.get(key) is None}}
    tied = config.get("tie_word_embeddings") or False
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings is {tied!r}, and must be true or false.")
    if kind in MIXTURES:
        return _mixture(full, _sizes(full, keys), tied)
    sizes = _sizes(full, keys)
    if "head_dim" not in sizes and "head_dim" not in LLAMAS[kind]:
        _divides(full, "num_attention_heads", "hidden_size")
    _divides(full, "num_key_value_heads", "num_attention_heads")
    window = (
        _sizes(full, {"window": "sliding_window"}) if kind == "mistral" and full.get("sliding_window") else {}
    )
    return Llama(**(LLAMAS[kind] | sizes | window), tied=tied)


def _mixture(config: Mapping[str, Any], sizes: dict[str, Any], tied: bool) -> Mixture:
    if config["model_type"] == "qwen3_moe":
        refuse_other(config, {"mlp_only_layers": []})
        return Mixture(**sizes | _sizes(config, _EXPERTS | {"experts": "num_experts"}), tied=tied)
    found = _sizes(config, _EXPERTS | {"experts": "n_routed_experts", "shared": "n_shared_experts"})
    found["shared_width"] = found.pop("shared") * found["expert_width"]
    dense = config.get("first_k_dense_replace", 0)
    if not isinstance(dense, int) or not 0 <= dense <= sizes["depth"]:
        raise ValueError(f"first_k_dense_replace is {dense!r}, and must be a number of blocks.")
    latent = Latent(**_sizes(config, _LATENT))
    return Mixture(**sizes | found | {"head_dim": 0}, dense=dense, latent=latent, tied=tied)


def quantized(config: Mapping[str, Any]) -> str:
    """Return the configuration's words for weights that were rounded to few bits; empty if they were not.

    >>> quantized({"quantization_config": {"quant_method": "awq", "bits": 4}})
    "quantization_config (quant_method 'awq', bits 4)"
    """
    for one in (config, *(inside for inside in config.values() if isinstance(inside, Mapping))):
        for key in ("quantization_config", "compression_config"):
            how = one.get(key)
            if how is not None:
                said = how if isinstance(how, dict) else {}
                method = ", ".join(f"{name} {said[name]!r}" for name in _QUANTIZED_BY if name in said)
                return f"{key} ({method or 'without a quant_method'})"
    return ""


_QUANTIZED_BY = ("quant_method", "bits", "load_in_4bit", "load_in_8bit")


def _gpt2(config: Mapping[str, Any]) -> GPT2:
    sizes = _sizes(config, _GPT2_KEYS)
    refuse_other(
        config, {"n_inner": 4 * sizes["width"], "tie_word_embeddings": True, "add_cross_attention": False}
    )
    _divides(config, "n_head", "n_embd")
    dropout = config.get("resid_pdrop", 0.1)
    if not isinstance(dropout, int | float):
        raise ValueError(f"resid_pdrop is {dropout!r}, which is no number.")
    return GPT2(**sizes, dropout=bool(dropout))


def refuse_other(config: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    """Refuse what changes a model in a way that is not read here.

    Raises:
        ValueError: an entry is there, and is not the accepted one.
    """
    other = [key for key in accepted if config.get(key) not in (None, accepted[key])]
    if other:
        said = ", ".join(f"{key} {config[key]!r}" for key in other)
        raise ValueError(
            f"{said} change{'s' * (len(other) == 1)} the model in a way that is not read without "
            f"transformers; accepted: {', '.join(repr(accepted[key]) for key in other)}."
        )


def _sizes(config: Mapping[str, Any], key_of_size: Mapping[str, str]) -> dict[str, int]:
    """The sizes under their names here."""
    found = {size: config.get(key) for size, key in key_of_size.items()}
    wrong = [
        f"{key_of_size[size]} is " + ("missing" if value is None else f"{value!r}")
        for size, value in found.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if wrong:
        raise ValueError(
            f"a configuration of model_type {config['model_type']!r} needs "
            f"{', '.join(key_of_size.values())}, integers of at least 1; {', '.join(wrong)}."
        )
    for size, value in found.items():
        most = MOST_BLOCKS if size == "depth" else LARGEST_SIZE
        if value is not None and value > most:
            raise ValueError(f"{key_of_size[size]} must be at most {most:,}; every tensor is listed.")
    return {size: int(value) for size, value in found.items() if value is not None}


def _divides(config: Mapping[str, Any], part: str, whole: str) -> None:
    if config[whole] % config[part]:
        raise ValueError(f"{whole} {config[whole]} is no multiple of {part} {config[part]}.")
