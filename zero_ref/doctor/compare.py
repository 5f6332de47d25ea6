"""Find the values of a trial that depart from the plain loop by more than reordered sums explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zero_ref.doctor.plain import Part
from zero_ref.doctor.trace import Phase, Snapshot

SAFETY = 4.0
"""The largest deviation of several runs with noise, times this, is what noise explains: of normal deviations
the largest of six lies near 1.3 sigma, so this is five sigma."""
LAST_PLACES = 2.0
"""A sum that is exact here may be rounded there, once before and once after the division."""

Bounds = list[dict[tuple[int, str], dict[str, float]]]
"""By part, by (step, phase), by name: the absolute difference that noise explains."""


@dataclass(frozen=True)
class Place:
    """Elements of one parameter on one rank that depart.

    Attributes:
        start, stop: the first element that departs and one past the last, in the flattened parameter.
        departing: how many elements between them do.
        ulps: the largest difference, in units in the last place of what was expected.
        allowed_ulps: the difference that reordered sums explain there.
        observed, expected: the values where the difference is largest. `observed` is None if the program has
            no tensor of this name, or one of another shape.
    """

    parameter: str
    rank: int
    start: int
    stop: int
    numel: int
    departing: int
    ulps: float
    allowed_ulps: float
    observed: float | None
    expected: float


@dataclass(frozen=True)
class Where:
    """The first step and phase that depart, and all places that do so there.

    Attributes:
        part: 0, or 1 after a load on another number of ranks.
        places: those of values, or losses, by name and rank.
    """

    part: int
    step: int
    phase: Phase
    places: tuple[Place, ...]


def bounds_of(expected: Sequence[Part], noisy: Sequence[Sequence[Part]]) -> Bounds:
    """Return the bound of what noise explains: for each snapshot and name, one for all elements and ranks."""
    bounds: Bounds = []
    for number, part in enumerate(expected):
        of_part: dict[tuple[int, str], dict[str, float]] = {}
        for rank, trace in enumerate(part.traces):
            for place, snapshot in enumerate(trace):
                others = [loop[number].traces[rank][place] for loop in noisy]
                of_snapshot = of_part.setdefault((snapshot.step, snapshot.phase), {})
                for name, tensor in snapshot.tensors.items():
                    if tensor is not None:
                        bound = _bound(tensor, [other.tensors[name] for other in others])
                        of_snapshot[name] = max(of_snapshot.get(name, 0.0), bound)
        bounds.append(of_part)
    return bounds


def _bound(tensor: torch.Tensor, others: Sequence[torch.Tensor | None]) -> float:
    floor = last_places(tensor)
    deviations = [
        (other.double() - tensor.double()).abs().nan_to_num(0.0).max().item()
        for other in others
        if other is not None and tensor.numel()
    ]
    return max([floor, *(SAFETY * deviation for deviation in deviations)])


def last_places(tensor: torch.Tensor) -> float:
    """The units in the last place of a tensor's largest element that one operation may change.

    0 for integers.
    """
    if not tensor.is_floating_point():
        return 0.0
    largest = tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if tensor.numel() else 0.0
    return LAST_PLACES * torch.finfo(tensor.dtype).eps * float(largest)


def differing(
    observed: torch.Tensor | None, expected: torch.Tensor | None, bound: float
) -> torch.Tensor | None:
    """Which elements depart, flattened; None if one of the two is not there or has another shape."""
    if observed is None or expected is None or observed.shape != expected.shape:
        return None
    ours, plain = observed.double(), expected.double()
    same = ((ours - plain).abs() <= bound) | (ours == plain) | (ours.isnan() & plain.isnan())
    return ~same.flatten()


def first_departure(observed: Sequence[Part], expected: Sequence[Part], bounds: Bounds) -> Where | None:
    """The first step whose values or losses depart, with the phase in which it begins; None if none do."""
    for number, (ours, plain) in enumerate(zip(observed, expected)):
        for place in range(len(plain.traces[0])):
            snapshot = plain.traces[0][place]
            if snapshot.of_gradients:
                continue
            places = tuple(_places(ours, plain, place, bounds[number]))
            if places:
                phase = snapshot.phase
                if phase == "step":
                    phase = _phase(ours, plain, place, bounds[number], places)
                return Where(number, snapshot.step, phase, places)
    return None


def _places(
    ours: Part, plain: Part, place: int, bounds: dict[tuple[int, str], dict[str, float]]
) -> Iterator[Place]:
    for name in plain.traces[0][place].tensors:
        for rank, (our_trace, plain_trace) in enumerate(zip(ours.traces, plain.traces)):
            snapshot, found = plain_trace[place], our_trace[place]
            bound = bounds[snapshot.step, snapshot.phase].get(name, 0.0)
            values, right = found.tensors.get(name), snapshot.tensors[name]
            differs = differing(values, right, bound)
            if differs is not None and differs.any() and values is not None and right is not None:
                yield _place(name, rank, values, right, differs, bound)
            elif differs is None and right is not None:
                numel = right.numel()
                yield Place(name, rank, 0, numel, numel, numel, float("inf"), 0, None, 0)


def _place(
    name: str, rank: int, values: torch.Tensor, right: torch.Tensor, differs: torch.Tensor, bound: float
) -> Place:
    where = differs.nonzero().flatten()
    difference = (values.double() - right.double()).abs().flatten().nan_to_num(float("inf"))
    at = int(difference.argmax())
    expected, observed = right.flatten()[at].item(), values.flatten()[at].item()
    ulp = ulp_of(right.flatten()[at])
    return Place(
        name, rank, int(where[0]), int(where[-1]) + 1, right.numel(), len(where),
        difference[at].item() / ulp, bound / ulp, observed, expected,
    )  # fmt: skip


def ulp_of(value: torch.Tensor) -> float:
    """A unit in the last place of a number; 1 for an integer.

    >>> ulp_of(torch.tensor(1.0)) == 2.0**-23
    True
    """
    if not value.is_floating_point():
        return 1.0
    known = torch.finfo(value.dtype)
    size = abs(value.item())
    if not size < float("inf"):
        size = 1.0
    exponent = torch.frexp(torch.tensor(max(size, known.tiny), dtype=torch.float64)).exponent.item() - 1
    return float(known.eps * 2.0**exponent)


def _phase(
    ours: Part,
    plain: Part,
    place: int,
    bounds: dict[tuple[int, str], dict[str, float]],
    places: Sequence[Place],
) -> Phase:
    """The first phase of the step in which no rank has the right gradient where the values depart."""
    name = places[0].parameter
    for earlier in range(place):
        snapshot = plain.traces[0][earlier]
        if snapshot.of_gradients and gradient_is_wrong(ours, plain, earlier, bounds, name):
            if snapshot.step == plain.traces[0][place].step:
                return snapshot.phase
            break  # an earlier step had the same, and its values were right: gradients are averaged later
    return "step"


def gradient_is_wrong(
    ours: Part, plain: Part, place: int, bounds: dict[tuple[int, str], dict[str, float]], name: str
) -> bool:
    """Whether ranks have a gradient, and for some element none of them has the right one."""
    snapshots: list[tuple[Snapshot, Snapshot]] = [
        (our_trace[place], plain_trace[place]) for our_trace, plain_trace in zip(ours.traces, plain.traces)
    ]
    all_wrong: torch.Tensor | None = None
    for found, snapshot in snapshots:
        bound = bounds[snapshot.step, snapshot.phase].get(name, 0.0)
        differs = differing(found.tensors.get(name), snapshot.tensors.get(name), bound)
        if differs is not None:
            all_wrong = differs if all_wrong is None else all_wrong & differs
    return all_wrong is not None and bool(all_wrong.any())
