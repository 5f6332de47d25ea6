"""Kernels: counted against the operations that torch counts, and worked by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from zero_ref.simulator.activations import CHECKPOINTING
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.costs import BACKWARD_OF_FLASH, COMPILED, EAGER, RECOMPUTED, VENDOR
from zero_ref.simulator.device import ATTENTION_KERNELS, Device
from zero_ref.simulator.devices import DEVICES
from zero_ref.simulator.kernels import Kernels, Pass, Product, kernels, touched_by_token
from zero_ref.simulator.layers import Layer
from zero_ref.simulator.models import GPT2, TRANSFORMERS, Llama, blocks, from_config
from zero_ref.simulator.operations import COMPUTE, Operation
from zero_ref.simulator.price import Workload
from zero_ref.simulator.scenario import Scenario

LLAMA = Llama(width=64, depth=3, hidden=160, heads=8, key_value_heads=2, vocabulary=1000, positions=32)
GPT = GPT2(width=64, depth=3, heads=8, vocabulary=1000, positions=32)
# 10^9 operations a millisecond by products, half as many by attention, 10^6 bytes a millisecond.
PLAIN = Device("plain", 1, 1.0, None, 2, attention_reached=0.5, memory_reached=0.5)


def in_blocks(architecture: GPT2 | Llama) -> int:
    """Elements of the matrices that tokens are multiplied with, beside the head."""
    shapes = architecture.shapes()
    return sum(shapes[n].numel for unit in blocks(shapes)[1:] for n in unit if len(shapes[n].shape) == 2)


# ----------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("architecture", [LLAMA, GPT])
def test_forward_multiplies_each_token_with_each_matrix_once(architecture: GPT2 | Llama) -> None:
    found = kernels(architecture, batch=2, sequence=16)
    products = 2 * 32 * (in_blocks(architecture) + 64 * 1000)
    # Query i has i keys: 16 * 17 / 2 scores a head and sequence, two products with 8 elements of each head.
    attention = 3 * 2 * 8 * (16 * 17 / 2) * 8 * 2 * 2
    assert sum(one.flops for one in found.forward.products) == products
    assert found.forward.attention_flops == attention
    assert found.forward.flops == products + attention
    assert sum(one.flops for one in found.backward.products) == 2 * products
    assert found.backward.attention_flops == 2.5 * attention


def test_attention_that_is_written_out_multiplies_squares_and_touches_every_score() -> None:
    kept, flash = (kernels(LLAMA, 2, 16, attention=how) for how in ("unfused", "fused"))
    squares = 3 * 2 * 8 * 16 * 16
    assert kept.forward.attention_flops == kept.backward.attention_flops == 0
    products = sum(one.flops for one in kept.forward.products) - sum(
        one.flops for one in flash.forward.products
    )
    assert products == 2 * 2 * squares * 8
    assert kept.forward.touched_bytes - flash.forward.touched_bytes == 13 * squares
    assert kept.backward.touched_bytes - flash.backward.touched_bytes == 15 * squares


def test_a_pass_takes_the_time_of_its_kernels() -> None:
    made = Pass((Product(10, 20, 30, times=2),), attention_flops=5e9, touched_bytes=3e6, itemsize=4)
    # 24,000 operations take less than 8,800 bytes, at 10^6 bytes a millisecond.
    assert made.parts_ms(PLAIN) == {"matrix products": 0.0088, "attention": 10.0, "memory": 3.0}
    assert made.ms(PLAIN) == pytest.approx(13.0088)
    slow = replace(PLAIN, product_passes=3)
    # Thin products are limited by their bytes, which are not moved three times for that.
    assert made.parts_ms(slow)["matrix products"] == pytest.approx(0.0088 + 3 * 24_000 / 1e9)
    large = Product(3000, 3000, 3000)  # 54 ms of operations, 54 MB in 54 ms at 10^6 bytes a millisecond
    twice = replace(slow, tflops=0.5)
    assert twice.product_ms(large.flops, large.nbytes(2)) == pytest.approx(108 + 3 * 54)


def test_kernels_of_a_vendor_are_one_for_each_norm_rotation_and_gate() -> None:
    less = [
        eager - vendor
        for eager, vendor in zip(touched_by_token(LLAMA, EAGER), touched_by_token(LLAMA, VENDOR), strict=True)
    ]
    heads = 8 * (8 + 2)
    forward = 64 * 2 * (36 - 4) + heads * (20 - 4) + 160 * (10 - 6)
    backward = 64 * 2 * (72 - 6) + heads * (20 - 4) + 160 * (18 - 10)
    assert less == [forward, backward]
    compiled, both = (kernels(LLAMA, 2, 16, compiled=True, vendor=vendor) for vendor in (False, True))
    assert compiled == both


def test_kernels_of_a_vendor_cast_each_operand_to_fp8_once() -> None:
    plain, fp8 = (kernels(LLAMA, 2, 16, vendor=True, fp8=fp8) for fp8 in (False, True))
    inputs = 3 * 32 * (3 * 64 + 64 + 2 * 64 + 160)  # queries, keys, values; the projection; the gated MLP
    results = 3 * 32 * (64 + 2 * 16 + 64 + 2 * 160 + 64)
    assert fp8.forward.touched_bytes - plain.forward.touched_bytes == 2 * inputs
    assert fp8.backward.touched_bytes - plain.backward.touched_bytes == 4 * results


@pytest.mark.parametrize(
    ("name", "usual", "shares"),
    [
        ("h100-ib", 0.34, {"flash-2": 0.34, "flash-3": 0.58, "flash-4": 0.65, "cudnn": 0.56}),
        ("b200-ib", 0.44, {"flash-2": 0.14, "cudnn": 0.44}),
        ("a100-ib", 0.60, {"flash-2": 0.60, "cudnn": 0.60}),  # cuDNN's is not taken there
    ],
)
def test_attention_reaches_the_share_of_its_kernel(name: str, usual: float, shares: dict[str, float]) -> None:
    machine = cluster(name)
    assert Scenario(LLAMA, machine, 1).machine.device.attention_reached == usual
    for kernel in ATTENTION_KERNELS:
        if kernel in shares:
            scenario = Scenario(LLAMA, machine, 1, attention_kernel=kernel)
            assert scenario.machine.device.attention_reached == shares[kernel]
        else:
            with pytest.raises(ValueError, match=f"nothing is known of the attention of {kernel}"):
                Scenario(LLAMA, machine, 1, attention_kernel=kernel)


def test_a_kernel_of_fused_attention_is_refused_where_attention_is_not_fused() -> None:
    with pytest.raises(ValueError, match="is of fused attention; attention is unfused"):
        Scenario(LLAMA, cluster("h100-ib"), 1, attention="unfused", attention_kernel="flash-3")
    # An option of norms and gates says nothing about attention.
    vendor = Scenario(LLAMA, cluster("h100-ib"), 1, vendor_kernels=True)
    assert vendor.machine.device.attention_reached == 0.34


def test_shares_of_attention_are_of_the_published_rates() -> None:
    """Forward makes 2 products and backward 5: devices.py says where the rates are from."""
    rates = {
        ("H200", "flash-3"): (602, 559),
        ("H200", "flash-4"): (675, 629),
        ("H200", "cudnn"): (655, 526),
        ("B200", "flash-2"): (373, 299),
        ("B200", "cudnn"): (1171, 943),
        ("GB200", "flash-4"): (1576, 1280),
        ("GB200", "cudnn"): (1559, 1297),
        ("GB300", "flash-4"): (1888, 1409),
        ("GB300", "cudnn"): (1886, 1420),
    }
    for (name, kernel), (forward, backward) in rates.items():
        device = DEVICES[name]
        together = (1 + BACKWARD_OF_FLASH) / (1 / forward + BACKWARD_OF_FLASH / backward)
        assert together / device["tflops"] == pytest.approx(device["attention_by"][kernel], abs=0.006)


def test_what_a_token_touches_in_a_block_of_llama() -> None:
    heads = 8 * (8 + 2)  # elements of queries and keys
    forward = 64 * (2 * 36 + 2 * 6) + 64 * 4 + heads * 20 + 160 * 10
    backward = 64 * (2 * 72 + 2 * 6 + 3 * 6) + 64 * 4 + heads * 20 + 160 * 18
    assert touched_by_token(LLAMA, EAGER) == (forward, backward)
    assert touched_by_token(LLAMA, COMPILED).forward == 64 * (2 * 4 + 2 * 4) + heads * 4 + 160 * 6


def test_what_a_token_touches_in_a_block_of_gpt2() -> None:
    biases = 9 * 64  # 3 + 1 + 4 + 1
    forward = 64 * (2 * 4 + 2 * 6 + 2 * 5) + 64 * 4 + 4 * 64 * 4
    backward = 64 * (2 * 6 + 2 * 6 + 2 * 5 + 2 * 6) + 2 * biases + 64 * 4 + 4 * 64 * 6
    assert touched_by_token(GPT, EAGER) == (forward, backward)


def test_the_head_touches_logits_and_is_never_computed_again() -> None:
    kept, full = (kernels(LLAMA, 1, 32, way) for way in ("none", "full"))
    of_blocks = 32 * 3 * touched_by_token(LLAMA, EAGER).forward
    assert kept.forward.touched_bytes == of_blocks + 32 * 1000 * 18
    head = Product(32, 64, 1000)
    for found in (kept, full):
        (of_head,) = (one for one in found.backward.products if one[:3] == head[:3])
        assert of_head.times == 2


@pytest.mark.parametrize(
    ("architecture", "last"), [(LLAMA, 64 * 160), (replace(GPT, dropout=False), 64 * 256)]
)
def test_full_checkpointing_computes_all_but_a_blocks_last_product_again(
    architecture: GPT2 | Llama, last: int
) -> None:
    kept, full = (kernels(architecture, 2, 16, way) for way in ("none", "full"))
    again = full.flops - kept.flops
    products = 2 * 32 * (in_blocks(architecture) - 3 * last)
    assert again == pytest.approx(products + kept.forward.attention_flops)
    touched = full.backward.touched_bytes - kept.backward.touched_bytes
    assert touched == pytest.approx(32 * 3 * touched_by_token(architecture, EAGER).forward)


def test_every_other_block_costs_half_of_that_and_by_operation_half_of_all_products_but_the_last() -> None:
    def more(way: str) -> tuple[float, float, float]:
        """Operations of products and attention, and bytes."""
        kept, found = (kernels(LLAMA, 2, 16, each).backward for each in ("none", way))
        attention = found.attention_flops - kept.attention_flops
        return found.flops - kept.flops - attention, attention, found.touched_bytes - kept.touched_bytes

    full = more("full")
    assert more("every-other-block") == pytest.approx([each / 2 for each in full])
    assert more("by-operation") == pytest.approx([2 * 32 * (in_blocks(LLAMA) - 3 * 64 * 160) / 2, 0, full[2]])


def test_every_way_of_checkpointing_says_what_it_computes_again() -> None:
    assert set(CHECKPOINTING) == set(RECOMPUTED)
    with pytest.raises(ValueError, match="unknown checkpointing 'some'; choose one of none, selective, full"):
        kernels(LLAMA, 1, 32, "some")
    with pytest.raises(ValueError, match="unknown attention 'flash'; choose one of fused, unfused"):
        kernels(LLAMA, 1, 32, attention="flash")


# --------------------------------------------------------------------------------------------- for all

sizes = st.integers(1, 6)


def counted(architecture: GPT2 | Llama, checkpointing: str) -> int:
    """The operations of matrix products that torch counts in forward and backward of 2 x 16 tokens."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": 1000, "attn_implementation": "eager", "use_cache": False}
    if isinstance(architecture, Llama):
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
        }
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, **common))
    else:
        share = 0.1 if architecture.dropout else 0.0
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), share)
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=8, n_positions=32, **drops, **common))
    model.train()
    for block in model.model.layers if isinstance(architecture, Llama) else model.transformer.h:
        if checkpointing == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter:
        model(tokens, labels=tokens).loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("architecture", [LLAMA, GPT, replace(GPT, dropout=False)])
def test_the_operations_are_those_that_torch_counts(architecture: GPT2 | Llama) -> None:
    for way in ("none", "full"):
        assert counted(architecture, way) == kernels(architecture, 2, 16, way, attention="unfused").flops


# --------------------------------------------------------------------------------------------- as priced


def priced(found: Kernels, label: str, numel: int, device: Device) -> float:
    work = Workload(tokens=1, kernels=found, moved_bytes=(2.0, 6.0))
    return work.compute_ms(Operation(label, COMPUTE, numel=numel, tensors=5), numel, device)


def test_a_scenario_prices_the_whole_model_whatever_the_strategy() -> None:
    scenario = Scenario(TRANSFORMERS["gpt2"], cluster("h100-ib"), 8, batch=4)
    for strategy in ("ddp", "zero-even", "zero-2", "zero-3"):
        run = scenario.run(strategy)
        computing = sum(
            stop - start
            for one, start, stop in zip(run.schedule.operations, run.played.begin_ms, run.played.end_ms)
            if one.label in ("forward", "backward")
        )
        assert computing == pytest.approx(sum(run.computing_ms.values())), strategy
        assert set(run.computing_ms) == {"matrix products", "attention", "memory", "moved"}


def test_what_the_network_moves_through_memory_is_counted_by_hand() -> None:
    scenario = Scenario(TRANSFORMERS["gpt2"], cluster("h100-ib"), 8)
    assert scenario.workload_of("ddp").moved_bytes == (0, 4 + 8)
    assert scenario.workload_of("zero-2").moved_bytes == (0, 4 + 4)
    assert scenario.workload_of("zero-3").moved_bytes == (4, 4 + 4 + 4)
    assert replace(scenario, world_size=1).workload_of("ddp").moved_bytes == (0, 0)


# ------------------------------------------------------------------------------- blocks that are not alike

SPARSE = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def test_each_token_is_multiplied_with_the_experts_that_it_is_sent_to_and_no_others() -> None:
    model = from_config(SPARSE)
    found = kernels(model, batch=2, sequence=16)
    # Of 32 tokens each goes to 2 of 8 experts, so an expert gets 8.
    latent = 32 * 12 + 12 * 40 + 32 * 24 + 20 * 56 + 32 * 32
    of_token = 3 * latent + 3 * 32 * 48 + 2 * (2 + 1) * 3 * 32 * 24 + 2 * 8 * 32
    head = 64 * 32
    assert sum(one.flops for one in found.forward.products) == 2 * 32 * (of_token + head)
    assert Product(8, 24, 32, 2 * 8) in found.forward.products, "down, of 8 experts in 2 blocks"
    assert Product(8, 32, 48, 2 * 8) in found.forward.products, "gate and up"
    norms = sum(param.numel for param in model.shapes() if "norm" in param.name)
    assert model.active == of_token + head + 64 * 32 + norms
    # Heads of 10 for scores, of 8 for values; 136 pairs of a query and a key in a sequence of 16.
    assert found.forward.attention_flops == 3 * 2 * 4 * 136 * (10 + 8) * 2


def test_checkpointing_by_operation_computes_experts_again_and_half_of_the_other_products() -> None:
    model = from_config(SPARSE)
    none, found, full = (kernels(model, 2, 16, way) for way in ("none", "by-operation", "full"))
    forward = sum(one.flops for one in none.forward.products) - 2 * 32 * 64 * 32  # without the head
    experts = 2 * 32 * 2 * 2 * 3 * 32 * 24  # gate, up and down, of the 2 experts of each token
    last = 2 * 32 * (32 * 48 + 2 * 32 * 24)  # of the dense block, and of the shared expert of two blocks
    assert found.backward.flops - none.backward.flops == (forward - experts - last) / 2 + experts * 2 / 3
    assert found.backward.flops < full.backward.flops


def test_a_window_leaves_out_what_it_hides() -> None:
    whole, windowed = (Llama(32, 4, 48, 4, 4, 64, window=window) for window in (0, 4))
    flops = [kernels(model, 1, 16).forward.attention_flops for model in (whole, windowed)]
    # Queries see 1, 2, 3 and then 4 keys: 58 pairs; without a window 136.
    assert flops[1] / flops[0] == 58 / 136
    share = [
        Scenario(model, cluster("h100-ib"), 1, sequence=16).attention_share for model in (whole, windowed)
    ]
    assert share[1] / share[0] == 4 / 16


def test_norms_with_biases_are_layer_norms_and_others_rms_norms() -> None:
    gpt2, llama = GPT2(32, 2, 4, dropout=False), Llama(32, 2, 48, 4, 4, 64)
    assert [model.layers[0].layer_norms for model in (gpt2, llama)] == [True, False]
    assert [layer.layer_norms for layer in from_config(SPARSE).layers] == [False, False]
    (block,) = gpt2.layers
    rms, layer_norm = (
        touched_by_token(Blocks((block._replace(layer_norms=one),), block.number), EAGER)  # type: ignore[arg-type]
        for one in (False, True)
    )
    assert rms.forward - layer_norm.forward == 2 * 32 * (36 - 4)


class Blocks(NamedTuple):
    """What `touched_by_token` asks of a model."""

    layers: tuple[Layer, ...]
    depth: int
