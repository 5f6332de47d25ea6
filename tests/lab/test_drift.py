"""The distance between ranks: exactly 0 if they hold the same values, and never otherwise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from zero_ref.lab.drift import distances, in_groups, who_agrees
from zero_ref.local_sgd.averaging import AveragingSchedule


def test_a_distance_is_the_norm_of_the_difference_from_the_mean() -> None:
    assert distances([torch.tensor([3.0, 4.0]), torch.tensor([-3.0, -4.0])]) == [5.0, 5.0]
    assert distances([torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([3.0])]) == [1.0, 1.0, 2.0]


@settings(max_examples=50)
@given(st.integers(1, 8), st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_equal_ranks_are_at_a_distance_of_exactly_0(world_size: int, values: list[float]) -> None:
    assert distances([torch.tensor(values)] * world_size) == [0.0] * world_size


@settings(max_examples=50)
@given(st.integers(2, 8), st.floats(2**-20, 2**20, width=32))
def test_a_difference_in_the_last_bit_is_a_distance(world_size: int, value: float) -> None:
    one = torch.tensor([1.0, value])
    other = torch.nextafter(one, torch.tensor(torch.inf))
    of_ranks = distances([one] * (world_size - 1) + [other])
    assert all(of_rank > 0 for of_rank in of_ranks)
    assert who_agrees([one] * (world_size - 1) + [other]) == [0] * (world_size - 1) + [world_size - 1]


def test_no_ranks_have_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one"):
        distances([])


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_who_agrees_names_the_lowest_rank_with_the_same_values(values: list[int]) -> None:
    assert who_agrees([torch.tensor([v]) for v in values]) == [values.index(v) for v in values]


@settings(max_examples=30)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16]))
def test_groups_are_as_large_as_the_schedule_says(size: int, world_size: int) -> None:
    lowest = in_groups(size, world_size)
    assert {lowest.count(first) for first in lowest} == {size}
    assert all(lowest[first] == first and first <= rank for rank, first in enumerate(lowest))
    schedule = AveragingSchedule.hierarchical({1: size, 2: world_size}) if size < world_size else None
    if schedule is not None:
        assert in_groups(schedule.agreeing(1, world_size), world_size) == lowest
