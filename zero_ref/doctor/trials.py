"""The trials. Each does one thing that training does, and has the steps that both the program and the plain
loop play.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zero_ref.doctor.model import Shape

MICRO = 3
"""The number of micro-batches in a step that accumulates."""
MAX_NORM = 512.0
"""The limit for clipping. It is far below the norm of the doctor's gradients, so every clipping scales."""
OWN_MAX_NORM = 2.0**-6
"""The same for a model of the program's own, whose gradients are as large as its loss makes them."""
ADDED = (4, 6)
"""Inputs and outputs of the layer that is added as a group."""


@dataclass(frozen=True)
class Step:
    """One step of a loop.

    Args:
        number: counted from 0.
        micro: the number of micro-batches, whose gradients are added up.
        set_to_none: the argument of `zero_grad`, which is called at the beginning.
        max_norm: gradients are clipped to this norm; None: they are not clipped.
        factor: the scheduler sets all learning rates to this factor times their first value; None: there is
            no scheduler.
        nan: the loss of the last rank is NaN, so no rank updates anything.
        raises: before the step's own batch there is a forward of another batch, which an exception ends
            before its backward; the loop catches the exception.
        adds: a parameter group is added before the step.
        freezes: a layer is frozen (True) or unfrozen (False) before the step; None: neither.
        unused: the layers that have no data on any rank.
        unused_on_first: the layers that have no data on rank 0.
        reloads: before the step the state is saved, and loaded into new objects.
    """

    number: int
    micro: int = 1
    set_to_none: bool = True
    max_norm: float | None = None
    factor: float | None = None
    nan: bool = False
    raises: bool = False
    adds: bool = False
    freezes: bool | None = None
    unused: tuple[str, ...] = ()
    unused_on_first: tuple[str, ...] = ()
    reloads: bool = False


@dataclass(frozen=True)
class Trial:
    """One thing that training does.

    Attributes:
        name: the name by which a user leaves it out.
        steps: the steps that are played.
        shape: which model the doctor uses.
        own: whether it can be tried with a program that has a model of its own, too.
        elsewhere: whether the state that was saved is loaded on another number of ranks.
    """

    name: str
    steps: tuple[Step, ...]
    shape: Shape = field(default_factory=Shape)
    own: bool = True
    elsewhere: bool = False


FROZEN = "later"
"""The name of the layer that some trials freeze, or do not use."""


def make_trials(steps: int = 5, shape: Shape | None = None, max_norm: float = MAX_NORM) -> tuple[Trial, ...]:
    """All trials, the simplest first.

    >>> [trial.name for trial in make_trials()][:3]
    ['plain', 'accumulation', 'clipping']

    Args:
        steps: the number of steps of each trial; at least 3, so that something can happen between two steps.
        shape: the model, which some trials change; None: the standard one.
        max_norm: the limit for clipping.
    Raises:
        ValueError: there are fewer than 3 steps.
    """
    if steps < 3:
        raise ValueError(f"steps is {steps}, and a trial needs at least 3: one before, one with, one after.")
    shape = shape or Shape()
    base = tuple(Step(number) for number in range(steps))
    middle = steps // 2

    def at(number: int, **changes: object) -> tuple[Step, ...]:
        return tuple(replace(step, **changes) if step.number == number else step for step in base)  # type: ignore[arg-type]

    def each(**changes: object) -> tuple[Step, ...]:
        return tuple(replace(step, **changes) for step in base)  # type: ignore[arg-type]

    frozen = tuple(replace(step, freezes={1: True, steps - 1: False}.get(step.number)) for step in base)
    scheduled = tuple(replace(step, factor=2.0 ** -(step.number % 4)) for step in base)
    return (
        Trial("plain", base, shape),
        Trial("accumulation", each(micro=MICRO), shape),
        Trial("clipping", each(max_norm=max_norm), shape),
        Trial("scheduler", scheduled, shape),
        Trial("group added", at(middle, adds=True), shape),
        Trial("frozen layer", frozen, shape, own=False),
        Trial("save and load", at(middle, reloads=True), shape),
        Trial("another world size", at(middle, reloads=True), shape, elsewhere=True),
        Trial("unused parameters", at(middle, unused=(FROZEN,)), shape, own=False),
        Trial("unused on a rank", at(1, unused_on_first=(FROZEN,)), shape, own=False),
        Trial("mixed dtypes", base, replace(shape, mixed=True), own=False),
        Trial("tied weights", base, replace(shape, tied=True), own=False),
        Trial("zero_grad", each(set_to_none=False), shape),
        Trial("NaN step", at(middle, nan=True), shape),
        Trial("exception", at(middle, raises=True), shape),
        Trial("buffers", base, replace(shape, buffers=True), own=False),
    )


NAMES: Sequence[str] = tuple(trial.name for trial in make_trials())
"""The names of all trials."""
