"""A block of Llama in PyTorch, to hold activations on paper against what autograd keeps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from zero_ref.simulator.models import Llama


class FusedNorm(torch.autograd.Function):
    """RMSNorm as torch's fused kernel computes it on a GPU: it keeps its input and a statistic a token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, scale = ctx.saved_tensors
        return (grad * weight * scale).to(x.dtype), (grad * x * scale).sum(tuple(range(x.dim() - 1))).to(
            x.dtype
        )


S, B = 8, 3
SMALL = Llama(width=16, depth=1, hidden=40, heads=4, key_value_heads=2, vocabulary=11, positions=S)
SHAPES = {param.name.split(".", 3)[-1]: param.shape for param in SMALL.shapes() if ".0." in param.name}


class LlamaBlock(torch.nn.Module):
    """Grouped heads, rotary positions, RMSNorm, a gated MLP. Input and output: (batch, positions, width)."""

    def __init__(self, attention: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.fused = attention == "fused"
        self.weights = torch.nn.ParameterDict(
            {
                name.replace(".", "_"): torch.nn.Parameter(0.1 * torch.randn(shape, dtype=dtype))
                for name, shape in SHAPES.items()
            }
        )
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.randn(1, 1, S, SMALL.head_width, dtype=dtype))

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}_proj_weight"])

    def of_heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.linear(x, f"self_attn_{name}").view(B, S, -1, SMALL.head_width).transpose(1, 2)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * SMALL.head_width**-0.5
        return (
            torch.softmax(scores + torch.full((S, S), -torch.inf, dtype=scores.dtype).triu(1), dim=-1) @ value
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        normed = FusedNorm.apply(x, weights["input_layernorm_weight"])
        query, key = (self.rotated(self.of_heads(normed, name)) for name in ("q", "k"))
        mixed = self.attend(query, key, self.of_heads(normed, "v")).transpose(1, 2).reshape(B, S, -1)
        x = x + self.linear(mixed, "self_attn_o")
        normed = FusedNorm.apply(x, weights["post_attention_layernorm_weight"])
        gate, up = (self.linear(normed, f"mlp_{name}") for name in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, "mlp_down")
