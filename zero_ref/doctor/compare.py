"""Find the values of a trial that depart from the plain loop by more than rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zero_ref.doctor.plain import Part
from zero_ref.doctor.trace import Phase, Snapshot

SAFETY = 8.0
"""An element's largest deviation of several runs with noise, times this, is what rounding explains there. The
noise is at least half of its bound, so the largest of six runs is no less than a third of what a right
program has, but for the luck of equal signs: `diagnose.FEW` says what is done about it."""
LAST_PLACES = 8.0
"""The units in the last place of an element, at its largest so far, that rounding explains in any case."""
SHORT_SAFETY, SHORT_PLACES = 4.0, 1.5
"""The same for tensors of 16 bits, whose last bit most steps leave as it is."""

Bounds = list[dict[tuple[int, str], dict[str, torch.Tensor]]]
"""By part, by (step, phase), by name: for each element the absolute difference that rounding explains."""


@dataclass(frozen=True)
class Place:
    """Elements of one parameter on one rank that depart.

    Attributes:
        kind: "value", "gradient", "loss" or "average": what departs.
        start, stop: the first element that departs and one past the last, in the flattened parameter.
        departing: how many elements between them do.
        observed, expected: the values where they differ most.
            `observed` is None if the program has no tensor of this name, or one of another shape.
        allowed: the difference that rounding explains there.
        ratio: of the observed elements that depart to the expected ones, if all have the same; else None.
    """

    parameter: str
    rank: int
    kind: str
    start: int
    stop: int
    numel: int
    departing: int
    observed: float | None
    expected: float
    allowed: float
    ratio: float | None = None

    @property
    def elements(self) -> str:
        """Which elements depart, in words."""
        if self.departing == self.numel:
            return f"all {self.numel} elements" if self.numel > 1 else "its one element"
        if self.departing == 1:
            return f"element {self.start} of {self.numel}"
        if self.departing < self.stop - self.start:
            return f"{self.departing} of {self.numel} elements, between {self.start} and {self.stop - 1}"
        end = ", the first ones" if self.start == 0 else ", the last ones" if self.stop == self.numel else ""
        return f"elements {self.start} to {self.stop - 1} of {self.numel}{end}"


@dataclass(frozen=True)
class Where:
    """The first step and phase that depart, and all places that do so there.

    Attributes:
        part: 0, or 1 after a load on another number of ranks.
        place: of the snapshot, in each trace of the part.
        places: by name and rank.
    """

    part: int
    place: int
    step: int
    phase: Phase
    places: tuple[Place, ...]


def bounds_of(expected: Sequence[Part], noisy: Sequence[Sequence[Part]]) -> Bounds:
    """For each snapshot and name the bound of what rounding explains in each element, on all ranks."""
    bounds: Bounds = []
    largest: dict[str, torch.Tensor] = {}
    for number, part in enumerate(expected):
        of_part: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        for rank, trace in enumerate(part.traces):
            for place, snapshot in enumerate(trace):
                if rank and snapshot.phase != "forward":
                    continue  # the plain loop has one model
                of_snapshot = of_part.setdefault((snapshot.step, snapshot.phase), {})
                for name, tensor in snapshot.tensors.items():
                    if tensor is not None:
                        others = [loop[number].traces[rank][place].tensors[name] for loop in noisy]
                        kind = f"{'gradient' if snapshot.of_gradients else 'value'} {name}"
                        bound = _bound(tensor, others, largest, kind)
                        before = of_snapshot.get(name, bound)
                        of_snapshot[name] = torch.maximum(bound, before)
        bounds.append(of_part)
    return bounds


def _bound(
    tensor: torch.Tensor, others: Sequence[torch.Tensor | None], largest: dict[str, torch.Tensor], kind: str
) -> torch.Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=torch.float64)
    size = tensor.double().abs().nan_to_num(0.0, 0.0, 0.0)
    if not kind.startswith("gradient") and kind in largest and largest[kind].shape == size.shape:
        size = torch.maximum(size, largest[kind])
    largest[kind] = size
    short = tensor.dtype.itemsize < 4
    bound = (SHORT_PLACES if short else LAST_PLACES) * torch.finfo(tensor.dtype).eps * size
    for other in others:
        if other is not None:
            deviation = (other.double() - tensor.double()).abs().nan_to_num(0.0)
            bound = torch.maximum(bound, (SHORT_SAFETY if short else SAFETY) * deviation)
            if short and deviation.numel():  # it is some few last bits, of which one element may see none
                bound = torch.maximum(bound, 1.5 * deviation.max().expand_as(bound))
    return bound


def differing(
    observed: torch.Tensor | None, expected: torch.Tensor | None, bound: torch.Tensor | float
) -> torch.Tensor | None:
    """Which elements depart, flattened; None if one of the two is not there or has another shape."""
    if observed is None or expected is None or observed.shape != expected.shape:
        return None
    ours, plain = observed.double(), expected.double()
    same = ((ours - plain).abs() <= bound) | (ours == plain) | (ours.isnan() & plain.isnan())
    return ~same.flatten()


def first_departure(observed: Sequence[Part], expected: Sequence[Part], bounds: Bounds) -> Where | None:
    """The first snapshot of values, averages or losses that departs; None if none does."""
    for number, (ours, plain) in enumerate(zip(observed, expected)):
        for place, snapshot in enumerate(plain.traces[0]):
            if snapshot.of_gradients or not (places := tuple(places_in(ours, plain, place, bounds[number]))):
                continue
            if snapshot.phase == "average":  # it may only show what the values after the step do
                following = tuple(places_in(ours, plain, place + 1, bounds[number]))
                if following:
                    return Where(number, place + 1, snapshot.step, "step", following)
            return Where(number, place, snapshot.step, snapshot.phase, places)
    return None


def places_in(
    ours: Part, plain: Part, place: int, bounds: dict[tuple[int, str], dict[str, torch.Tensor]]
) -> Iterator[Place]:
    """The places of a snapshot that depart, in the model's order."""
    for name in plain.traces[0][place].tensors:
        for rank, (our_trace, plain_trace) in enumerate(zip(ours.traces, plain.traces)):
            snapshot, found = plain_trace[place], our_trace[place]
            bound = bounds[snapshot.step, snapshot.phase].get(name, torch.zeros(()))
            values, right = found.tensors.get(name), snapshot.tensors[name]
            differs = differing(values, right, bound)
            kind = _kind(snapshot)
            if differs is not None and differs.any() and values is not None and right is not None:
                yield _place(name, rank, kind, values, right, differs, bound)
            elif differs is None and right is not None and not snapshot.of_gradients:
                yield Place(name, rank, kind, 0, right.numel(), right.numel(), right.numel(), None, 0.0, 0.0)


def _kind(snapshot: Snapshot) -> str:
    if snapshot.of_gradients:
        return "gradient"
    return {"forward": "loss", "average": "average"}.get(snapshot.phase, "value")


def _place(
    name: str,
    rank: int,
    kind: str,
    values: torch.Tensor,
    right: torch.Tensor,
    differs: torch.Tensor,
    bound: torch.Tensor,
) -> Place:
    where = differs.nonzero().flatten()
    ours, plain = values.double().flatten(), right.double().flatten()
    allowed = bound.expand(right.shape).flatten()
    at = int(where[(ours - plain).abs().nan_to_num(torch.inf)[where].argmax()])
    return Place(
        name, rank, kind, int(where[0]), int(where[-1]) + 1, right.numel(), len(where),
        values.flatten()[at].item(), right.flatten()[at].item(), float(allowed[at]),
        common_ratio(ours[where], plain[where]),
    )  # fmt: skip


def common_ratio(ours: torch.Tensor, plain: torch.Tensor, tolerance: float = 1e-4) -> float | None:
    """The ratio of the elements of two tensors if it is the same in all of them, and not 1."""
    known = plain != 0
    if not known.any() or (ours[~known] != 0).any():
        return None
    ratios = ours[known] / plain[known]
    median = ratios.median().item()
    close = (ratios - median).abs() <= tolerance * max(abs(median), 1e-2)
    return median if bool(close.all()) and abs(median - 1) > tolerance else None
