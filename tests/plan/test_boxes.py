"""A range of a flat tensor as boxes: every element once, in order, and few boxes."""

import itertools
from math import prod

import torch
from hypothesis import given
from hypothesis.strategies import DataObject, data, integers, lists, permutations

from zero_ref.plan.boxes import Box, boxes, boxes_in_memory, memory_order

shapes = lists(integers(1, 5), max_size=4)


def test_a_range_inside_one_row_is_one_box() -> None:
    assert boxes(4, 5, (3, 3)) == [Box((1, 1), (1, 1), 4)]
    assert boxes(0, 12, (3, 4)) == [Box((0, 0), (3, 4), 0)]
    assert boxes(3, 3, (3, 4)) == []
    assert boxes(0, 1, ()) == [Box((), (), 0)]


def test_a_range_of_three_dimensions_may_need_five_boxes() -> None:
    found = boxes(1, 35, (3, 3, 4))
    assert [box.sizes for box in found] == [(1, 1, 3), (1, 2, 4), (1, 3, 4), (1, 2, 4), (1, 1, 3)]


@given(shapes, data())
def test_boxes_are_the_range_in_its_order(shape: list[int], some: DataObject) -> None:
    numel = prod(shape)
    start = some.draw(integers(0, numel))
    stop = some.draw(integers(start, numel))
    numbers = torch.arange(numel).reshape(shape)
    found = boxes(start, stop, shape)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    in_order = []
    for box in found:
        part = numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]
        assert box.numel == part.numel()
        assert part.flatten()[0] == box.start
        in_order += part.flatten().tolist()
    assert in_order == list(range(start, stop))


@given(shapes, data())
def test_in_memory_boxes_are_the_range_whatever_the_strides(shape: list[int], some: DataObject) -> None:
    order = some.draw(permutations(range(len(shape))))
    numel = prod(shape)
    start = some.draw(integers(0, numel))
    stop = some.draw(integers(start, numel))
    base = torch.arange(numel).reshape([shape[dim] for dim in order])
    numbers = base.permute([order.index(dim) for dim in range(len(shape))])
    in_order = []
    for box in boxes_in_memory(start, stop, numbers.shape, numbers.stride()):
        part = numbers[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]
        in_order += part.permute(memory_order(numbers.stride())).flatten().tolist()
    assert in_order == list(range(start, stop))


def test_boxes_of_neighbouring_ranges_cover_the_tensor_once() -> None:
    shape, cuts = (4, 3, 5), [0, 7, 22, 23, 41, 60]
    found = [box for start, stop in itertools.pairwise(cuts) for box in boxes(start, stop, shape)]
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in found:
        seen[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))] += 1
    assert bool((seen == 1).all())
