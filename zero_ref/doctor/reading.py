"""Read off the numbers in which phase a step departs, and what stands there in place of the right thing.

Each phase is judged by its own input as it was observed:

- backward: the plain loop knows every rank's gradient of every micro-batch. What is in `.grad` is a sum of
  them, so the weight of each is the solution of linear equations;
- clip: one factor for all gradients, and the norm that gives it;
- step: a shadow, the plain optimizer that is fed the gradients which the program was seen to have. If its
  values do not stand there, it is fed a few other things, such as the gradients of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_ref.doctor.compare import Bounds, Place, Where, common_ratio, differing, places_in
from zero_ref.doctor.plain import Part, PlainLoop
from zero_ref.doctor.trace import Snapshot, Tensors
from zero_ref.doctor.trials import Step
from zero_ref.doctor.weights import CLOSE, LEFT, in_words, meaning, rounded, solve, times


@dataclass(frozen=True)
class Patient:
    """A trial that departs, with what is needed to look at it.

    Attributes:
        steps: of the trial.
        loop: makes the plain loop; its argument is the class, `PlainLoop` or a subclass.
        observed, expected: what the program's ranks noted, and what the plain loop gives.
        where: the first departure of values.
    """

    steps: tuple[Step, ...]
    loop: Callable[[Any], Any]
    observed: list[Part]
    expected: list[Part]
    bounds: Bounds
    where: Where

    @property
    def ranks(self) -> int:
        """The number of ranks where it departs."""
        return len(self.observed[self.where.part].traces)

    def seen(self, step: int, rank: int, *phases: str) -> Tensors:
        """The last tensors that a rank noted in one of these phases of a step; none if it did not."""
        return _last(self.observed[self.where.part].traces[rank], step, phases)

    def right(self, step: int, *phases: str) -> Tensors:
        """The same of the plain loop, in any part."""
        return _last([one for part in self.expected for one in part.traces[0]], step, phases)

    def before(self, rank: int) -> Tensors:
        """A rank's values before the step that departs, which were right."""
        trace = self.observed[self.where.part].traces[rank][: self.where.place]
        return [one for one in trace if one.phase in VALUES][-1].tensors

    @property
    def bound(self) -> dict[str, torch.Tensor]:
        """What rounding explains in the values that depart."""
        return self.bounds[self.where.part][self.where.step, self.where.phase]


VALUES = ("start", "load", "step")
"""The phases whose snapshots are values of parameters."""
GRADIENTS = ("backward", "clip")
"""Those whose snapshots are gradients."""


def _last(trace: Sequence[Snapshot], step: int, phases: Sequence[str]) -> Tensors:
    found = [one.tensors for one in trace if one.step == step and one.phase in phases]
    return found[-1] if found else {}


class Shadow(PlainLoop):
    """A plain loop that steps with gradients which it is fed, by the step's number.

    Attributes:
        feed: the gradients by name of each step; where it has none, the loop's own are used.
        emptied: the step before which the optimizer's state is emptied; None: it is not.
    """

    feed: dict[int, Tensors]
    emptied: int | None = None

    def update(self, step: Step) -> None:
        """Step with what was fed."""
        for name, grad in self.feed.get(step.number, {}).items():
            if name in (named := self.named()):
                param = named[name]
                real = grad if grad is None or not param.is_complex() else torch.view_as_complex(grad)
                if real is None:
                    param.grad = None
                elif real.shape == param.shape:  # a program may show a part
                    param.grad = real.to(param.dtype).clone()
        if step.number == self.emptied:
            self.optimizer.state.clear()
        super().update(step)


def shadow(patient: Patient, feed: dict[int, Tensors], emptied: int | None = None) -> Tensors:
    """The values after the step that departs, if the plain optimizer is fed these gradients."""
    loop = patient.loop(Shadow)
    loop.feed, loop.emptied = feed, emptied
    return loop.play(patient.where.step)[-1].traces[0][-1].tensors


def read(patient: Patient, where: Where) -> tuple[str, ...]:
    """What the numbers say of a departure that begins there."""
    if where.phase == "backward":
        return tuple(_of_backward(patient, where))
    if where.phase == "clip":
        return tuple(_of_clip(patient))
    return tuple(_of_step(patient) if where.phase == "step" else _of_values(patient))


# ------------------------------------------------------------------------------- in which phase it begins


def begins(patient: Patient) -> Where:
    """The phase in which the departure begins, with its places there."""
    where = patient.where
    if where.phase != "step":
        return where
    part, names = where.part, {place.parameter for place in where.places}
    obeys = obeyed(patient, [_fed(patient, rank) for rank in range(patient.ranks)])
    for number, snapshot in enumerate(patient.expected[part].traces[0][: where.place]):
        if snapshot.step != where.step or not snapshot.of_gradients:
            continue
        ours, plain = patient.observed[part], patient.expected[part]
        found = tuple(places_in(ours, plain, number, patient.bounds[part]))
        # A rank may have a gradient of what another rank steps.
        wrong = {name for name in snapshot.tensors if _wrong_on_all(patient, number, name)}
        found = tuple(place for place in found if place.parameter in wrong)
        depart = {place.parameter for place in found} & names
        if depart and (obeys or not all(_unreduced(patient, name) for name in depart)):
            return Where(part, number, where.step, snapshot.phase, found)
    return where


def _fed(patient: Patient, rank: int) -> dict[int, Tensors]:
    """The gradients that a rank had when it stepped, in each step of the part that departs."""
    steps = {one.step for one in patient.observed[patient.where.part].traces[rank]}
    return {step: patient.seen(step, rank, *GRADIENTS) for step in steps}


def obeyed(
    patient: Patient,
    feeds: Sequence[dict[int, Tensors]],
    emptied: int | None = None,
    everywhere: bool = False,
) -> bool:
    """Whether every element that departs is as some rank's shadow has it.

    Args:
        everywhere: so is every other element of the tensors that depart.
    """
    shadows = [shadow(patient, feed, emptied) for feed in feeds]
    for place in patient.where.places:
        name = place.parameter
        ours = patient.seen(patient.where.step, place.rank, "step").get(name)
        right, before = patient.right(patient.where.step, "step")[name], patient.before(place.rank).get(name)
        left = differing(ours, right, patient.bound[name])
        if left is None or ours is None:
            return False
        left = torch.ones_like(left) if everywhere else left
        for supposed in shadows:
            value = supposed.get(name)
            if value is None or value.shape != ours.shape:
                return False
            moved = (value - before).abs().double() if before is not None else value.abs().double()
            own = CLOSE * moved + 16 * torch.finfo(value.dtype).eps * value.abs().double()
            differs = differing(ours, value, torch.maximum(own, patient.bound[name]))
            left = left if differs is None else left & differs
        if left.any():
            return False
    return True


def _wrong_on_all(patient: Patient, number: int, name: str) -> bool:
    """Whether no rank has the right gradient, and some rank has one."""
    part = patient.where.part
    snapshot = patient.expected[part].traces[0][number]
    bound = patient.bounds[part][snapshot.step, snapshot.phase].get(name, torch.zeros(()))
    seen = [trace[number].tensors.get(name) for trace in patient.observed[part].traces]
    differ = [differing(one, snapshot.tensors.get(name), bound) for one in seen]
    known = [one for one in differ if one is not None]
    return bool(known) and all(bool(one.any()) for one in known)


def _unreduced(patient: Patient, name: str) -> bool:
    """Whether each rank still has the gradient of its own data alone when it steps."""
    local = _local(patient)
    for rank in range(patient.ranks):
        ours, own = patient.seen(patient.where.step, rank, "backward").get(name), total(local[rank], name)
        if ours is None and own is None:
            continue
        if ours is None or own is None or ours.shape != own.shape:
            return False
        scaled = common_ratio(ours.double().flatten(), own.double().flatten(), CLOSE)
        if scaled is None and not torch.allclose(ours, own, rtol=CLOSE, atol=0.0):
            return False
    return True


def _local(patient: Patient) -> list[list[Tensors]]:
    """The gradients of each rank's micro-batches in the step that departs."""
    loop = patient.loop(PlainLoop)
    loop.play(patient.where.step)
    found: list[list[Tensors]] = loop.local
    return found


def total(micro: Sequence[Tensors], name: str) -> torch.Tensor | None:
    """The sum of a parameter's gradients; None if there is none."""
    there = [grad for one in micro if (grad := one.get(name)) is not None]
    return torch.stack(there).sum(0) if there else None


# ------------------------------------------------------------------------------------------- backward


def _of_backward(patient: Patient, where: Where) -> Iterator[str]:
    loop = patient.loop(PlainLoop)
    loop.play(where.step)
    shares = torch.tensor(loop.weights, dtype=torch.float64)
    right = shares * (1 if loop.mean else shares.shape[1])
    names = list(dict.fromkeys(place.parameter for place in where.places))
    groups: dict[tuple[Any, ...], list[str]] = {}
    for several in ([name] for name in names):
        _group(groups, weights_of(patient, where, several, loop.local), several)
    if not groups:  # perhaps each tensor has too few elements that depart, and all together have enough
        _group(groups, weights_of(patient, where, names, loop.local), names)
    for key, members in list(groups.items())[:2]:
        found = {rank: torch.tensor(rows, dtype=torch.float64) for rank, rows in key}
        others = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield f"in {members[0]}{others}: {meaning(found, right)}"
        same = len({rows for _, rows in key}) == 1
        for rank, one in list(found.items())[:1] if same else found.items():
            on = "each rank" if same and len(found) == shares.shape[0] else f"rank {rank}"
            yield f"  weights on {on}: {in_words(one)}"
        yield f"  right would be: {in_words(right)}"
    if not groups:
        yield from _of_step_before(patient, where)


def _of_step_before(patient: Patient, where: Where) -> Iterator[str]:
    earlier = patient.right(where.step - 1, "backward")
    now = patient.right(where.step, "backward")
    for place in where.places[:1]:
        ours, old = (
            patient.seen(where.step, place.rank, "backward")[place.parameter],
            earlier.get(place.parameter),
        )
        if ours is None or old is None or ours.shape != old.shape:
            continue
        columns = [old.double().flatten(), now[place.parameter].double().flatten()]  # type: ignore[union-attr]
        solved = solve(columns, ours.double().flatten())
        if solved is not None:
            before, this = (_number(round(one, 4)) for one in solved.tolist())
            yield (
                f"on rank {place.rank} {place.parameter} has {before} times the right gradient of the step "
                f"before, and {this} times that of this step"
            )
            return
    if where.places[0].ratio is None and where.places[0].numel > 1:
        yield "the gradient that is there is no weighted sum of the ranks' gradients"


def _group(
    groups: dict[tuple[Any, ...], list[str]], found: dict[int, torch.Tensor] | None, names: list[str]
) -> None:
    if found is not None:
        key = tuple((rank, tuple(map(tuple, rounded(one)))) for rank, one in found.items())
        groups.setdefault(key, []).extend(names)


def weights_of(
    patient: Patient, where: Where, names: Sequence[str], local: list[list[Tensors]]
) -> dict[int, torch.Tensor] | None:
    """On each rank, the weight of every rank's gradient of every micro-batch, (ranks, micro-batches).

    They are those of the whole tensors, or if there are none, of the elements that depart.
    None if these are too few to tell, or no weights give what is there.
    """
    found = {}
    right, bounds = patient.right(where.step, "backward"), patient.bounds[where.part][where.step, "backward"]
    each = [micro for of_rank in local for micro in of_rank]
    for rank in range(patient.ranks):
        noted = patient.seen(where.step, rank, "backward")
        parts: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
        for name in names:
            ours, departs = (
                noted.get(name),
                differing(noted.get(name), right.get(name), bounds.get(name, 0.0)),
            )
            if ours is not None and departs is not None:
                none = torch.zeros_like(ours).flatten()
                columns = [none if one.get(name) is None else _real(one[name]) for one in each]
                parts.append((ours.double().flatten(), departs, columns))
        if not parts:
            continue
        seen, departs = (torch.cat([part[which] for part in parts]) for which in (0, 1))  # type: ignore[misc]
        columns = [torch.cat([part[2][number] for part in parts]) for number in range(len(each))]
        there = [number for number, column in enumerate(columns) if column.any()]
        solved = solve([columns[number] for number in there], seen)
        if solved is None:
            there = [number for number in there if columns[number][departs].any()]
            solved = solve([columns[number][departs] for number in there], seen[departs])
        if solved is None:
            return None
        weights = torch.full((len(each),), torch.nan, dtype=torch.float64)
        weights[there] = solved  # of what has no gradient nobody can tell the weight
        found[rank] = weights.view(len(local), -1)
    return found or None


def _real(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


# ----------------------------------------------------------------------------------------------- clip


def _of_clip(patient: Patient) -> Iterator[str]:
    step = patient.where.step
    limit = patient.steps[step].max_norm or 0.0
    right = factors(patient.right(step, "backward"), patient.right(step, "clip"))
    said = set()
    for rank in range(patient.ranks):
        before = patient.seen(step, rank, "backward")
        found = factors(before, patient.seen(step, rank, "clip"))
        if not found or not right:
            continue
        values, wanted = list(found.values()), next(iter(right.values()))
        if max(values) - min(values) > CLOSE * max(map(abs, values)):
            shown = ", ".join(f"{name} {one:.4g}" for name, one in _distinct(found)[:4])
            text = f"gradients are scaled by different factors: {shown}; right is {wanted:.4g} for all"
        elif wanted == 1:
            text = f"all gradients are multiplied by {values[0]:.4g}, and their norm is below the limit"
        elif abs(values[0] - 1) <= CLOSE * wanted:
            text = f"gradients are not scaled; right is a factor of {wanted:.4g}"
        else:
            norm = limit / values[0]
            text = (
                f"all gradients are multiplied by {values[0]:.4g}, and right is {wanted:.4g}"
                + _norm_in_words(norm, limit / wanted, before, patient, rank)
            )
        if text not in said:
            said.add(text)
            yield text if not said - {text} else f"on rank {rank}: {text}"


def factors(before: Tensors, after: Tensors) -> dict[str, float]:
    """By which factor clipping has scaled each gradient."""
    found = {}
    for name, one in before.items():
        other = after.get(name)
        if one is not None and other is not None and one.shape == other.shape and one.any():
            one, other = one.double(), other.double()
            found[name] = ((one * other).sum() / one.square().sum()).item()
    return found


def _distinct(found: dict[str, float]) -> list[tuple[str, float]]:
    kept: list[tuple[str, float]] = []
    for name, one in found.items():
        if all(abs(one - other) > CLOSE * abs(other) for _, other in kept):
            kept.append((name, one))
    return kept


def _norm_in_words(norm: float, right: float, before: Tensors, patient: Patient, rank: int) -> str:
    """Where a norm that was used comes from, if the gradients say so."""
    said = f". That is for a norm of {norm:.5g}, and all gradients have one of {right:.5g}"
    there = [(name, grad.double().flatten()) for name, grad in before.items() if grad is not None]
    flat = torch.cat([grad for _, grad in there])
    tails = flat.square().flip(0).cumsum(0)
    near = ((tails - (right**2 - norm**2)).abs() <= 1e-4 * right**2).nonzero().flatten()
    local = _local(patient)
    for other in range(patient.ranks):
        grads = [total(local[other], name) for name, _ in there]
        own = torch.cat([grad.double().flatten() for grad in grads if grad is not None]).norm().item()
        if abs(own - norm) <= CLOSE * norm:
            return f"{said}; {norm:.5g} is the norm of the gradients of rank {other}'s own data"
    if norm < right * (1 - 1e-5) and len(near):
        count = int(near[0]) + 1
        return f"{said}; {norm:.5g} is the norm without the last {count} elements"
    return f"{said}: {times(norm / right, {'ranks': patient.ranks}).replace('gradient', 'norm')}"


# ----------------------------------------------------------------------------------------------- step


def _of_step(patient: Patient) -> Iterator[str]:
    step, ranks = patient.where.step, patient.ranks
    place = patient.where.places[0]
    moves = tuple(f"in {place.parameter}: {text}" for text in _of_move(patient, place))
    yield from (*moves, *_of_options(patient))
    if moves:
        return
    right = patient.right(step, *GRADIENTS)
    local = _local(patient)
    none = {name for name, grad in right.items() if grad is None}
    tried: dict[str, tuple[list[Tensors], int | None]] = {
        "an empty state": ([right], step),
        "each rank's own gradients": ([{n: total(one, n) for n in right} for one in local], None),
        f"gradients {ranks} times as large": (
            [{n: None if g is None else g * ranks for n, g in right.items()}],
            None,
        ),
        "gradients of 0 where there are none": (
            [
                right
                | {
                    n: torch.zeros_like(old)
                    for n, old in patient.before(0).items()
                    if old is not None and n in none
                }
            ],
            None,
        ),
        "gradients that are not clipped": ([patient.right(step, "backward")], None),
        "no gradients": ([dict.fromkeys(right)], None),
    }
    earlier = patient.right(step - 1, *GRADIENTS)
    if {place.parameter for place in patient.where.places} <= earlier.keys():
        stale = right | {n: earlier.get(n) for n in none}
        tried["the gradients of the step before where there are none"] = [stale], None
        tried["the gradients of the step before"] = [{n: earlier.get(n) for n in right.keys() - none}], None
    found = [
        name
        for name, (feeds, emptied) in tried.items()
        if obeyed(patient, [{step: feed} for feed in feeds], emptied, everywhere=True)
    ]
    if len(found) == 1:
        yield f"the values are those of the plain optimizer with {found[0]}"


def _of_move(patient: Patient, place: Place) -> Iterator[str]:
    """How the elements that depart have moved, as a combination of what could move them."""
    step, name = patient.where.step, place.parameter
    ours, right = patient.seen(step, place.rank, "step").get(name), patient.right(step, "step")[name]
    before = patient.before(place.rank).get(name)
    if ours is None or right is None or before is None or ours.shape != right.shape:
        return
    differs = differing(ours, right, patient.bound[name])
    assert differs is not None
    moved, wanted = ((one.double() - before.double()).flatten()[differs] for one in (ours, right))
    small = LEFT * wanted.abs().clamp(min=1e-12)
    if (moved.abs() <= small).all():
        yield "they did not move: the values before the step stand there"
        return
    if (stale := _stale(patient, ours, differs, name)) is not None:
        yield stale
        return
    gradient = patient.right(step, *GRADIENTS).get(name)
    columns = {
        "the right move": wanted,
        "the gradient": (torch.zeros_like(before) if gradient is None else gradient)
        .double()
        .flatten()[differs],
        "the value before the step": before.double().flatten()[differs],
    }
    # A move is the difference of two rounded values: where it is small, rounding is a large part of it.
    rounding = patient.bound[name].flatten()[differs] / CLOSE
    for chosen in (*((words,) for words in columns), ("the right move", "the value before the step")):
        solved = solve([columns[words] for words in chosen], moved, rounding)
        if solved is not None:
            if chosen == ("the right move",):
                yield f"they moved {solved[0]:.4g} times as far as they should"
            else:
                terms = [f"{one:.4g} times {words}" for one, words in zip(solved.tolist(), chosen)]
                yield f"they moved by {' plus '.join(terms)}"
            return


def _of_options(patient: Patient) -> Iterator[str]:
    """The options of groups that are not those of the plain loop, where groups correspond."""
    where = patient.where
    plain = patient.expected[where.part].traces[0][where.place].options
    said = set()
    for rank, trace in enumerate(patient.observed[where.part].traces):
        ours = trace[where.place].options
        if len(ours) != len(plain):
            continue
        for number, (mine, right) in enumerate(zip(ours, plain)):
            for name in sorted(mine.keys() & right.keys()):
                if mine[name] != right[name] and (number, name) not in said:
                    said.add((number, name))
                    yield (
                        f"group {number} has {name}={_number(mine[name])} on rank {rank}, and "
                        f"{_number(right[name])} in the plain loop"
                    )


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | int) else str(value)


# ------------------------------------------------------------------------------- start, load, average


def _of_values(patient: Patient) -> Iterator[str]:
    if patient.where.phase not in ("load", "average", "start"):
        return
    place = patient.where.places[0]
    trace = patient.observed[patient.where.part].traces[place.rank]
    ours = trace[patient.where.place].tensors.get(place.parameter)
    right = (
        patient.expected[patient.where.part].traces[place.rank][patient.where.place].tensors[place.parameter]
    )
    differs = differing(ours, right, patient.bound[place.parameter])
    if ours is not None and differs is not None:
        stale = _stale(patient, ours, differs, place.parameter)
        if stale is not None:
            yield f"in {place.parameter}: {stale}"
    if patient.where.phase == "start" and patient.ranks > 1:
        yield "ranks begin with different values, and rank 0's are not sent to all"


def _stale(patient: Patient, ours: torch.Tensor, differs: torch.Tensor, name: str) -> str | None:
    """Whether all elements that depart are values of an earlier snapshot, and of which."""
    trace = [one for part in patient.expected for one in part.traces[0] if one.phase in VALUES]
    for one in reversed(trace):
        old = one.tensors.get(name)
        if one.step <= patient.where.step and old is not None and old.shape == ours.shape:
            other = differing(ours, old, patient.bound[name])
            if other is not None and not (other & differs).any():
                when = "the start" if one.phase == "start" else f"after step {one.step}"
                if one.phase == "load":
                    continue
                return (
                    f"they are the values of {when}" if when == "the start" else f"they are the values {when}"
                )
    return None
