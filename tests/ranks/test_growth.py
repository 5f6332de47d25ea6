"""The measuring of growth, at a tiny size: every thing and contender once, on real ranks."""

from __future__ import annotations

import pytest

from benchmarks import growth, rounds
from benchmarks.contenders import OURS, TORCH_BEST
from benchmarks.growth import Size, sizes
from benchmarks.results import GROWING, SuiteResult
from zero_ref.lab import ranks

pytestmark = pytest.mark.ranks


def measured(size: Size) -> list[SuiteResult]:
    rounds.TOUCHED_NBYTES = 2**20
    return growth.measure(size, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_thing_is_timed_for_ours_for_torch_and_alone(world_size):
    size = Size("ranks", world_size, 3, 3_001)
    found, *others = ranks.run(measured, world_size, size, timeout=100)
    assert all(of_rank == found for of_rank in others)
    assert [one.suite for one in found] == list(GROWING)
    for one in found:
        assert (one.set, one.ranks, one.tensors, one.parameters) == size
        assert {OURS, TORCH_BEST} <= one.taken.keys()
        alone = world_size == 1 and one.suite in ("sync", "consolidate")
        assert len(one.taken) == (2 if alone else 3)
        for taken in one.taken.values():
            assert len(taken.wall_ms) == len(taken.cpu_ms) == 2
            assert min(taken.wall_ms) > 0


def test_the_sizes_span_what_is_to_be_shown():
    spans = {}
    for size in sizes():
        spans.setdefault(size.axis, []).append(getattr(size, size.axis))
    assert {axis: (min(of), max(of)) for axis, of in spans.items()} == {
        "parameters": (10**6, 3 * 10**8),
        "tensors": (10, 10**4),
        "ranks": (1, 8),
    }


def test_tensors_have_all_parameters_and_nearly_one_size():
    params = growth._params(Size("tensors", 2, 3, 3_001))
    assert [param.numel() for param in params] == [1001, 1000, 1000]
