"""Autocast: against what torch.autocast keeps, and what it makes of a scenario."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from library.living import Living
from library.llama_block import SMALL, B, LlamaBlock, S
from torch.utils.checkpoint import checkpoint

from zero_ref.simulator.activations import activations
from zero_ref.simulator.autocast import reads_of_norms
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.costs import COMPILED, EAGER
from zero_ref.simulator.kernels import kernels, touched_by_token
from zero_ref.simulator.models import MODELS, TRANSFORMERS
from zero_ref.simulator.scenario import Scenario

H100 = cluster("h100-ib")


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("way", ["none", "every-other-block", "full"])
def test_what_lives_in_and_after_autocast_is_what_is_counted(way: str, depth: int) -> None:
    stack = [LlamaBlock("fused", torch.float32) for _ in range(depth)]
    first = torch.randn(B, S, SMALL.width, requires_grad=True)
    with Living() as living:
        with torch.autocast("cpu", torch.bfloat16):
            x = first
            for number, block in enumerate(stack):
                again = way == "full" or (way == "every-other-block" and number % 2)
                x = partial(checkpoint, block, use_reentrant=False)(x) if again else block(x)
            before_it_ends = living.nbytes()
        after = living.nbytes()
    found = activations(replace(SMALL, depth=depth), B, checkpointing=way, autocast=True)
    assert x.nbytes == first.nbytes, "the last result is alive too, and the first input was made before"
    assert after == found.blocks
    assert before_it_ends == found.blocks + found.cached


def test_by_hand_what_a_block_of_llama_3_keeps_under_autocast() -> None:
    model, tokens = TRANSFORMERS["llama3-8b"], 1000
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    # Input and stream of 4 bytes; a norm's result three times and twice; queries, keys, values, attention's
    # result; four of the MLP. A statistic of each norm and of each head.
    numel = 5 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    by_hand = tokens * (2 * 4 * 4096 + 2 * numel + 2 * 4 + 32 * 4) + 2 * weights
    assert activations(model, 1, tokens, autocast=True).blocks == 32 * by_hand
    # A compiler casts once, casts weights again in backward, and computes an operand again.
    numel -= 3 * 4096 + 14336
    by_hand = tokens * (2 * 4 * 4096 + 2 * numel + 2 * 4 + 32 * 4)
    assert activations(model, 1, tokens, autocast=True, compiled=True).blocks == 32 * by_hand


def test_parameters_and_state_are_those_of_float32_and_the_peak_of_16_bits() -> None:
    scenario = Scenario(TRANSFORMERS["gpt2"], H100, 2, dtype="float32", batch=8, autocast="bfloat16")
    full, half = (replace(scenario, autocast=None, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert (scenario.machine.device.tflops, full.machine.device.tflops) == (989, 67)
    memory, other = (one.run("ddp").memory for one in (scenario, full))
    for part in ("parameter_bytes", "gradient_bytes", "master_bytes", "moment_bytes"):
        assert getattr(memory, part) == getattr(other, part), part
    assert memory.master_bytes == 0
    products = [one.run("ddp").computing_ms["matrix products"] for one in (scenario, full, half)]
    assert products[0] == products[2] < products[1] / 4
    assert [call.nbytes for call in scenario.schedule("ddp").calls] == [
        call.nbytes for call in full.schedule("ddp").calls
    ]
    # More is kept than in 16 bits, and less than in 32.
    assert half.activation_bytes < scenario.activation_bytes < full.activation_bytes


def test_what_is_cast_is_read_and_written() -> None:
    model = TRANSFORMERS["gpt2"]
    plain, cast = (kernels(model, 1, 64, autocast=autocast) for autocast in (False, True))
    assert cast.flops == plain.flops
    weights = 12 * 12 * 768 * 768 + 50_257 * 768
    # Two norms and two sums of a block are of twice as many bytes. Two results of 768 elements are cast.
    more = [12 * 64 * 768 * (2 * (4 + 6) + 2 * 6), 12 * 64 * 768 * (2 * (6 + 6) + 2 * 6)]
    assert cast.forward.touched_bytes - plain.forward.touched_bytes == more[0] + 6 * weights
    assert cast.backward.touched_bytes - plain.backward.touched_bytes == more[1] + 6 * weights
    # RMSNorm kernel by kernel is in 32 bits in any case.
    llama = TRANSFORMERS["llama3-8b"]
    for costs, norms in ((EAGER, 0), (COMPILED, 2 * 4)):
        found, usual = (touched_by_token(llama, costs, autocast=one).forward for one in (True, False))
        reads = sum(reads_of_norms(llama.layers[0], compiled=costs is COMPILED).values())
        assert found - usual == 4096 * (norms + 2 * costs.add[0] + 6 * reads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "autocast casts parameters of float32; the dtype is bfloat16, and so are"),
        (
            {"dtype": "float32", "tf32": True},
            "tf32 is how products of float32 are made; the dtype is bfloat16",
        ),
        (
            {"dtype": "float32", "autocast": "int8"},
            "unknown autocast 'int8'; choose one of bfloat16, float16",
        ),
    ],
)
def test_a_mistake_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario(MODELS["gpt2"], H100, 2, **({"autocast": "bfloat16"} | options))
