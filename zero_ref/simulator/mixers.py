"""Tables of the parts that mix the tokens of a sequence: kinds of attention, and mixers of linear cost."""

from __future__ import annotations

from zero_ref.simulator.dense import (
    ATTENTION,
    ATTENTION_PLAIN,
    NORMS_OF_HEADS,
)
from zero_ref.simulator.families import Mixer

SOFTMAX = Mixer(ATTENTION)
SOFTMAX_PLAIN = Mixer(ATTENTION_PLAIN)
SOFTMAX_NORMED = Mixer(ATTENTION + NORMS_OF_HEADS)
SINKS = Mixer("self_attn.sinks[a] " + ATTENTION)

GATED_SOFTMAX = Mixer(
    ATTENTION.replace("q_proj(q,d)", "q_proj(2*q,d)") + NORMS_OF_HEADS,
    kept="query_and_gate(2*q):product key_before_its_norm(k):product norms(a+g):statistics4 "
    "query(q):product key(k):product value(k):product",
    after="heads_together(q):pointwise gate(q):pointwise gated(q):operand",
)
"""Attention whose results are multiplied by a gate, which is the other half of the query's product."""

GATED_BY_ITSELF = Mixer(
    ATTENTION_PLAIN + NORMS_OF_HEADS + "self_attn.gate_proj(q,d) ",
    kept="before_the_norms(q+k):product norms(a+g):statistics4 gate(q):product query(q):product "
    "key(k):product value(k):product",
    after="gate(q):pointwise gated(q):operand",
)
"""The same with a product of its own for the gate."""

_LATENT_KEYS = (
    "self_attn.kv_a_proj_with_mqa(kv_rank+rope,d)+attention_bias self_attn.kv_a_layernorm(kv_rank) "
    "self_attn.kv_b_proj(a*nope+a*value,kv_rank) self_attn.o_proj(d,a*value)+attention_bias "
)
_LATENT_KEPT = (
    "compressed_key_and_value(kv_rank+rope):product normed(kv_rank):operand norm(1):statistics4 "
    "keys_and_values(a*nope+a*value):product query(a*nope+a*rope):product key(a*nope+a*rope):product"
)
LATENT = Mixer(
    "self_attn.q_a_proj(q_rank,d)+attention_bias self_attn.q_a_layernorm(q_rank) "
    "self_attn.q_b_proj(a*nope+a*rope,q_rank) " + _LATENT_KEYS,
    kept="compressed_query(q_rank):product normed_query(q_rank):operand its_norm(1):statistics4 "
    + _LATENT_KEPT,
    scores=("a", "nope+rope", "value"),
    attended="a*value",
    after="heads_together(a*value):operand",
    rotated="a*rope+rope",
)
"""Multi-head latent attention (arXiv:2405.04434), its keys and values written out for training."""

LATENT_WHOLE_QUERY = LATENT._replace(
    tensors="self_attn.q_proj(a*nope+a*rope,d) " + _LATENT_KEYS, kept=_LATENT_KEPT
)

_INDEXER = (
    "self_attn.indexer.wq_b(index_heads*index_width,q_rank) self_attn.indexer.wk(index_width,d) "
    "self_attn.indexer.k_norm(index_width)+ self_attn.indexer.weights_proj(index_heads,d) "
)
LATENT_INDEXED = LATENT._replace(
    tensors=LATENT.tensors + _INDEXER,
    missing="which tokens the indexer chooses: attention counts as if every token were attended to",
)

_DELTA_KEPT = (
    "before_the_convolution(2*lk*le+lv*lw):product gate(lv*lw):product convolved(2*lk*le+lv*lw):operand "
    "queries_and_keys(2*lk*le):operand norms(2*lk):statistics4 decay(3*lv):statistics4 "
    "strength(2*lv):product chunks(64*lv):operand"
)
_DELTA_TIME = "the time of the gated delta rule's recurrence, beside its matrix products"
_DELTA_FIRST = "linear_attn.dt_bias[lv] linear_attn.A_log[lv] linear_attn.conv1d(2*lk*le+lv*lw,1,taps) "
_DELTA_OUT = "linear_attn.norm(lw) linear_attn.out_proj(d,lv*lw) "
DELTA_RULE = Mixer(
    _DELTA_FIRST + "linear_attn.in_proj_qkvz(2*lk*le+2*lv*lw,d) linear_attn.in_proj_ba(2*lv,d) " + _DELTA_OUT,
    kept=_DELTA_KEPT,
    scores=(),
    attended="lv*lw",
    after="norm(lv):statistics4 normed_result(lv*lw):operand",
    rotated="0",
    missing=_DELTA_TIME,
)
"""Gated delta rule (arXiv:2412.06464): as much is kept as `chunk_gated_delta_rule` and `FusedRMSNormGated` of
flash-linear-attention save, in chunks of 64 tokens."""

DELTA_RULE_APART = DELTA_RULE._replace(
    tensors=_DELTA_FIRST
    + _DELTA_OUT
    + "linear_attn.in_proj_qkv(2*lk*le+lv*lw,d) linear_attn.in_proj_z(lv*lw,d) "
    "linear_attn.in_proj_b(lv,d) linear_attn.in_proj_a(lv,d) "
)

KIMI_DELTA = Mixer(
    "self_attn.q_proj(lk*le,d) self_attn.k_proj(lk*le,d) self_attn.v_proj(lk*le,d) "
    "self_attn.conv1d(3*lk*le,1,taps) self_attn.forget_gate.dt_bias[lk*le] "
    "self_attn.forget_gate.A_log[1,1,lk,1] self_attn.forget_gate.f_a_proj(le,d) "
    "self_attn.forget_gate.f_b_proj(lk*le,le) self_attn.b_proj(lk,d) self_attn.g_a_proj(le,d) "
    "self_attn.g_b_proj(lk*le,le) self_attn.o_norm(le) self_attn.o_proj(d,lk*le) ",
    kept="before_the_convolution(3*lk*le):product convolved(3*lk*le):operand gates(2*le+2*lk*le):product "
    "queries_and_keys(2*lk*le):operand norms(2*lk):statistics4",
    scores=(),
    attended="lk*le",
    after="norm(lk):statistics4 normed_result(lk*le):operand",
    rotated="0",
    missing="what Kimi delta attention keeps of its decays and chunks, and the time of its recurrence",
)

MAMBA_TENSORS = (
    "{0}.dt_bias[mh] {0}.A_log[mh] {0}.D[mh] {0}.conv1d(mh*me+2*mg*ms,1,mt)+use_conv_bias "
    "{0}.in_proj(2*mh*me+2*mg*ms+mh,d)+use_bias {0}.norm(mh*me) {0}.out_proj(d,mh*me)+use_bias "
)
MAMBA = Mixer(
    MAMBA_TENSORS.format("mixer"),
    kept="projected(2*mh*me+2*mg*ms+mh):product",
    scores=(),
    attended="mh*me",
    after="norm(mg):statistics4 normed_result(mh*me):operand",
    rotated="0",
    missing="the time of Mamba-2's scan, beside its matrix products",
)
"""Mamba-2 (arXiv:2405.21060): as much is kept as `mamba_split_conv1d_scan_combined` of mamba_ssm saves."""

CONVOLUTION = Mixer(
    "conv.conv(d,1,taps)+conv_bias conv.in_proj(3*d,d)+conv_bias conv.out_proj(d,d)+conv_bias ",
    kept="projected(3*d):product times_the_first_gate(d):operand convolved(d):operand",
    scores=(),
    attended="d",
    rotated="0",
)
"""A short convolution between two gates, as LFM2 has it."""

NOTHING = Mixer("", kept="", scores=(), attended="0", rotated="0")

_V4 = (
    "self_attn.sinks[a] self_attn.q_a_proj(q_rank,d) self_attn.q_a_norm(q_rank) self_attn.q_b_proj(q,q_rank) "
    "self_attn.kv_proj(e,d) self_attn.kv_norm(e) self_attn.o_a_proj(o_groups*o_rank,o_inputs) "
    "self_attn.o_b_proj(d,o_groups*o_rank) "
)
_V4_KEPT = (
    "compressed_query(q_rank):product normed_query(q_rank):operand norms(2+a):statistics4 "
    "query_before_its_norm(q):product query(q):product key_and_value_before_the_norm(e):product "
    "key_and_value(e):product"
)
_V4_SPARSE = "{0}.position_bias[4,2*{1}] {0}.kv_proj(2*{1},d) {0}.gate_proj(2*{1},d) {0}.kv_norm({1}) "
V4_WINDOW = Mixer(
    _V4,
    kept=_V4_KEPT,
    after="output_in_groups(o_groups*o_rank):product",
    rotated="a*rope+rope",
    missing="what hyper-connections keep, and their time",
)
V4_SPARSE = V4_WINDOW._replace(
    tensors=_V4
    + _V4_SPARSE.format("self_attn.compressor", "e")
    + _V4_SPARSE.format("self_attn.compressor.indexer", "index_width")
    + "self_attn.compressor.indexer.q_b_proj(index_heads*index_width,q_rank) "
    "self_attn.compressor.indexer.scorer.weights_proj(index_heads,d) ",
    missing="what hyper-connections and compressed attention keep, and their time",
)
V4_COMPRESSED = V4_SPARSE._replace(
    tensors=_V4 + "self_attn.compressor.position_bias[128,e] self_attn.compressor.kv_proj(e,d) "
    "self_attn.compressor.gate_proj(e,d) self_attn.compressor.kv_norm(e) "
)

NARROW_VALUES = Mixer(
    "self_attn.q_proj(q,d)+attention_bias self_attn.k_proj(k,d)+attention_bias "
    "self_attn.v_proj(g*value,d)+attention_bias self_attn.o_proj(d,a*value) ",
    kept="query(q):product key(k):product value(g*value):product",
    scores=("a", "e", "value"),
    attended="a*value",
)
