"""The families whose blocks differ: mixtures of experts, and those with more than one kind of attention.

Weights of all experts of a block are one tensor, as transformers keeps them.
"""

from __future__ import annotations

from zero_ref.simulator.dense import (
    ATTENTION,
    ATTENTION_PLAIN,
    ATTENTION_QKV_BIAS,
    GATED_PLAIN,
    NO_ATTENTION_BIAS,
    NORMS,
    NORMS_BIAS,
    NORMS_OF_ALL,
    NORMS_OF_HEADS,
    POST_NORMS,
    SANDWICH,
)
from zero_ref.simulator.experts import (
    DEEPSEEK_SHARED,
    DENSE_MLP,
    KEPT_ROUTED,
    KEPT_SHARED,
    NO_MLP,
    QWEN_SHARED,
    ROUTED_LAST,
    ROUTED_OF_MLP_WIDTH,
    experts,
    one_of,
    stacked,
)
from zero_ref.simulator.families import BlockKind, Family, Mixer, Mlp
from zero_ref.simulator.mixers import (
    CONVOLUTION,
    DELTA_RULE,
    DELTA_RULE_APART,
    GATED_BY_ITSELF,
    GATED_SOFTMAX,
    KIMI_DELTA,
    LATENT,
    LATENT_INDEXED,
    LATENT_WHOLE_QUERY,
    MAMBA,
    MAMBA_TENSORS,
    NARROW_VALUES,
    NOTHING,
    SINKS,
    SOFTMAX,
    SOFTMAX_NORMED,
    SOFTMAX_PLAIN,
    V4_COMPRESSED,
    V4_SPARSE,
    V4_WINDOW,
)

_BLOCK = "{mixer} {mlp} " + NORMS
_QK_NORMS = BlockKind(qk_norms=True)

_GRANITE = "block_sparse_moe.router(x,d) " + stacked("block_sparse_moe.experts", "h")
_GRANITE_SHARED = "shared_mlp.input_linear(2*s,d) shared_mlp.output_linear(d,s) "
_OF_MLP_WIDTH = {"m": "intermediate_size"}
_OF_QWEN = {"s": "shared_expert_intermediate_size"}

_GEMMA4_QUERY = "self_attn.q_proj(q,d)+attention_bias self_attn.q_norm(e) "
_GEMMA4_KEY = "self_attn.k_norm(e) self_attn.k_proj(k,d)+attention_bias "
_GEMMA4_VALUE = "self_attn.v_proj(k,d)+attention_bias "
_GEMMA4_OUT = "self_attn.o_proj(d,q)+attention_bias "

_QWEN_AHEAD = "fc(d,2*d) norm(d) pre_fc_norm_embedding(d) pre_fc_norm_hidden(d)"
_DEEPSEEK_AHEAD = "eh_proj(d,2*d) enorm(d) hnorm(d) shared_head.norm(d)"

_DEEPSEEK = Family(
    _BLOCK,
    options=NO_ATTENTION_BIAS,
    mixers={"latent": LATENT, "latent, whole query": LATENT_WHOLE_QUERY},
    mlps={"dense": DENSE_MLP, "sparse": DEEPSEEK_SHARED},
    rule="latent",
    ahead=(_DEEPSEEK_AHEAD, "", "sparse"),
)
_QWEN3_NEXT = Family(
    _BLOCK,
    options=NO_ATTENTION_BIAS,
    head_width=256,
    positions=32768,
    mixers={"full_attention": GATED_SOFTMAX, "linear_attention": DELTA_RULE},
    mlps={"dense": DENSE_MLP, "sparse": QWEN_SHARED},
    rule="delta",
    sizes=_OF_QWEN,
    kind=BlockKind(qk_norms=True),
    ahead=(_QWEN_AHEAD, "full_attention", "sparse"),
)
_QWEN3_MOE = Family(
    _BLOCK,
    options=NO_ATTENTION_BIAS,
    positions=32768,
    mixers={"": SOFTMAX_NORMED},
    mlps={"dense": DENSE_MLP, "sparse": ROUTED_LAST},
    rule="every so many",
    windows="late",
    kind=_QK_NORMS,
)

MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        _BLOCK,
        mixers={"": SOFTMAX_PLAIN},
        mlps={"sparse": ROUTED_OF_MLP_WIDTH},
        rule="all sparse",
        windows="all",
        positions=131072,
    ),
    "qwen2_moe": Family(
        _BLOCK,
        options={"qkv_bias": True},
        mixers={"": Mixer(ATTENTION_QKV_BIAS.replace("attention_bias", "qkv_bias"))},
        mlps={"dense": DENSE_MLP, "sparse": QWEN_SHARED},
        rule="every so many",
        sizes=_OF_QWEN,
        positions=32768,
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT._replace(
        mixers={"full_attention": GATED_SOFTMAX, "linear_attention": DELTA_RULE_APART},
        mlps={"dense": DENSE_MLP},
        rule="delta, dense",
        ahead=(_QWEN_AHEAD, "full_attention", "dense"),
    ),
    "qwen3_5_moe_text": _QWEN3_NEXT._replace(
        mixers={"full_attention": GATED_SOFTMAX, "linear_attention": DELTA_RULE_APART},
        mlps={"sparse": QWEN_SHARED},
        rule="delta, sparse",
        keys={"hidden": "moe_intermediate_size"},
    ),
    "olmoe": Family(
        _BLOCK,
        options=NO_ATTENTION_BIAS,
        mixers={"": Mixer(ATTENTION + NORMS_OF_ALL)},
        mlps={"sparse": ROUTED_OF_MLP_WIDTH},
        rule="all sparse",
        kind=_QK_NORMS,
    ),
    "phimoe": Family(
        "{mixer} {mlp} " + NORMS_BIAS,
        last="norm(d)+",
        options={"attention_bias": False, "lm_head_bias": False},
        mixers={"": SOFTMAX},
        mlps={"sparse": experts("mlp.router(x,d) " + stacked("mlp.experts", "h"), m="h")},
        rule="all sparse",
        windows="all",
        head_bias="+lm_head_bias",
        named="phimoe",
    ),
    "gpt_oss": Family(
        _BLOCK,
        options={"attention_bias": True},
        head_width=64,
        mixers={"": SINKS},
        mlps={
            "sparse": experts(
                "mlp.router(x,d)+ mlp.experts.gate_up_proj[x,d,2*h] mlp.experts.gate_up_proj_bias[x,2*h] "
                "mlp.experts.down_proj[x,h,d] mlp.experts.down_proj_bias[x,d] ",
                m="h",
            )
        },
        rule="all sparse",
        windows="but every 2nd",
        positions=131072,
    ),
    "granitemoe": Family(
        "{mixer} " + NORMS + "{mlp}",
        options=NO_ATTENTION_BIAS,
        mixers={"": SOFTMAX},
        mlps={"sparse": experts(_GRANITE, m="h")},
        rule="all sparse",
        positions=2048,
    ),
    "granitemoehybrid": Family(
        NORMS + "{mlp} {mixer}",
        options={"attention_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False},
        mixers={
            "attention": SOFTMAX,
            "mamba": MAMBA._replace(
                tensors=MAMBA_TENSORS.format("mamba")
                .replace("use_conv_bias", "mamba_conv_bias")
                .replace("use_bias", "mamba_proj_bias")
            ),
        },
        mlps={
            "dense": Mlp(_GRANITE_SHARED, width="s"),
            "sparse": experts(_GRANITE + _GRANITE_SHARED, m="h", shared=True),
        },
        rule="granite",
        sizes={"s": "shared_intermediate_size"},
        positions=2048,
    ),
    "minimax_m2": Family(
        _BLOCK,
        head_width=128,
        mixers={"": Mixer(ATTENTION_PLAIN + NORMS_OF_ALL)},
        mlps={"sparse": ROUTED_OF_MLP_WIDTH},
        rule="all sparse",
        kind=_QK_NORMS,
        named="minimaxm2",
    ),
    "ernie4_5_moe": Family(
        _BLOCK,
        options={"use_bias": False},
        tied=True,
        head_bias="+use_bias",
        mixers={"": Mixer(ATTENTION.replace("attention_bias", "use_bias"))},
        mlps={
            "dense": Mlp(GATED_PLAIN.replace("d) ", "d)+use_bias ").replace("h) ", "h)+use_bias ")),
            "sparse": experts(
                "mlp.gate(x,d) mlp.gate.moe_statics.e_score_correction_bias[1,x] "
                + stacked("mlp.experts")
                + one_of("mlp.shared_experts").replace(") ", ")+use_bias "),
                shared=True,
            ),
        },
        rule="ernie",
        sizes={
            "x": "moe_num_experts",
            "c": "moe_k",
            "s": "moe_num_shared_experts*moe_intermediate_size",
        },
        positions=131072,
    ),
    "dots1": Family(
        _BLOCK,
        options=NO_ATTENTION_BIAS,
        mixers={"": SOFTMAX_NORMED},
        mlps={"dense": DENSE_MLP, "sparse": DEEPSEEK_SHARED},
        rule="first dense",
        kind=_QK_NORMS,
        positions=2048,
    ),
    "glm4_moe": Family(
        _BLOCK,
        options=NO_ATTENTION_BIAS,
        mixers={
            "": Mixer(ATTENTION_QKV_BIAS),
            "normed": Mixer(
                ATTENTION_QKV_BIAS + NORMS_OF_HEADS,
                kept="before_the_norms(q+k):product norms(a+g):statistics4 query(q):product key(k):product "
                "value(k):product",
            ),
        },
        mlps={"dense": DENSE_MLP, "sparse": DEEPSEEK_SHARED},
        rule="glm",
        positions=131072,
        ahead=(_DEEPSEEK_AHEAD, "", "sparse"),
    ),
    "exaone_moe": Family(
        _BLOCK,
        mixers={"": Mixer(ATTENTION_PLAIN + NORMS_OF_HEADS)},
        mlps={"dense": DENSE_MLP, "sparse": DEEPSEEK_SHARED},
        rule="first dense",
        windows="but every 4th",
        kind=_QK_NORMS,
        positions=2048,
    ),
    "hunyuan_v1_moe": Family(
        _BLOCK,
        options=NO_ATTENTION_BIAS,
        mixers={"": Mixer(ATTENTION + "self_attn.query_layernorm(e) self_attn.key_layernorm(e) ")},
        mlps={
            "sparse": experts(
                "mlp.gate.wg(x,d) " + stacked("mlp.experts", "h") + one_of("mlp.shared_mlp"),
                shared=True,
                m="h",
            )
        },
        rule="all sparse",
        sizes={"c": "moe_topk", "s": "intermediate_size"},
        kind=_QK_NORMS,
        positions=2048,
        named="hunyuanmoev1",
    ),
    "llama4_text": Family(
        _BLOCK,
        options=NO_ATTENTION_BIAS,
        head_width=128,
        mixers={"": SOFTMAX},
        mlps={
            "dense": Mlp(one_of("feed_forward"), width="s"),
            "sparse": experts(
                "feed_forward.experts.gate_up_proj[x,d,2*h] feed_forward.experts.down_proj[x,h,d] "
                "feed_forward.router(x,d) " + GATED_PLAIN.replace("mlp.", "feed_forward.shared_expert."),
                m="h",
                shared=True,
            ),
        },
        rule="llama4",
        windows="chunks",
        positions=131072,
    ),
    "deepseek_v2": _DEEPSEEK._replace(ahead=None, positions=2048),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK._replace(named="deepseekv3"),
    "glm4_moe_lite": _DEEPSEEK._replace(ahead=None, positions=202752),
    "deepseek_v32": _DEEPSEEK._replace(
        mixers={"latent": LATENT_INDEXED}, ahead=(_DEEPSEEK_AHEAD, "", "sparse")
    ),
    "glm_moe_dsa": _DEEPSEEK._replace(
        mixers={"latent": LATENT_INDEXED}, rule="latent, every indexer", ahead=None, positions=202752
    ),
    "deepseek_v4": Family(
        _BLOCK + "attn_hc.fn[2*streams+streams*streams,streams*d] attn_hc.base[2*streams+streams*streams] "
        "attn_hc.scale[3] ffn_hc.fn[2*streams+streams*streams,streams*d] "
        "ffn_hc.base[2*streams+streams*streams] ffn_hc.scale[3] ",
        last="norm(d) hc_head.hc_fn[streams,streams*d] hc_head.hc_base[streams] hc_head.hc_scale[1]",
        mixers={
            "sliding_attention": V4_WINDOW,
            "compressed_sparse_attention": V4_SPARSE,
            "heavily_compressed_attention": V4_COMPRESSED,
        },
        mlps={
            "sparse": experts(
                "mlp.gate(x,d) " + stacked("mlp.experts") + one_of("mlp.shared_experts"), shared=True
            )
        },
        rule="deepseek_v4",
        keys={"hidden": "moe_intermediate_size"},
        sizes={"o_groups": "o_groups", "o_rank": "o_lora_rank", "streams": "hc_mult"},
        positions=1048576,
    ),
    "kimi_linear": Family(
        _BLOCK,
        mixers={"full": LATENT, "full, whole query": LATENT_WHOLE_QUERY, "delta": KIMI_DELTA},
        mlps={"dense": DENSE_MLP, "sparse": DEEPSEEK_SHARED},
        rule="kimi",
        sizes={
            "lk": "linear_num_heads|linear_attn_config.num_heads",
            "le": "linear_head_dim|linear_attn_config.head_dim",
            "taps": "linear_conv_kernel_dim|linear_attn_config.short_conv_kernel_size",
        },
        options=NO_ATTENTION_BIAS,
        fixed={
            "tie_word_embeddings": False,
            "attn_res_block_size": 0,
            "routed_expert_hidden_size": 0,
            "mla_use_output_gate": False,
            "linear_attn_config.use_full_rank_gate": False,
        },
        positions=1048576,
    ),
    "nemotron_h": Family(
        "norm(d) {mixer} {mlp}",
        last="norm_f(d)",
        embedding="embeddings(v,d)",
        options={"mlp_bias": False, "use_bias": False, "use_conv_bias": True},
        fixed={"tie_word_embeddings": False},
        mixers={
            "": NOTHING,
            "M": MAMBA,
            "*": Mixer(ATTENTION_PLAIN.replace("self_attn", "mixer")),
        },
        mlps={
            "": NO_MLP,
            "-": Mlp("mixer.up_proj(h,d)+mlp_bias mixer.down_proj(d,h)+mlp_bias "),
            "E": Mlp(
                "mixer.experts.up_proj[x,m,d] mixer.experts.down_proj[x,d,m] mixer.gate(x,d) "
                "mixer.shared_experts.up_proj(s,d)+mlp_bias mixer.shared_experts.down_proj(d,s)+mlp_bias ",
                kept="scores_of_experts(x):statistics4 rows(c*d):operand up(c*m):product "
                "activation(c*m):operand results(c*d):product places(4*c):statistics8 shared_up(s):product "
                "shared_activation(s):operand",
                width="c*m+s",
                moved="2*c*d",
            ),
            "E, latent": Mlp(
                "mixer.experts.up_proj[x,m,latent] mixer.experts.down_proj[x,latent,m] mixer.gate(x,d) "
                "mixer.shared_experts.up_proj(s,d)+mlp_bias mixer.shared_experts.down_proj(d,s)+mlp_bias "
                "mixer.fc1_latent_proj(latent,d)+mlp_bias mixer.fc2_latent_proj(d,latent)+mlp_bias ",
                kept="scores_of_experts(x):statistics4 rows(c*latent):operand up(c*m):product "
                "activation(c*m):operand results(c*latent):product sum(latent):operand "
                "places(4*c):statistics8 shared_up(s):product shared_activation(s):operand",
                width="c*m+s",
                moved="2*c*latent",
            ),
        },
        rule="nemotron_h",
        sizes={"s": "moe_shared_expert_intermediate_size", "latent": "moe_latent_size"},
        kind=BlockKind(gated=False, pre_norms=1, rotary=False),
    ),
    "nemotron-nas": Family(
        "{mixer} {mlp}",
        options=NO_ATTENTION_BIAS,
        mixers={"": Mixer(ATTENTION + "input_layernorm(d) "), "no attention": NOTHING},
        mlps={"": Mlp(GATED_PLAIN + "post_attention_layernorm(d) "), "no MLP": NO_MLP},
        rule="nemotron-nas",
        keys={"hidden": "hidden_size", "key_value_heads": "num_attention_heads"},  # each block has its own
        named="decilm",
        positions=131072,
    ),
    "lfm2": Family(
        "{mixer} {mlp} operator_norm(d) ffn_norm(d)",
        last="embedding_norm(d)",
        options={"conv_bias": False},
        tied=True,
        mixers={
            "full_attention": Mixer(
                ATTENTION_PLAIN.replace("o_proj", "out_proj")
                + "self_attn.q_layernorm(e) self_attn.k_layernorm(e) "
            ),
            "conv": CONVOLUTION,
        },
        mlps={
            "dense": Mlp("feed_forward.w1(h,d) feed_forward.w3(h,d) feed_forward.w2(d,h) "),
            "sparse": experts(stacked("feed_forward.experts") + "feed_forward.gate(x,d) "),
        },
        rule="lfm2",
        sizes={"taps": "conv_L_cache"},
        kind=_QK_NORMS,
        positions=128000,
    ),
    "gemma4_text": Family(
        "{mixer} {mlp}",
        options=NO_ATTENTION_BIAS,
        tied=True,
        positions=131072,
        mixers={
            "own": Mixer(_GEMMA4_QUERY + _GEMMA4_KEY + _GEMMA4_VALUE + _GEMMA4_OUT),
            "keys are values": Mixer(_GEMMA4_QUERY + _GEMMA4_KEY + _GEMMA4_OUT),
            "of another block": Mixer(
                _GEMMA4_QUERY + _GEMMA4_OUT,
                kept="query_before_its_norm(q):product norms(a):statistics4 query(q):product",
                rotated="q",
            ),
        },
        mlps={
            "dense": Mlp(GATED_PLAIN + SANDWICH),
            "dense, per layer": Mlp(
                GATED_PLAIN + SANDWICH + "per_layer_input_gate(p,d) per_layer_projection(d,p) "
                "post_per_layer_input_norm(d)",
                missing="what the embeddings of each layer keep, and their time",
            ),
            "sparse": Mlp(
                GATED_PLAIN
                + SANDWICH
                + "router.scale[d] router.per_expert_scale[x] router.proj(x,d) "
                + stacked("experts")
                + "post_feedforward_layernorm_1(d) post_feedforward_layernorm_2(d) "
                "pre_feedforward_layernorm_2(d)",
                kept=KEPT_ROUTED
                + KEPT_SHARED.replace("(s)", "(h)")
                + " dense_result(d):product input_of_experts(d):operand sum(d):operand norms(4):statistics4",
                width="c*m+h",
                moved="2*c*d",
            ),
        },
        rule="gemma4",
        windows="but every 6th",
        sizes={
            "c": "top_k_experts",
            "m": "moe_intermediate_size|expert_intermediate_size",
            "p": "hidden_size_per_layer_input",
            "vp": "vocab_size_per_layer_input",
        },
        kind=BlockKind(post_norms=2, qk_norms=True),
    ),
    "mimo_v2_flash": Family(
        _BLOCK,
        options=NO_ATTENTION_BIAS,
        mixers={
            "full": NARROW_VALUES,
            "sliding": NARROW_VALUES._replace(tensors="self_attn.sinks[a] " + NARROW_VALUES.tensors),
        },
        mlps={"dense": DENSE_MLP, "sparse": ROUTED_LAST},
        rule="mimo",
        positions=131072,
        named="mimov2flash",
    ),
}
MIXTURES |= {
    "afmoe": Family(
        "{mixer} input_layernorm(d) post_attention_layernorm(d) pre_mlp_layernorm(d) post_mlp_layernorm(d) "
        "{mlp}",
        mixers={"": GATED_BY_ITSELF},
        mlps={
            "dense": DENSE_MLP,
            "sparse": experts(
                "mlp.expert_bias[x] mlp.router.gate(x,d) "
                + one_of("mlp.shared_experts")
                + stacked("mlp.experts"),
                shared=True,
            ),
        },
        rule="afmoe",
        windows="but every 4th",
        kind=BlockKind(post_norms=2, qk_norms=True),
        head_width=128,
        positions=16384,
    ),
    "hy_v3": Family(
        _BLOCK,
        options=NO_ATTENTION_BIAS,
        fixed={"mlp_bias": False},
        mixers={"": SOFTMAX_NORMED},
        mlps={
            "dense": DENSE_MLP,
            "sparse": experts(
                "mlp.gate(x,d) " + stacked("mlp.experts") + one_of("mlp.shared_experts"), shared=True
            ),
        },
        rule="first dense",
        kind=_QK_NORMS,
        head_width=128,
        positions=131072,
        named="hyv3",
    ),
    "solar_open": Family(
        _BLOCK,
        fixed={"first_k_dense_replace": 0, "attention_bias": False},
        mixers={"": SOFTMAX_PLAIN},
        mlps={"sparse": DEEPSEEK_SHARED},
        rule="all sparse",
        keys={"hidden": "moe_intermediate_size"},
        head_width=128,
        positions=131072,
    ),
    "flex_olmo": MIXTURES["olmoe"]._replace(
        block="{mixer} {mlp} " + POST_NORMS, kind=BlockKind(pre_norms=0, post_norms=2, qk_norms=True)
    ),
    "glm4v_moe_text": MIXTURES["glm4_moe"]._replace(
        options={"attention_bias": True},
        mixers={"": Mixer(ATTENTION_QKV_BIAS)},
        rule="first dense",
        ahead=None,
    ),
    "mistral4": _DEEPSEEK._replace(ahead=None),
}
MIXTURES |= {
    "gemma4_text, per layer": MIXTURES["gemma4_text"]._replace(
        last="norm(d) embed_tokens_per_layer(vp,n*p) per_layer_model_projection(n*p,d) "
        "per_layer_projection_norm(p)"
    ),
    "lfm2_moe": MIXTURES["lfm2"],
    "qwen3_vl_moe_text": _QWEN3_MOE,
}
"""The families whose blocks differ, by `model_type`, as transformers 5.24 builds them."""
