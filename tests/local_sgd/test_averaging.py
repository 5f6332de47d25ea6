"""The schedule of local SGD, by itself: when, over whom, and who holds the same parameters in between."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from zero_ref.local_sgd.averaging import AveragingSchedule, Level

# ---------------------------------------------------------------------------------------------- by example


def due(schedule: AveragingSchedule, steps: int) -> dict[int, Level]:
    """The steps that end with an average, and which."""
    found = ((step, schedule.level(step)) for step in range(steps))
    return {step: level for step, level in found if level is not None}


def test_a_flat_schedule_averages_first_at_the_step_after_the_warm_up() -> None:
    assert list(due(AveragingSchedule.periodic(4), 10)) == [0, 4, 8]
    assert list(due(AveragingSchedule.periodic(4, warmup_steps=3), 12)) == [3, 7, 11]


def test_a_hierarchical_schedule_counts_from_step_0_and_takes_the_widest_level_alone() -> None:
    schedule = AveragingSchedule.hierarchical({2: 2, 4: 4, 12: 8}, warmup_steps=3)
    sizes = {step: level.group_size for step, level in due(schedule, 15).items()}
    assert sizes == {4: 4, 6: 2, 8: 4, 10: 2, 12: 8, 14: 2}


def test_ranks_agree_in_the_warm_up_and_then_as_far_as_averages_and_gradients_go() -> None:
    schedule = AveragingSchedule.hierarchical({3: 4, 6: 8}, warmup_steps=2, gradient_group=2)
    assert [schedule.agreeing(step, 8) for step in range(8)] == [8, 8, 2, 4, 2, 2, 8, 2]


def test_the_steady_steps_are_a_cycle_that_ends_with_an_average_of_all() -> None:
    assert AveragingSchedule.hierarchical({2: 2, 3: 4}, warmup_steps=7).steady == range(13, 19)
    assert AveragingSchedule.periodic(5).steady == range(1, 6)


def test_of_levels_in_any_order_the_last_that_is_due_is_taken() -> None:
    """As torch's averager does; groups of a level need not be made of those of another."""
    schedule = AveragingSchedule.hierarchical({6: 3, 2: 2, 3: 4, 8: 4, 4: 12})
    sizes = {step: level.group_size for step, level in due(schedule, 13).items()}
    assert sizes == {0: 12, 2: 2, 3: 4, 4: 12, 6: 4, 8: 12, 9: 4, 10: 2, 12: 12}
    assert schedule.never_taken == [Level(6, 3), Level(8, 4)]
    schedule.check_fits(12)
    assert AveragingSchedule.hierarchical({2: 2, 4: 4, 8: 4}).never_taken == []


def test_levels_may_be_pairs_for_which_a_dict_could_stand() -> None:
    pairs: Any = [(2, 2), (4, 4)]
    assert AveragingSchedule.hierarchical(pairs) == AveragingSchedule.hierarchical({2: 2, 4: 4})


def test_schedules_are_values() -> None:
    one, same = (AveragingSchedule.periodic(3, warmup_steps=1) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != AveragingSchedule.periodic(3)


WRONG: dict[str, tuple[type[Exception], Any]] = {
    "period must be a whole number, got 3.0": (TypeError, lambda: AveragingSchedule.periodic(3.0)),  # type: ignore[arg-type]
    "period must be a whole number, got '3'": (TypeError, lambda: AveragingSchedule.periodic("3")),  # type: ignore[arg-type]
    "period must be at least 1, got 0": (ValueError, lambda: AveragingSchedule.periodic(0)),
    "warmup_steps must be at least 0, got -1": (
        ValueError,
        lambda: AveragingSchedule.periodic(3, warmup_steps=-1),
    ),
    "warmup_steps must be a whole number, got 1.5": (
        TypeError,
        lambda: AveragingSchedule.periodic(3, warmup_steps=1.5),  # type: ignore[arg-type]
    ),
    "gradient_group must be at least 1, got 0": (
        ValueError,
        lambda: AveragingSchedule.periodic(3, gradient_group=0),
    ),
    "origin must be at least 0, got -2": (ValueError, lambda: AveragingSchedule((Level(3),), origin=-2)),
    "group_size must be a whole number, got 2.0": (
        TypeError,
        lambda: AveragingSchedule.hierarchical({2: 2.0, 4: 4}),  # type: ignore[dict-item]
    ),
    "group_size must be at least 1, got 0": (
        ValueError,
        lambda: AveragingSchedule.hierarchical({2: 0, 4: 4}),
    ),
    "at least one level": (ValueError, lambda: AveragingSchedule.hierarchical({})),
    "group_size=None comes last": (
        ValueError,
        lambda: AveragingSchedule((Level(2), Level(4, 4))),
    ),
    "one of 4 ranks cannot be made of groups of 3": (
        ValueError,
        lambda: AveragingSchedule.hierarchical({2: 4}, gradient_group=3),
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_schedule_that_makes_no_sense_is_refused(text: str) -> None:
    kind, make = WRONG[text]
    with pytest.raises(kind) as error:
        make()
    assert text in str(error.value)


def test_a_schedule_for_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="averages over 4 ranks and there are 8"):
        AveragingSchedule.hierarchical({2: 2, 4: 4}).check_fits(8)
    with pytest.raises(ValueError, match="6 ranks cannot be divided into groups of 4"):
        AveragingSchedule.periodic(3, gradient_group=4).check_fits(6)
    with pytest.raises(ValueError, match="averages over 4 ranks and there are 2"):
        AveragingSchedule.hierarchical({2: 4}).agreeing(0, 2)


# -------------------------------------------------------------------------------------------- for all plans


@st.composite
def schedules(draw: st.DrawFn) -> tuple[AveragingSchedule, int]:
    """A schedule, and the number of ranks it is for. Sizes are 1, 2, 4, ... of up to 16, so they nest."""
    sizes = sorted(draw(st.sets(st.sampled_from([1, 2, 4, 8, 16]), min_size=1)))
    periods = sorted(draw(st.sets(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes))))
    world_size = sizes[-1]
    levels = [Level(period, size) for period, size in zip(periods, sizes, strict=True)]
    if draw(st.booleans()):
        levels[-1] = Level(periods[-1])
    group = draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if size <= world_size]))
    warmup, origin = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    return AveragingSchedule(tuple(levels), warmup, origin, group), world_size


def block_of_equals(values: list[Any]) -> int:
    """The largest size of groups of consecutive ranks in which all have the same."""
    sizes = (size for size in range(len(values), 0, -1) if len(values) % size == 0)
    return next(
        size
        for size in sizes
        if all(values[rank] == values[rank - rank % size] for rank in range(len(values)))
    )


@settings(max_examples=60)
@given(schedules())
def test_the_ranks_said_to_agree_are_those_that_have_seen_the_same(
    drawn: tuple[AveragingSchedule, int],
) -> None:
    # Each rank's parameters as a name for what went into them: equal names, equal parameters.
    schedule, world_size = drawn
    names: dict[Any, int] = {}
    ranks = range(world_size)

    def name(*made_of: Any) -> int:
        return names.setdefault(made_of, len(names))

    held = [name("start")] * world_size
    for step in range(25):
        size = schedule.gradient_group if schedule.is_local(step) else world_size
        held = [name(step, "update", held[rank], rank // size) for rank in ranks]
        level = schedule.level(step)
        if level is not None:
            size = level.group_size or world_size
            groups = [frozenset(held[first : first + size]) for first in range(0, world_size, size)]
            # The average of ranks that hold the same is what they hold.
            means = [next(iter(group)) if len(group) == 1 else name("mean", group) for group in groups]
            held = [means[rank // size] for rank in ranks]
        assert block_of_equals(held) == schedule.agreeing(step, world_size), f"step {step}"


@settings(max_examples=60)
@given(schedules())
def test_every_cycle_is_like_the_steady_one_which_begins_and_ends_with_an_average_of_all(
    drawn: tuple[AveragingSchedule, int],
) -> None:
    schedule, world_size = drawn
    steady = schedule.steady
    assert len(steady) == schedule.cycle == math.lcm(*(level.period for level in schedule.levels))
    for last in (steady[0] - 1, steady[-1]):
        assert schedule.level(last) == schedule.levels[-1]
        assert schedule.agreeing(last, world_size) == world_size
    for step in steady:
        assert schedule.level(step) == schedule.level(step + schedule.cycle)
    # It is the first of its kind: no whole cycle earlier would the warm-up be over.
    earlier = steady[0] - 1 - schedule.cycle
    assert earlier < max(schedule.warmup_steps, schedule.origin)


@settings(max_examples=60)
@given(schedules(), st.integers(0, 60))
def test_nothing_is_averaged_in_the_warm_up_and_a_period_apart_after_it(
    drawn: tuple[AveragingSchedule, int], step: int
) -> None:
    schedule, _ = drawn
    level = schedule.level(step)
    if step < schedule.warmup_steps:
        assert level is None
        return
    away = abs(step - schedule.origin)
    fitting = [other for other in schedule.levels if away % other.period == 0]
    assert level == max(fitting, key=lambda other: other.period, default=None)
