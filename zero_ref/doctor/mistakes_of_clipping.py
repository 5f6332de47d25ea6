"""Mistakes in clipping by the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zero_ref.doctor import parts
from zero_ref.doctor.mistake import Mistake, Patient
from zero_ref.doctor.mistakes_of_gradients import scaled
from zero_ref.doctor.plain import Copy
from zero_ref.doctor.trials import Step


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
    parts_of: parts.PartsOf

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        says = "gradients are clipped by a local norm: that of a rank's own part, not of all gradients"
        for parts_of in parts.ALL:
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


class VectorsCountedOnEveryRank(Unclipped):
    """Parameters that every rank has, such as biases, count once for each rank in the sum of squares."""

    says = "the norm counts what is no matrix once for every rank"

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        params = [param for param in of.named().values() if param.grad is not None]
        square = sum(
            (1 if param.dim() > 1 else self.ranks) * param.grad.float().square().sum().item()
            for param in params
            if param.grad is not None
        )
        nn.utils.clip_grads_with_norm_(params, max_norm, torch.tensor(square**0.5))


class ClippedByAnotherNorm(Unclipped):
    """The norm that was used, whatever it is, found from the clipped gradients."""

    says = "all gradients are clipped by one norm, which is not the norm of all gradients"
    last_resort = True
    factors: dict[int, float]

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        factors: dict[int, float] = {}
        observed, expected = patient.observed[0].traces[0], patient.expected[0].traces[0]
        for place, snapshot in enumerate(expected):
            if snapshot.phase == "clip":
                before = [one for one in expected[:place] if one.phase == "backward"][-1].tensors
                pairs = [(observed[place].tensors.get(name), grad) for name, grad in before.items()]
                there = [
                    (ours, grad)
                    for ours, grad in pairs
                    if ours is not None and grad is not None and ours.shape == grad.shape
                ]
                squares = sum(grad.double().square().sum().item() for _, grad in there)
                products = sum((ours.double() * grad.double()).sum().item() for ours, grad in there)
                if squares:
                    factors[snapshot.step] = products / squares
        if factors:
            yield cls.says, {"factors": factors}

    def backward(self, step: Step) -> None:
        super().backward(step)
        self.now = step.number

    def clip(self, of: Copy, rank: int, max_norm: float) -> None:
        for param in of.named().values():
            if param.grad is not None:
                param.grad.mul_(self.factors.get(self.now, 1.0))


MISTAKES: tuple[type[Mistake], ...] = (
    Unclipped, ClippedByValue, ClippedApart, ClippedFirst, ClippedByOwnNorm, ClippedByOwnData, ClippedTwice,
    NormMiscounted, VectorsCountedOnEveryRank, ClippedByAnotherNorm,
)  # fmt: skip
