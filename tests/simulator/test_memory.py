"""The memory of a rank: the formula against the ledger, partitions against the optimizer's state by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from zero_ref.plan.choice import plan_partition
from zero_ref.plan.layout import lay_out
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.ledger import (
    BOTH_GRADS_20,
    CONVENTIONS,
    Convention,
    StateRule,
    ledger,
)
from zero_ref.simulator.memory import (
    Memory,
    MemorySettings,
    average_memory,
    gathered_bytes,
    memory_of_ranks,
    whole_bytes,
)
from zero_ref.simulator.models import blocks, shapes, specs

MIB = 2**20

# ----------------------------------------------------------------------------------------------- example


def test_a_rank_by_hand_at_every_stage() -> None:
    # 16 bytes a parameter, in fp16 and fp32; rank 0 owns 600 of 1000 elements in two tensors, of three.
    params = [ParamSpec(500, name="0.w"), ParamSpec(400, name="1.w"), ParamSpec(100, name="1.b")]
    partition = Partition((500, 400, 100), sorted_greedy([500, 400, 100], 2).slices_of_rank)
    assert partition.loads == (500, 500)

    def of_rank_1(stage: int) -> Memory:
        return memory_of_ranks(
            partition, params, MemorySettings(stage, bucket_bytes=100, activation_bytes=7)
        )[1]

    assert of_rank_1(0) == Memory(2000, 2000, 4000, 8000, 12, 0, 2000, 0, 7)
    assert of_rank_1(1) == Memory(2000, 2000, 2000, 4000, 8, 0, 2000, 100, 7)
    assert of_rank_1(2) == Memory(2000, 1000, 2000, 4000, 8, 0, 0, 100, 7)
    # Two units of 500 elements gathered, and the gradients of one.
    assert of_rank_1(3) == Memory(1000, 1000, 2000, 4000, 8, 0, 0, 2000 + 1000, 7)
    assert of_rank_1(3).total_bytes == sum(of_rank_1(3).items.values()) == 11015


def test_the_optimizer_takes_the_place_of_adams_moments() -> None:
    params = [ParamSpec(10)]
    whole = {
        name: whole_bytes(params, MemorySettings(1, optimizer=name))
        for name in ("SGD", "Adam", "Adam+amsgrad")
    }
    assert [state.moments for state in whole.values()] == [0, 80, 120]
    assert [state.master for state in whole.values()] == [40, 40, 40]
    eight_bit = Convention(2, 2, 4 + 2, moment=1)
    assert whole_bytes(params, MemorySettings(1, eight_bit)) == (20, 20, 40, 20, 4)
    assert whole_bytes(params, MemorySettings(1, BOTH_GRADS_20, StateRule(1, 0))) == (20, 20, 80, 40, 0)


def test_no_buffer_is_larger_than_what_travels() -> None:
    params = [ParamSpec(10), ParamSpec(90, trainable=False)]
    assert average_memory(params, 2, MemorySettings(1)).communication_bytes == 20
    assert average_memory(params, 2, MemorySettings(2, "fp32-grads-18")).communication_bytes == 40
    assert average_memory(specs(shapes("gpt2")), 2, MemorySettings(1)).communication_bytes == 25 * MIB
    assert average_memory(params, 2, MemorySettings(1, flat=True)).communication_bytes == 0
    assert average_memory(params, 2, MemorySettings(2, flat=True)).communication_bytes == 20


def test_stage_3_gathers_its_largest_units() -> None:
    named = shapes("llama3-8b")
    root, block, *_ = (sum(named[i].numel for i in unit) for unit in blocks(named))
    assert root > block
    two = average_memory(specs(named), 64, MemorySettings(3)).communication_bytes
    assert two == 2 * (root + 2 * block) + 2 * root, "the root stays, two blocks, and one unit's gradients"
    four = average_memory(specs(named), 64, MemorySettings(3, gathered_units=4)).communication_bytes
    assert four - two == 2 * (2 * block)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MemorySettings(4), "a ZeRO stage is 0 .* got 4"),
        (lambda: MemorySettings(1, "mixed"), "unknown convention 'mixed'; choose mixed-16"),
        (lambda: MemorySettings(1, Convention(2, 2, 4)), "no room for Adam's two moments"),
        (lambda: MemorySettings(1, optimizer="adam"), "unknown optimizer 'adam'; choose one of SGD"),
        (lambda: MemorySettings(1, bucket_bytes=-1), "bucket_bytes must be at least 0, got -1"),
        (lambda: MemorySettings(1, activation_bytes=-1), "activation_bytes must be at least 0, got -1"),
        (lambda: MemorySettings(3, gathered_units=0), "gathered_units must be at least 1, got 0"),
        (lambda: MemorySettings(3, flat=True), "flat tensors are for stages 1 and 2; stage 3 keeps none"),
        (lambda: average_memory([], 0, MemorySettings(1)), "world_size must be at least 1 rank, got 0"),
        (
            lambda: memory_of_ranks(sorted_greedy([1], 1), [ParamSpec(2)], MemorySettings(1)),
            "for 1 parameters of 1 elements; got 1 of 2",
        ),
    ],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------------------- property

PARAMS = st.lists(
    st.builds(
        ParamSpec,
        st.integers(0, 10**4),
        st.sampled_from(["float32", "bfloat16", "float64"]),
        trainable=st.booleans(),
        name=st.sampled_from(["embedding", "h.0.w", "h.1.w"]),
    ),
    max_size=12,
)


@given(st.integers(0, 10**12), st.integers(1, 2048), st.integers(0, 3), st.sampled_from(list(CONVENTIONS)))
def test_the_average_is_the_ledger(numel: int, world_size: int, stage: int, convention: str) -> None:
    books = ledger(numel, world_size, stage, convention)
    memory = average_memory([ParamSpec(numel)], world_size, MemorySettings(stage, convention))
    assert memory.parameter_bytes == books.parameter_bytes
    assert memory.gradient_bytes == books.gradient_bytes
    # Two quotients are added here where the ledger divides a sum: one rounding of a float apart.
    assert memory.master_bytes + memory.moment_bytes == pytest.approx(books.optimizer_bytes, rel=1e-15)


@given(PARAMS, st.integers(1, 9), st.integers(0, 3), st.sampled_from([None, *CONVENTIONS]))
def test_what_is_divided_adds_up_and_what_is_not_is_everywhere(
    params: list[ParamSpec], world_size: int, stage: int, convention: str | None
) -> None:
    settings = MemorySettings(stage, convention)
    partition = plan_partition("even", params, world_size)
    memories = memory_of_ranks(partition, params, settings)
    average = average_memory(params, world_size, settings)
    whole = whole_bytes(params, settings)
    for item, first, nbytes in (
        ("parameters", 3, whole.params),
        ("gradients", 2, whole.grads),
        ("master copies", 1, whole.master),
        ("moments", 1, whole.moments),
    ):
        of_rank = [memory.items[item] for memory in memories]
        if stage >= first:
            assert sum(of_rank) == nbytes
            assert average.items[item] == nbytes / world_size
        else:
            assert of_rank == [nbytes] * world_size == [average.items[item]] * world_size
    for item in ("gradient buckets", "communication", "activations"):
        assert {memory.items[item] for memory in memories} == {average.items[item]}


@given(PARAMS, st.integers(1, 9))
def test_padding_is_the_layouts(params: list[ParamSpec], world_size: int) -> None:
    partition = plan_partition("sorted_greedy", params, world_size)
    flats = lay_out(partition, params).flats
    in_own_dtype = memory_of_ranks(partition, params, MemorySettings(1, None, flat=True))
    assert {memory.padding_bytes for memory in in_own_dtype} == {sum(f.padding * f.itemsize for f in flats)}
    in_16_bits = memory_of_ranks(partition, params, MemorySettings(2, flat=True))
    assert {memory.padding_bytes for memory in in_16_bits} == {sum(flat.padding * 2 for flat in flats)}


# ------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_rank_alone_holds_what_torch_holds(optimizer: str) -> None:
    module = torch.nn.Linear(7, 5)
    stepper = getattr(torch.optim, optimizer)(module.parameters(), lr=0.1)
    module(torch.ones(1, 7)).sum().backward()
    stepper.step()
    held = list(module.parameters())
    held += [param.grad for param in module.parameters()]
    held += [value for state in stepper.state.values() for value in state.values() if value is not None]
    params = [ParamSpec(param.numel()) for param in module.parameters()]
    settings = MemorySettings(0, None, optimizer, gradient_as_bucket_view=True)
    (memory,) = memory_of_ranks(sorted_greedy([35, 5], 1), params, settings)
    assert memory.total_bytes == sum(tensor.nbytes for tensor in held)


def test_stage_3_of_deepspeed_keeps_gathered_parameters_alive() -> None:
    params = [
        ParamSpec(1000, name="embedding"),
        *(ParamSpec(100, name=f"layers.{n}.weight") for n in range(9)),
    ]
    usual = MemorySettings(3, convention=None)
    # The root and two blocks are whole at a time; so many elements; all of the model.
    for live, elements in ((0, 1200), (1100, 1200), (1500, 1500), (10**9, 1900)):
        assert gathered_bytes(params, replace(usual, live_numel=live)) == 4 * elements
