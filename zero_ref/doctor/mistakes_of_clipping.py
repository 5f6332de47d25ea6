"""Mistakes in clipping by the norm of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zero_ref.doctor.mistake import Mistake, Patient
from zero_ref.doctor.mistakes_of_gradients import scaled
from zero_ref.doctor.plain import Copy
from zero_ref.doctor.trials import Step
from zero_ref.plan import rules


class Unclipped(Mistake):
    """Gradients are not clipped."""

    says = "gradients are not clipped"

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.max_norm is not None)

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        pass


class ClippedByValue(Unclipped):
    """Elements are clipped, not the norm."""

    says = "each element is clipped to max_norm, not the norm of all"

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        nn.utils.clip_grad_value_(list(of.named().values()), max_norm)


class ClippedApart(Unclipped):
    """Each parameter by its own norm."""

    says = "each parameter is clipped by its own norm, not by the norm of all gradients"

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        for param in of.named().values():
            nn.utils.clip_grad_norm_([param], max_norm)


class ClippedFirst(Unclipped):
    """Clipping precedes the reduction."""

    says = "each rank clips its own gradients, before they are averaged"

    def backward(self, step: Step) -> None:
        for number in range(self.ranks):
            names = list(self.copies[0].named())
            sums = {name: self.summed(name)[number] for name in names}
            there = [grad for grad in sums.values() if grad is not None]
            norm = nn.utils.get_total_norm(there)
            factor = min(1.0, (step.max_norm or float("inf")) / (norm.item() + 1e-6))
            self.local[number] = [{name: scaled(grad, factor) for name, grad in sums.items()}]
        super().backward(step)


class ClippedByOwnNorm(Unclipped):
    """The norm is that of what a rank has: its part of the parameters, or its own gradients."""

    says = "gradients are clipped by a local norm"
    parts_of: Callable[[list[tuple[str, nn.Parameter]], int], list[list[tuple[str, slice]]]]

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        says = "gradients are clipped by a local norm: that of a rank's own part, not of all gradients"
        for parts_of in (
            by_rule(rules.sorted_greedy),
            by_rule(rules.registration_greedy),
            by_rule(rules.even),
        ):
            yield says, {"parts_of": parts_of}
        for parts_of in (by_rows, by_turns, by_number, flat_ceil):
            yield says, {"parts_of": parts_of}

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        named = [(name, param) for name, param in of.named().items() if param.grad is not None]
        grads = {name: param.grad.flatten() for name, param in named if param.grad is not None}
        for part in self.parts_of(named, self.ranks):
            pieces = [grads[name][of_param] for name, of_param in part]
            if pieces:
                norm = torch.cat([piece.float() for piece in pieces]).norm()
                for piece in pieces:
                    piece.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))


Parts = list[list[tuple[str, slice]]]


def by_rule(rule: Any) -> Any:
    """The parts of a rule of this package."""

    def parts_of(named: Sequence[tuple[str, nn.Parameter]], ranks: int) -> Parts:
        partition = rule([param.numel() for _, param in named], ranks)
        return [
            [(named[piece.param][0], slice(piece.start, piece.stop)) for piece in slices]
            for slices in partition.slices_of_rank
        ]

    return parts_of


def by_rows(named: Sequence[tuple[str, nn.Parameter]], ranks: int) -> Parts:
    """Each parameter's first dimension in chunks, as DTensor cuts it."""
    parts: Parts = [[] for _ in range(ranks)]
    for name, param in named:
        start = 0
        for rank, chunk in enumerate(param.detach().chunk(ranks)):
            parts[rank].append((name, slice(start, start + chunk.numel())))
            start += chunk.numel()
    return parts


def by_turns(named: Sequence[tuple[str, nn.Parameter]], ranks: int) -> Parts:
    """Parameter i belongs to rank i modulo the number of ranks."""
    return [[(name, slice(None)) for name, _ in named[rank::ranks]] for rank in range(ranks)]


def by_number(named: Sequence[tuple[str, nn.Parameter]], ranks: int) -> Parts:
    """The list of parameters in chunks."""
    size = -(-len(named) // ranks)
    return [[(name, slice(None)) for name, _ in named[rank * size :][:size]] for rank in range(ranks)]


def flat_ceil(named: Sequence[tuple[str, nn.Parameter]], ranks: int) -> Parts:
    """All parameters flattened end to end, in equal shares of which the last is padded."""
    size = -(-sum(param.numel() for _, param in named) // ranks)
    parts: Parts = [[] for _ in range(ranks)]
    at = 0
    for name, param in named:
        for rank in range(ranks):
            start, stop = max(rank * size - at, 0), min((rank + 1) * size - at, param.numel())
            if start < stop:
                parts[rank].append((name, slice(start, stop)))
        at += param.numel()
    return parts


class ClippedByOwnData(Unclipped):
    """Each rank clips averaged gradients by the norm of those of its own data."""

    says = "averaged gradients are clipped by the norm of a rank's own gradients"
    per_rank = True

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        there = [
            grad for name in of.named() if (grad := self.summed(name)[min(rank, self.ranks - 1)]) is not None
        ]
        nn.utils.clip_grads_with_norm_(list(of.named().values()), max_norm, nn.utils.get_total_norm(there))


class ClippedTwice(Unclipped):
    """The factor is applied twice."""

    says = "gradients are multiplied by the clipping factor twice"

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        params = list(of.named().values())
        norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        for _ in range(2):
            nn.utils.clip_grads_with_norm_(params, max_norm, norm)


class NormMiscounted(Unclipped):
    """The norm counts each gradient several times, or is of sums."""

    says = "the norm is wrong by the number of ranks"
    factor: float

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        ranks = patient.ranks[0]
        yield "the norm counts each gradient once for every rank", {"factor": ranks**0.5}
        yield "the norm is the number of ranks times too large", {"factor": float(ranks)}
        yield "the norm is divided by the number of ranks", {"factor": 1 / ranks}
        yield "the norm is divided by the root of the number of ranks", {"factor": ranks**-0.5}

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        params = list(of.named().values())
        norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        nn.utils.clip_grads_with_norm_(params, max_norm, norm * self.factor)


MISTAKES: tuple[type[Mistake], ...] = (
    Unclipped, ClippedByValue, ClippedApart, ClippedFirst, ClippedByOwnNorm, ClippedByOwnData, ClippedTwice,
    NormMiscounted,
)  # fmt: skip
