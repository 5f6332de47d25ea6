"""Parameter shapes: of published models by name, or of a module at hand.

A model's memory and messages follow from its parameters' shapes, in registration order; no weights are
needed. To add a model of a family below, add a line to MODELS. To add a family, write a frozen dataclass of
its dimensions with a method `shapes`, in the order in which its module registers the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from zero_ref.partition import ParamSpec


class ParamShape(NamedTuple):
    """A parameter's name and shape.

    >>> ParamShape("wte", (50257, 768)).numel
    38597376
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Architecture(Protocol):
    """The dimensions of a model, from which its shapes follow."""

    def shapes(self) -> tuple[ParamShape, ...]:
        """All parameters, in registration order; one that is used twice (a tied head) is listed once."""


@dataclass(frozen=True)
class GPT2:
    """GPT-2: learned positions, LayerNorm, biases, an output head that is the token embedding.

    Names, order and shapes are those of transformers' GPT2LMHeadModel, whose linear layers keep their
    weights as (inputs, outputs). Source: Radford et al., 2019; the `openai-community/gpt2*` configurations.
    """

    width: int
    depth: int
    vocabulary: int = 50257
    positions: int = 1024

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
        return (*listed, *_norm("transformer.ln_f", d))


@dataclass(frozen=True)
class Llama:
    """Llama: rotary positions, RMSNorm, no biases, a gated MLP, few key heads, an output head of its own.

    Names, order and shapes are those of transformers' LlamaForCausalLM, (outputs, inputs).
    Source: Touvron et al. (arXiv:2302.13971); Llama 3: arXiv:2407.21783 and its published configurations.
    """

    width: int
    depth: int
    hidden: int
    heads: int
    key_value_heads: int
    vocabulary: int

    def shapes(self) -> tuple[ParamShape, ...]:
        d, hidden = self.width, self.hidden
        key_value = d // self.heads * self.key_value_heads
        listed = [ParamShape("model.embed_tokens.weight", (self.vocabulary, d))]
        for i in range(self.depth):
            block = f"model.layers.{i}"
            listed += [
                ParamShape(f"{block}.self_attn.q_proj.weight", (d, d)),
                ParamShape(f"{block}.self_attn.k_proj.weight", (key_value, d)),
                ParamShape(f"{block}.self_attn.v_proj.weight", (key_value, d)),
                ParamShape(f"{block}.self_attn.o_proj.weight", (d, d)),
                ParamShape(f"{block}.mlp.gate_proj.weight", (hidden, d)),
                ParamShape(f"{block}.mlp.up_proj.weight", (hidden, d)),
                ParamShape(f"{block}.mlp.down_proj.weight", (d, hidden)),
                ParamShape(f"{block}.input_layernorm.weight", (d,)),
                ParamShape(f"{block}.post_attention_layernorm.weight", (d,)),
            ]
        return (
            *listed,
            ParamShape("model.norm.weight", (d,)),
            ParamShape("lm_head.weight", (self.vocabulary, d)),
        )


MODELS: dict[str, Architecture] = {
    "gpt2": GPT2(width=768, depth=12),
    "gpt2-medium": GPT2(width=1024, depth=24),
    "gpt2-large": GPT2(width=1280, depth=36),
    "gpt2-xl": GPT2(width=1600, depth=48),
    "llama3-8b": Llama(width=4096, depth=32, hidden=14336, heads=32, key_value_heads=8, vocabulary=128256),
}


def shapes(name: str) -> tuple[ParamShape, ...]:
    """The parameters of a published model, in registration order.

    >>> gpt2 = shapes("gpt2")
    >>> len(gpt2), sum(param.numel for param in gpt2), gpt2[0]
    (148, 124439808, ParamShape(name='transformer.wte.weight', shape=(50257, 768)))

    Raises:
        ValueError: the name is not in MODELS.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}.")
    return MODELS[name].shapes()


def specs(shapes: Iterable[ParamShape], dtype: str = "float32") -> list[ParamSpec]:
    """Shapes as the parameters of one trainable group, which is what partitions and schedules take.

    >>> specs([ParamShape("weight", (2, 3))], dtype="bfloat16")
    [ParamSpec(numel=6, dtype='bfloat16', device='cpu', group=0, trainable=True, name='weight')]
    """
    return [ParamSpec(param.numel, dtype, name=param.name) for param in shapes]


# ------------------------------------------------------------------------------------- a module at hand


def from_module(module: Any) -> list[ParamSpec]:
    """The parameters of a module, with their dtype, device, name and `requires_grad`.

    Any object with torch's `named_parameters()` will do, so torch is not imported here. A module built under
    `torch.device("meta")` has shapes but takes no memory: a model too large for this machine can be planned.

    >>> import torch
    >>> from_module(torch.nn.Linear(3, 2, device="meta", dtype=torch.bfloat16))[0]
    ParamSpec(numel=6, dtype='bfloat16', device='meta', group=0, trainable=True, name='weight')
    """
    return [
        ParamSpec(
            numel=param.numel(),
            dtype=str(param.dtype).removeprefix("torch."),
            device=str(param.device),
            trainable=param.requires_grad,
            name=name,
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
