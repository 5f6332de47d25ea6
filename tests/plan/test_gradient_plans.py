"""The buckets of gradients without DDP: by hand, and for all partitions: each element has its owner once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given, strategies as st

from zero_ref.plan.choice import RULES, plan_partition
from zero_ref.plan.gradients import SMALL_NUMEL, Cut, GradientPlan, GradientTensors, gradient_plans
from zero_ref.plan.partition import ALIGNMENT, ParamSpec, Partition, SharedRange, Slice
from zero_ref.plan.rules import equal_shares, from_lists

# ----------------------------------------------------------------------------------------------- example


def test_the_gradients_of_a_range_lie_where_its_parameters_do() -> None:
    params = [ParamSpec(7), ParamSpec(100), ParamSpec(50)]
    plan = GradientPlan.of_range(SharedRange.of([1, 2], [100, 50], world_size=2), params, world_size=2)
    assert (plan.starts, plan.numels, plan.numel) == ({1: 0, 2: 128}, {1: 100, 2: 50}, 256)
    assert plan.is_shared
    assert [plan.runs(rank) for rank in range(2)] == [[range(128)], [range(128, 256)]]
    assert [list(plan.own(rank)) for rank in range(2)] == [[(Slice(1, 0, 100), 0)], [(Slice(2, 0, 50), 0)]]
    assert plan.own_numel(0) == plan.own_numel(1) == 128, "padding included"


def test_a_share_begins_within_a_parameter_and_frozen_ones_leave_a_gap() -> None:
    params = [ParamSpec(60, trainable=False), ParamSpec(200), ParamSpec(1)]
    plan = GradientPlan.of_range(SharedRange.of([0, 1, 2], [60, 200, 1], world_size=3), params, world_size=3)
    assert (plan.starts, plan.numel) == ({1: 64, 2: 320}, 384)
    assert [list(plan.own(rank)) for rank in range(3)] == [
        [(Slice(1, 0, 64), 64)],
        [(Slice(1, 64, 192), 0)],
        [(Slice(1, 192, 200), 0), (Slice(2, 0, 1), 64)],
    ]


def test_other_parameters_lie_end_to_end_and_neighbours_of_an_owner_are_one_run() -> None:
    partition = from_lists([6, 5, 4, 1], [[0, Slice(2, 0, 3)], [1, 3, Slice(2, 3, 4)]])
    plan = GradientPlan.of_params([3, 2, 1, 0], partition)
    assert (plan.starts, plan.numel) == ({3: 0, 2: 1, 1: 5, 0: 10}, 16)
    assert not plan.is_shared
    assert plan.runs(0) == [range(1, 4), range(10, 16)]
    assert plan.runs(1) == [range(1), range(4, 10)], "the end of 2 and all of 1 are neighbours"
    assert list(plan.own(0)) == [(Slice(2, 0, 3), 0), (Slice(0, 0, 6), 3)]
    assert list(plan.own(1)) == [(Slice(3, 0, 1), 0), (Slice(2, 3, 4), 1), (Slice(1, 0, 5), 2)]
    assert (plan.own_numel(0), plan.own_numel(1)) == (9, 7)


def test_small_gradients_that_follow_one_another_share_a_tensor() -> None:
    numels = [SMALL_NUMEL, 1, SMALL_NUMEL + 1, 5]
    plan = GradientPlan.of_params([3, 2, 1, 0], from_lists(numels, [[0, 2], [1, 3]]))
    large = range(5, 5 + SMALL_NUMEL + 1)
    assert plan.tensors() == GradientTensors(
        (range(5), large, range(large.stop, plan.numel)),
        (True, False, True),
        {3: (0, 0), 2: (1, 0), 1: (2, 0), 0: (2, 1)},
    )
    assert [plan.sent_numels(rank) for rank in range(2)] == [[SMALL_NUMEL + 1, SMALL_NUMEL], [5, 1]]


def test_the_tensor_of_small_neighbours_has_the_gaps_between_them_and_one_for_all_has_every_gap() -> None:
    params = [ParamSpec(3), ParamSpec(70)]
    plan = GradientPlan.of_range(SharedRange.of([0, 1], [3, 70], world_size=2), params, world_size=2)
    assert plan.tensors() == GradientTensors((range(64 + 70),), (True,), {0: (0, 0), 1: (0, 64)})
    whole = plan.tensors(as_one=True)
    assert whole == GradientTensors((range(256),), (True,), {0: (0, 0), 1: (0, 64)})
    assert list(whole.cuts(plan.runs(1))) == [Cut(0, 128, 256, 0)]
    assert [list(plan.tensors().cuts(plan.runs(rank))) for rank in range(2)] == [
        [Cut(0, 0, 128, 0)],
        [Cut(0, 128, 134, 0)],
    ]


def test_an_owner_is_sent_a_message_for_each_tensor_that_it_has_a_part_of() -> None:
    tensors = GradientTensors((range(10), range(10, 30), range(40, 50)), (True, False, True), {})
    cuts = list(tensors.cuts([range(5, 12), range(25, 45)]))
    assert cuts == [Cut(0, 5, 10, 0), Cut(1, 0, 2, 5), Cut(1, 15, 20, 7), Cut(2, 0, 5, 22)]
    assert [cut.within for cut in cuts] == [slice(0, 5), slice(5, 7), slice(7, 12), slice(22, 27)]


@pytest.mark.parametrize(
    ("numels", "buckets"),
    [
        ([10, 10, 10, 10], [[3, 2], [1, 0]]),
        ([10, 10, 9, 10], [[3, 2, 1], [0]]),
        ([5, 100, 5], [[2, 1], [0]]),
        ([100, 100], [[1], [0]]),
        ([0], [[0]]),
        ([], []),
    ],
)
def test_a_bucket_is_full_with_the_parameter_that_brings_it_to_the_cap(
    numels: list[int], buckets: list[list[int]]
) -> None:
    params = [ParamSpec(numel) for numel in numels]
    plans = gradient_plans(plan_partition("sorted_greedy", params, 2), params, cap=20)
    assert [list(plan.starts) for plan in plans] == buckets


def test_each_kind_has_buckets_of_its_own_ranges_too_and_frozen_parameters_none() -> None:
    params = [
        ParamSpec(10, "bfloat16"),
        ParamSpec(10),
        ParamSpec(10, trainable=False),
        ParamSpec(10, device="cuda:0"),
        ParamSpec(10, "bfloat16"),
        ParamSpec(10),
    ]
    plans = gradient_plans(plan_partition("even", params, 2), params)
    assert [list(plan.starts) for plan in plans] == [[3], [5, 1], [4, 0]]
    shared = gradient_plans(plan_partition("equal_shares", params, 2), params)
    assert [list(plan.starts) for plan in shared] == [[3], [1, 5], [0, 4]]
    whole = [param._replace(whole=number in (1, 3)) for number, param in enumerate(params)]
    mixed = gradient_plans(plan_partition("equal_shares", whole, 2), whole)
    assert [(list(plan.starts), plan.is_shared) for plan in mixed] == [
        ([5], True),
        ([3], False),
        ([1], False),
        ([0, 4], True),
    ]


def test_a_range_of_frozen_parameters_has_no_bucket() -> None:
    params = [ParamSpec(100), ParamSpec(100, trainable=False)]
    partition = equal_shares([100, 100], 2, range_numel=1)
    assert [one.params for one in partition.ranges] == [(1,), (0,)]
    assert [list(plan.starts) for plan in gradient_plans(partition, params)] == [[0]]


# ---------------------------------------------------------------------------------------------- property

params_of_model = st.lists(
    st.builds(
        lambda numel, dtype, trainable, whole: ParamSpec(numel, dtype, trainable=trainable, whole=whole),
        st.integers(0, 400),
        st.sampled_from(["float32", "float32", "bfloat16"]),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([False, False, True]),
    ),
    max_size=8,
)
ranks = st.integers(1, 6)


@st.composite
def planned(draw: st.DrawFn) -> tuple[list[ParamSpec], Partition, list[GradientPlan]]:
    """Parameters, their owners, and their buckets: some with one range, some with several."""
    params, world_size = draw(params_of_model), draw(ranks)
    if draw(st.booleans()):
        partition = equal_shares(params, world_size, range_numel=draw(st.integers(1, 1000)))
    else:
        partition = plan_partition(draw(st.sampled_from(list(RULES))), params, world_size)
    return params, partition, gradient_plans(partition, params, cap=draw(st.integers(1, 1000)))


def places(runs: Sequence[range]) -> list[int]:
    return list(chain.from_iterable(runs))


@given(planned())
def test_every_trained_element_is_in_one_owners_runs_and_it_is_its_owners(
    case: tuple[list[ParamSpec], Partition, list[GradientPlan]],
) -> None:
    params, partition, plans = case
    trained = [number for number, param in enumerate(params) if param.trainable]
    assert sorted(number for plan in plans for number in plan.starts) == trained, "each in one bucket"
    for plan in plans:
        owners: dict[int, int] = {}
        for rank in range(partition.world_size):
            mine = places(plan.runs(rank))
            assert len(mine) == plan.own_numel(rank)
            assert not owners.keys() & set(mine)
            assert set(mine) <= set(range(plan.numel))
            owners |= dict.fromkeys(mine, rank)
        for number, start in plan.starts.items():
            for piece, owner in partition.pieces_of_param[number]:
                assert [owners[start + i] for i in range(piece.start, piece.stop)] == [owner] * piece.numel


@given(planned())
def test_what_a_rank_owns_of_all_buckets_is_what_it_owns_of_the_trained_parameters(
    case: tuple[list[ParamSpec], Partition, list[GradientPlan]],
) -> None:
    params, partition, plans = case
    for rank in range(partition.world_size):
        own = [piece for plan in plans for piece, _ in plan.own(rank)]
        assert sorted(own) == [one for one in partition.slices_of_rank[rank] if params[one.param].trainable]
        for plan in plans:
            mine = places(plan.runs(rank))
            for piece, place in plan.own(rank):
                first = plan.starts[piece.param] + piece.start
                assert mine[place : place + piece.numel] == list(range(first, first + piece.numel))


@given(planned(), st.booleans(), st.sampled_from([1, 100, SMALL_NUMEL]))
def test_the_cuts_of_an_owner_are_its_part_of_the_tensors_without_gap_or_overlap(
    case: tuple[list[ParamSpec], Partition, list[GradientPlan]], as_one: bool, small_numel: int
) -> None:
    _, partition, plans = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_ref.plan.gradients.SMALL_NUMEL", small_numel)
        for plan in plans:
            tensors = plan.tensors(as_one=as_one)
            held = set(chain.from_iterable(tensors.extents))
            for number, (tensor, start) in tensors.of_param.items():
                extent = tensors.extents[tensor][start : start + plan.numels[number]]
                assert extent == range(plan.starts[number], plan.starts[number] + plan.numels[number])
                assert tensors.joint[tensor] or extent == tensors.extents[tensor], "a gradient by itself"
            sent: list[int] = []
            for rank in range(partition.world_size):
                mine, cuts = places(plan.runs(rank)), list(tensors.cuts(plan.runs(rank)))
                for cut in cuts:
                    inside = tensors.extents[cut.tensor][cut.start : cut.stop]
                    assert list(inside) == mine[cut.within]
                    assert len(inside) == cut.stop - cut.start > 0
                    sent += inside
                in_part = [place for cut in cuts for place in range(cut.within.start, cut.within.stop)]
                assert in_part == [at for at, place in enumerate(mine) if place in held]
                if as_one or not plan.is_shared:
                    assert in_part == list(range(plan.own_numel(rank)))
                if not as_one:
                    assert plan.sent_numels(rank) == [cut.stop - cut.start for cut in cuts]
            assert sorted(sent) == sorted(held), "each element goes to one owner"


@given(planned())
def test_shares_of_a_range_are_equal_and_no_parameter_begins_within_a_vector(
    case: tuple[list[ParamSpec], Partition, list[GradientPlan]],
) -> None:
    _, partition, plans = case
    for plan in plans:
        if plan.is_shared:
            assert {plan.own_numel(rank) for rank in range(partition.world_size)} == {
                plan.numel // partition.world_size
            }
            shares = [plan.runs(rank)[0].start for rank in range(partition.world_size)]
            assert all(start % ALIGNMENT == 0 for start in (*plan.starts.values(), *shares))


@given(planned())
def test_the_last_parameters_bucket_is_reduced_first(
    case: tuple[list[ParamSpec], Partition, list[GradientPlan]],
) -> None:
    params, _, plans = case
    firsts = [min(plan.starts) for plan in plans]
    assert firsts == sorted(firsts, reverse=True)
    assert {len({params[number].dtype for number in plan.starts}) for plan in plans} <= {1}
