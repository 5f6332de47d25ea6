"""Sizes of a model, layer by layer, on which its activations and kernels depend.

A `Layer` is one kind of block: what mixes the tokens of a sequence, and what is done with each token alone.
Models whose blocks are alike have one layer; a mixture of experts whose first blocks are dense has two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


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


class BlockKind(NamedTuple):
    """The structure of a transformer's block, as far as its activations and its kernels depend on it.

    Args:
        gated: the MLP has a gate: three matrices, not two.
        dropout: of attention's scores and of both results, as GPT-2 has it.
        pre_norms: how many norms of the residual stream there are whose results are multiplied by weights.
        post_norms: how many results are normed before they are added to the stream.
        qk_norms: queries and keys are normed.
        rotary: queries and keys are rotated; positions have no embedding.
        fused_qkv: queries, keys and values are one product.
    """

    gated: bool = True
    dropout: bool = False
    pre_norms: int = 2
    post_norms: int = 0
    qk_norms: bool = False
    rotary: bool = True
    fused_qkv: bool = False


class Kept(NamedTuple):
    """A tensor that autograd keeps of a block.

    Args:
        numel: elements for each token.
        role: "input" of the block; "stream", its sum with attention's result; "product", the result of a
            matrix product; "operand", what is computed from these for the next product; "pointwise", what no
            product reads, so that a compiler computes it again where it is read; "attention", its result;
            "scores" of it; "statistics" of norms and attention; "mask" of dropout.
        nbytes: of an element; 0 for those of the model's dtype.
    """

    name: str
    numel: float
    role: str
    nbytes: int = 0


class Matrix(NamedTuple):
    """A weight of a block that activations are multiplied with.

    Args:
        copies: how many such weights there are, as of experts.
        share: the share of the tokens that each of them is given, if experts get as many as others.
    """

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    share: float = 1.0


class Layer(NamedTuple):
    """One kind of block, of which a model has `number`.

    Args:
        kind: what it is made of, as far as its family tells.
        hidden: elements of the activation function's results, for each token: of all experts that it goes to.
        heads, key_value_heads, head_width: of attention; 0 heads where nothing is attended to.
        value_width: elements of a value's head.
        window: tokens that attention sees, at most; 0 for the whole sequence.
        mixed: what autograd keeps of the mixer up to the scores; None for what `kind` has.
        attended: elements of the mixer's result; 0 where the block has no mixer.
        after: what is kept between that result and the last product.
        rotated: elements that are rotated.
        mlp: what autograd keeps of the MLP; None for what `kind` has.
        moved: elements that are brought to experts and back.
        products: the weights of all matrix products, in the order of registration.
        last: those whose results nothing in backward reads.
        biased: elements of linear layers' results that have a bias.
        layer_norms: the block's norms have biases, so they are LayerNorms and no RMSNorms.
    """

    width: int
    number: int
    kind: BlockKind
    hidden: int
    heads: int
    key_value_heads: int
    head_width: int
    value_width: int
    window: int = 0
    mixed: tuple[Kept, ...] | None = None
    attended: int = 0
    after: tuple[Kept, ...] = ()
    rotated: int = 0
    mlp: tuple[Kept, ...] | None = None
    moved: int = 0
    products: tuple[Matrix, ...] = ()
    last: tuple[Matrix, ...] = ()
    biased: int = 0
    layer_norms: bool = False

    @property
    def has_mlp(self) -> bool:
        """Whether there is one."""
        return self.hidden > 0

    def pairs(self, sequence: int) -> float:
        """Return the pairs of a query and a key that it attends to in a sequence, under a causal mask.

        >>> alike(16, 1, BlockKind(), 32, 2, 2, 8, window=2).pairs(4)
        7.0
        """
        seen = min(self.window or sequence, sequence)
        return seen * (seen + 1) / 2 + float(seen) * (sequence - seen)


def alike(
    width: int,
    number: int,
    kind: BlockKind,
    hidden: int,
    heads: int,
    key_value_heads: int,
    head_width: int,
    *,
    window: int = 0,
    shapes: Sequence[ParamShape] = (),
) -> Layer:
    """The layer of a model whose blocks are alike: attention of equal heads and a dense MLP.

    Args:
        shapes: of a block's parameters.
    """
    query, key = heads * head_width, key_value_heads * head_width
    products, last, biased, layer_norms = weights_of(shapes, share=1.0)
    return Layer(
        width, number, kind, hidden, heads, key_value_heads, head_width, head_width, window,
        attended=query, rotated=query + key, products=products, last=last, biased=biased,
        layer_norms=layer_norms,
    )  # fmt: skip


class Weights(NamedTuple):
    """Facts of a block's parameters on which its kernels depend; `Layer` has the same fields."""

    products: tuple[Matrix, ...]
    last: tuple[Matrix, ...]
    biased: int
    layer_norms: bool


def weights_of(shapes: Sequence[ParamShape], share: float) -> Weights:
    """The weights of a block's matrix products, and its biases.

    >>> block = [ParamShape("mlp.gate.weight", (4, 8)), ParamShape("mlp.experts.down_proj", (4, 8, 6))]
    >>> for one in weights_of(block, share=0.5).products:
    ...     print(one)
    Matrix(name='mlp.gate', inputs=8, outputs=4, copies=1, share=1.0)
    Matrix(name='mlp.experts.down_proj', inputs=6, outputs=8, copies=4, share=0.5)

    Args:
        share: of the tokens, that an expert is given.
    """
    products, biased, layer_norms = [], 0, False
    for name, shape in shapes:
        stem, _, last = name.rpartition(".")
        if is_of_experts(name):
            if len(shape) == 3:
                products.append(Matrix(name, shape[2], shape[1], shape[0], share))
            else:
                biased += round(share * math.prod(shape))
        elif last == "weight" and len(shape) == 2:
            products.append(Matrix(stem, shape[1], shape[0]))
        elif last == "bias" and not _is_norm(stem.rpartition(".")[2]):
            biased += shape[0]
        elif last == "bias":
            layer_norms = layer_norms or "." not in stem  # of the block, and not of what is inside
    names = [(one, one.name.split(".")) for one in products]
    ends = [one for one, name in names if name[-1] in LAST and "attn" not in name[0]]
    return Weights(tuple(products), tuple(ends), biased, layer_norms)


LAST = ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "w2", "output_linear")
"""The names of an MLP's last layer."""


def is_of_experts(name: str) -> bool:
    """Whether a parameter is of experts that not all tokens go to.

    >>> is_of_experts("layers.3.mlp.experts.down_proj"), is_of_experts("mlp.shared_experts.up_proj.weight")
    (True, False)
    """
    return ".experts." in f".{name}"


def _is_norm(layer: str) -> bool:
    return "norm" in layer or layer.startswith("ln_")
