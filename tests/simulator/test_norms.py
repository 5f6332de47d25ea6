"""The tensors that separate operations keep, where fused kernels keep fewer: counted, and by autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from zero_ref.simulator.activations import activations
from zero_ref.simulator.models import GPT2, Llama, from_config
from zero_ref.simulator.norms import beside_of_element, kept_beside

TOKENS, WIDTH = 100, 64
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def as_transformers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def as_litgpt(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def weight_in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def as_torch_without_a_kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (WIDTH,), weight, 1e-5)  # on a CPU there is none


def kept_of_norm(norm: Norm, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps of a norm of a tensor that nothing else keeps, beside a statistic a token."""
    weight = torch.ones(WIDTH, dtype=dtype, requires_grad=True)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True) + 0
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = norm(x, weight)
    assert result.shape == x.shape
    saved.pop(weight.untyped_storage().data_ptr(), None)
    return sum(nbytes for nbytes in saved.values() if nbytes > 4 * TOKENS)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize(
    ("norm", "norms"),
    [
        (as_transformers, "by-hand"),
        (as_litgpt, "by-hand"),
        (weight_in_float32, "composite"),
        (as_torch_without_a_kernel, "composite"),
    ],
)
def test_a_norm_of_separate_operations_keeps_what_autograd_saves(
    norm: Norm, norms: str, dtype: torch.dtype, itemsize: int
) -> None:
    fused = TOKENS * WIDTH * itemsize  # the input
    assert kept_of_norm(norm, dtype) == fused + TOKENS * WIDTH * beside_of_element(norms, itemsize)


def kept_by(function: Callable[[], torch.Tensor]) -> int:
    """Bytes of all storages that autograd keeps of a computation."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = function()
    return sum(saved.values())


def test_keys_and_values_that_are_repeated_are_kept_once_for_each_query_head() -> None:
    heads, few, elements = 4, 2, 8
    query, key, value = (torch.randn(1, n, 16, elements, requires_grad=True) + 0 for n in (heads, few, few))

    def kept(repeated: bool) -> int:
        keys = [one.repeat_interleave(heads // few, dim=1) if repeated else one for one in (key, value)]
        attend = F.scaled_dot_product_attention
        return kept_by(lambda: attend(query, *keys, is_causal=True, enable_gqa=not repeated))

    model = Llama(heads * elements, 1, 8, heads, few, 10)
    (more,) = kept_beside(model.layers[0], "fused", True)
    assert kept(True) - kept(False) == 16 * 4 * more.numel


def test_a_softmax_by_hand_keeps_the_exponentials_too() -> None:
    heads, tokens = 4, 16
    values = torch.randn(heads, tokens, 8, requires_grad=True)

    def attended(weights: torch.Tensor) -> torch.Tensor:
        return weights @ values

    def by_hand() -> torch.Tensor:
        scores = torch.randn(heads, tokens, tokens, requires_grad=True) + 0
        raised = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True))
        return attended(raised / raised.sum(dim=-1, keepdim=True))

    def in_one() -> torch.Tensor:
        scores = torch.randn(heads, tokens, tokens, requires_grad=True) + 0
        return attended(torch.softmax(scores, dim=-1))

    layer = Llama(32, 1, 8, heads, heads, 10).layers[0]
    (more,) = kept_beside(layer, "fused", False, exponentials=tokens)
    sums = heads * tokens * 4
    assert kept_by(by_hand) - kept_by(in_one) == tokens * more.numel * 4 + sums


def test_a_silu_by_hand_keeps_the_sigmoid_too() -> None:
    gate, up = (torch.randn(TOKENS, 24, requires_grad=True) + 0 for _ in range(2))
    by_hand, in_one = kept_by(lambda: gate * torch.sigmoid(gate) * up), kept_by(lambda: F.silu(gate) * up)
    (more,) = kept_beside(Llama(8, 1, 24, 1, 1, 10).layers[0], "fused", False, silu_by_hand=True)
    assert by_hand - in_one == TOKENS * more.numel * 4


def test_a_layer_norm_is_one_kernel() -> None:
    model = GPT2(64, 2, 4, dropout=False)
    assert activations(model, 1, norms="by-hand") == activations(model, 1)


def test_norms_of_heads_and_of_results_count() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 100}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    qwen = from_config({"model_type": "qwen3", **sizes, "max_position_embeddings": 64})
    assert kept_beside(qwen.layers[0], "by-hand", False)[0].numel == 2 * 64 + 6 * 16
    olmo = from_config({"model_type": "olmo2", **sizes, "max_position_embeddings": 64})
    assert kept_beside(olmo.layers[0], "by-hand", False)[0].numel == 2 * 64 + 6 * 16
