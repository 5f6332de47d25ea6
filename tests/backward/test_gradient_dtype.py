"""Gradients that are added up in 32 bits beside 16-bit parameters, as Megatron-LM keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.scenario import Scenario

H100 = cluster("h100-ib")
GPT2 = Scenario(MODELS["gpt2"], H100, 4, bucket_view=True)
WIDE = replace(GPT2, gradient_dtype="float32")


def test_megatrons_bytes_of_a_parameter() -> None:
    # Megatron-LM, distributed optimizer: 18 bytes without it, and 6 + 12/d with it.
    numel, of_steps = WIDE.numel, 4 * len(WIDE.params)
    held = {name: WIDE.run(name).memories[0] for name in ("ddp", "zero-even")}
    held = {name: one.state_bytes + one.gradient_bytes for name, one in held.items()}
    assert held["ddp"] == 18 * numel + of_steps
    assert held["zero-even"] == pytest.approx((6 + 12 / 4) * numel, rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "zero-even", "zero-2", "zero-3"])
def test_gradients_take_and_travel_in_twice_the_bytes(strategy: str) -> None:
    plain, wide = GPT2.run(strategy), WIDE.run(strategy)
    assert wide.memory.gradient_bytes == 2 * plain.memory.gradient_bytes
    for part in ("parameter_bytes", "master_bytes", "moment_bytes"):
        assert getattr(wide.memory, part) == getattr(plain.memory, part), part
    sent = [
        sum(one.nbytes for one in run.schedule.operations if one.label == "reduce") for run in (plain, wide)
    ]
    assert sent[1] == 2 * sent[0] > 0
    narrow = replace(WIDE, reduce_dtype="bfloat16").run(strategy)
    assert narrow.schedule == plain.schedule
    assert narrow.memory.gradient_bytes == wide.memory.gradient_bytes


def test_the_step_converts_no_gradients_and_the_loop_adds_them() -> None:
    plain, wide = (one.run("zero-even").memories[0] for one in (GPT2, WIDE))
    assert plain.phase_bytes["step"] - plain.state_bytes - plain.gradient_bytes == plain.master_bytes
    assert wide.phase_bytes["step"] == wide.state_bytes + wide.gradient_bytes
    # Two bytes more are read; kernel by kernel, no gradient is converted before.
    foreach = [replace(one, update="foreach") for one in (GPT2, WIDE)]
    steps = [one.workload_of("ddp").step_bytes for one in (GPT2, WIDE, *foreach)]
    assert steps == [28, 30, 92, 86]
    # Read in 16 bits and added in 32; and an all-reduce reads and writes twice.
    assert WIDE.workload_of("ddp").moved_bytes[1] == 2 + 4 + 4 + 2 * 4 * 2
    alone = replace(WIDE, world_size=1)
    assert alone.workload_of("ddp").moved_bytes == (0, 10)
    assert replace(alone, gradient_dtype=None).workload_of("ddp").moved_bytes == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gradient_dtype": "float16"},
            "gradient_dtype float16 beside parameters of bfloat16: gradients are",
        ),
        ({"dtype": "float32", "gradient_dtype": "bfloat16"}, "bfloat16 beside parameters of float32"),
        (
            {"gradient_dtype": "fp32"},
            "unknown gradient_dtype 'fp32'; choose one of bfloat16, float16, float32",
        ),
    ],
)
def test_a_mistake_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GPT2, **options)
