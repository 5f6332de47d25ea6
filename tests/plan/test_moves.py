"""From one partition to another: every element that changes owner moves once, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from zero_ref.plan.moves import Move, moves, numels_between
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import even, from_lists, registration_greedy, sorted_greedy

sizes = st.lists(st.integers(0, 40) | st.integers(0, 2), max_size=12)
ranks = st.integers(1, 6)


def at_random(numels: Sequence[int], world_size: int, data: st.DataObject) -> Partition:
    """Each parameter cut anywhere, each piece to any rank, also two neighbours to the same."""
    owned: list[list[Slice]] = [[] for _ in range(world_size)]
    for param, numel in enumerate(numels):
        inner = data.draw(st.sets(st.integers(1, numel - 1), max_size=4)) if numel > 1 else set()
        for start, stop in itertools.pairwise(sorted({0, *inner, numel}) if numel else [0, 0]):
            owned[data.draw(st.integers(0, world_size - 1))].append(Slice(param, start, stop))
    return from_lists(numels, owned)


def owner_of_each(partition: Partition) -> dict[tuple[int, int], int]:
    """The owner of every element; a parameter without elements counts as one element, number -1."""
    return {
        (piece.param, element): rank
        for rank, slices in enumerate(partition.slices_of_rank)
        for piece in slices
        for element in (range(piece.start, piece.stop) if piece.numel else [-1])
    }


def elements_of(move: Move) -> list[tuple[int, int]]:
    param, start, stop = move.piece
    return [(param, element) for element in (range(start, stop) if stop > start else [-1])]


# ----------------------------------------------------------------------------------------------- example


def test_a_parameter_that_is_split_sends_what_others_get() -> None:
    whole = from_lists([10, 4], [[0], [], [1]])
    split = from_lists([10, 4], [[Slice(0, 0, 3)], [Slice(0, 3, 7)], [Slice(0, 7, 10), 1]])
    assert moves(whole, split) == [Move(Slice(0, 3, 7), 0, 1), Move(Slice(0, 7, 10), 0, 2)]
    assert moves(split, whole) == [Move(Slice(0, 3, 7), 1, 0), Move(Slice(0, 7, 10), 2, 0)]
    assert numels_between(moves(whole, split)) == {(0, 1): 4, (0, 2): 3}


def test_borders_that_shift_move_only_what_lies_between() -> None:
    old = from_lists([100], [[Slice(0, 0, 50)], [Slice(0, 50, 100)]])
    new = from_lists([100], [[Slice(0, 0, 60)], [Slice(0, 60, 100)]])
    assert moves(old, new) == [Move(Slice(0, 50, 60), 1, 0)]


def test_a_parameter_without_elements_changes_owner_too() -> None:
    assert moves(from_lists([0], [[0], []]), from_lists([0], [[], [0]])) == [Move(Slice(0, 0, 0), 0, 1)]


def test_onto_fewer_ranks_each_new_one_hears_what_it_needs() -> None:
    needed = moves(even([256, 512], 4), even([256, 512], 2), staying=True)
    assert numels_between(needed) == {(0, 0): 192, (1, 0): 192, (2, 1): 192, (3, 1): 192}
    assert numels_between(moves(even([256, 512], 4), even([256, 512], 2))) == {
        (1, 0): 192,
        (2, 1): 192,
        (3, 1): 192,
    }


def test_partitions_of_different_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 parameters \(5 elements\), the other of 2 \(7 elements\)"):
        moves(even([5], 2), even([5, 2], 2))


def test_a_large_model_on_many_ranks_takes_no_time() -> None:
    numels = [1000 + 7 * index for index in range(3000)]
    planned = moves(sorted_greedy(numels, 512), even(numels, 4096))
    assert 0.99 * sum(numels) < sum(numels_between(planned).values()) <= sum(numels)


# ---------------------------------------------------------------------------------------------- property


@settings(deadline=None)
@given(sizes, ranks, ranks, st.data())
def test_the_moves_turn_the_old_partition_into_the_new_one(
    numels: list[int], before: int, after: int, data: st.DataObject
) -> None:
    old, new = at_random(numels, before, data), at_random(numels, after, data)
    owner = owner_of_each(old)
    for move in moves(old, new):
        for element in elements_of(move):
            assert owner[element] == move.src
            owner[element] = move.dst
    assert owner == owner_of_each(new)


@settings(deadline=None)
@given(sizes, ranks, st.data())
def test_what_keeps_its_owner_does_not_move_and_the_rest_moves_once(
    numels: list[int], world_size: int, data: st.DataObject
) -> None:
    old, new = at_random(numels, world_size, data), at_random(numels, world_size, data)
    moved = [element for move in moves(old, new) for element in elements_of(move)]
    owner, owner_later = owner_of_each(old), owner_of_each(new)
    assert sorted(moved) == sorted(element for element in owner if owner[element] != owner_later[element])
    assert moves(old, old) == []
    assert [(m.piece, m.dst, m.src) for m in moves(old, new)] == moves(new, old)


@settings(deadline=None)
@given(sizes, ranks, ranks, st.data())
def test_with_what_stays_every_element_is_listed_once_in_order_and_in_the_longest_runs(
    numels: list[int], before: int, after: int, data: st.DataObject
) -> None:
    old, new = at_random(numels, before, data), at_random(numels, after, data)
    listed = moves(old, new, staying=True)
    assert [element for move in listed for element in elements_of(move)] == sorted(owner_of_each(old))
    assert [move for move in listed if move.src != move.dst] == moves(old, new)
    borders = {
        piece[:2] for partition in (old, new) for of_rank in partition.slices_of_rank for piece in of_rank
    }
    assert {move.piece[:2] for move in listed} == borders, "a run begins where a slice does, and only there"


@settings(deadline=None)
@given(sizes, ranks, ranks)
def test_a_rank_receives_what_it_will_own_and_did_not(numels: list[int], before: int, after: int) -> None:
    for old, new in itertools.product(
        [
            sorted_greedy(numels, before),
            registration_greedy(numels, before),
            even(numels, before, alignment=4),
        ],
        [sorted_greedy(numels, after), even(numels, after, alignment=4)],
    ):
        between = numels_between(moves(old, new, staying=True))
        for rank, load in enumerate(old.loads):
            assert sum(numel for (src, _), numel in between.items() if src == rank) == load
        for rank, load in enumerate(new.loads):
            assert sum(numel for (_, dst), numel in between.items() if dst == rank) == load
