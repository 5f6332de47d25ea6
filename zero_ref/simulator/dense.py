"""The families of dense decoders, whose blocks are alike but for the window that attention sees."""

from __future__ import annotations

from zero_ref.simulator.families import BlockKind, Family

ATTENTION = (
    "self_attn.q_proj(q,d)+attention_bias self_attn.k_proj(k,d)+attention_bias "
    "self_attn.v_proj(k,d)+attention_bias self_attn.o_proj(d,q)+attention_bias "
)
ATTENTION_PLAIN = ATTENTION.replace("+attention_bias", "")
ATTENTION_QKV_BIAS = ATTENTION.replace("o_proj(d,q)+attention_bias", "o_proj(d,q)")
GATED = "mlp.gate_proj(h,d)+mlp_bias mlp.up_proj(h,d)+mlp_bias mlp.down_proj(d,h)+mlp_bias "
GATED_PLAIN = GATED.replace("+mlp_bias", "")
GATE_UP = "mlp.gate_up_proj(hh,d) mlp.down_proj(d,h) "
UP_DOWN = "mlp.up_proj(h,d)+mlp_bias mlp.down_proj(d,h)+mlp_bias "
NORMS = "input_layernorm(d) post_attention_layernorm(d) "
NORMS_BIAS = "input_layernorm(d)+ post_attention_layernorm(d)+ "
SANDWICH = NORMS + "pre_feedforward_layernorm(d) post_feedforward_layernorm(d) "
POST_NORMS = "post_attention_layernorm(d) post_feedforward_layernorm(d) "
NORMS_OF_HEADS = "self_attn.q_norm(e) self_attn.k_norm(e) "
NORMS_OF_ALL = "self_attn.q_norm(q) self_attn.k_norm(k) "
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
NO_ATTENTION_BIAS = {"attention_bias": False}

DENSE: dict[str, Family] = {
    "llama": Family(ATTENTION + GATED + NORMS, options=NO_BIAS, positions=2048),
    "mistral": Family(
        ATTENTION_PLAIN + GATED_PLAIN + NORMS, key_value_heads=0, positions=131072, windows="all"
    ),
    "ministral3": Family(
        ATTENTION_PLAIN + GATED_PLAIN + NORMS,
        head_width=128,
        key_value_heads=8,
        positions=262144,
        windows="all",
    ),
    "qwen2": Family(
        ATTENTION_QKV_BIAS.replace("attention_bias", "") + GATED_PLAIN + NORMS,
        positions=32768,
        windows="late",
    ),
    "qwen3": Family(
        ATTENTION + NORMS_OF_HEADS + GATED_PLAIN + NORMS,
        options=NO_ATTENTION_BIAS,
        head_width=128,
        positions=32768,
        kind=BlockKind(qk_norms=True),
        windows="late",
    ),
    "gemma": Family(
        ATTENTION + GATED_PLAIN + NORMS,
        options=NO_ATTENTION_BIAS,
        head_width=256,
        key_value_heads=16,
        positions=8192,
        tied=True,
    ),
    "gemma2": Family(
        ATTENTION + GATED_PLAIN + SANDWICH,
        options=NO_ATTENTION_BIAS,
        head_width=256,
        key_value_heads=4,
        positions=8192,
        tied=True,
        kind=BlockKind(post_norms=2),
        windows="but every 2nd",
    ),
    "gemma3_text": Family(
        ATTENTION + NORMS_OF_HEADS + GATED_PLAIN + SANDWICH,
        options=NO_ATTENTION_BIAS,
        absent={"num_attention_heads": 8, "vocab_size": 262208},  # as in google/gemma-3-4b-it
        head_width=256,
        key_value_heads=4,
        positions=131072,
        tied=True,
        kind=BlockKind(post_norms=2, qk_norms=True),
        windows="but every 6th",
    ),
    "phi": Family(
        ATTENTION.replace("attention_bias", "").replace("o_proj", "dense")
        + "mlp.fc1(h,d)+ mlp.fc2(d,h)+ input_layernorm(d)+",
        last="final_layernorm(d)+",
        fixed={"qk_layernorm": False},
        positions=2048,
        head_bias="+",
        kind=BlockKind(gated=False, pre_norms=1, parallel=True),
    ),
    "phi3": Family(
        "self_attn.o_proj(d,q) self_attn.qkv_proj(qkv,d) " + GATE_UP + NORMS,
        positions=4096,
        kind=BlockKind(fused_qkv=True, fused_gate=True),
        windows="all",
    ),
    "olmo": Family(
        ATTENTION + GATED_PLAIN,
        last="",
        options=NO_ATTENTION_BIAS,
        positions=2048,
    ),
    "olmo2": Family(
        ATTENTION + NORMS_OF_ALL + GATED_PLAIN + POST_NORMS,
        options=NO_ATTENTION_BIAS,
        positions=2048,
        kind=BlockKind(pre_norms=0, post_norms=2, qk_norms=True),
    ),
    "olmo3": Family(
        ATTENTION + NORMS_OF_ALL + GATED_PLAIN + POST_NORMS,
        options=NO_ATTENTION_BIAS,
        positions=2048,
        kind=BlockKind(pre_norms=0, post_norms=2, qk_norms=True),
        windows="but every 4th",
    ),
    "starcoder2": Family(
        ATTENTION.replace("attention_bias", "use_bias")
        + "mlp.c_fc(h,d)+use_bias mlp.c_proj(d,h)+use_bias "
        + NORMS_BIAS,
        last="norm(d)+",
        options={"use_bias": True},
        key_value_heads=2,
        positions=4096,
        tied=True,
        kind=BlockKind(gated=False),
        windows="all",
    ),
    "gpt_neox": Family(
        NORMS_BIAS + "attention.query_key_value(qkv,d)+attention_bias attention.dense(d,q)+attention_bias "
        "mlp.dense_h_to_4h(h,d)+ mlp.dense_4h_to_h(d,h)+",
        last="final_layer_norm(d)+",
        embedding="embed_in(v,d)",
        base="gpt_neox",
        options={"attention_bias": True},
        positions=2048,
        kind=BlockKind(gated=False, parallel=True, fused_qkv=True),
    ),
    "granite": Family(ATTENTION + GATED + NORMS, options=NO_BIAS, positions=2048),
    "stablelm": Family(
        ATTENTION_QKV_BIAS.replace("attention_bias", "use_qkv_bias") + GATED_PLAIN + NORMS_BIAS,
        last="norm(d)+",
        options={"use_qkv_bias": False},
        fixed={"qk_layernorm": False, "use_parallel_residual": False},
    ),
    "smollm3": Family(
        ATTENTION + GATED + NORMS, options=NO_BIAS, key_value_heads=4, positions=32768, tied=True
    ),
    "cohere": Family(
        ATTENTION + GATED_PLAIN + "input_layernorm(d)",
        options=NO_ATTENTION_BIAS,
        fixed={"use_qk_norm": False},
        positions=8192,
        tied=True,
        kind=BlockKind(pre_norms=1, parallel=True),
    ),
    "cohere2": Family(
        ATTENTION + GATED_PLAIN + "input_layernorm(d)",
        options=NO_ATTENTION_BIAS,
        positions=8192,
        tied=True,
        kind=BlockKind(pre_norms=1, parallel=True),
        windows="but every 4th",
    ),
    "glm": Family(
        ATTENTION_QKV_BIAS + GATE_UP + NORMS,
        options={"attention_bias": True},
        head_width=128,
        key_value_heads=2,
        positions=131072,
        kind=BlockKind(fused_gate=True),
    ),
    "glm4": Family(
        ATTENTION_QKV_BIAS + GATE_UP + NORMS + "post_self_attn_layernorm(d) post_mlp_layernorm(d)",
        options={"attention_bias": True},
        head_width=128,
        key_value_heads=2,
        positions=131072,
        kind=BlockKind(post_norms=2, fused_gate=True),
    ),
    "seed_oss": Family(
        ATTENTION_QKV_BIAS.replace("o_proj(d,q)", "o_proj(d,q)+attention_out_bias") + GATED + NORMS,
        options={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        head_width=128,
        key_value_heads=8,
        positions=524288,
    ),
    "exaone4": Family(
        ATTENTION_PLAIN + NORMS_OF_HEADS + GATED_PLAIN + POST_NORMS,
        positions=2048,
        kind=BlockKind(pre_norms=0, post_norms=2, qk_norms=True),
        windows="but every 4th",
    ),
    "ernie4_5": Family(
        ATTENTION.replace("attention_bias", "use_bias") + GATED.replace("mlp_bias", "use_bias") + NORMS,
        options={"use_bias": False},
        head_width=128,
        key_value_heads=2,
        positions=131072,
        tied=True,
    ),
    "hunyuan_v1_dense": Family(
        ATTENTION + "self_attn.query_layernorm(e) self_attn.key_layernorm(e) " + GATED_PLAIN + NORMS,
        options=NO_ATTENTION_BIAS,
        positions=2048,
        kind=BlockKind(qk_norms=True),
        named="hunyuandensev1",
    ),
    "apertus": Family(
        ATTENTION + NORMS_OF_HEADS + "mlp.up_proj(h,d) mlp.down_proj(d,h) mlp.act_fn.alpha_p[1] "
        "mlp.act_fn.alpha_n[1] attention_layernorm(d) feedforward_layernorm(d)",
        options=NO_ATTENTION_BIAS,
        positions=65536,
        kind=BlockKind(gated=False, qk_norms=True),
    ),
    "mimo": Family(
        ATTENTION_QKV_BIAS.replace("attention_bias", "") + GATED_PLAIN + NORMS,
        fixed={"attention_bias": True},
        positions=32768,
        windows="late",
        ahead=("input_proj(d,2*d) token_layernorm(d) hidden_layernorm(d) final_layernorm(d)", "", ""),
    ),
    "arcee": Family(ATTENTION + UP_DOWN + NORMS, options=NO_BIAS, kind=BlockKind(gated=False)),
    "nemotron": Family(
        ATTENTION + UP_DOWN + NORMS_BIAS,
        last="norm(d)+",
        options=NO_BIAS,
        key_value_heads=0,
        kind=BlockKind(gated=False),
    ),
}
DENSE |= {
    "ministral": DENSE["mistral"]._replace(key_value_heads=8, windows="all"),
    "glm4v_text": DENSE["glm4"]._replace(head_width=None),
    "qwen2_vl_text": DENSE["qwen2"],
    "qwen2_5_vl_text": DENSE["qwen2"],
    "qwen3_vl_text": DENSE["qwen3"]._replace(positions=128000),
}
"""The dense families that are known, by the `model_type` of their configurations, beside gpt2.

Source: the modules of transformers 5.24 (tests/simulator/test_decoders.py builds each, and compares names and
shapes).
"""
