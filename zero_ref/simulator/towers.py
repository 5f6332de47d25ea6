"""Tables of the parts that bring images into a model: vision towers and the projections of their results.

The parameters of a tower are counted. The simulated training is on text, in which a tower takes no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TowerKind(NamedTuple):
    """The parameters of a tower, and where its configuration has their sizes.

    Args:
        before: (name, number of them, tensors) of what is registered before the language model; the number is
            a symbol, or empty for one whose name has no number. Tensors are written as in `families`.
        behind: likewise of what is registered after the language model.
        sizes: keys by symbol: of the tower's configuration, or with `text.` of the language model's, or with
            `model.` of the one around both. A key that ends in `[]` is a list, whose length counts. `patches`
            is the number of patches in an image.
        options: keys of options that add biases, and what they are where a configuration does not say.
        needs: options that change the parameters in another way, and the value that they must have.
        absent: what transformers takes for sizes that published configurations leave out.
        text, head: what the names of the language model's body and of its output head begin with.
    """

    before: tuple[tuple[str, str, str], ...]
    sizes: Mapping[str, str]
    behind: tuple[tuple[str, str, str], ...] = ()
    options: Mapping[str, bool] = {}
    needs: Mapping[str, object] = {}
    absent: Mapping[str, int] = {"num_channels": 3, "in_channels": 3}
    text: str = "model.language_model"
    head: str = "lm_head"


_QWEN_BLOCK = "norm1(w)+ norm2(w)+ attn.qkv(3*w,w)+ attn.proj(w,w)+ mlp.linear_fc1(i,w)+ mlp.linear_fc2(w,i)+"
_QWEN3 = TowerKind(
    (
        ("model.visual", "", "patch_embed.proj(w,channels,time,patch,patch)+ pos_embed(places,w)"),
        ("model.visual.blocks", "depth", _QWEN_BLOCK),
        (
            "model.visual.merger",
            "",
            "norm(w)+ linear_fc1(merge*merge*w,merge*merge*w)+ linear_fc2(out,merge*merge*w)+",
        ),
        (
            "model.visual.deepstack_merger_list",
            "deep",
            "norm(merge*merge*w)+ linear_fc1(merge*merge*w,merge*merge*w)+ linear_fc2(out,merge*merge*w)+",
        ),
    ),
    {
        "w": "hidden_size",
        "i": "intermediate_size",
        "depth": "depth",
        "channels": "in_channels",
        "time": "temporal_patch_size",
        "patch": "patch_size",
        "places": "num_position_embeddings",
        "merge": "spatial_merge_size",
        "out": "out_hidden_size",
        "deep": "deepstack_visual_indexes[]",
    },
)

TOWERS: dict[str, TowerKind] = {
    "qwen3_vl": _QWEN3,
    "qwen2_5_vl": TowerKind(
        (
            ("model.visual", "", "patch_embed.proj(w,channels,time,patch,patch)"),
            (
                "model.visual.blocks",
                "depth",
                "norm1(w) norm2(w) attn.qkv(3*w,w)+ attn.proj(w,w)+ mlp.gate_proj(i,w)+ mlp.up_proj(i,w)+ "
                "mlp.down_proj(w,i)+",
            ),
            ("model.visual.merger", "", "ln_q(w)"),
            ("model.visual.merger.mlp", "", "0(merge*merge*w,merge*merge*w)+ 2(out,merge*merge*w)+"),
        ),
        {
            "w": "hidden_size",
            "i": "intermediate_size",
            "depth": "depth",
            "channels": "in_channels|in_chans",
            "time": "temporal_patch_size",
            "patch": "patch_size",
            "merge": "spatial_merge_size",
            "out": "out_hidden_size",
        },
    ),
    "pixtral": TowerKind(
        (
            ("model.vision_tower", "", "patch_conv(w,channels,patch,patch) ln_pre(w)"),
            (
                "model.vision_tower.transformer.layers",
                "depth",
                "attention_norm(w) feed_forward.gate_proj(i,w) feed_forward.up_proj(i,w) "
                "feed_forward.down_proj(w,i) attention.k_proj(w,w) attention.v_proj(w,w) "
                "attention.q_proj(w,w) attention.o_proj(w,w) ffn_norm(w)",
            ),
            (
                "model.multi_modal_projector",
                "",
                "norm(w) patch_merger.merging_layer(w,merge*merge*w) linear_1(d,w)+multimodal_projector_bias "
                "linear_2(d,d)+multimodal_projector_bias",
            ),
        ),
        {
            "w": "hidden_size",
            "i": "intermediate_size",
            "depth": "num_hidden_layers",
            "channels": "num_channels",
            "patch": "patch_size",
            "merge": "model.spatial_merge_size",
            "d": "text.hidden_size",
        },
        options={"model.multimodal_projector_bias": False},
    ),
    "siglip_vision_model": TowerKind(
        (
            (
                "model.vision_tower",
                "",
                "embeddings.patch_embedding(w,channels,patch,patch)+ "
                "embeddings.position_embedding(patches,w)",
            ),
            (
                "model.vision_tower.encoder.layers",
                "depth",
                "layer_norm1(w)+ self_attn.k_proj(w,w)+ self_attn.v_proj(w,w)+ self_attn.q_proj(w,w)+ "
                "self_attn.out_proj(w,w)+ layer_norm2(w)+ mlp.fc1(i,w)+ mlp.fc2(w,i)+",
            ),
            ("model.vision_tower", "", "post_layernorm(w)+"),
            (
                "model.multi_modal_projector",
                "",
                "mm_input_projection_weight[w,d] mm_soft_emb_norm(w)",
            ),
        ),
        {
            "w": "hidden_size",
            "i": "intermediate_size",
            "depth": "num_hidden_layers",
            "channels": "num_channels",
            "patch": "patch_size",
            "d": "text.hidden_size",
        },
        needs={"vision_use_head": False},
    ),
    "gemma4_vision": TowerKind(
        (
            (
                "model.vision_tower.patch_embedder",
                "",
                "position_embedding_table[2,places,w] input_proj(w,3*patch*patch)",
            ),
            (
                "model.vision_tower.encoder.layers",
                "depth",
                "self_attn.q_proj.linear(a*e,w) self_attn.k_proj.linear(g*e,w) "
                "self_attn.v_proj.linear(g*e,w) self_attn.o_proj.linear(w,a*e) self_attn.q_norm(e) "
                "self_attn.k_norm(e) "
                "mlp.gate_proj.linear(i,w) mlp.up_proj.linear(i,w) mlp.down_proj.linear(w,i) "
                "input_layernorm(w) post_attention_layernorm(w) pre_feedforward_layernorm(w) "
                "post_feedforward_layernorm(w)",
            ),
        ),
        {
            "w": "hidden_size",
            "i": "intermediate_size",
            "depth": "num_hidden_layers",
            "patch": "patch_size",
            "places": "position_embedding_size",
            "a": "num_attention_heads",
            "g": "num_key_value_heads",
            "e": "head_dim",
            "d": "text.hidden_size",
        },
        behind=(("model.embed_vision", "", "embedding_projection(d,w)"),),
        needs={"attention_bias": False},
    ),
    "llama4_vision_model": TowerKind(
        (
            (
                "vision_model",
                "",
                "class_embedding[w] positional_embedding_vlm[patches+1,w] "
                "patch_embedding.linear(w,channels*patch*patch) layernorm_pre(w)+ layernorm_post(w)+",
            ),
            (
                "vision_model.model.layers",
                "depth",
                "self_attn.q_proj(w,w)+ self_attn.k_proj(w,w)+ self_attn.v_proj(w,w)+ self_attn.o_proj(w,w)+ "
                "mlp.fc1(i,w)+ mlp.fc2(w,i)+ input_layernorm(w)+ post_attention_layernorm(w)+",
            ),
            (
                "vision_model.vision_adapter.mlp",
                "",
                "fc1(projected,i) fc2(result,result)",
            ),
            ("multi_modal_projector", "", "linear_1(d,out)"),
        ),
        {
            "w": "hidden_size",
            "i": "intermediate_size",
            "depth": "num_hidden_layers",
            "channels": "num_channels",
            "patch": "patch_size",
            "projected": "projector_input_dim",
            "result": "projector_output_dim",
            "out": "vision_output_dim",
            "d": "text.hidden_size",
        },
        text="language_model.model",
        head="language_model.lm_head",
    ),
}
TOWERS |= dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3)
TOWERS |= {f"{name}_vision": kind for name, kind in TOWERS.items() if name.startswith("qwen")}
"""By the `model_type` of the vision configuration, with and without what transformers 5 adds to it."""
