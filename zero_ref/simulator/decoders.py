"""Dense decoders of Hugging Face, family by family: the names and shapes of their parameters.

`models.from_config` reads a configuration of one of them. To add a family, add it to FAMILIES:
tests/test_decoders.py builds it with transformers, and compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


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


class Head(NamedTuple):
    """What a model computes from the last hidden states, where it is no head over the vocabulary.

    >>> REWARD = Head("score", 1)
    >>> REWARD.behind([ParamShape("model.norm.weight", (8,))], width=8)[1]
    ParamShape(name='score.weight', shape=(1, 8))
    >>> Head().behind([ParamShape("model.norm.weight", (8,))], width=8)
    (ParamShape(name='norm.weight', shape=(8,)),)

    Args:
        name: of the layer; empty where there is none, and names do not begin with the body's either.
        outputs: of the layer, for each token.
        bias: the layer has one.
    """

    name: str = ""
    outputs: int = 0
    bias: bool = False

    def behind(self, body: Iterable[ParamShape], width: int) -> tuple[ParamShape, ...]:
        """The parameters of the body and of this head."""
        if not self.name:
            return tuple(param._replace(name=param.name.partition(".")[2]) for param in body)
        layer = [ParamShape(f"{self.name}.weight", (self.outputs, width))]
        layer += [ParamShape(f"{self.name}.bias", (self.outputs,))] * self.bias
        return (*body, *layer)


class BlockKind(NamedTuple):
    """What a transformer's block is made of, as far as its activations and its kernels depend on it.

    Args:
        gated: the MLP has a gate: three matrices, not two.
        dropout: of attention's scores and of both results, as GPT-2 has it.
        pre_norms: how many norms of the residual stream there are whose results are multiplied by weights.
        post_norms: how many results are normed before they are added to the stream.
        qk_norms: queries and keys are normed.
        parallel: attention and MLP begin with the same values.
        rotary: queries and keys are rotated; positions have no embedding.
        fused_qkv: queries, keys and values are one product.
        fused_gate: gate and up are one product.
    """

    gated: bool = True
    dropout: bool = False
    pre_norms: int = 2
    post_norms: int = 0
    qk_norms: bool = False
    parallel: bool = False
    rotary: bool = True
    fused_qkv: bool = False
    fused_gate: bool = False


class Family(NamedTuple):
    """The parameters of a family, and what a configuration may leave out.

    A tensor is written as `name(rows,columns)`, and as `name(rows,columns)+option` with a bias, which it has
    where the option is true, or always where no option follows the plus. The sizes are d, the width; h, of
    the MLP; e, of a head; q and k, of all query and all key heads; qkv, of both and the values; hh, twice h;
    v, the vocabulary.

    Args:
        block: the tensors of a block, in registration order.
        last: those behind the blocks, but for the head.
        embedding, blocks: their names.
        options: that add biases, and what they are where a configuration does not say.
        fixed: options that change the parameters in another way, and the only value that is counted here.
        head_width: of a configuration that does not say; None for the width divided by the heads.
        key_value_heads: likewise; None for as many as heads, 0 where it must be said.
        positions: likewise.
        tied: likewise: the output head is the embedding.
        head_bias: the output head has a bias.
        kind: what a block is made of.
    """

    block: str
    last: str = "norm(d)"
    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    options: Mapping[str, bool] = {}
    fixed: Mapping[str, Any] = {}
    head_width: int | None = None
    key_value_heads: int | None = None
    positions: int = 4096
    tied: bool = False
    head_bias: bool = False
    kind: BlockKind = BlockKind()


_ATTENTION = (
    "self_attn.q_proj(q,d)+attention_bias self_attn.k_proj(k,d)+attention_bias "
    "self_attn.v_proj(k,d)+attention_bias self_attn.o_proj(d,q)+attention_bias "
)
_ATTENTION_PLAIN = _ATTENTION.replace("+attention_bias", "")
_ATTENTION_QKV_BIAS = _ATTENTION.replace("o_proj(d,q)+attention_bias", "o_proj(d,q)")
_GATED = "mlp.gate_proj(h,d)+mlp_bias mlp.up_proj(h,d)+mlp_bias mlp.down_proj(d,h)+mlp_bias "
_GATED_PLAIN = _GATED.replace("+mlp_bias", "")
_GATE_UP = "mlp.gate_up_proj(hh,d) mlp.down_proj(d,h) "
_UP_DOWN = "mlp.up_proj(h,d)+mlp_bias mlp.down_proj(d,h)+mlp_bias "
_NORMS = "input_layernorm(d) post_attention_layernorm(d) "
_NORMS_BIAS = "input_layernorm(d)+ post_attention_layernorm(d)+ "
_SANDWICH = _NORMS + "pre_feedforward_layernorm(d) post_feedforward_layernorm(d) "
_POST_NORMS = "post_attention_layernorm(d) post_feedforward_layernorm(d) "
_NORMS_OF_HEADS = "self_attn.q_norm(e) self_attn.k_norm(e) "
_NORMS_OF_ALL = "self_attn.q_norm(q) self_attn.k_norm(k) "
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_NO_ATTENTION_BIAS = {"attention_bias": False}

FAMILIES: dict[str, Family] = {
    "llama": Family(_ATTENTION + _GATED + _NORMS, options=_NO_BIAS, positions=2048),
    "mistral": Family(_ATTENTION_PLAIN + _GATED_PLAIN + _NORMS, key_value_heads=0, positions=131072),
    "ministral3": Family(
        _ATTENTION_PLAIN + _GATED_PLAIN + _NORMS, head_width=128, key_value_heads=8, positions=262144
    ),
    "qwen2": Family(
        _ATTENTION_QKV_BIAS.replace("attention_bias", "") + _GATED_PLAIN + _NORMS, positions=32768
    ),
    "qwen3": Family(
        _ATTENTION + _NORMS_OF_HEADS + _GATED_PLAIN + _NORMS,
        options=_NO_ATTENTION_BIAS,
        head_width=128,
        positions=32768,
        kind=BlockKind(qk_norms=True),
    ),
    "gemma": Family(
        _ATTENTION + _GATED_PLAIN + _NORMS,
        options=_NO_ATTENTION_BIAS,
        head_width=256,
        key_value_heads=16,
        positions=8192,
        tied=True,
    ),
    "gemma2": Family(
        _ATTENTION + _GATED_PLAIN + _SANDWICH,
        options=_NO_ATTENTION_BIAS,
        head_width=256,
        key_value_heads=4,
        positions=8192,
        tied=True,
        kind=BlockKind(post_norms=2),
    ),
    "gemma3_text": Family(
        _ATTENTION + _NORMS_OF_HEADS + _GATED_PLAIN + _SANDWICH,
        options=_NO_ATTENTION_BIAS,
        head_width=256,
        key_value_heads=4,
        positions=131072,
        tied=True,
        kind=BlockKind(post_norms=2, qk_norms=True),
    ),
    "phi": Family(
        _ATTENTION.replace("attention_bias", "").replace("o_proj", "dense")
        + "mlp.fc1(h,d)+ mlp.fc2(d,h)+ input_layernorm(d)+",
        last="final_layernorm(d)+",
        fixed={"qk_layernorm": False},
        positions=2048,
        head_bias=True,
        kind=BlockKind(gated=False, pre_norms=1, parallel=True),
    ),
    "phi3": Family(
        "self_attn.o_proj(d,q) self_attn.qkv_proj(qkv,d) " + _GATE_UP + _NORMS,
        positions=4096,
        kind=BlockKind(fused_qkv=True, fused_gate=True),
    ),
    "olmo": Family(
        _ATTENTION + _GATED_PLAIN,
        last="",
        options=_NO_ATTENTION_BIAS,
        positions=2048,
    ),
    "olmo2": Family(
        _ATTENTION + _NORMS_OF_ALL + _GATED_PLAIN + _POST_NORMS,
        options=_NO_ATTENTION_BIAS,
        positions=2048,
        kind=BlockKind(pre_norms=0, post_norms=2, qk_norms=True),
    ),
    "olmo3": Family(
        _ATTENTION + _NORMS_OF_ALL + _GATED_PLAIN + _POST_NORMS,
        options=_NO_ATTENTION_BIAS,
        positions=2048,
        kind=BlockKind(pre_norms=0, post_norms=2, qk_norms=True),
    ),
    "starcoder2": Family(
        _ATTENTION.replace("attention_bias", "use_bias")
        + "mlp.c_fc(h,d)+use_bias mlp.c_proj(d,h)+use_bias "
        + _NORMS_BIAS,
        last="norm(d)+",
        options={"use_bias": True},
        key_value_heads=2,
        positions=4096,
        tied=True,
        kind=BlockKind(gated=False),
    ),
    "gpt_neox": Family(
        _NORMS_BIAS + "attention.query_key_value(qkv,d)+attention_bias attention.dense(d,q)+attention_bias "
        "mlp.dense_h_to_4h(h,d)+ mlp.dense_4h_to_h(d,h)+",
        last="final_layer_norm(d)+",
        embedding="gpt_neox.embed_in",
        blocks="gpt_neox.layers",
        options={"attention_bias": True},
        positions=2048,
        kind=BlockKind(gated=False, parallel=True, fused_qkv=True),
    ),
    "granite": Family(_ATTENTION + _GATED + _NORMS, options=_NO_BIAS, positions=2048),
    "stablelm": Family(
        _ATTENTION_QKV_BIAS.replace("attention_bias", "use_qkv_bias") + _GATED_PLAIN + _NORMS_BIAS,
        last="norm(d)+",
        options={"use_qkv_bias": False},
        fixed={"qk_layernorm": False, "use_parallel_residual": False},
    ),
    "smollm3": Family(
        _ATTENTION + _GATED + _NORMS, options=_NO_BIAS, key_value_heads=4, positions=32768, tied=True
    ),
    "cohere": Family(
        _ATTENTION + _GATED_PLAIN + "input_layernorm(d)",
        options=_NO_ATTENTION_BIAS,
        fixed={"use_qk_norm": False},
        positions=8192,
        tied=True,
        kind=BlockKind(pre_norms=1, parallel=True),
    ),
    "cohere2": Family(
        _ATTENTION + _GATED_PLAIN + "input_layernorm(d)",
        options=_NO_ATTENTION_BIAS,
        positions=8192,
        tied=True,
        kind=BlockKind(pre_norms=1, parallel=True),
    ),
    "glm": Family(
        _ATTENTION_QKV_BIAS + _GATE_UP + _NORMS,
        options={"attention_bias": True},
        head_width=128,
        key_value_heads=2,
        positions=131072,
        kind=BlockKind(fused_gate=True),
    ),
    "glm4": Family(
        _ATTENTION_QKV_BIAS + _GATE_UP + _NORMS + "post_self_attn_layernorm(d) post_mlp_layernorm(d)",
        options={"attention_bias": True},
        head_width=128,
        key_value_heads=2,
        positions=131072,
        kind=BlockKind(post_norms=2, fused_gate=True),
    ),
    "seed_oss": Family(
        _ATTENTION_QKV_BIAS.replace("o_proj(d,q)", "o_proj(d,q)+attention_out_bias") + _GATED + _NORMS,
        options={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        head_width=128,
        key_value_heads=8,
        positions=524288,
    ),
    "exaone4": Family(
        _ATTENTION_PLAIN + _NORMS_OF_HEADS + _GATED_PLAIN + _POST_NORMS,
        positions=2048,
        kind=BlockKind(pre_norms=0, post_norms=2, qk_norms=True),
    ),
    "arcee": Family(_ATTENTION + _UP_DOWN + _NORMS, options=_NO_BIAS, kind=BlockKind(gated=False)),
    "nemotron": Family(
        _ATTENTION + _UP_DOWN + _NORMS_BIAS,
        last="norm(d)+",
        options=_NO_BIAS,
        key_value_heads=0,
        kind=BlockKind(gated=False),
    ),
}
"""The families that are known, by the `model_type` of their configurations, beside gpt2.

Source: the modules of transformers 5.24 (tests/test_decoders.py builds each, and compares names and shapes).
"""

MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "phimoe", "dbrx", "jamba"),
    *("granitemoe", "gpt_oss", "llama4_text", "glm4_moe", "minimax", "ernie4_5_moe", "hunyuan_v1_moe"),
)
"""Model types of mixtures of experts, which are refused by name."""


_LINE = re.compile(r"^(.+)\((.+)\)(\+?)(\w*)$")


@dataclass(frozen=True)
class Decoder:
    """A decoder of one of the FAMILIES.

    >>> Decoder("qwen2", width=8, depth=1, hidden=16, heads=2, key_value_heads=1, vocabulary=10).shapes()[1:3]
    (ParamShape(name='model.layers.0.self_attn.q_proj.weight', shape=(8, 8)),
     ParamShape(name='model.layers.0.self_attn.q_proj.bias', shape=(8,)))

    Args:
        family: a name in FAMILIES.
        hidden: width of the MLP.
        head_dim: elements of a head; 0 for `width / heads`.
        tied: the output head is the embedding.
        options: of the family's, those that are true.
        head: in place of the output head over the vocabulary.
    """

    family: str
    width: int
    depth: int
    hidden: int
    heads: int
    key_value_heads: int
    vocabulary: int
    positions: int = 4096
    head_dim: int = 0
    tied: bool = False
    options: tuple[str, ...] = ()
    head: Head | None = None

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def kind(self) -> BlockKind:
        """What a block is made of."""
        return FAMILIES[self.family].kind

    def shapes(self) -> tuple[ParamShape, ...]:
        """All parameters, in registration order."""
        family = FAMILIES[self.family]
        base = family.blocks.rpartition(".")[0]
        of_block = list(self._tensors(family.block))
        body = (
            ParamShape(f"{family.embedding}.weight", (self.vocabulary, self.width)),
            *(
                ParamShape(f"{family.blocks}.{number}.{name}", shape)
                for number in range(self.depth)
                for name, shape in of_block
            ),
            *(ParamShape(f"{base}.{name}", shape) for name, shape in self._tensors(family.last)),
        )
        if self.head is not None:
            return self.head.behind(body, self.width)
        head = list(self._tensors("lm_head(v,d)+" if family.head_bias else "lm_head(v,d)"))
        return (*body, *head[self.tied :])

    def _tensors(self, written: str) -> Iterator[ParamShape]:
        query, key = self.heads * self.head_width, self.key_value_heads * self.head_width
        sizes = {"d": self.width, "h": self.hidden, "hh": 2 * self.hidden, "v": self.vocabulary}
        sizes |= {"e": self.head_width, "q": query, "k": key, "qkv": query + 2 * key}
        for line in written.split():
            name, dims, has_bias, option = _LINE.findall(line)[0]
            shape = tuple(sizes[size] for size in dims.split(","))
            yield ParamShape(f"{name}.weight", shape)
            if has_bias and (not option or option in self.options):
                yield ParamShape(f"{name}.bias", shape[:1])
