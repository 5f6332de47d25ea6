"""Mistakes on the way from a batch to the gradients that ranks step with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from zero_ref.doctor import parts
from zero_ref.doctor.mistake import Mistake, Patient, updates_elements
from zero_ref.doctor.plain import mean
from zero_ref.doctor.trials import Step

Grad = torch.Tensor | None


def scaled(grad: Grad, factor: float) -> Grad:
    """The gradient times a number; None stays None."""
    return None if grad is None else grad * factor


class Scaled(Mistake):
    """The mean gradient is multiplied by a number."""

    says = "gradients are summed and not averaged, or averaged twice, over ranks or micro-batches"
    factor: float

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        ranks = patient.ranks[patient.where.part]
        micro = max(step.micro for step in patient.case.trial.steps)
        if ranks > 1:
            yield "gradients are summed over the ranks, and not averaged", {"factor": float(ranks)}
            yield "gradients are averaged twice: divided by the number of ranks twice", {"factor": 1 / ranks}
        if micro > 1:
            yield "gradients are divided by the number of micro-batches", {"factor": 1 / micro}
            yield (
                "each micro-batch's gradient counts as often as there are micro-batches",
                {"factor": float(micro)},
            )

    def reduced(self, name: str, rank: int) -> Grad:
        return scaled(super().reduced(name, rank), self.factor)


class OwnOnly(Mistake):
    """Each rank steps with the gradients of its own data."""

    says = "gradients are not reduced: a rank steps with those of its own data alone"
    per_rank = True

    def reduced(self, name: str, rank: int) -> Grad:
        return self.summed(name)[min(rank, self.ranks - 1)]


class OwnRangeAveraged(OwnOnly):
    """A rank has averages in its own range of the parameters, and its own gradients elsewhere."""

    says = "a rank has averages in its own range alone: what it computes from a whole matrix is half local"
    matrices_only: bool

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return not updates_elements(patient)

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        for matrices_only in (True, False):
            yield cls.says, {"matrices_only": matrices_only}

    def reduced(self, name: str, rank: int) -> Grad:
        own, average = super().reduced(name, rank), mean(self.summed(name))
        if own is None or average is None or rank >= self.ranks:
            return own
        named = list(self.copies[rank].named().items())
        cut = [(n, param) for n, param in named if param.dim() == 2 or not self.matrices_only]
        mixed = own.clone().flatten()
        for other, of_param in parts.end_to_end(cut, self.ranks)[rank]:
            if other == name:
                mixed[of_param] = average.flatten()[of_param]
        return mixed.view_as(own)


class RoundedOnTheWay(Mistake):
    """Gradients are reduced in 16 bits."""

    says = "gradients are rounded to 16 bits on their way"
    per_rank = True  # each begins its sum at another rank: a ring does so too
    dtype: torch.dtype
    divided_first: bool

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        for dtype, first in itertools.product((torch.bfloat16, torch.float16), (True, False)):
            says = f"gradients are rounded to {str(dtype).removeprefix('torch.')} on their way"
            yield says, {"dtype": dtype, "divided_first": first}

    def reduced(self, name: str, rank: int) -> Grad:
        there = [part for part in self.summed(name) if part is not None]
        if not there:
            return None
        turned = there[rank % len(there) :] + there[: rank % len(there)]
        divisor = self.ranks if self.divided_first else 1
        sums = sum((part.to(self.dtype) / divisor for part in turned[1:]), turned[0].to(self.dtype) / divisor)
        return (sums / (1 if self.divided_first else self.ranks)).to(there[0].dtype)


class OwnDivided(OwnOnly):
    """Each rank divides its own gradients as if they were a sum."""

    says = "gradients are divided by the number of ranks, but never summed over them"

    def reduced(self, name: str, rank: int) -> Grad:
        return scaled(super().reduced(name, rank), 1 / self.ranks)


class OneRanksOnly(Mistake):
    """One rank's gradients stand for all."""

    says = "one rank's gradients are used in place of the mean"
    source: int

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        for rank in range(min(patient.ranks)):
            yield (
                f"the gradients of rank {rank} alone are used, in place of the mean over the ranks",
                {"source": rank},
            )

    def reduced(self, name: str, rank: int) -> Grad:
        return self.summed(name)[self.source]


class OneRankLost(Mistake):
    """One rank's gradients are missing in the sum."""

    says = "one rank's gradients are missing"
    lost: int
    divisor_of_rest: bool

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        for rank, rest in itertools.product(range(min(patient.ranks)), (False, True)):
            how = "the mean of the other ranks is used" if rest else "the sum is divided by all ranks"
            yield f"the gradients of rank {rank} are lost: {how}", {"lost": rank, "divisor_of_rest": rest}

    def reduced(self, name: str, rank: int) -> Grad:
        parts = self.summed(name)
        rest = parts[: self.lost] + parts[self.lost + 1 :]
        return scaled(mean(rest), 1.0 if self.divisor_of_rest else len(rest) / len(parts)) if rest else None


class OneUseOfTied(Mistake):
    """One gradient of a weight that two layers share is lost, or counts twice."""

    says = "of tied weights one use's gradient is lost"
    lost: str
    times: float

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.case.trial.shape.tied

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        for layer in ("head", "embedding"):
            yield (
                f"the gradient of tied weights lacks what comes by `{layer}`",
                {"lost": layer, "times": -1.0},
            )
        yield "the gradient of tied weights counts twice", {"lost": "both", "times": 1.0}

    def losses(self, step: Step, micro: int) -> Iterator[torch.Tensor]:
        lost = ("head", "embedding") if self.lost == "both" else (self.lost,)
        for rank, loss in enumerate(super().losses(step, micro)):
            model = self.copy_of(rank).model
            data = self.case.data(step, micro, rank)
            part = model({name: data[name] for name in lost}) * self.times
            yield loss + part - part.detach()


MISTAKES: tuple[type[Mistake], ...] = (
    Scaled, OwnOnly, OwnDivided, OneRanksOnly, OneRankLost,
    OneUseOfTied, OwnRangeAveraged, RoundedOnTheWay,
)  # fmt: skip
