"""Mistakes in adding up gradients: over micro-batches, over steps, after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zero_ref.doctor.mistake import Mistake, Patient
from zero_ref.doctor.mistakes_of_gradients import Grad, scaled
from zero_ref.doctor.on_rank import INTERRUPTED
from zero_ref.doctor.plain import mean, total
from zero_ref.doctor.trace import Tensors
from zero_ref.doctor.trials import Step


class OneMicroBatch(Mistake):
    """Accumulation keeps one micro-batch."""

    says = "accumulation keeps only one micro-batch"
    kept: int

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.micro > 1)

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "accumulation keeps only the last micro-batch of a step", {"kept": -1}
        yield "accumulation keeps only the first micro-batch of a step", {"kept": 0}

    def summed(self, name: str) -> list[Grad]:
        return [of_rank[self.kept].get(name) for of_rank in self.local]


class OnlyLastReduced(Mistake):
    """Gradients accumulated before the last micro-batch stay on their rank."""

    says = "only the last micro-batch is reduced over the ranks; the others stay on their rank"
    per_rank = True
    applies = OneMicroBatch.applies

    def reduced(self, name: str, rank: int) -> Grad:
        last = mean([of_rank[-1].get(name) for of_rank in self.local])
        earlier = [micro.get(name) for micro in self.local[min(rank, self.ranks - 1)][:-1]]
        return total([*earlier, last])


class ReducedAgain(Mistake):
    """Each backward reduces by a sum what has been accumulated, and what was reduced before with it."""

    says = "what was accumulated is reduced again with each micro-batch, and so counts several times"
    applies = OneMicroBatch.applies

    def reduced(self, name: str, rank: int) -> Grad:
        sums: Grad = None
        for micro in range(len(self.local[0])):
            new = mean([of_rank[micro].get(name) for of_rank in self.local])
            sums = total([scaled(sums, 2.0), new])
        return sums


class NeverZeroed(Mistake):
    """Gradients of earlier steps are still there."""

    says = "gradients of an earlier step are not zeroed, and are added to those of this step"
    only_skipped = False
    kept: Tensors

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield cls.says, {}
        if patient.any_step(lambda step: step.nan):
            yield "NaN of the skipped step are still in the gradients", {"only_skipped": True}

    def backward(self, step: Step) -> None:
        named = self.copies[0].named()
        before: Tensors = self.kept if step.number else {}
        super().backward(step)
        for name, param in named.items():
            param.grad = total([before.get(name), param.grad])
        self.kept = {} if self.only_skipped and not step.nan else self.gradients(self.copies[0])


class InterruptedCounts(Mistake):
    """The batch before the exception counts."""

    says = "the batch that ended with an exception counts in the next step"

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.raises)

    def interrupted(self, step: Step) -> None:
        self.extra: list[Tensors] = []
        for loss in self.losses(step, INTERRUPTED):
            named = self.copies[0].named()
            grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            self.extra.append(dict(zip(named, grads)))

    def summed(self, name: str) -> list[Grad]:
        own = super().summed(name)
        extra: list[Tensors] = getattr(self, "extra", [])
        return [total([grad, more.get(name)]) for grad, more in zip(own, extra)] if extra else own

    def update(self, step: Step) -> None:
        super().update(step)
        self.extra = []


MISTAKES: tuple[type[Mistake], ...] = (
    OneMicroBatch,
    OnlyLastReduced,
    ReducedAgain,
    NeverZeroed,
    InterruptedCounts,
)
