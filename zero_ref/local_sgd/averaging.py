"""The schedule of local SGD: the steps at which ranks average, and the ranks over which they average.

In `stairs/owners.py` ranks have averaged gradients in every step. With local SGD each rank trains by itself
between averages. The hook that reduces gradients, the averager, the simulator and the plots all use one
schedule, so they cannot disagree. Like `partition.py`, this module is arithmetic on integers: it has no
tensors and no communication.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Level(NamedTuple):
    """An average of parameters that is taken every `period` steps.

    Args:
        period: steps from one average to the next, H.
        group_size: the number of consecutive ranks that are averaged: with 4, ranks 0 to 3, 4 to 7 and so on;
            None for all ranks.
    """

    period: int
    group_size: int | None = None


@dataclass(frozen=True)
class AveragingSchedule:
    """The steps at which gradients or parameters are averaged, and the ranks over which they are averaged.

    Steps are counted from 0. Before `warmup_steps` every step averages gradients over all ranks, as DDP does.
    From then on gradients are averaged within a gradient group at most, and a step may end with an average of
    the parameters. If several levels are due, only the level of the largest groups is taken.

    >>> flat = AveragingSchedule.periodic(3, warmup_steps=2)
    >>> [step for step in range(10) if flat.level(step)]
    [2, 5, 8]
    >>> nodes = AveragingSchedule.hierarchical({2: 8, 4: 64})
    >>> [nodes.level(step) and nodes.level(step).group_size for step in range(5)]
    [64, None, 8, None, 64]

    Args:
        levels: from the smallest groups, averaged most often, to all ranks. If several are due, the last one
            in this order is taken.
        warmup_steps: the number of steps before local training.
        origin: the step from which periods are counted. torch's periodic averager counts from the end of the
            warm-up, its hierarchical averager from step 0.
        gradient_group: the number of ranks over which gradients are averaged after the warm-up, such as the
            ranks of a machine; with 1 they are not averaged.
    Raises:
        TypeError: a number is not an integer.
        ValueError: there is no level, a number is too small, another level than the last has group_size=None,
            or groups cannot be made of gradient groups.
    Source: post-local SGD, and hierarchical local SGD with its several levels (Lin et al., arXiv:1808.07217).
    """

    levels: tuple[Level, ...]
    warmup_steps: int = 0
    origin: int = 0
    gradient_group: int = 1

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError(
                "a schedule of local SGD needs at least one level: ranks must average some time."
            )
        _check_at_least(0, warmup_steps=self.warmup_steps, origin=self.origin)
        _check_at_least(1, gradient_group=self.gradient_group)
        for level in self.levels:
            _check_at_least(1, period=level.period)
            if level.group_size is not None:
                _check_at_least(1, group_size=level.group_size)
        if any(level.group_size is None for level in self.levels[:-1]):
            raise ValueError("only the last level averages over all ranks: group_size=None comes last.")
        # Ranks that share gradients stay equal, so a group of one kind must be made of groups of the other.
        for size in self.group_sizes:
            inner, outer = sorted((size, self.gradient_group))
            if outer % inner:
                raise ValueError(
                    f"groups must nest, and one of {outer} ranks cannot be made of groups of {inner}."
                )

    @classmethod
    def periodic(cls, period: int, *, warmup_steps: int = 0, gradient_group: int = 1) -> AveragingSchedule:
        """Average all ranks every `period` steps, for the first time after step `warmup_steps`."""
        return cls((Level(period),), warmup_steps, warmup_steps, gradient_group)

    @classmethod
    def hierarchical(
        cls, size_of_period: Mapping[int, int], *, warmup_steps: int = 0, gradient_group: int = 1
    ) -> AveragingSchedule:
        """Average within groups often, and over all ranks seldom.

        As in torch's hierarchical averager, periods are counted from step 0, not from the end of the warm-up.

        Args:
            size_of_period: {period: ranks in a group}, all ranks last.
        """
        levels = tuple(Level(period, size) for period, size in dict(size_of_period).items())
        return cls(levels, warmup_steps, gradient_group=gradient_group)

    @property
    def group_sizes(self) -> list[int]:
        """The sizes of the groups in this schedule, ascending, without duplicates and without 1."""
        named = {self.gradient_group, *(level.group_size for level in self.levels)}
        return sorted(size for size in named if size is not None and size > 1)

    @property
    def never_taken(self) -> list[Level]:
        """The levels that are never taken, since a later level is due at each of their steps.

        >>> AveragingSchedule.hierarchical({4: 2, 2: 8}).never_taken
        [Level(period=4, group_size=2)]
        """
        later = [self.levels[place + 1 :] for place in range(len(self.levels))]
        return [
            level
            for level, others in zip(self.levels, later)
            if any(level.period % other.period == 0 for other in others)
        ]

    @property
    def cycle(self) -> int:
        """The number of steps after which the schedule repeats."""
        return math.lcm(*(level.period for level in self.levels))

    @property
    def steady(self) -> range:
        """The steps of the first cycle after the warm-up that begins with equal ranks.

        Its last step averages over all ranks, so the next cycle begins with equal ranks, too.

        >>> AveragingSchedule.periodic(3, warmup_steps=2).steady
        range(3, 6)
        """
        cycles = max(0, math.ceil((self.warmup_steps - self.origin) / self.cycle))
        first = self.origin + cycles * self.cycle + 1
        return range(first, first + self.cycle)

    def is_local(self, step: int) -> bool:
        """Return whether the warm-up is over at this step."""
        return step >= self.warmup_steps

    def level(self, step: int) -> Level | None:
        """The average that follows the update of this step; None if none follows."""
        if not self.is_local(step):
            return None
        due = [level for level in self.levels if (step - self.origin) % level.period == 0]
        return due[-1] if due else None

    def agreeing(self, step: int, world_size: int) -> int:
        """The number of consecutive ranks with the same parameters after a step, if all began with the same.

        Ranks have the same parameters if they used the same gradients in every step, or were just averaged.

        >>> schedule = AveragingSchedule.hierarchical({2: 4, 4: 8}, warmup_steps=2, gradient_group=2)
        >>> [schedule.agreeing(step, world_size=8) for step in range(6)]
        [8, 8, 4, 2, 8, 2]

        Raises:
            ValueError: the schedule does not fit this number of ranks.
        """
        self.check_fits(world_size)
        if not self.is_local(step):
            return world_size
        level = self.level(step)
        averaged = 1 if level is None else level.group_size or world_size
        return max(averaged, self.gradient_group)

    def check_fits(self, world_size: int) -> None:
        """Refuse a number of ranks that cannot be divided into the groups.

        Raises:
            ValueError: the number cannot be divided, or the last level does not average over all ranks.
        """
        last = self.levels[-1].group_size
        if last is not None and last != world_size:
            raise ValueError(
                f"the last level averages over {last} ranks and there are {world_size}: ranks of different "
                f"groups would never meet. Give {world_size} as the last group size."
            )
        for size in self.group_sizes:
            if world_size % size:
                raise ValueError(f"{world_size} ranks cannot be divided into groups of {size}.")


def _check_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        try:
            operator.index(number)
        except TypeError:
            raise TypeError(f"{name} must be a whole number, got {number!r}.") from None
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}.")
