"""Reading a configuration of Hugging Face: a `config.json` becomes an architecture, or is refused.

What is not known is refused with what is missing, and nothing is guessed: an architecture that is read has
the parameters that transformers builds. `rules` finds what each block of it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_ref.simulator.architectures import GPT2, Llama
from zero_ref.simulator.decoders import FAMILIES, Block, Decoder, Head, Tower
from zero_ref.simulator.families import SIZES, Family
from zero_ref.simulator.rules import RULES, Config, windows_of
from zero_ref.simulator.towers import TOWERS

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

NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which a model of several parts has the configuration of its language model."""


def from_config(config: Mapping[str, Any]) -> GPT2 | Llama | Decoder:
    """The architecture that a Hugging Face configuration describes, as read from its `config.json`.

    >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    >>> from_config({"model_type": "gpt2", **sizes})
    GPT2(width=8, depth=1, heads=2, vocabulary=10, positions=4, dropout=True, head=None)
    >>> reward = {"architectures": ["GPT2ForSequenceClassification"], "num_labels": 1}
    >>> from_config({"model_type": "gpt2", **sizes, **reward}).head
    Head(name='score', outputs=1, bias=False)

    Args:
        config: of a decoder, whose `model_type` is "gpt2" or in `decoders.FAMILIES`, and its sizes; or of a
            model with such a decoder inside, in one of NESTED.
            What may be absent is then what transformers takes: `head_dim`, `tie_word_embeddings`,
            `max_position_embeddings`, `num_key_value_heads` and options that add biases. `architectures`
            names the class, and so the output head: that over the vocabulary where it is absent, labels of
            a classifier or a reward model, as many as in `id2label` or `num_labels`, or none. Where
            neither is there, it is one, a reward; transformers would take two.
    Raises:
        ValueError: the model type or the class is another, a size is missing or not a positive integer, sizes
            do not divide, an option adds parameters that are not counted here or has no value that it can
            have, or the weights are quantized, which cannot be trained.
    Source: the configurations of transformers 5.24.
    """
    method = quantized(config)
    if method:
        raise ValueError(
            f"{method} says that the weights are quantized, and an "
            "optimizer such as AdamW cannot update quantized weights. Take the config.json of the model "
            "before it was quantized; or remove the entry, to simulate that model with all of its "
            "parameters trained."
        )
    return described(config)


def described(config: Mapping[str, Any]) -> GPT2 | Llama | Decoder:
    """The same, whatever format the weights are stored in: to count parameters, not to train them.

    >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    >>> stored = {"model_type": "gpt2", **sizes, "quantization_config": {"quant_method": "awq", "bits": 4}}
    >>> quantized(stored), described(stored).width
    ("quantization_config (quant_method 'awq', bits 4)", 8)

    Raises:
        ValueError: as `from_config`, but not for quantized weights.
    """
    inside = next((key for key in NESTED if isinstance(config.get(key), Mapping)), None)
    text: Mapping[str, Any] = config if inside is None else config[inside]
    kind = text.get("model_type")
    if isinstance(kind, str) and inside is None and f"{kind}_text" in FAMILIES and kind not in FAMILIES:
        kind = f"{kind}_text"  # written flat, as transformers 4 did
    kind = _known(kind, config, inside)
    for key in ("dtype", "torch_dtype"):
        if not isinstance(text.get(key), str | None):
            raise ValueError(f"{key} is {text[key]!r}, which is no name of a dtype, such as 'bfloat16'.")
    if kind == "gpt2":
        return _gpt2(text)
    tower = _tower(config, text)
    if inside is None and tower is None:
        head = _head(kind, FAMILIES[kind].named, text)
    else:
        _check_class_around(config)
        head = None
        around = config.get("tie_word_embeddings")
        text = {**text, **({} if around is None else {"tie_word_embeddings": around})}
    return _decoder(kind, FAMILIES[kind], {**text, "model_type": kind}, head, tower)


def quantized(config: Mapping[str, Any]) -> str:
    """Return the configuration's words for weights that were rounded to few bits; empty if they were not."""
    for one in (config, *(config[key] for key in NESTED if isinstance(config.get(key), Mapping))):
        for key in ("quantization_config", "compression_config"):
            how = one.get(key)
            if how is not None:
                said = how if isinstance(how, dict) else {}
                method = ", ".join(f"{name} {said[name]!r}" for name in _QUANTIZED_BY if name in said)
                return f"{key} ({method or 'without a quant_method'})"
    return ""


_QUANTIZED_BY = ("quant_method", "bits", "load_in_4bit", "load_in_8bit")


def _known(kind: Any, config: Mapping[str, Any], inside: str | None) -> str:
    """The model type, if it is in a table and the one around it does not change the decoder inside."""
    if not isinstance(kind, str) or kind not in ("gpt2", *FAMILIES):
        where = f" in {inside}" if inside else ""
        raise ValueError(
            f"model_type {kind!r}{where} is not known; known are 'gpt2', {', '.join(map(repr, FAMILIES))}. "
            "Of any other model, take the parameters from the module itself: from_module."
        )
    outer = config.get("model_type")
    if inside and isinstance(outer, str) and outer in CHANGED:
        raise ValueError(
            f"model_type {outer!r} is not known: {CHANGED[outer]}. Take the parameters from the module "
            "itself: from_module."
        )
    return kind


CHANGED = {
    "mllama": "its decoder has blocks that attend to the image",
    "gemma3n": "its decoder has parts that no table has, such as alternating updates and low-rank residuals",
}
"""Models whose decoders are not what the `model_type` inside says, and why."""


def _gpt2(config: Mapping[str, Any]) -> GPT2:
    head = _head("gpt2", "", config)
    sizes = _sizes(config, _GPT2_KEYS)
    accepted = {"n_inner": 4 * sizes["width"], "tie_word_embeddings": True, "add_cross_attention": False}
    Config(config).refuse_other(accepted)
    _divides(config, "n_head", "n_embd")
    dropout = config.get("resid_pdrop", 0.1)
    if not isinstance(dropout, int | float):
        raise ValueError(f"resid_pdrop is {dropout!r}, which is no number.")
    return GPT2(**sizes, dropout=bool(dropout), head=head)


HEADS = ("ForCausalLM", "LMHeadModel", "Model", "ForSequenceClassification", "ForTokenClassification")
"""Endings of the names of those classes of transformers whose output heads are known."""


def _head(kind: str, class_name: str, config: Mapping[str, Any]) -> Head | None:
    """Return the layer in place of the output head over the vocabulary, by the class in `architectures`."""
    named = config.get("architectures")
    if named is None or named == []:
        return None
    # As in OlmoForCausalLM, GPTNeoXModel, Gemma3ForCausalLM and Gemma3TextModel.
    begins = class_name or kind.replace("_", "").removesuffix("text")
    found = None
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        pattern = f"{begins}(?:text)?({'|'.join(HEADS)})"
        found = re.fullmatch(pattern, named[0].replace("_", ""), re.IGNORECASE)
    if found is None:
        raise ValueError(
            f"architectures is {named!r}, whose output head is not known. Of model_type {kind!r} it must be "
            f"one class of transformers, whose name ends in {', '.join(HEADS)}. Correct or remove the entry "
            "(without it, the output head is that over the vocabulary), or take the parameters from the "
            "module itself: from_module."
        )
    ending = found[1].lower()
    if ending in ("forcausallm", "lmheadmodel"):
        return None
    if ending == "model":
        return Head()
    labels, count = config.get("id2label"), config.get("num_labels")
    if labels is not None:
        count = len(labels) if isinstance(labels, dict) else 0
    elif count is None:
        count = 1  # a reward
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= LARGEST_SIZE:
        raise ValueError(
            f"{named[0]} needs id2label, an object with an entry for each label, or num_labels, how many "
            f"there are; id2label is {labels!r} and num_labels {config.get('num_labels')!r}."
        )
    if ending == "forsequenceclassification":
        return Head("score", count)
    return Head("classifier" if kind in ("gpt2", "gpt_neox") else "score", count, bias=True)


AROUND = ("ForConditionalGeneration", "ForImageTextToText", "ForCausalLM")
"""Endings of the names of classes around a language model whose output head is over the vocabulary."""


def _check_class_around(config: Mapping[str, Any]) -> None:
    """Refuse a class around a language model whose output head is not known."""
    named = config.get("architectures")
    if named and not (isinstance(named, list) and len(named) == 1 and str(named[0]).endswith(AROUND)):
        raise ValueError(
            f"architectures is {named!r}, whose output head is not known. Of a model with a language model "
            f"inside it must be one class of transformers, whose name ends in {', '.join(AROUND)}. Correct "
            "or remove the entry (without it, the output head is that over the vocabulary), or take the "
            "parameters from the module itself: from_module."
        )


def _tower(config: Mapping[str, Any], text: Mapping[str, Any]) -> Tower | None:
    """Return the vision tower, which has only its name if its kind is not known; None if there is none."""
    inside = config.get("vision_config")
    if not isinstance(inside, Mapping):
        return None
    name = inside.get("model_type") or config.get("model_type")
    if not isinstance(name, str) or name not in TOWERS:
        return Tower(str(name))
    kind = TOWERS[name]
    places = {"": Config({**kind.absent, **inside}), "text": Config(text), "model": Config(config)}
    places[""].refuse_other(kind.needs, needed=True)
    sizes = {}
    for symbol, keys in kind.sizes.items():
        place, _, key = keys.rpartition(".")
        sizes[symbol] = places[place].count(key)
    if sizes.get("depth", 1) > MOST_BLOCKS:
        raise ValueError(f"a vision tower has at most {MOST_BLOCKS:,} blocks, not {sizes['depth']:,}.")
    if "image_size" in inside:
        sizes["patches"] = (places[""].size("image_size") // sizes["patch"]) ** 2
    options = []
    for option, usual in kind.options.items():
        place, _, key = option.rpartition(".")
        if places[place].flag(key, usual):
            options.append(key)
    return Tower(name, tuple(sizes.items()), tuple(options))


VARIANTS = {"gemma4_text": ("hidden_size_per_layer_input", "gemma4_text, per layer")}
"""Families with a table of their own where a size is there and above 0."""


def _decoder(
    kind: str, family: Family, config: Mapping[str, Any], head: Head | None, tower: Tower | None
) -> Llama | Decoder:
    if kind in VARIANTS and config.get(VARIANTS[kind][0]):
        return _decoder(VARIANTS[kind][1], FAMILIES[VARIANTS[kind][1]], config, head, tower)
    Config(config).refuse_other(family.fixed)
    if kind == "gpt_neox":  # its configuration has no such size
        config = {**config, "num_key_value_heads": config.get("num_attention_heads")}
    absent = {
        "num_key_value_heads": config.get("num_attention_heads")
        if family.key_value_heads is None
        else family.key_value_heads or None,
        "max_position_embeddings": family.positions,
        "head_dim": family.head_width,
        **family.absent,
    }
    # Where transformers' own classes write null, they mean the default.
    full = {**config, **{key: value for key, value in absent.items() if config.get(key) is None}}
    keys = _KEYS | dict(family.keys)
    if full.get("head_dim") is not None:
        keys["head_dim"] = "head_dim"
    sizes = _sizes(full, keys)
    if "head_dim" not in sizes:
        _divides(full, "num_attention_heads", "hidden_size")
    if family.rule != "nemotron-nas":
        _divides(full, "num_key_value_heads", "num_attention_heads")
    reader = Config(full)
    tied = reader.flag("tie_word_embeddings", family.tied)
    options = tuple(option for option, usual in family.options.items() if reader.flag(option, usual))
    windows = windows_of(reader, family.windows, sizes["depth"])
    if kind in ("llama", "mistral") and not options and tower is None and len(set(windows)) == 1:
        return Llama(**sizes, tied=tied, head=head, window=windows[0])
    blocks = RULES[family.rule](reader, sizes)
    strange = [block for block in blocks if block.mixer not in family.mixers or block.mlp not in family.mlps]
    if strange:
        made_of = " and ".join(filter(None, strange[0][:2]))
        raise ValueError(
            f"a block of {made_of} is not known of model_type {kind!r}. Take the parameters from the module "
            "itself: from_module."
        )
    if any(windows):
        blocks = [
            block._replace(sizes=(*block.sizes, ("window", window)) if window else block.sizes)
            for block, window in zip(blocks or [Block()] * sizes["depth"], windows, strict=True)
        ]
    base = TOWERS[tower.kind].text if tower is not None and tower.kind in TOWERS else ""
    found = Decoder(
        kind,
        **sizes,
        tied=tied,
        options=options,
        head=head,
        sizes=(),
        blocks=tuple(blocks),
        base=base,
        tower=tower,
        predicting_ahead=reader.modules_ahead(),
    )
    return replace(found, sizes=tuple(_further_sizes(reader, family, found).items()))


def _further_sizes(config: Config, family: Family, model: Decoder) -> dict[str, int]:
    """The sizes that the tables of this model name, beside those that every family has."""
    return {
        symbol: config.size(family.sizes.get(symbol, SIZES.get(symbol, symbol)))
        for symbol in sorted(model.symbols())
    }


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
