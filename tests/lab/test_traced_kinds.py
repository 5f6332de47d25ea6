"""Models of many kinds: parameters, what autograd keeps, and products, against a real run on a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero_ref.lab import on_meta
from zero_ref.lab.built import built, from_config, from_factory
from zero_ref.simulator.activations import activations
from zero_ref.simulator.kernels import kernels
from zero_ref.simulator.traced import Traced

BATCH, LENGTH = 2, 64

SIZES = {"vocab_size": 4096, "num_hidden_layers": 2, "max_position_embeddings": 512}
SIZES |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0}
"""A CPU keeps a dropout's mask in the dtype of its input, and a GPU in a byte for each element."""


def text(kind: str, width: int, hidden: int, heads: int, few: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads}
    return {"model_type": kind, **SIZES, **sizes, "num_key_value_heads": few, **others}


EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 16, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    # The dimensions of Llama 3.2 1B, OLMo-2 7B, Phi-4-mini, Gemma 3 1B; of Qwen3-30B-A3B with fewer experts;
    # of DeepSeek-V3 at a quarter of its width; and so on.
    "dense": text("llama", 2048, 8192, 32, 8),
    "norms of results": text("olmo2", 4096, 11008, 32, 32),
    "products that are one": text("phi3", 3072, 8192, 24, 8, partial_rotary_factor=0.75),
    "windows": text("gemma3_text", 1152, 6912, 4, 1, head_dim=256, sliding_window=512),
    "mixture": text("qwen3_moe", 2048, 6144, 32, 4, head_dim=128, **EXPERTS),
    "latent attention": text(
        *("deepseek_v3", 1792, 4608, 32, 32),
        n_routed_experts=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        q_lora_rank=384,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=192,  # as wide as a query's head: a CPU has no fused attention for others
    ),
    "linear attention": text(
        *("qwen3_next", 1024, 2560, 8, 2),
        **{"head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 16, **EXPERTS},
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        shared_expert_intermediate_size=256,
        layer_types=["linear_attention", "full_attention"],
    ),
    "hybrid with a state space": text(
        *("nemotron_h", 1024, 4096, 16, 4),
        layers_block_type=["mamba", "attention", "mlp"],
        num_hidden_layers=3,
        head_dim=64,
        mamba_num_heads=32,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=64,
    ),
    "encoder": {**text("bert", 768, 3072, 12, 12), **NO_DROPOUT, "architectures": ["BertForMaskedLM"]},
    "encoder and decoder": {
        "model_type": "bart",
        "d_model": 768,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "vocab_size": 4096,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "architectures": ["BartForConditionalGeneration"],
    },
    "vision": {
        "model_type": "vit",
        "hidden_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "architectures": ["ViTForImageClassification"],
        **NO_DROPOUT,
    },
    "vision and text": {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "text_config": {"num_hidden_layers": 2, "vocab_size": 4096},
        "vision_config": {"num_hidden_layers": 2, "hidden_size": 768, "image_size": 224, "patch_size": 32},
    },
}


class Diffusion(nn.Module):
    """A diffusion transformer's blocks: norms that are shifted and scaled by a condition, and a gate."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.condition = nn.Linear(width, 6 * width)

        def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
            shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.condition(F.silu(condition))[
                :, None
            ].chunk(6, dim=-1)
            normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale_1) + shift_1
            parts = (
                one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(normed).chunk(3, -1)
            )
            x = x + gate_1 * self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
            normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale_2) + shift_2
            return x + gate_2 * self.down(F.gelu(self.up(normed), approximate="tanh"))

    def __init__(self) -> None:
        super().__init__()
        width = 1152
        self.patches, self.time = nn.Conv2d(4, width, 2, stride=2), nn.Linear(256, width)
        self.blocks = nn.ModuleList(self.Block(width, 16) for _ in range(2))
        self.last = nn.Linear(width, 16)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        x, condition = self.patches(images).flatten(2).transpose(1, 2), self.time(times)
        for block in self.blocks:
            x = block(x, condition)
        return self.last(x).float().square().mean()


def of_diffusion(batch: int, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.zeros(batch, 4, 16, 16, dtype=torch.bfloat16)
    return images, torch.zeros(batch, 256, dtype=torch.bfloat16)


def of_grouped(first: Any, second: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Products of experts, which torch's counter leaves out."""
    return 2 * first[0] * first[1] * second[-1]


def of_convolution(made: Any, _: Any, weight: Any, *others: Any, **__: Any) -> int:
    """Backward of a convolution; torch's formula gives each group's weight the inputs of all groups."""
    return 2 * made[0] * math.prod(made[2:]) * math.prod(weight) * sum(others[-1][:2])


FORMULAS = {torch.ops.aten._grouped_mm: of_grouped, torch.ops.aten.convolution_backward: of_convolution}


def measured(module: nn.Module, given: Any) -> tuple[int, int]:
    """The bytes that autograd keeps, and the operations that torch counts, in a real forward and backward."""
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def loss() -> torch.Tensor:
        result = module(**given) if isinstance(given, dict) else module(*given)
        return result if isinstance(result, torch.Tensor) else result.loss  # type: ignore[no-any-return]

    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made = loss()
        made.backward()  # type: ignore[no-untyped-call]
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}
    kept = sum(one.nbytes() for at, one in saved.items() if at not in own)
    return kept, counter.get_total_flops()


def check(model: Traced, module: nn.Module, given: Any, length: int) -> None:
    assert sum(one.numel for one in model.shapes()) == sum(one.numel() for one in module.parameters())
    kept, flops = measured(module, given)
    # The statistics of LayerNorms are of 32 bits on a GPU, and of 16 on a CPU.
    assert activations(model, BATCH, length).kept == pytest.approx(kept, rel=0.02)
    found = kernels(model, BATCH, length)
    products = sum(one.flops for way in (found.forward, found.backward) for one in way.products)
    assert products == pytest.approx(flops, rel=0.01)  # a CPU's fused attention is not counted by torch


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_transformers_is_traced_as_it_runs(kind: str) -> None:
    config = CONFIGS[kind]
    model = from_config(config, "bfloat16", LENGTH)
    module: Any = built(config).to_empty(device="cpu")
    module.tie_weights()
    for one in (*module.parameters(), *module.buffers()):
        if one.is_floating_point():
            torch.nn.init.constant_(one.data, 0.01)
        else:
            one.data.zero_()
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    length = LENGTH
    if kind in ("vision", "vision and text"):
        images = torch.zeros(BATCH, 3, 224, 224, dtype=torch.bfloat16)
        given = {"pixel_values": images, "labels": torch.zeros(BATCH, dtype=torch.long)}
        length = 1
    if kind == "vision and text":
        given, length = {"pixel_values": images, "input_ids": ids, "return_loss": True}, LENGTH
    check(model, module, given, length)


def test_a_diffusion_transformer_of_ones_own_is_traced_as_it_runs() -> None:
    model = from_factory(lambda: (Diffusion(), of_diffusion), "bfloat16")
    assert model.positions == 1
    check(model, Diffusion().bfloat16(), of_diffusion(BATCH, 1), 1)


WINDOWED = {
    "mistral": (text("mistral", 256, 512, 4, 2, sliding_window=128), 2),
    "gemma2": (text("gemma2", 256, 512, 4, 2, head_dim=64, sliding_window=128), 1),
    "gemma3_text": (text("gemma3_text", 256, 512, 4, 2, head_dim=64, sliding_window=128), 2),
    "phi3": (text("phi3", 256, 512, 4, 4, sliding_window=128), 2),
    "qwen2": (
        text("qwen2", 256, 512, 4, 2, sliding_window=128, use_sliding_window=True, max_window_layers=1),
        1,
    ),
    "gpt_oss": (text("gpt_oss", 256, 512, 4, 2, head_dim=64, sliding_window=128, num_local_experts=4), 1),
}
"""Configurations, and how many of their two blocks have the window."""


@pytest.mark.parametrize("kind", WINDOWED)
def test_attention_with_a_window_multiplies_what_the_window_shows(kind: str) -> None:
    config, windowed = WINDOWED[kind]
    length, width = 512, 4 * 64
    model = from_config(config, "bfloat16", length)
    whole, seen = length * (length + 1) / 2, 128 * 129 / 2 + 128 * (length - 128)
    found = kernels(model, 1, length)
    assert found.forward.attention_flops == 2 * 2 * width * (windowed * seen + (2 - windowed) * whole)
    assert found.backward.attention_flops == 2.5 * found.forward.attention_flops
    # No score is kept, with a window or without one.
    without = from_config({**config, "sliding_window": length}, "bfloat16", length)
    assert activations(model, 1, length).kept == activations(without, 1, length).kept
    shown = windowed * 128 + (2 - windowed) * length
    assert model.attention_share(1, length) * 2 * length == pytest.approx(
        without.attention_share(1, length) * shown
    )


def test_dropout_of_attention_reaches_the_fused_kernel_which_keeps_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend, shares = on_meta._attend, []

    def noted(*tensors: torch.Tensor, dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
        shares.append(dropout_p)
        return attend(*tensors, dropout_p=dropout_p, **options)

    monkeypatch.setattr(on_meta, "_attend", noted)
    config = text("llama", 256, 512, 4, 2)
    with_dropout = from_config({**config, "attention_dropout": 0.1}, "bfloat16", LENGTH)
    assert set(shares) == {0.1}
    without = from_config({**config, "attention_dropout": 0.0}, "bfloat16", LENGTH)
    assert set(shares) == {0.1, 0.0}
    assert activations(with_dropout, 1, LENGTH).kept == activations(without, 1, LENGTH).kept
