"""Products in FP8: their peak, what is cast for them, and what stays in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.device import Device
from zero_ref.simulator.kernels import Pass, Product, kernels
from zero_ref.simulator.models import MODELS, TRANSFORMERS
from zero_ref.simulator.scenario import Scenario

H100 = cluster("h100-ib")
LLAMA = Scenario(TRANSFORMERS["llama3-8b"], H100, 64, compiled=True)
EIGHT = replace(LLAMA, fp8=True)


def test_a_product_of_8_bits_takes_the_time_of_its_own_peak() -> None:
    # 10^9 operations a millisecond, 2 x 10^9 in FP8; so many bytes that they do not count.
    device = Device("plain", 1, 1.0, None, 10**6, peaks={"bfloat16": 1, "fp8": 2}, memory_reached=1.0)
    ms = [Pass((Product(1000, 1000, 1000, fp8=fp8),), 0, 0).ms(device) for fp8 in (False, True)]
    assert ms[0] == pytest.approx(2)
    assert ms[1] == pytest.approx(1)
    assert Product(10, 20, 30, fp8=True).nbytes(2) == 10 * 20 + 20 * 30 + 2 * 10 * 30


def test_products_of_blocks_are_of_8_bits_and_the_heads_are_not() -> None:
    found = EIGHT.kernels
    assert found is not None
    head = 8192, 4096, 128_256
    for made in (found.forward, found.backward):
        assert {one[:3] for one in made.products if not one.fp8} == {head}
        assert len({one[:3] for one in made.products if one.fp8}) == 3


@pytest.mark.parametrize(("compiled", "of_operand"), [(False, 5), (True, 3)])
def test_each_product_casts_both_of_its_operands(compiled: bool, of_operand: int) -> None:
    model, tokens = TRANSFORMERS["gpt2"], 64
    plain, found = (kernels(model, 1, tokens, compiled=compiled, fp8=fp8) for fp8 in (False, True))
    assert found.flops == plain.flops
    weights = 12 * 12 * 768 * 768
    read, made = 12 * tokens * (3 * 768 + 4 * 768), 12 * tokens * (3 * 768 + 2 * 768 + 4 * 768)
    forward, backward = of_operand * (read + weights), of_operand * (read + weights + 2 * made)
    assert found.forward.touched_bytes - plain.forward.touched_bytes == forward
    assert found.backward.touched_bytes - plain.backward.touched_bytes == backward
    plain, found = (kernels(model, 1, tokens, "full", compiled=compiled, fp8=fp8) for fp8 in (False, True))
    assert found.backward.touched_bytes - plain.backward.touched_bytes == backward + forward


def test_what_is_kept_and_sent_stays_in_16_bits() -> None:
    plain, eight = LLAMA.run("zero-3"), EIGHT.run("zero-3")
    assert eight.memory == plain.memory
    assert eight.schedule == plain.schedule
    assert eight.computing_ms["matrix products"] < 0.65 * plain.computing_ms["matrix products"]
    assert eight.computing_ms["attention"] == plain.computing_ms["attention"]
    assert eight.computing_ms["memory"] > plain.computing_ms["memory"]
    # A share of the peak in 16 bits, as torchtitan logs it.
    assert eight.utilisation / plain.utilisation == pytest.approx(plain.iteration_ms / eight.iteration_ms)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float32"},
            "fp8 casts operands of 16 bits; products are in float32. Ask for bfloat16, or",
        ),
        ({"dtype": "float32", "tf32": True}, "fp8 casts operands of 16 bits; products are in float32"),
        (
            {"cluster": cluster("a100-ib")},
            r"A100 80 GB: no peak in FP8 is known. It is of H100 80 GB, RTX 4090,",
        ),
        ({"cluster": cluster("loopback")}, "no peak in FP8 is known"),
        ({"architecture": MODELS["mlp-tiny"]}, "fp8 is for transformers"),
    ],
)
def test_a_mistake_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(EIGHT, **options)
