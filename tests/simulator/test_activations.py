"""Activations: the published formula, and what autograd saves in a block like the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from library.living import Living
from library.llama_block import SMALL, B, FusedNorm, LlamaBlock, S
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from zero_ref.simulator.activations import (
    activation_bytes,
    activations,
    head_bytes,
    kept_of_block,
    kinds_apart,
    matrices,
)
from zero_ref.simulator.kernels import kernels
from zero_ref.simulator.models import GPT2, TRANSFORMERS, blocks, from_config

# ----------------------------------------------------------------------------------------------- example


def test_the_formula_by_hand() -> None:
    # s = 4, b = 3, h = 8, a = 2: s*b*h = 96; the scores' 5*a*s/h = 5.
    model = GPT2(width=8, depth=10, heads=2, vocabulary=7, positions=4)
    assert activation_bytes(model, 3, attention="unfused") == 10 * 96 * (34 + 5)
    assert activation_bytes(model, 3, checkpointing="selective", attention="unfused") == 10 * 96 * 34
    assert activation_bytes(model, 3) == activation_bytes(model, 3, checkpointing="selective") == 10 * 96 * 34
    # Ten inputs, and the other activations of the block that is computed again.
    unfused = activation_bytes(model, 3, checkpointing="full", attention="unfused")
    assert unfused == 10 * 96 * 2 + 96 * (34 + 5 - 2)
    assert activation_bytes(model, 3, checkpointing="full") == 10 * 96 * 2 + 96 * 32
    scores = 10 * 5 * 2 * 2 * 2 * 3
    assert activation_bytes(model, 3, sequence=2, attention="unfused") == 10 * 48 * 34 + scores
    assert head_bytes(model, 3) == 96 * 5 + 4 * 3 * 4 * 7


def test_scores_are_the_published_multiple_of_the_rest() -> None:
    # Korthikanti et al., section 5: for GPT-3 (h 12288, a 96, s 2048), 5*a*s/h = 80, more than 34, so that
    # selective recomputation saves 70% of the activations.
    everything, without_scores = (
        activation_bytes(TRANSFORMERS["gpt3-175b"], 1, checkpointing=way, attention="unfused")
        for way in ("none", "selective")
    )
    assert everything / without_scores == (34 + 80) / 34
    assert round(1 - without_scores / everything, 2) == 0.70


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": -1}, "at least 1 sequence, got -1"),
        ({"batch": 0}, "at least 1 sequence, got 0"),
        ({"batch": 1, "sequence": 0}, "at least 1 token, got 0"),
        (
            {"batch": 1, "checkpointing": "some"},
            "unknown checkpointing 'some'; choose one of none, selective, every-other-block",
        ),
        ({"batch": 1, "attention": "flash"}, "unknown attention 'flash'; choose one of fused, unfused"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        activation_bytes(TRANSFORMERS["gpt2"], **arguments)


# ------------------------------------------------------------------------------------------------ parity


def kept_by_autograd(
    function: Callable[..., Any], x: torch.Tensor, weights: Iterable[torch.Tensor]
) -> tuple[Any, list[int]]:
    """The result, and the bytes of each storage that autograd keeps beside those of the weights."""
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function(x)
    of_weights = {weight.untyped_storage().data_ptr() for weight in weights}
    return result, [storage.nbytes() for pointer, storage in saved.items() if pointer not in of_weights]


def test_the_formula_is_what_autograd_saves_in_a_block() -> None:
    s, b, h, a = 6, 3, 16, 4
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        for name, shape in {
            "norm1": (h,),
            "query": (h, h),
            "key": (h, h),
            "value": (h, h),
            "out": (h, h),
            "norm2": (h,),
            "up": (4 * h, h),
            "down": (h, 4 * h),
        }.items()
    }

    def dropout(x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0]  # its mask has a byte an element, as the paper counts

    def of_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).view(s, b * a, h // a).transpose(0, 1)

    def block(x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, (h,), weights["norm1"])
        query, key, value = (of_heads(normed, weights[name]) for name in ("query", "key", "value"))
        scores = dropout(torch.softmax(query @ key.transpose(1, 2) * (h // a) ** -0.5, dim=-1))
        mixed = (scores @ value).transpose(0, 1).reshape(s, b, h)
        x = x + dropout(F.linear(mixed, weights["out"]))
        raised = F.linear(F.layer_norm(x, (h,), weights["norm2"]), weights["up"])
        return x + dropout(F.linear(F.gelu(raised), weights["down"]))

    x = torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
    result, kept = kept_by_autograd(block, x, weights.values())
    # Each norm keeps a mean and a deviation a token, which the paper leaves out.
    statistics = [nbytes for nbytes in kept if nbytes in (2 * s * b, 4 * s * b)]
    assert result.shape == (s, b, h)
    assert len(statistics) == 4
    model = GPT2(width=h, depth=1, heads=a, vocabulary=1, positions=s)
    assert sum(kept) - sum(statistics) == activation_bytes(model, b, attention="unfused")


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("attention", ["fused", "unfused"])  # by hand: tests/simulator/test_norms.py
def test_a_llamas_block_keeps_what_autograd_saves(attention: str, dtype: torch.dtype, itemsize: int) -> None:
    block = LlamaBlock(attention, dtype)
    x = torch.randn(B, S, SMALL.width, dtype=dtype, requires_grad=True)
    others = [*block.parameters(), *block.buffers()]
    _, kept = kept_by_autograd(block, x, others)
    found = activations(SMALL, B, attention=attention, itemsize=itemsize)
    assert sum(kept) == found.blocks


ROUTING = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_DEEPSEEK = {
    **ROUTING,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
OF_QWEN = {**ROUTING, "head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("kind", "number", "sizes"),
    [
        ("qwen3_moe", 0, OF_QWEN),
        ("deepseek_v3", 0, OF_DEEPSEEK),  # dense
        ("deepseek_v3", 1, OF_DEEPSEEK),
    ],
)
def test_a_block_of_a_mixture_keeps_what_autograd_saves(
    kind: str, number: int, sizes: dict[str, Any]
) -> None:
    """Blocks of transformers with fused norms, flash attention, and experts as one product of groups."""
    config = CONFIG_MAPPING[kind](**OF_A_MIXTURE, **{"num_key_value_heads": 2} | sizes)
    config._experts_implementation = "grouped_mm"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(lambda norm, x: FusedNorm.apply(x, norm.weight), module)
    x = torch.randn(B, 2 * S, 32, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(2 * S).expand(B, -1)
    rotation = model.model.rotary_emb(x, positions)
    block = partial(
        model.model.layers[number],
        position_embeddings=rotation,
        position_ids=positions,
        attention_mask=None,
    )
    others = [*model.parameters(), *model.buffers(), *rotation]
    _, kept = kept_by_autograd(block, x, others)
    read = from_config(config.to_dict() | sizes)
    layer = read.layers[number]
    counted = kept_of_block(layer, 2 * S)
    ends_of_groups = 4 * 4 * (layer.mlp is not None)  # an integer of 32 bits for each of four experts
    assert sum(kept) == B * 2 * S * sum(one.numel * (one.nbytes or 2) for one in counted) + ends_of_groups


OF_A_MIXTURE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    ("dtype", "itemsize", "loss_dtype", "loss_itemsize"),
    [
        (torch.bfloat16, 2, torch.float32, 4),
        (torch.bfloat16, 2, torch.bfloat16, 2),
        (torch.float32, 4, torch.float32, 4),
    ],
)
def test_the_head_keeps_what_autograd_saves(
    dtype: torch.dtype, itemsize: int, loss_dtype: torch.dtype, loss_itemsize: int
) -> None:
    norm, head = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((16,), (11, 16)))
    targets = torch.randint(11, (B * S,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(FusedNorm.apply(x, norm), head)
        return F.cross_entropy(logits.flatten(0, 1).to(loss_dtype), targets)

    x = torch.randn(B, S, 16, dtype=dtype, requires_grad=True)
    _, kept = kept_by_autograd(loss, x, [norm, head, targets])
    total_weight = loss_itemsize  # of the mean, a number
    found = activations(SMALL, B, itemsize=itemsize, loss_itemsize=loss_itemsize)
    assert sum(kept) - total_weight == found.head


# ------------------------------------------------------------------------- what lives while a model computes


def every_other_product() -> Any:
    """torchtitan's policy: keep attention's results, and those of every other product from the first on."""
    count = {False: 0, True: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = func == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        if func == torch.ops.aten.mm.default:
            count[ctx.is_recompute] += 1
            keep = count[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def run_block(way: str, number: int, block: LlamaBlock, x: torch.Tensor) -> torch.Tensor:
    """A block under a kind of checkpointing, as PyTorch does it."""
    if way == "selective":
        block.attend = partial(checkpoint, LlamaBlock.attend.__get__(block), use_reentrant=False)  # type: ignore[method-assign]
    if way == "full" or (way == "every-other-block" and number % 2):
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]
    if way == "by-operation":
        return checkpoint(block, x, use_reentrant=False, context_fn=every_other_product)  # type: ignore[no-any-return]
    return block(x)  # type: ignore[no-any-return]


WAYS = ["none", "selective", "every-other-block", "by-operation", "full"]


IN_TORCH = [("fused", way) for way in kinds_apart("fused")] + [
    ("unfused", way)
    for way in WAYS
    if way != "by-operation"  # torchtitan keeps the result of the fused kernel
]


@pytest.mark.parametrize(("attention", "way"), IN_TORCH)
@pytest.mark.parametrize("depth", [1, 5])
def test_what_lives_after_forward_is_what_is_kept(attention: str, way: str, depth: int) -> None:
    stack = [LlamaBlock(attention, torch.bfloat16) for _ in range(depth)]
    first = torch.randn(B, S, SMALL.width, dtype=torch.bfloat16, requires_grad=True)
    with Living() as living:
        x = first
        for number, block in enumerate(stack):
            x = run_block(way, number, block, x)
    found = activations(replace(SMALL, depth=depth), B, checkpointing=way, attention=attention)
    assert x.nbytes == first.nbytes, "the last result is alive too, and the first input was made before"
    assert living.nbytes() == found.blocks


@pytest.mark.parametrize("way", WAYS)
def test_backward_makes_as_many_products_again_as_torch_counts(way: str) -> None:
    stack = [LlamaBlock("fused", torch.bfloat16) for _ in range(2)]
    x = torch.randn(B, S, SMALL.width, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        for number, block in enumerate(stack):
            x = run_block(way, number, block, x)
        x.sum().backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    found = kernels(replace(SMALL, depth=2, vocabulary=0), B, S, way)
    assert counted == sum(one.flops for each in (found.forward, found.backward) for one in each.products)


def peak_of_a_step(attention: str, way: str, depth: int, vocabulary: int) -> tuple[int, int]:
    """The most bytes that live in a step beside weights and their gradients; and as predicted."""
    stack = [LlamaBlock(attention, torch.bfloat16) for _ in range(depth)]
    norm, head = (
        torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((16,), (vocabulary, 16))
    )
    targets = torch.randint(vocabulary, (B * S,))
    x = torch.randn(B, S, SMALL.width, dtype=torch.bfloat16, requires_grad=True)
    params = [norm, head, *(param for block in stack for param in block.parameters())]
    for param in params:
        param.grad = torch.zeros_like(param)
    with Living() as living:
        last = x
        for number, block in enumerate(stack):
            last = run_block(way, number, block, last)
        logits = F.linear(FusedNorm.apply(last, norm), head)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets)
        del logits, last
        loss.backward()
    architecture = replace(SMALL, depth=depth, vocabulary=vocabulary)
    found = activations(architecture, B, checkpointing=way, attention=attention)
    return living.peak, max(found.kept + found.loss, found.blocks + found.again + found.gradients)


@pytest.mark.parametrize(
    ("attention", "way", "vocabulary"),
    [*((*one, 11) for one in IN_TORCH), ("fused", "none", 4000), ("fused", "full", 4000)],
)
def test_the_peak_is_at_the_loss_or_in_a_block(attention: str, way: str, vocabulary: int) -> None:
    peak, predicted = peak_of_a_step(attention, way, 4, vocabulary)
    made_before = B * S * SMALL.width * 2  # the first input
    # At the loss to a hundredth. In a block gradients are counted in whole tensors, and some overlap.
    assert peak + made_before == pytest.approx(predicted, rel=0.01 if vocabulary == 4000 else 0.05)


def test_a_compiled_block_keeps_what_torchs_partitioner_keeps() -> None:
    from functorch.compile import aot_module, min_cut_rematerialization_partition, nop

    block = LlamaBlock("fused", torch.bfloat16)
    compiled = aot_module(
        block, fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
    )
    x = torch.randn(B, S, SMALL.width, dtype=torch.bfloat16, requires_grad=True)
    with Living() as living:
        result = compiled(x)
    found, eager = (activations(SMALL, B, compiled=one) for one in (True, False))
    assert result.nbytes == x.nbytes, "the result is alive too, and the input was made before"
    assert living.nbytes() == found.blocks
    assert eager.blocks - found.blocks == 2 * B * S * SMALL.hidden


def test_by_hand_what_each_kind_keeps_of_llama_3() -> None:
    # 8B: width 4096, heads 32 of 128, of keys 8, MLP 14336; bytes of a token and block, in 16 bits.
    model, tokens = TRANSFORMERS["llama3-8b"], 8192

    def each(way: str, **options: Any) -> float:
        return activations(model, 1, tokens, way, **options).blocks / tokens / model.depth

    statistics = 2 * 4 + 32 * 4
    assert each("none") == each("selective") == 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336) + statistics
    # Input, query, value, attention's result, gate and down.
    assert each("by-operation") == 2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 32 * 4
    assert each("by-operation", compiled=True) == each("by-operation") - 2 * 4096
    assert each("full") == 2 * 4096
    assert each("every-other-block") == (each("selective") + each("full")) / 2


def test_logits_take_4_bytes_and_12_in_backward_or_fused_2_and_4() -> None:
    model = TRANSFORMERS["llama3-8b"]
    small = replace(model, vocabulary=1)
    counts: list[tuple[dict[str, Any], int, int]] = [({}, 4, 12), ({"itemsize": 4}, 4, 12)]
    counts += [({"fused_loss": True}, 2, 4), ({"loss_itemsize": 2}, 2, 6)]
    for options, kept, at_once in counts:
        many, few = (activations(one, 1, 100, "full", **options) for one in (model, small))
        logits = 100 * (model.vocabulary - 1)
        assert many.head - few.head == kept * logits
        assert many.head + many.loss - few.head - few.loss == at_once * logits


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_products_are_the_matrices_of_a_block(name: str) -> None:
    model = TRANSFORMERS[name]
    check_matrices(model)


def check_matrices(model: Any) -> None:
    named = model.shapes()
    of_block = sorted(named[i].numel for i in blocks(named)[1] if len(named[i].shape) == 2)
    assert sorted(one.inputs * one.outputs for one in matrices(model.layers[0])) == of_block
