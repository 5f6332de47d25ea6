"""LoRA: what autograd keeps beside frozen weights, and what a scenario makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from library.living import Living
from library.llama_block import SMALL, B, LlamaBlock, S
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from zero_ref.simulator.activations import activations, matrices
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.kernels import kernels
from zero_ref.simulator.lora import LORA_ON, Lora
from zero_ref.simulator.models import MODELS, TRANSFORMERS
from zero_ref.simulator.scenario import Scenario

H100 = cluster("h100-ib")
LLAMA = Scenario(TRANSFORMERS["llama3-8b"], H100, 8, sequence=4096, bucket_view=True)
RANK = 3


class LoraBlock(LlamaBlock):
    """A block whose weights are frozen, with adapters."""

    def __init__(self, on: str, dtype: torch.dtype) -> None:
        super().__init__("fused", dtype)
        self.requires_grad_(False)
        self.adapters = torch.nn.ParameterDict()
        for name, weight in self.weights.items():
            if weight.dim() == 2 and (on == "all-linear" or "attn" in name):
                outputs, inputs = weight.shape
                self.adapters[f"{name}_a"] = torch.randn(RANK, inputs, dtype=dtype)
                self.adapters[f"{name}_b"] = torch.zeros(outputs, RANK, dtype=dtype)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        result, name = super().linear(x, name), f"{name}_proj_weight"
        if f"{name}_a" not in self.adapters:
            return result
        return result + F.linear(F.linear(x, self.adapters[f"{name}_a"]), self.adapters[f"{name}_b"])


@pytest.mark.parametrize("on", LORA_ON)
@pytest.mark.parametrize("way", ["none", "full"])
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_what_lives_after_forward_is_what_is_kept(
    on: str, way: str, dtype: torch.dtype, itemsize: int
) -> None:
    stack = [LoraBlock(on, dtype) for _ in range(3)]
    first = torch.randn(B, S, SMALL.width, dtype=dtype, requires_grad=True)
    with Living() as living:
        x = first
        for block in stack:
            x = block(x) if way == "none" else partial(checkpoint, block, use_reentrant=False)(x)
    found = activations(replace(SMALL, depth=3), B, checkpointing=way, itemsize=itemsize, lora=Lora(RANK, on))
    assert x.nbytes == first.nbytes, "the last result is alive too, and the first input was made before"
    assert living.nbytes() == found.blocks


@pytest.mark.parametrize("on", LORA_ON)
def test_the_operations_are_those_that_torch_counts(on: str) -> None:
    block = LoraBlock(on, torch.float32)
    x = torch.randn(B, S, SMALL.width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        block(x).sum().backward()
    products = sum(
        flops for func, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(func)
    )
    found = kernels(SMALL, B, S, lora=Lora(RANK, on))
    head = 2 * B * S * SMALL.width * SMALL.vocabulary
    of_products = [sum(one.flops for one in way.products) for way in (found.forward, found.backward)]
    assert products == sum(of_products) - 2 * head, "forward, and backward once to what is before it"


def test_adapters_are_as_many_as_peft_counts() -> None:
    # peft prints "trainable params: 41,943,040 || all params: 8,072,204,288" for Llama 3 8B.
    scenario = replace(LLAMA, lora=16)
    assert (scenario.trained_numel, scenario.numel) == (41_943_040, 8_072_204_288)
    assert scenario.active == scenario.numel
    by_hand = 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert replace(scenario, lora_on="attention").trained_numel == by_hand


@pytest.mark.parametrize("strategy", ["ddp", "zero-even", "zero-2", "zero-3"])
def test_only_adapters_have_gradients_and_state_and_travel(strategy: str) -> None:
    scenario = replace(LLAMA, lora=16)
    full, found = LLAMA.run(strategy), scenario.run(strategy)
    share = scenario.trained_numel / LLAMA.numel
    for part in ("gradient_bytes", "master_bytes", "moment_bytes"):
        few, many = getattr(found.memory, part), getattr(full.memory, part)
        assert few == pytest.approx(share * many, rel=0.01), part
    # The weights are there, in 16 bits.
    parameters = found.memory.parameter_bytes / full.memory.parameter_bytes
    assert parameters == pytest.approx(scenario.numel / LLAMA.numel, rel=0.01)
    reduced = [
        sum(one.nbytes for one in run.schedule.operations if one.label == "reduce") for run in (found, full)
    ]
    assert reduced[0] == pytest.approx(share * reduced[1], rel=0.01)
    most = max(sum(of_kind.values()) for _, of_kind in found.memory_by_kind())
    assert most == pytest.approx(found.peak_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": MODELS["mlp-tiny"]},
            "lora of rank 8 is for transformers whose blocks have",
        ),
        ({"architecture": TRANSFORMERS["qwen3-30b-a3b"]}, "lora of rank 8 is for transformers whose blocks"),
        ({"optimizer": "Muon+AdamW"}, "lora of rank 8 is not simulated with fp8, or with Muon"),
        ({"cluster": cluster("loopback")}, "lora of rank 8 is not simulated on"),
        ({"lora": 0}, "lora must be at least 1, got 0"),
        ({"lora_on": "mlp"}, "unknown lora_on 'mlp'; choose one of all-linear, attention"),
    ],
)
def test_a_mistake_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **({"lora": 8} | options))


def test_checkpointing_by_operation_keeps_every_other_product_of_adapters_too() -> None:
    model, lora = SMALL, Lora(RANK)
    plain, found = (
        activations(model, B, checkpointing="by-operation", lora=one).blocks for one in (None, lora)
    )
    # Of each weight with adapters there are three products: W, A, B. Of query, value, gate and down the first
    # and the last are kept, of the others the second.
    listed = matrices(model)
    more = sum(one.outputs for one in listed[::2]) + RANK * len(listed[1::2])
    assert found - plain == 2 * B * S * more
