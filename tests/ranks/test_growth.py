"""The measuring of growth, at a tiny size: every thing and contender once, on real ranks."""

from __future__ import annotations

import pytest

from benchmarks import growth, rounds
from benchmarks.contenders import OURS, TORCH_BEST
from benchmarks.growth import Size, sizes
from benchmarks.results import GROWING, GrowthPoint
from zero_ref.lab import ranks

pytestmark = pytest.mark.ranks


def measured(size: Size) -> list[GrowthPoint]:
    rounds.TOUCHED_NBYTES = 2**20
    return growth.measure(size, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_thing_is_timed_for_ours_for_torch_and_alone(world_size):
    size = Size("ranks", world_size, 3, 3_001)
    points, *others = ranks.run(measured, world_size, size, timeout=100)
    assert all(of_rank == points for of_rank in others)
    assert {point.what for point in points} == set(GROWING)
    for what in GROWING:
        of_what = {point.contender: point for point in points if point.what == what}
        assert {OURS, TORCH_BEST} <= of_what.keys()
        assert len(of_what) == (2 if world_size == 1 and what in ("sync", "consolidate") else 3)
        for point in of_what.values():
            assert (point.axis, point.ranks, point.tensors, point.parameters) == size
            assert len(point.wall_ms) == len(point.cpu_ms) == 2
            assert min(point.wall_ms) > 0


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
