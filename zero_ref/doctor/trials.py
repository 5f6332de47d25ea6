"""The trials. Each does one thing that training does, or several at once, and has the steps that both the
program and the plain loop play.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from zero_ref.doctor.model import Shape

MICRO = 5
"""The number of micro-batches in a step that accumulates: not the number of ranks that are usual here."""
MAX_NORM = 2.0
"""The limit for clipping. It is far below the norm of the doctor's gradients, so every clipping scales."""
OWN_MAX_NORM = 2.0**-6
"""The same for a model of the program's own, whose gradients are as large as its loss makes them."""
ADDED = (6, 4)
"""Rows and columns of the layer that is added as a group."""
SMALL_STEPS = 16
"""The steps at a low rate that only masters can add up: each is less than the last bit of 16."""
FROZEN, UNUSED = "later", "second"
"""The layers that some trials freeze, or do not use."""


@dataclass(frozen=True)
class Step:
    """One step of a loop.

    Args:
        number: counted from 0.
        micro: the number of micro-batches, whose gradients are added up.
        set_to_none: the argument of `zero_grad`, which is called at the beginning.
        max_norm: gradients are clipped to this norm; None: they are not clipped.
        factor: the scheduler sets all learning rates to this factor times their first value; None: it leaves
            them as they are.
        nan: the loss of the last rank is NaN, so no rank updates anything.
        raises: before the step's own batch there is a forward of another batch, which an exception ends
            before its backward; the loop catches the exception.
        adds: a parameter group is added before the step.
        freezes: a layer is frozen (True) or unfrozen (False) before the step; None: neither.
        unused: the layers that have no data on any rank.
        unused_on_first: the layers that have no data on rank 0.
        reloads: before the step the state is loaded into new objects. It was saved right after the step
            before, when nothing had read the new values yet.
        averages: after the step a running average of the parameters is updated.
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
    averages: bool = False


@dataclass(frozen=True)
class Trial:
    """One thing that training does, or several.

    Attributes:
        name: the name by which a user leaves it out.
        steps: the steps that are played.
        shape: which model the doctor uses.
        own: whether it can be tried with a program that has a model of its own, too.
        elsewhere: whether the state that was saved is loaded on another number of ranks.
        apart: whether the ranks begin with different values.
        late: whether in each step one rank comes late, so that what the others do not wait for is missing.
        needs: the trials of one thing each that this one puts together.
    """

    name: str
    steps: tuple[Step, ...]
    shape: Shape = field(default_factory=Shape)
    own: bool = True
    elsewhere: bool = False
    apart: bool = False
    late: bool = False
    needs: tuple[str, ...] = ()


def make_trials(
    steps: int = 5, shape: Shape | None = None, max_norm: float = MAX_NORM, masters: bool = False
) -> tuple[Trial, ...]:
    """All trials but "all together", the simplest first.

    >>> [trial.name for trial in make_trials()][:3]
    ['plain', 'accumulation', 'clipping']

    Args:
        steps: the number of steps of each trial; at least 3, so that something can happen between two steps.
        shape: the model, which some trials change; None: the standard one.
        max_norm: the limit for clipping.
        masters: there are 32-bit copies of 16-bit parameters, so that small steps add up.
    Raises:
        ValueError: there are fewer than 3 steps.
    """
    if steps < 3:
        raise ValueError(f"steps is {steps}, and a trial needs at least 3: one before, one with, one after.")
    shape = shape or Shape()
    base = tuple(Step(number) for number in range(steps))
    middle = steps // 2

    def at(number: int, steps: tuple[Step, ...] = base, **changes: object) -> tuple[Step, ...]:
        return tuple(replace(step, **changes) if step.number == number else step for step in steps)  # type: ignore[arg-type]

    def each(**changes: object) -> tuple[Step, ...]:
        return tuple(replace(step, **changes) for step in base)  # type: ignore[arg-type]

    frozen = at(steps - 1, at(1, freezes=True), freezes=False)
    scheduled = tuple(replace(step, factor=2.0 ** -(step.number % 4)) for step in base)
    # The last rate before the save is not the first one, and nobody sets another after the load.
    before = tuple(replace(step, factor=0.5 if step.number < middle else None) for step in base)
    small = tuple(Step(number, factor=2.0**-5) for number in range(steps, steps + SMALL_STEPS))
    load, group, rates = "save and load", "group added", "scheduler"
    return (
        Trial("plain", base, shape, late=True),
        Trial("accumulation", each(micro=MICRO), shape),
        # In the middle step the norm is far below the limit, so that nothing may be scaled.
        Trial("clipping", at(middle, each(max_norm=max_norm), max_norm=2.0**40), shape),
        Trial(rates, scheduled, shape),
        Trial(group, at(middle, adds=True), shape),
        Trial("frozen layer", frozen, shape, own=False),
        Trial(load, at(middle, reloads=True), shape, late=True),
        Trial("another world size", at(middle, reloads=True), shape, elsewhere=True),
        Trial("unused parameters", at(middle, unused=(UNUSED,)), shape, own=False),
        Trial("unused on a rank", at(1, unused_on_first=(UNUSED,)), shape, own=False),
        Trial("mixed dtypes", base + small if masters else base, replace(shape, mixed=True), own=False),
        Trial("tied weights", base, replace(shape, tied=True), own=False),
        Trial("zero_grad", each(set_to_none=False), shape),
        Trial("NaN step", at(middle, nan=True), shape),
        Trial("exception", at(middle, raises=True), shape),
        Trial("buffers", at(middle, reloads=True), replace(shape, buffers=True), own=False),
        Trial("different starts", base, shape, apart=True),
        Trial("average of weights", each(averages=True), shape, late=True),
        Trial(
            "accumulation and clipping",
            each(micro=MICRO, max_norm=max_norm),
            shape,
            needs=("accumulation", "clipping"),
        ),
        Trial("scheduler and load", at(middle, before, reloads=True), shape, needs=(rates, load)),
        Trial("group and load", at(middle, at(1, adds=True), reloads=True), shape, needs=(group, load)),
        Trial("group and scheduler", at(1, scheduled, adds=True), shape, needs=(group, rates)),
        Trial(
            "frozen and load",
            at(middle, frozen, reloads=True),
            shape,
            own=False,
            needs=("frozen layer", load),
        ),
    )


TOGETHER = "all together"


def together(names: Collection[str], shape: Shape, max_norm: float, own: bool) -> Trial:
    """One trial with everything that the trials of these names do, so that any two of them meet.

    What lasts, such as a frozen layer or another learning rate, lasts over the save and the load. Gradients
    are accumulated in some steps, clipped in some, both in some, since clipping hides their scale.
    """

    def on(name: str, value: object, default: object) -> object:
        return value if name in names else default

    steps = []
    # Nobody sets a rate right after the load. In the last step rates are high, and everything trains.
    for number, factor in enumerate((1.0, 0.5, 0.25, 0.5, None, None, 0.25, 1.0)):
        changes = {
            "micro": on("accumulation", MICRO if number % 3 != 1 else 1, 1),
            "max_norm": on("clipping", max_norm if number % 2 else None, None),
            "factor": on("scheduler", factor, None),
            "set_to_none": on("zero_grad", number not in (2, 5), True),
            "adds": on("group added", number == 1, False),
            "freezes": on("frozen layer", {2: True, 6: False}.get(number), None),
            "unused_on_first": on("unused on a rank", (UNUSED,) if number == 3 else (), ()),
            "reloads": on("save and load", number == 4, False),
            "raises": on("exception", number in (2, 4), False),
            "unused": on("unused parameters", (UNUSED,) if number == 5 else (), ()),
            "nan": on("NaN step", number == 6, False),
        }
        steps.append(replace(Step(number), **changes))  # type: ignore[arg-type]
    shape = replace(
        shape, mixed=bool(on("mixed dtypes", True, False)), tied=bool(on("tied weights", True, False))
    )
    return Trial(TOGETHER, tuple(steps), shape, own=own, apart="different starts" in names)


NAMES: Sequence[str] = (*(trial.name for trial in make_trials()), TOGETHER)
"""The names of all trials."""
