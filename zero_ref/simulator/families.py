"""The description of a family of decoders: a table of the tensors of a block, and of its other parts.

A tensor is written as `name(rows,columns)`, and as `name(rows,columns)+option` with a bias, which it has
where the option is true, or always where no option follows the plus. `name[...]` is a parameter whose name
has no `.weight` behind it. A size is a sum of products of numbers and symbols. These are the symbols:

    d, h, v, n      width; width of the MLP; entries of the vocabulary; number of blocks
    a, g, e         query heads; heads of keys and of values; elements of a head
    q, k, qkv, hh   all query heads, a*e; all key heads, g*e; q+2*k; 2*h
    x, c, m, s      experts; those that a token goes to; width of one; of the MLP that all tokens go through

and those of SIZES, which says where a configuration has them. `configuration` reads one. To add a family, add
it to `dense` or `mixtures`: tests/simulator/test_decoders.py builds it with transformers, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zero_ref.simulator.layers import BlockKind as BlockKind

SIZES: dict[str, str] = {
    "x": "num_experts|num_local_experts|n_routed_experts",
    "c": "num_experts_per_tok|num_experts_per_token",
    "m": "moe_intermediate_size",
    "s": "n_shared_experts*moe_intermediate_size|num_shared_experts*moe_intermediate_size",
    # Latent attention: ranks of the two compressions, parts of a head, and a value's elements.
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "index_heads": "index_n_heads",
    "index_width": "index_head_dim",
    # Linear attention: key heads and their elements, value heads and theirs, taps of the convolution.
    "lk": "linear_num_key_heads",
    "le": "linear_key_head_dim",
    "lv": "linear_num_value_heads",
    "lw": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
    # Mamba-2: heads, their elements, groups, states.
    "mh": "mamba_num_heads|mamba_n_heads",
    "me": "mamba_head_dim|mamba_d_head",
    "mg": "n_groups|mamba_n_groups",
    "ms": "ssm_state_size|mamba_d_state",
    "mt": "conv_kernel|mamba_d_conv",
}
"""Keys of a configuration for each further size, or products of keys; the first that is there counts."""


class Mixer(NamedTuple):
    """The part of a block that mixes the tokens of a sequence.

    Args:
        tensors: of its own, which stand where a family's block has `{mixer}`.
        kept: what autograd keeps of it up to the scores, as `name(elements for each token):role`, and a digit
            for the bytes of an element that is not of the model's dtype; None for queries, keys and values as
            the family's `kind` has them.
        scores: heads of attention, the elements of a query's head, and those of a value's; empty for what
            computes no scores.
        attended: elements of the result, before the last product.
        after: what is kept between result and last product, written as `kept`.
        rotated: elements that are rotated.
        missing: what of it is not counted in activations and time, for people; empty where all is.
    """

    tensors: str = ""
    kept: str | None = None
    scores: tuple[str, ...] = ("a", "e", "e")
    attended: str = "q"
    after: str = ""
    rotated: str = "q+k"
    missing: str = ""


class Mlp(NamedTuple):
    """The part of a block that computes with each token alone.

    Args:
        tensors: of its own, which stand where a family's block has `{mlp}`.
        kept: what autograd keeps of it, written as `Mixer.kept`; None for what the family's `kind` keeps.
        width: what takes the place of the width of the MLP: elements of the activation function's results.
        moved: elements that are brought to experts and back, for each token.
        missing: as `Mixer.missing`.
    """

    tensors: str = ""
    kept: str | None = None
    width: str = "h"
    moved: str = "0"
    missing: str = ""


class Family(NamedTuple):
    """The parameters of a family, and what a configuration may leave out.

    Args:
        block: the tensors of a block, in registration order; `{mixer}` and `{mlp}` stand for those that
            differ from one block to another.
        last: those behind the blocks, but for the head.
        embedding: those before the blocks.
        base, layers: what their names begin with.
        options: that add biases, and what they are where a configuration does not say.
        fixed: options that change the parameters in another way, and the only value that is counted here.
        absent: what transformers takes for sizes that published configurations leave out.
        head_width: of a configuration that does not say; None for the width divided by the heads.
        key_value_heads: likewise; None for as many as heads, 0 where it must be said.
        positions: likewise.
        tied: likewise: the output head is the embedding.
        head_bias: a plus if the output head has a bias; an option behind it if it has one where that is true.
        kind: what a block is made of.
        mixers, mlps: by the names that `rule` gives them.
        rule: how blocks are found in a configuration: a name in `configuration.RULES`.
        windows: which layers see a window of the sequence only, where `layer_types` does not say: a name in
            `configuration.WINDOWS`.
        sizes: where a configuration has sizes, in place of SIZES.
        keys: where a configuration has the sizes that every family has, if that is another key.
        ahead: the tensors of a module of multi-token prediction, but for its block, and the mixer and the MLP
            of that block, of which an empty mixer is that of the last block; None where none is known.
        named: what the names of its classes begin with, if that is not the model type.
    """

    block: str
    last: str = "norm(d)"
    embedding: str = "embed_tokens(v,d)"
    base: str = "model"
    layers: str = "layers"
    options: Mapping[str, bool] = {}
    fixed: Mapping[str, Any] = {}
    absent: Mapping[str, Any] = {}
    head_width: int | None = None
    key_value_heads: int | None = None
    positions: int = 4096
    tied: bool = False
    head_bias: str = ""
    kind: BlockKind = BlockKind()
    mixers: Mapping[str, Mixer] = {"": Mixer()}
    mlps: Mapping[str, Mlp] = {"": Mlp()}
    rule: str = ""
    windows: str = ""
    sizes: Mapping[str, str] = {}
    keys: Mapping[str, str] = {}
    ahead: tuple[str, str, str] | None = None
    named: str = ""
