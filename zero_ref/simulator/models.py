"""Parameter shapes: of published models by name, of a configuration, or of a module at hand.

A model's memory and messages follow from its parameters' shapes, in registration order; no weights are
needed. To add a model of a family below, add a line to MODELS. To add a family, write a frozen dataclass of
its dimensions with a method `shapes`, in the order in which its module registers the parameters; a family of
transformers has the attributes of `Transformer` too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator._checks import check_name
from zero_ref.simulator.decoders import (
    FAMILIES,
    MIXTURES,
    BlockKind,
    Decoder,
    Family,
    Head,
    ParamShape as ParamShape,
)


class Architecture(Protocol):
    """The dimensions of a model, from which its shapes follow."""

    def shapes(self) -> tuple[ParamShape, ...]:
        """All parameters, in registration order; one that is used twice (a tied head) is listed once."""


class Transformer(Architecture, Protocol):
    """An architecture with what its activations and operations are counted from, beside its shapes."""

    def __hash__(self) -> int:
        """A frozen dataclass has one; what is counted from it is kept by it."""

    @property
    def width(self) -> int:
        """Elements of a token's hidden state."""

    @property
    def depth(self) -> int:
        """Blocks."""

    @property
    def heads(self) -> int:
        """Query heads of the attention in each block."""

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and of values."""

    @property
    def head_width(self) -> int:
        """Elements of a head."""

    @property
    def hidden(self) -> int:
        """Width of the MLP in each block."""

    @property
    def kind(self) -> BlockKind:
        """What a block is made of."""

    @property
    def vocabulary(self) -> int:
        """Tokens that there are, each with a row in the embedding."""

    @property
    def head(self) -> Head | None:
        """In place of the output head over the vocabulary."""

    @property
    def positions(self) -> int:
        """Tokens in a sequence, at most."""


def outputs_of(architecture: Transformer) -> int:
    """What the output head gives for each token: a logit for each entry of the vocabulary, labels or nothing.

    >>> outputs_of(GPT2(width=8, depth=1, heads=2)), outputs_of(GPT2(8, 1, 2, head=Head("score", 1)))
    (50257, 1)
    """
    return architecture.vocabulary if architecture.head is None else architecture.head.outputs


@dataclass(frozen=True)
class GPT2:
    """GPT-2: learned positions, LayerNorm, biases, an output head that is the token embedding.

    GPT-3 and Megatron-LM's GPT models have the same parameters. Names, order and shapes are those of
    transformers' GPT2LMHeadModel, whose linear layers keep their weights as (inputs, outputs).
    Source: Radford et al., 2019; the `openai-community/gpt2*` configurations.

    Args:
        dropout: of scores and results. No parameter depends on it, but activations and kernels do.
        head: in place of the output head over the vocabulary.
    """

    width: int
    depth: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024
    dropout: bool = True
    head: Head | None = None

    @property
    def key_value_heads(self) -> int:
        """As many as query heads."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        return 4 * self.width

    @property
    def kind(self) -> BlockKind:
        """What a block is made of."""
        return BlockKind(gated=False, dropout=self.dropout, rotary=False, fused_qkv=True)

    def shapes(self) -> tuple[ParamShape, ...]:
        d = self.width
        listed = [
            ParamShape("transformer.wte.weight", (self.vocabulary, d)),
            ParamShape("transformer.wpe.weight", (self.positions, d)),
        ]
        for i in range(self.depth):
            block = f"transformer.h.{i}"
            listed += [
                *_norm(f"{block}.ln_1", d),
                *_linear(f"{block}.attn.c_attn", d, 3 * d),
                *_linear(f"{block}.attn.c_proj", d, d),
                *_norm(f"{block}.ln_2", d),
                *_linear(f"{block}.mlp.c_fc", d, 4 * d),
                *_linear(f"{block}.mlp.c_proj", 4 * d, d),
            ]
        listed += _norm("transformer.ln_f", d)
        return tuple(listed) if self.head is None else self.head.behind(listed, d)


@dataclass(frozen=True)
class Llama:
    """Llama: rotary positions, RMSNorm, no biases, a gated MLP, few key heads, an output head of its own.

    Names, order and shapes are those of transformers' LlamaForCausalLM, (outputs, inputs).
    Source: Touvron et al. (arXiv:2302.13971); Llama 3: arXiv:2407.21783 and its published configurations.

    Args:
        hidden: width of the gated MLP.
        positions: 8,192 is what Llama 3 was first trained with (section 3.4.1). No parameter depends on it.
        head_dim: elements of a head; 0 for `width / heads`.
        tied: the output head is the token embedding.
        head: in place of the output head over the vocabulary.
    """

    width: int
    depth: int
    hidden: int
    heads: int
    key_value_heads: int
    vocabulary: int
    positions: int = 8192
    head_dim: int = 0
    tied: bool = False
    head: Head | None = None

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def kind(self) -> BlockKind:
        """What a block is made of."""
        return BlockKind()

    def shapes(self) -> tuple[ParamShape, ...]:
        return Decoder("llama", **vars(self)).shapes()


@dataclass(frozen=True)
class MLP:
    """Linear layers with a function between them, named as in an nn.Sequential: layer, function, layer.

    >>> [(param.name, param.shape) for param in MLP((3, 8, 2)).shapes()]
    [('0.weight', (8, 3)), ('0.bias', (8,)), ('2.weight', (2, 8)), ('2.bias', (2,))]

    Args:
        widths: inputs of the first layer, then outputs of each.
    """

    widths: tuple[int, ...]

    def shapes(self) -> tuple[ParamShape, ...]:
        return tuple(
            param
            for layer, (inputs, outputs) in enumerate(pairwise(self.widths))
            for param in (
                ParamShape(f"{2 * layer}.weight", (outputs, inputs)),
                ParamShape(f"{2 * layer}.bias", (outputs,)),
            )
        )


TRANSFORMERS: dict[str, Transformer] = {
    "gpt2": GPT2(width=768, depth=12, heads=12),
    "gpt2-medium": GPT2(width=1024, depth=24, heads=16),
    "gpt2-large": GPT2(width=1280, depth=36, heads=20),
    "gpt2-xl": GPT2(width=1600, depth=48, heads=25),
    "llama3-8b": Llama(width=4096, depth=32, hidden=14336, heads=32, key_value_heads=8, vocabulary=128256),
    "llama3-70b": Llama(width=8192, depth=80, hidden=28672, heads=64, key_value_heads=8, vocabulary=128256),
    "llama3-405b": Llama(
        width=16384, depth=126, hidden=53248, heads=128, key_value_heads=8, vocabulary=128256
    ),
    "gpt3-175b": GPT2(width=12288, depth=96, heads=96, positions=2048),
    "zero-7.5b": GPT2(width=4096, depth=36, heads=32, vocabulary=51200, positions=2048),
    "zero-128b": GPT2(width=8192, depth=158, heads=64, vocabulary=51200, positions=2048),
    "zero-1t": GPT2(width=25600, depth=128, heads=160, vocabulary=51200, positions=2048),
}
"""The presets whose activations can be counted too.

GPT-3's dimensions are those of Brown et al. (arXiv:2005.14165, table 2.1). `zero-*` are the three sizes of
the ZeRO paper's Table 1 (arXiv:1910.02054), which gives numbers of parameters and no shapes. 7.5B and 1T have
the shapes of Megatron-LM's models of these sizes (arXiv:2104.04473, table 1). No published model has 128B:
ours is 8,192 wide, the width of the ZeRO paper's runs of 100B and more, and as deep as comes nearest to 128B.
"""

MODELS: dict[str, Architecture] = {**TRANSFORMERS, "mlp-tiny": MLP((64, 256, 256, 10))}
"""All presets: those of TRANSFORMERS, and an MLP of 85,002 parameters to try things on."""


def shapes(name: str) -> tuple[ParamShape, ...]:
    """The parameters of a published model, in registration order.

    >>> gpt2 = shapes("gpt2")
    >>> len(gpt2), sum(param.numel for param in gpt2), gpt2[0]
    (148, 124439808, ParamShape(name='transformer.wte.weight', shape=(50257, 768)))

    Raises:
        ValueError: the name is not in MODELS.
    """
    check_name("model", name, MODELS)
    return MODELS[name].shapes()


def specs(shapes: Iterable[ParamShape], dtype: str = "float32") -> list[ParamSpec]:
    """Shapes as the parameters of one trainable group, which is what partitions and schedules take.

    >>> specs([ParamShape("weight", (2, 3))], dtype="bfloat16")
    [ParamSpec(numel=6, dtype='bfloat16', device='cpu', group=0, trainable=True, name='weight', shape=(2, 3),
     whole=False)]
    """
    return [ParamSpec(param.numel, dtype, name=param.name, shape=param.shape) for param in shapes]


def blocks(params: Iterable[ParamShape | ParamSpec]) -> list[list[int]]:
    """The units in which stage 3 gathers parameters: what lies outside every block, then block by block.

    A block is what has a number in its name: `transformer.h.3.mlp.c_fc.weight` belongs to `transformer.h.3`,
    and the first number counts. Embeddings, the last norm and the head have none; they make the root unit.

    >>> units = blocks(shapes("gpt2"))
    >>> len(units), units[0], units[1][:3], units[12][-1]
    (13, [0, 1, 146, 147], [2, 3, 4], 145)

    Args:
        params: in registration order.
    Returns:
        Numbers of parameters. The first list is the root's, which is empty if every name has a number; if
        none has, all are in it.
    Source: the groups of torch.distributed.fsdp.fully_shard, called on each block and last on the model.
    """
    return [list(unit) for unit in _blocks(tuple(param.name for param in params))]


@lru_cache(maxsize=16)
def _blocks(names: tuple[str, ...]) -> list[list[int]]:
    root: list[int] = []
    units: dict[tuple[str, ...], list[int]] = {}
    for index, name in enumerate(names):
        path = name.split(".")
        number = next((place for place, part in enumerate(path) if part.isdecimal()), None)
        unit = root if number is None else units.setdefault(tuple(path[: number + 1]), [])
        unit.append(index)
    return [root, *units.values()]


def matrices_whole(params: Sequence[ParamSpec]) -> list[ParamSpec]:
    """The matrices of the blocks marked `whole`, which Muon orthogonalizes, and in a group of their own.

    >>> sum(param.whole for param in matrices_whole(specs(shapes("gpt2"))))                # 4 in each block
    48

    Source: torch.optim.Muon's advice: hidden layers; AdamW for embeddings, head, norms and biases.
    """
    units = blocks(params)[1:]
    hidden = {number for unit in units for number in unit if len(params[number].shape) == 2}
    return [
        param._replace(whole=number in hidden, group=int(number in hidden))
        for number, param in enumerate(params)
    ]


# -------------------------------------------------------------------------------------- a configuration

LARGEST_SIZE = 2**31 - 1
"""Of a dimension in a configuration."""

MOST_BLOCKS = 10_000
"""In a configuration. Each is listed tensor by tensor; the deepest model among the presets has 158."""

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


def from_config(config: Mapping[str, Any]) -> GPT2 | Llama | Decoder:
    """The architecture that a Hugging Face configuration describes, as read from its `config.json`.

    >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    >>> from_config({"model_type": "gpt2", **sizes})
    GPT2(width=8, depth=1, heads=2, vocabulary=10, positions=4, dropout=True, head=None)
    >>> reward = {"architectures": ["GPT2ForSequenceClassification"], "num_labels": 1}
    >>> from_config({"model_type": "gpt2", **sizes, **reward}).head
    Head(name='score', outputs=1, bias=False)

    Args:
        config: of a dense decoder, whose `model_type` is "gpt2" or in `decoders.FAMILIES`, and its sizes.
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
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in MIXTURES:
        raise ValueError(
            f"model_type {kind!r} is a mixture of experts, whose routing and expert parallelism are not "
            "modelled. Its memory can be had from the module itself: from_module."
        )
    if not isinstance(kind, str) or kind not in ("gpt2", *FAMILIES):
        raise ValueError(
            f"model_type {kind!r} is not known; known are 'gpt2', {', '.join(map(repr, FAMILIES))}. "
            "Of any other model, take the parameters from the module itself: from_module."
        )
    _refuse_quantized(config)
    for key in ("dtype", "torch_dtype"):
        if not isinstance(config.get(key), str | None):
            raise ValueError(f"{key} is {config[key]!r}, which is no name of a dtype, such as 'bfloat16'.")
    head = _head(kind, config)
    if kind != "gpt2":
        return _decoder(kind, FAMILIES[kind], config, head)
    sizes = _sizes(config, _GPT2_KEYS)
    accepted = {"n_inner": 4 * sizes["width"], "tie_word_embeddings": True, "add_cross_attention": False}
    _refuse_other(config, accepted)
    _divides(config, "n_head", "n_embd")
    dropout = config.get("resid_pdrop", 0.1)
    if not isinstance(dropout, int | float):
        raise ValueError(f"resid_pdrop is {dropout!r}, which is no number.")
    return GPT2(**sizes, dropout=bool(dropout), head=head)


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    """Refuse weights that were rounded to few bits, which no optimizer updates."""
    for key in ("quantization_config", "compression_config"):
        how = config.get(key)
        if how is not None:
            said = how if isinstance(how, dict) else {}
            method = ", ".join(f"{name} {said[name]!r}" for name in _QUANTIZED_BY if name in said)
            raise ValueError(
                f"{key} ({method or 'without a quant_method'}) says that the weights are quantized, and an "
                "optimizer such as AdamW cannot update quantized weights. Take the config.json of the model "
                "before it was quantized; or remove the entry, to simulate that model with all of its "
                "parameters trained."
            )


_QUANTIZED_BY = ("quant_method", "bits", "load_in_4bit", "load_in_8bit")

HEADS = ("ForCausalLM", "LMHeadModel", "Model", "ForSequenceClassification", "ForTokenClassification")
"""How the names end of transformers' classes whose output heads are known."""


def _head(kind: str, config: Mapping[str, Any]) -> Head | None:
    """What is in place of the output head over the vocabulary, by the class in `architectures`."""
    named = config.get("architectures")
    if named is None or named == []:
        return None
    # As in OlmoForCausalLM, GPTNeoXModel, Gemma3ForCausalLM and Gemma3TextModel.
    begins = kind.replace("_", "").removesuffix("text")
    found = None
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        found = re.fullmatch(f"{begins}(?:text)?({'|'.join(HEADS)})", named[0], re.IGNORECASE)
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


def _decoder(kind: str, family: Family, config: Mapping[str, Any], head: Head | None) -> Llama | Decoder:
    _refuse_other(config, family.fixed)
    if kind == "gpt_neox":  # its configuration has no such size
        config = {**config, "num_key_value_heads": config.get("num_attention_heads")}
    absent = {
        "num_key_value_heads": config.get("num_attention_heads")
        if family.key_value_heads is None
        else family.key_value_heads or None,
        "max_position_embeddings": family.positions,
        "head_dim": family.head_width,
    }
    # Where transformers' own classes write null, they mean the default.
    full = {**config, **{key: value for key, value in absent.items() if config.get(key) is None}}
    keys = _KEYS if full.get("head_dim") is None else _KEYS | {"head_dim": "head_dim"}
    sizes = _sizes(full, keys)
    if "head_dim" not in sizes:
        _divides(full, "num_attention_heads", "hidden_size")
    _divides(full, "num_key_value_heads", "num_attention_heads")
    tied = _flag(config, "tie_word_embeddings", family.tied)
    options = tuple(option for option, usual in family.options.items() if _flag(config, option, usual))
    if kind in ("llama", "mistral") and not options:
        return Llama(**sizes, tied=tied, head=head)
    return Decoder(kind, **sizes, tied=tied, options=options, head=head)


def _flag(config: Mapping[str, Any], key: str, usual: bool) -> bool:
    """An option that is true or false; `usual` where it is absent or null."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"{key} is {value!r}, and must be true or false.")
    return usual if value is None else value


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


def _refuse_other(config: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    """Refuse what would change the parameters in a way that `shapes` does not know."""
    for key, value in accepted.items():
        if config.get(key) not in (None, value):
            raise ValueError(
                f"{key} {config[key]!r} changes the parameters in a way that is not counted here; accepted: "
                f"{value!r}. Take the parameters from the module itself: from_module."
            )


# ------------------------------------------------------------------------------------- a module at hand


def from_module(module: Any) -> list[ParamSpec]:
    """The parameters of a module, with their dtype, device, name and `requires_grad`.

    Any object with torch's `named_parameters()` will do, so torch is not imported here. A module built under
    `torch.device("meta")` has shapes but takes no memory: a model too large for this machine can be planned.

    >>> import torch
    >>> from_module(torch.nn.Linear(3, 2, device="meta", dtype=torch.bfloat16))[0]
    ParamSpec(numel=6, dtype='bfloat16', device='meta', group=0, trainable=True, name='weight', shape=(2, 3),
     whole=False)
    """
    return [
        ParamSpec(
            numel=param.numel(),
            dtype=str(param.dtype).removeprefix("torch."),
            device=str(param.device),
            trainable=param.requires_grad,
            name=name,
            shape=tuple(param.shape),
        )
        for name, param in module.named_parameters()
    ]


def ready_order(module: Any, backward: Callable[[], object]) -> list[int]:
    """The order in which a backward pass completes the gradients: what DDP sorts its buckets by.

    Nearly the reverse of registration, but not quite. A linear layer's bias comes before its weight, which
    is the reverse; a normalisation or convolution hands out both at once, weight first, which is not. A tied
    weight is complete at its last use on the way back, so an embedding that is also the head comes last.

    Args:
        module: anything with torch's `named_parameters()`.
        backward: runs forward and backward once, on any input. It leaves gradients behind: clear them.
    Returns:
        Positions in `named_parameters()`; parameters that got no gradient are absent.
    """
    order: list[int] = []

    def note(index: int) -> Callable[[Any], None]:
        return lambda param: order.append(index)

    hooks = [
        param.register_post_accumulate_grad_hook(note(index))
        for index, (_, param) in enumerate(module.named_parameters())
        if param.requires_grad
    ]
    try:
        backward()
    finally:
        for hook in hooks:
            hook.remove()
    return order


def _linear(name: str, inputs: int, outputs: int) -> tuple[ParamShape, ParamShape]:
    return ParamShape(f"{name}.weight", (inputs, outputs)), ParamShape(f"{name}.bias", (outputs,))


def _norm(name: str, width: int) -> tuple[ParamShape, ParamShape]:
    return ParamShape(f"{name}.weight", (width,)), ParamShape(f"{name}.bias", (width,))
