"""Architectures: what the simulator asks of a model, and the few that are spelled out here.

GPT-2, Llama and its like, and two kinds of mixtures are in presets and in the explorers, which run without
torch. Of any other model `lab.tracing` makes a `traced.Traced`. To add one here, write a frozen dataclass of
its dimensions with a method `shapes`, in the order in which its module registers the parameters; a
transformer has the attributes of `Transformer` too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from zero_ref.simulator.layers import BlockKind, Kept, Layer, ParamShape, alike, is_of_experts, weights_of


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
    def tied(self) -> bool:
        """Whether the output head is the token embedding."""

    @property
    def active(self) -> int:
        """The parameters that a token goes through: of experts those it is sent to.

        The embedding counts whole, of which a token takes one row.
        """

    @property
    def positions(self) -> int:
        """Tokens in a sequence, at most."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The kinds of blocks, and how many there are of each."""


@dataclass(frozen=True)
class GPT2:
    """GPT-2: learned positions, LayerNorm, biases, an output head that is the token embedding.

    GPT-3 and Megatron-LM's GPT models have the same parameters. Names, order and shapes are those of
    transformers' GPT2LMHeadModel, whose linear layers keep their weights as (inputs, outputs).
    Source: Radford et al., 2019; the `openai-community/gpt2*` configurations.

    Args:
        dropout: of scores and results. No parameter depends on it, but activations and kernels do.
    """

    width: int
    depth: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024
    dropout: bool = True

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
    def tied(self) -> bool:
        """It always is."""
        return True

    @property
    def active(self) -> int:
        """All."""
        return sum(param.numel for param in self.shapes())

    @property
    def layers(self) -> tuple[Layer, ...]:
        """One kind of block."""
        # The weights are (inputs, outputs), where other models have them the other way round.
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
        return (*listed, *_norm("transformer.ln_f", d))


@dataclass(frozen=True)
class Llama:
    """Llama: rotary positions, RMSNorm, no biases, a gated MLP, few key heads, an output head of its own.

    Names, order and shapes are those of transformers' LlamaForCausalLM, (outputs, inputs). With the options
    it is Mistral, Qwen2, Qwen3 or OLMo-2, as `configuration.LLAMAS` says.
    Source: Touvron et al. (arXiv:2302.13971); Llama 3: arXiv:2407.21783 and its published configurations.

    Args:
        hidden: width of the gated MLP.
        positions: 8,192 is what Llama 3 was first trained with (section 3.4.1). No parameter depends on it.
        head_dim: elements of a head; 0 for `width / heads`.
        tied: the output head is the token embedding.
        window: tokens that attention sees, at most; 0 for the whole sequence.
        qkv_bias: queries, keys and values have a bias.
        qk_norms: norms of queries and keys: of each "head", of "all" heads together, or none.
        post_norms: results are normed before they are added to the stream, in place of what goes in.
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
    window: int = 0
    qkv_bias: bool = False
    qk_norms: str = ""
    post_norms: bool = False

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def kind(self) -> BlockKind:
        """The structure of a block."""
        before, behind = (0, 2) if self.post_norms else (2, 0)
        return BlockKind(pre_norms=before, post_norms=behind, qk_norms=bool(self.qk_norms))

    @property
    def active(self) -> int:
        """All."""
        return sum(param.numel for param in self.shapes())

    @property
    def layers(self) -> tuple[Layer, ...]:
        """One kind of block."""
        return (_alike(self, self._of_block(), self.window),)

    def _of_block(self) -> list[ParamShape]:
        d, query, key = self.width, self.heads * self.head_width, self.key_value_heads * self.head_width
        listed = _attention(d, query, key, bias=self.qkv_bias)
        if self.qk_norms:
            widths = (self.head_width,) * 2 if self.qk_norms == "head" else (query, key)
            listed += [ParamShape(f"self_attn.{name}_norm.weight", (one,)) for name, one in zip("qk", widths)]
        first, second = (
            ("post_attention", "post_feedforward") if self.post_norms else ("input", "post_attention")
        )
        norms = [ParamShape(f"{name}_layernorm.weight", (d,)) for name in (first, second)]
        return [*listed, *_gated("mlp", d, self.hidden), *norms]

    def shapes(self) -> tuple[ParamShape, ...]:
        return _decoder(self, [self._of_block()] * self.depth)


class Latent(NamedTuple):
    """Multi-head latent attention (arXiv:2405.04434), its keys and values written out for training.

    Args:
        query_rank, key_rank: elements of the compressed query, and of the compressed key and value.
        nope, rope: elements of a query's head that are not rotated, and that are.
        value: elements of a value's head.
    """

    query_rank: int
    key_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: Qwen3's, or with latent attention and an expert for all tokens DeepSeek-V3's.

    Names, order and shapes are those of transformers' Qwen3MoeForCausalLM and DeepseekV3ForCausalLM.
    Source: Qwen3 (arXiv:2505.09388) and DeepSeek-V3 (arXiv:2412.19437), and their published configurations.

    Args:
        hidden: width of the MLP of blocks without experts.
        experts, chosen: those of a block, and those that a token goes to.
        expert_width: of the MLP of each.
        shared_width: of the MLP that all tokens go through; 0 where there is none.
        dense: so many blocks at the beginning have no experts.
        latent: of attention; None for heads with norms of queries and keys, as Qwen3 has them.
    """

    width: int
    depth: int
    hidden: int
    heads: int
    key_value_heads: int
    vocabulary: int
    experts: int
    chosen: int
    expert_width: int
    shared_width: int = 0
    dense: int = 0
    latent: Latent | None = None
    positions: int = 4096
    head_dim: int = 0
    tied: bool = False

    @property
    def head_width(self) -> int:
        """Elements of a head of queries."""
        if self.latent is not None:
            return self.latent.nope + self.latent.rope
        return self.head_dim or self.width // self.heads

    @property
    def kind(self) -> BlockKind:
        """The structure of a block."""
        return BlockKind(qk_norms=self.latent is None)

    @property
    def active(self) -> int:
        """The parameters that a token goes through."""
        inside = sum(param.numel for param in self.shapes() if is_of_experts(param.name))
        outside = sum(param.numel for param in self.shapes()) - inside
        return outside + inside * self.chosen // self.experts

    def shapes(self) -> tuple[ParamShape, ...]:
        return self._shapes

    @cached_property
    def _shapes(self) -> tuple[ParamShape, ...]:
        return _decoder(self, [self._of_block(number >= self.dense) for number in range(self.depth)])

    def _of_block(self, sparse: bool) -> list[ParamShape]:
        d, experts = self.width, self.experts
        mlp = _gated("mlp", d, self.hidden)
        if sparse:
            mlp = [
                ParamShape("mlp.experts.gate_up_proj", (experts, 2 * self.expert_width, d)),
                ParamShape("mlp.experts.down_proj", (experts, d, self.expert_width)),
                ParamShape("mlp.gate.weight", (experts, d)),
            ]
            mlp += _gated("mlp.shared_experts", d, self.shared_width) if self.shared_width else []
        norms = [ParamShape(f"{name}_layernorm.weight", (d,)) for name in ("input", "post_attention")]
        return [*self._of_attention(), *mlp, *norms]

    def _of_attention(self) -> list[ParamShape]:
        d, heads, each = self.width, self.heads, self.head_width
        if self.latent is None:
            norms = [ParamShape(f"self_attn.{name}_norm.weight", (each,)) for name in "qk"]
            return [*_attention(d, heads * each, self.key_value_heads * each), *norms]
        query, key, nope, rope, value = self.latent
        sizes = {
            "q_a_proj": (query, d),
            "q_a_layernorm": (query,),
            "q_b_proj": (heads * each, query),
            "kv_a_proj_with_mqa": (key + rope, d),
            "kv_a_layernorm": (key,),
            "kv_b_proj": (heads * (nope + value), key),
            "o_proj": (d, heads * value),
        }
        return [ParamShape(f"self_attn.{name}.weight", shape) for name, shape in sizes.items()]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Blocks without experts and blocks with them."""
        numbers = Counter(number >= self.dense for number in range(self.depth))
        return tuple(self._layer(sparse, number) for sparse, number in numbers.items())

    def _layer(self, sparse: bool, number: int) -> Layer:
        share = self.chosen / self.experts
        products, last, biased, layer_norms = weights_of(self._of_block(sparse), share)
        attended = self.heads * (self.head_width if self.latent is None else self.latent.value)
        rotated = (self.heads + self.key_value_heads) * self.head_width
        if self.latent is not None:
            rotated = (self.heads + 1) * self.latent.rope
        return Layer(
            self.width,
            number,
            self.kind,
            self.chosen * self.expert_width + self.shared_width if sparse else self.hidden,
            self.heads,
            self.key_value_heads,
            self.head_width,
            attended // self.heads,
            mixed=self._kept_of_latent(self.latent) if self.latent is not None else None,
            attended=attended,
            after=(Kept("heads together", attended, "operand"),) if self.latent is not None else (),
            rotated=rotated,
            mlp=self._kept_of_experts() if sparse else None,
            moved=2 * self.chosen * self.width if sparse else 0,
            products=products,
            last=last,
            biased=biased,
            layer_norms=layer_norms,
        )

    def _kept_of_latent(self, latent: Latent) -> tuple[Kept, ...]:
        """What autograd keeps of latent attention, up to the scores."""
        heads, (query, key, nope, rope, value) = self.heads, latent
        return (
            Kept("compressed query", query, "product"),
            Kept("normed query", query, "operand"),
            Kept("its norm", 1, "statistics", 4),
            Kept("compressed key and value", key + rope, "product"),
            Kept("normed", key, "operand"),
            Kept("norm", 1, "statistics", 4),
            Kept("keys and values", heads * (nope + value), "product"),
            Kept("query", heads * (nope + rope), "product"),
            Kept("key", heads * (nope + rope), "product"),
        )

    def _kept_of_experts(self) -> tuple[Kept, ...]:
        """What autograd keeps of experts, if `grouped_mm` of transformers computes all in one product."""
        chosen, width, shared = self.chosen, self.expert_width, self.shared_width
        kept = [
            Kept("rows", chosen * self.width, "operand"),
            Kept("gate and up", 2 * chosen * width, "product"),
            Kept("activation", chosen * width, "pointwise"),
            Kept("gated", chosen * width, "operand"),
            Kept("results", chosen * self.width, "operand"),
        ]
        if self.latent is None:
            kept += [
                Kept("weights", chosen, "operand"),
                Kept("scores", self.experts, "statistics", 4),
                Kept("chosen", chosen + 1, "statistics", 4),
                Kept("places", 4 * chosen, "statistics", 8),
            ]
        else:  # DeepSeek's router computes in 32 bits, and chooses groups of experts first
            kept += [
                Kept("weights", chosen, "statistics", 4),
                Kept("input in 32 bits", self.width, "statistics", 4),
                Kept("scores", self.experts, "statistics", 4),
                Kept("chosen", chosen + 1, "statistics", 4),
                Kept("places", 5 * chosen + 1, "statistics", 8),
                Kept("left out", self.experts, "statistics", 1),
            ]
        names = {"shared gate": "product", "shared up": "product"}
        names |= {"shared activation": "pointwise", "shared gated": "operand"}
        return (*kept, *(Kept(name, shared, role) for name, role in names.items() if shared))


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


def _decoder(model: Llama | Mixture, blocks: Sequence[Sequence[ParamShape]]) -> tuple[ParamShape, ...]:
    """The parameters of a decoder of these blocks: embedding, blocks, a norm, a head if it is not tied."""
    embedding = (model.vocabulary, model.width)
    listed = [ParamShape("model.embed_tokens.weight", embedding)]
    for number, block in enumerate(blocks):
        listed += [ParamShape(f"model.layers.{number}.{name}", shape) for name, shape in block]
    listed.append(ParamShape("model.norm.weight", (model.width,)))
    return (*listed, *[ParamShape("lm_head.weight", embedding)][model.tied :])


def _attention(width: int, query: int, key: int, *, bias: bool = False) -> list[ParamShape]:
    listed = []
    for name, outputs in {"q": query, "k": key, "v": key}.items():
        listed.append(ParamShape(f"self_attn.{name}_proj.weight", (outputs, width)))
        listed += [ParamShape(f"self_attn.{name}_proj.bias", (outputs,))] * bias
    return [*listed, ParamShape("self_attn.o_proj.weight", (width, query))]


def _gated(name: str, width: int, hidden: int) -> list[ParamShape]:
    return [
        ParamShape(f"{name}.gate_proj.weight", (hidden, width)),
        ParamShape(f"{name}.up_proj.weight", (hidden, width)),
        ParamShape(f"{name}.down_proj.weight", (width, hidden)),
    ]


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
