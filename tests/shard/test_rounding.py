"""Stochastic rounding: what it gives, by itself and in an optimizer that is sharded; and masters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from library.training import WHOLE, Backward, assert_trains_as_plain
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import meter, virtual
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.owned import local_dtype
from zero_ref.shard.rounding import BLOCK_NUMEL, add_stochastically, round_stochastically
from zero_ref.simulator.ledger import ledger

DTYPES = [torch.bfloat16, torch.float16]


def rounded(values: torch.Tensor, dtype: torch.dtype, seed: int = 0, first: int = 0) -> torch.Tensor:
    into = torch.empty_like(values, dtype=dtype)
    round_stochastically(values, into, seed=seed, first=first)
    return into


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_the_dtype_has_stay(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2**-14, math.inf, -math.inf, math.nan])
    again = rounded(values, dtype)
    assert torch.equal(again.float().nan_to_num(7, 8, 9), values.nan_to_num(7, 8, 9))
    assert torch.equal(again.signbit()[:-1], values.signbit()[:-1])


def test_values_beyond_the_largest_number_become_that() -> None:
    assert rounded(torch.tensor([65519.0, 70000.0, -1e9]), torch.float16).tolist() == [
        65504.0,
        65504.0,
        -65504.0,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.integers(0, 99))
def test_a_value_goes_to_one_of_its_neighbours(
    dtype: torch.dtype, given_values: list[float], seed: int
) -> None:
    values = torch.tensor(given_values)
    nearest, chosen = values.to(dtype), rounded(values, dtype, seed)
    # Two neighbours of a value are one apart in the order of their bits.
    apart = nearest.view(torch.int16).int() - chosen.view(torch.int16).int()
    assert bool((apart.abs() <= 1).all())
    assert bool((values.sign() * chosen.float().sign() >= 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1 / 16, 1 / 4, 1 / 2, 9 / 10])
def test_the_mean_of_10000_roundings_is_the_value(dtype: torch.dtype, share: float) -> None:
    gap = torch.finfo(dtype).eps
    up = rounded(torch.full((10_000,), 1 + gap * share), dtype).float() > 1
    standard_error = math.sqrt(share * (1 - share) / 10_000)
    # The value in float32 is off from the share by 2**-24 / gap of a gap at most.
    assert abs(up.double().mean().item() - share) < 3 * standard_error + 2**-24 / gap


def test_other_seeds_and_other_places_give_other_choices() -> None:
    values = torch.full((1000,), 1 + 2**-8)
    base = rounded(values, torch.bfloat16)
    assert not torch.equal(base, rounded(values, torch.bfloat16, seed=1))
    assert not torch.equal(base, rounded(values, torch.bfloat16, first=1))


@pytest.mark.parametrize("start", [0, 64, BLOCK_NUMEL - 5, BLOCK_NUMEL])
def test_a_slice_is_rounded_as_within_its_parameter(start: int) -> None:
    values = torch.randn(300, BLOCK_NUMEL // 200, generator=torch.Generator().manual_seed(0)).t()
    whole = rounded(values, torch.bfloat16)
    flat = values.t().reshape(-1)
    part = rounded(flat[start : start + 1000].clone(), torch.bfloat16, first=start)
    assert torch.equal(whole.t().reshape(-1)[start : start + 1000], part)


def test_places_beyond_32_bits_do_not_depend_on_the_cut() -> None:
    values, border = torch.full((2 * BLOCK_NUMEL,), 1 + 2**-8), 2**31 - BLOCK_NUMEL // 2
    whole = rounded(values, torch.bfloat16, first=border)
    part = rounded(values[1000:].clone(), torch.bfloat16, first=border + 1000)
    assert torch.equal(whole[1000:], part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_master_weights_follow_small_updates_on_average(dtype: torch.dtype) -> None:
    weights, lost = torch.ones(10_000, dtype=dtype), torch.ones(10_000, dtype=dtype)
    update = torch.full((10_000,), torch.finfo(dtype).eps / 20)
    for step in range(50):
        add_stochastically(weights, update, seed=step)
        lost.add_(update)
    assert (lost == 1).all(), "each sum is rounded to the nearest, 1"
    moved = (weights.double().mean().item() - 1) / torch.finfo(dtype).eps  # in gaps
    # Each step adds a gap with a chance of 1/20.
    standard_error = math.sqrt(50 * 0.05 * 0.95 / 10_000)
    assert abs(moved - 2.5) < 3 * standard_error + 0.01


def test_with_one_seed_for_all_steps_a_weight_that_stays_once_stays() -> None:
    weights, update = torch.ones(1000, dtype=torch.bfloat16), torch.full((1000,), 1e-4)
    add_stochastically(weights, update, seed=0)
    stayed = weights == 1
    for _ in range(100):
        add_stochastically(weights, update, seed=0)
    assert stayed.sum() > 900
    assert (weights[stayed] == 1).all()


def test_an_update_of_a_slice_is_rounded_as_within_its_parameter() -> None:
    weights = torch.randn(300, BLOCK_NUMEL // 200, generator=torch.Generator().manual_seed(0)).bfloat16().t()
    update = torch.full(weights.shape, 1e-3)  # of other strides
    part = weights.t().reshape(-1)[70_000:].clone()
    add_stochastically(weights, update, seed=3)
    add_stochastically(part, torch.full(part.shape, 1e-3), seed=3, first=70_000)
    assert torch.equal(weights.t().reshape(-1)[70_000:], part)
    add_stochastically(torch.empty(0).bfloat16(), torch.empty(0), seed=0)


def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    def made(comm: Collectives, **options: object) -> str:
        try:
            ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], optim.SGD, comm, **options)
        except (TypeError, ValueError) as error:
            return str(error)
        return "made"

    for options, words in (
        ({"master_dtype": torch.int32}, "holds no floating-point numbers"),
        ({"master_dtype": "float32"}, "master_dtype='float32' is no dtype"),
    ):
        assert all(words in told for told in virtual.run(made, 2, **options))


def test_ranks_that_ask_for_other_masters_are_told() -> None:
    def made(comm: Collectives) -> str:
        dtype = torch.float32 if comm.rank else None
        with pytest.raises(ValueError, match="rank") as error:
            ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], optim.SGD, comm, master_dtype=dtype)
        return str(error.value)

    assert all("torch.float32" in told and "None" in told for told in virtual.run(made, 2))


def test_larger_parameters_are_stepped_as_they_are() -> None:
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]
    stepped = [local_dtype(torch.ones(1, dtype=dtype), torch.float32) for dtype in dtypes]
    assert stepped == [torch.float64, torch.float32, torch.float32, torch.float32, torch.int8]
    assert [local_dtype(torch.ones(1, dtype=dtype), None) for dtype in dtypes] == dtypes


class RoundedSGD(optim.Optimizer):
    """SGD of 16-bit weights without masters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (one for one in group["params"] if one.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                add_stochastically(param, -group["lr"] * param.grad.float(), seed=state["step"])


def test_an_optimizer_that_rounds_stochastically_is_sharded_as_any_other() -> None:
    def script(model: Any, optimizer: optim.Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(3):
            backward(step)
            optimizer.step()
            yield

    def trained(model: nn.Module) -> list[nn.Parameter]:
        return [param for param in model.bfloat16().parameters() if param.numel()]

    modes = [(partition, view) for partition in WHOLE for view in (False, True)]
    assert_trains_as_plain(script, RoundedSGD, modes=modes, groups=trained, elementwise=False, lr=1e-3)


def test_a_16_bit_model_on_4_ranks_holds_the_bytes_that_the_ledger_says() -> None:
    def held(comm: Collectives) -> meter.HeldBytes:
        model = GPT(GPTConfig(layers=2, width=128)).bfloat16()
        zero = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, comm, True, partition="even", master_dtype=torch.float32
        )
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        zero.step()
        return meter.held_bytes(model.parameters(), zero)

    numel = sum(param.numel() for param in GPT(GPTConfig(layers=2, width=128)).parameters())
    for world_size, expected in ((1, 16.0), (4, 7.0)):
        fullest = max(sum(of_rank) for of_rank in virtual.run(held, world_size))
        # Padding of the flat tensors, and a step counter for each slice.
        assert fullest / numel == pytest.approx(expected, rel=0.005)
        assert ledger(numel, world_size, stage=1).total_bytes / numel == pytest.approx(expected)
