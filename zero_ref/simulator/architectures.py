"""Architectures: what the simulator asks of a model, and the families that are not read from tables.

To add one, write a frozen dataclass of its dimensions with a method `shapes`, in the order in which its
module registers the parameters; a transformer has the attributes of `Transformer` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from zero_ref.simulator.decoders import Block, Decoder, Head
from zero_ref.simulator.layers import BlockKind, Layer, ParamShape, alike


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
        """The structure of a block."""

    @property
    def vocabulary(self) -> int:
        """Tokens that there are, each with a row in the embedding."""

    @property
    def head(self) -> Head | None:
        """In place of the output head over the vocabulary."""

    @property
    def positions(self) -> int:
        """Tokens in a sequence, at most."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The kinds of blocks, and how many there are of each."""


def outputs_of(architecture: Transformer) -> int:
    """Return the number of outputs for each token: the entries of the vocabulary, the labels, or 0.

    >>> outputs_of(GPT2(width=8, depth=1, heads=2)), outputs_of(GPT2(8, 1, 2, head=Head("score", 1)))
    (50257, 1)
    """
    return architecture.vocabulary if architecture.head is None else architecture.head.outputs


def trained(architecture: Architecture) -> tuple[ParamShape, ...]:
    """The parameters of what is simulated, training on text: all but those of a vision tower.

    >>> model = GPT2(width=8, depth=1, heads=2)
    >>> trained(model) == model.shapes()
    True
    """
    return architecture.language() if isinstance(architecture, Decoder) else architecture.shapes()


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
        """The structure of a block."""
        return BlockKind(gated=False, dropout=self.dropout, rotary=False, fused_qkv=True)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """One kind of block."""
        # The weights are (inputs, outputs), where other families have them the other way round.
        of_block = [ParamShape(name, shape[::-1]) for name, shape in self._of_block()]
        return (_alike(self, of_block),)

    def _of_block(self) -> list[ParamShape]:
        d = self.width
        return [
            *_norm("ln_1", d),
            *_linear("attn.c_attn", d, 3 * d),
            *_linear("attn.c_proj", d, d),
            *_norm("ln_2", d),
            *_linear("mlp.c_fc", d, 4 * d),
            *_linear("mlp.c_proj", 4 * d, d),
        ]

    def shapes(self) -> tuple[ParamShape, ...]:
        d = self.width
        listed = [
            ParamShape("transformer.wte.weight", (self.vocabulary, d)),
            ParamShape("transformer.wpe.weight", (self.positions, d)),
        ]
        for number in range(self.depth):
            listed += [
                ParamShape(f"transformer.h.{number}.{name}", shape) for name, shape in self._of_block()
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
        window: tokens that attention sees, at most; 0 for the whole sequence.
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
    window: int = 0

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def kind(self) -> BlockKind:
        """The structure of a block."""
        return BlockKind()

    def shapes(self) -> tuple[ParamShape, ...]:
        return self._decoder.shapes()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """One kind of block."""
        return (_alike(self, self._decoder.tensors_of_block(Block()), self.window),)

    @property
    def _decoder(self) -> Decoder:
        return Decoder("llama", **{name: value for name, value in vars(self).items() if name != "window"})


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


def _alike(model: GPT2 | Llama, of_block: Sequence[ParamShape], window: int = 0) -> Layer:
    return alike(
        model.width,
        model.depth,
        model.kind,
        model.hidden,
        model.heads,
        model.key_value_heads,
        model.head_width,
        window=window,
        shapes=of_block,
    )


def _linear(name: str, inputs: int, outputs: int) -> tuple[ParamShape, ParamShape]:
    return ParamShape(f"{name}.weight", (inputs, outputs)), ParamShape(f"{name}.bias", (outputs,))


def _norm(name: str, width: int) -> tuple[ParamShape, ParamShape]:
    return ParamShape(f"{name}.weight", (width,)), ParamShape(f"{name}.bias", (width,))
