"""The layout: where each owned piece lies in flat tensors, checked by hand and by property."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from zero_ref.plan.choice import plan_partition
from zero_ref.plan.layout import (
    ITEMSIZE,
    Bucket,
    BucketLayout,
    Flat,
    SliceRun,
    end_to_end,
    lay_out,
    runs_within,
)
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import equal_shares, even, from_lists, registration_greedy, sorted_greedy

params_of_model = st.lists(
    st.builds(
        lambda numel, dtype, device, trainable: ParamSpec(numel, dtype, device, trainable=trainable),
        st.integers(0, 200) | st.integers(0, 3),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from(["cpu", "cpu", "cuda:1"]),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=25,
)
ranks = st.integers(1, 9)
alignments = st.integers(1, 40)
rules = st.sampled_from(["sorted_greedy", "registration_greedy", "even"])


def at_random(params: Sequence[ParamSpec], world_size: int, data: st.DataObject) -> Partition:
    """A partition with no rule: each parameter cut anywhere, each piece to any rank."""
    owned: list[list[Slice]] = [[] for _ in range(world_size)]
    for index, param in enumerate(params):
        inner = data.draw(st.sets(st.integers(1, param.numel - 1), max_size=3)) if param.numel > 1 else set()
        cuts = sorted({0, *inner})
        for start, stop in zip(cuts, [*cuts[1:], param.numel]):
            owned[data.draw(st.integers(0, world_size - 1))].append(Slice(index, start, stop))
    return from_lists([param.numel for param in params], owned)


def runs(layout: BucketLayout) -> list[list[tuple[int, int, int]]]:
    return [[(bucket.owner, bucket.start, bucket.stop) for bucket in flat.buckets] for flat in layout.flats]


# ----------------------------------------------------------------------------------------------- example


def test_parameters_of_one_owner_lie_together() -> None:
    params = [ParamSpec(n) for n in (6, 5, 4, 1)]
    layout = lay_out(sorted_greedy([6, 5, 4, 1], 2), params, alignment=4)
    assert layout.flats == (
        Flat(
            device="cpu",
            dtype="float32",
            numel=20,  # 7 of rank 0, 1 of padding, 9 of rank 1, 3 of padding
            padding=4,
            offset_of_param={0: 0, 3: 6, 1: 8, 2: 13},
            buckets=(
                Bucket(0, 0, 7, (Slice(0, 0, 6), Slice(3, 0, 1)), (0, 6)),
                Bucket(1, 8, 17, (Slice(1, 0, 5), Slice(2, 0, 4)), (0, 5)),
            ),
        ),
    )
    assert layout.flats[0].padding == 4
    assert layout.flats[0].itemsize == 4


def test_an_even_partition_keeps_the_registration_order() -> None:
    params = [ParamSpec(n) for n in (6, 5, 4, 1)]
    (flat,) = lay_out(even([6, 5, 4, 1], 2, alignment=1), params, alignment=1).flats
    assert flat.offset_of_param == {0: 0, 1: 6, 2: 11, 3: 15}
    assert [(bucket.owner, bucket.start, bucket.stop) for bucket in flat.buckets] == [(0, 0, 8), (1, 8, 16)]
    assert flat.padding == 0


def test_a_parameter_between_two_ranks_lies_between_theirs() -> None:
    partition = from_lists([10, 4, 3], [[Slice(0, 0, 5), 1], [Slice(0, 5, 10), 2]])
    layout = lay_out(partition, [ParamSpec(10), ParamSpec(4), ParamSpec(3)], alignment=1)
    assert runs(layout) == [[(0, 0, 9), (1, 9, 17)]]
    assert layout.flats[0].offset_of_param == {1: 0, 0: 4, 2: 14}


def test_each_device_and_dtype_has_its_own_flat_in_order_of_first_use() -> None:
    params = [
        ParamSpec(3, "bfloat16"),
        ParamSpec(5),
        ParamSpec(2, "bfloat16"),
        ParamSpec(7, device="cuda:0"),
    ]
    layout = lay_out(from_lists([3, 5, 2, 7], [[0, 1], [2, 3]]), params, alignment=1)
    assert [(flat.device, flat.dtype) for flat in layout.flats] == [
        ("cpu", "bfloat16"),
        ("cpu", "float32"),
        ("cuda:0", "float32"),
    ]
    assert runs(layout) == [[(0, 0, 3), (1, 3, 5)], [(0, 0, 5)], [(1, 0, 7)]]


def test_frozen_parameters_lie_in_no_flat() -> None:
    params = [ParamSpec(6), ParamSpec(5, trainable=False), ParamSpec(4)]
    (flat,) = lay_out(sorted_greedy([6, 5, 4], 1), params, alignment=1).flats
    assert flat.offset_of_param == {0: 0, 2: 6}
    assert lay_out(sorted_greedy([5], 1), [ParamSpec(5, trainable=False)]).flats == ()


def test_a_frozen_parameter_may_have_a_dtype_that_cannot_be_trained() -> None:
    params = [ParamSpec(4), ParamSpec(8, "uint8", trainable=False)]
    assert len(lay_out(sorted_greedy([4, 8], 2), params).flats) == 1


def test_a_rank_without_elements_has_no_bucket() -> None:
    layout = lay_out(sorted_greedy([6, 0], 4), [ParamSpec(6), ParamSpec(0)])
    assert runs(layout) == [[(0, 0, 6)]]
    assert set(layout.flats[0].offset_of_param) == {0, 1}  # the empty parameter still has a place


def test_no_parameters_make_no_flats() -> None:
    assert lay_out(sorted_greedy([], 3), []).flats == ()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([ParamSpec(6)], "for 2 parameters of 11 elements; got 1 of 6"),
        ([ParamSpec(5), ParamSpec(6)], "for 2 parameters of 11 elements; got 2 of 11"),
        ([ParamSpec(6), ParamSpec(5, "int32")], "dtype int32 cannot be trained; known are float64"),
    ],
)
def test_mistakes_are_named(params: list[ParamSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out(sorted_greedy([6, 5], 2), params)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_item_sizes_are_torchs(dtype: str) -> None:
    assert ITEMSIZE[dtype] == getattr(torch, dtype).itemsize


# ---------------------------------------------------------------------------------------------- property


@given(params_of_model, ranks, alignments, st.data())
def test_every_owned_element_is_in_a_bucket_of_its_owner_at_the_place_of_its_parameter(
    params: list[ParamSpec], world_size: int, alignment: int, data: st.DataObject
) -> None:
    partition = at_random(params, world_size, data)
    layout = lay_out(partition, params, alignment=alignment)
    found = []
    for flat in layout.flats:
        for bucket in flat.buckets:
            place = bucket.start
            for piece in bucket.slices:
                param = params[piece.param]
                assert (param.device, param.dtype) == (flat.device, flat.dtype)
                assert flat.offset_of_param[piece.param] + piece.start == place
                place += piece.numel
                found.append((bucket.owner, piece))
            assert place == bucket.stop
    expected = [
        (rank, piece)
        for rank, slices in enumerate(partition.slices_of_rank)
        for piece in slices
        if params[piece.param].trainable and piece.numel
    ]
    assert sorted((rank, piece) for rank, piece in found if piece.numel) == sorted(expected)
    placed = [param for flat in layout.flats for param in flat.offset_of_param]
    assert sorted(placed) == [index for index, param in enumerate(params) if param.trainable]


@given(params_of_model, ranks, alignments, st.data())
def test_parameters_do_not_overlap_and_padding_is_less_than_a_unit_for_each_run(
    params: list[ParamSpec], world_size: int, alignment: int, data: st.DataObject
) -> None:
    for flat in lay_out(at_random(params, world_size, data), params, alignment=alignment).flats:
        ends = 0
        for index, offset in sorted(
            flat.offset_of_param.items(), key=lambda item: (item[1], params[item[0]].numel)
        ):
            assert offset >= ends
            ends = offset + params[index].numel
        assert ends <= flat.numel
        assert flat.numel % alignment == 0
        elements = sum(params[index].numel for index in flat.offset_of_param)
        assert flat.padding == flat.numel - elements
        # One gap before each parameter that begins a run, and one at the end.
        assert flat.padding <= (len(flat.offset_of_param) + 1) * (alignment - 1)


@given(params_of_model, ranks, alignments, rules)
def test_our_partitions_need_one_bucket_for_each_owner(
    params: list[ParamSpec], world_size: int, alignment: int, rule: str
) -> None:
    partition = plan_partition(rule, params, world_size)
    for flat in lay_out(partition, params, alignment=alignment).flats:
        owners = [bucket.owner for bucket in flat.buckets]
        assert owners == sorted(set(owners))
        members = {
            rank
            for index in flat.offset_of_param
            for piece, rank in partition.pieces_of_param[index]
            if piece.numel
        }
        assert set(owners) == members
        assert flat.padding <= (min(world_size, len(flat.offset_of_param)) + 1) * (alignment - 1)


@given(params_of_model, ranks, alignments)
def test_buckets_of_whole_parameters_begin_on_the_alignment(
    params: list[ParamSpec], world_size: int, alignment: int
) -> None:
    partition = registration_greedy([param.numel for param in params], world_size)
    for flat in lay_out(partition, params, alignment=alignment).flats:
        assert all(bucket.start % alignment == 0 for bucket in flat.buckets)


@given(params_of_model, ranks)
def test_an_even_layout_keeps_the_registration_order(params: list[ParamSpec], world_size: int) -> None:
    for flat in lay_out(plan_partition("even", params, world_size), params).flats:
        assert list(flat.offset_of_param) == sorted(flat.offset_of_param)


def test_a_shared_range_is_a_flat_tensor_with_a_bucket_for_each_rank() -> None:
    numels = [100, 640, 1, 200]
    params = [ParamSpec(100, trainable=False), *map(ParamSpec, numels[1:3]), ParamSpec(200, trainable=False)]
    [flat] = lay_out(equal_shares(numels, 2, range_numel=700), params).flats
    assert flat.shared
    assert flat.offset_of_param == {1: 0, 2: 640}
    assert flat.buckets == (
        Bucket(0, 0, 512, (Slice(1, 0, 512),), (0,)),
        Bucket(1, 512, 1024, (Slice(1, 512, 640), Slice(2, 0, 1)), (0, 128)),
    )
    assert flat.padding == 1024 - 641


def test_flat_tensors_of_ranges_come_in_the_order_of_forward_and_then_those_of_other_parameters() -> None:
    params = [ParamSpec(1, "bfloat16"), ParamSpec(64, whole=True), *[ParamSpec(640)] * 2]
    partition = equal_shares(params, 2, range_numel=640)
    flats = lay_out(partition, params).flats
    assert [list(flat.offset_of_param) for flat in flats] == [[0], [2], [3], [1]]
    assert [flat.shared for flat in flats] == [True, True, True, False]


# ------------------------------------------------------------------------------------------- runs


def test_runs_join_what_lies_together_and_leave_out_the_rest() -> None:
    slices = [Slice(0, 2, 6), Slice(1, 0, 3), Slice(2, 0, 0), Slice(3, 0, 5), Slice(4, 0, 1)]
    assert runs_within(slices, end_to_end(slices), {0, 1, 2, 4}) == [
        SliceRun(0, 7, (Slice(0, 2, 6), Slice(1, 0, 3))),
        SliceRun(12, 13, (Slice(4, 0, 1),)),
    ]
    assert runs_within(slices, end_to_end(slices), {2}) == []
    assert runs_within(slices, end_to_end(slices), set()) == []


@given(st.lists(st.integers(0, 9), max_size=12), st.sets(st.integers(0, 11)))
def test_runs_hold_exactly_the_elements_asked_for_in_order(numels: list[int], params: set[int]) -> None:
    slices = [Slice(param, 0, numel) for param, numel in enumerate(numels)]
    runs = runs_within(slices, end_to_end(slices), params)
    wanted = [piece for piece in slices if piece.param in params and piece.numel]
    assert [piece for run in runs for piece in run.slices] == wanted
    for run in runs:
        first = run.slices[0].param
        assert run.start == sum(numels[:first])
        assert run.stop - run.start == sum(piece.numel for piece in run.slices)
    assert all(before.stop < after.start for before, after in itertools.pairwise(runs)), (
        "could be one message"
    )
