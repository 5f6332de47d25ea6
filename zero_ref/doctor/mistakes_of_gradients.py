"""Mistakes on the way from a batch to the gradients that ranks step with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from zero_ref.doctor import parts
from zero_ref.doctor.mistake import Mistake, Patient, updates_elements
from zero_ref.doctor.plain import mean, total
from zero_ref.doctor.trace import Tensors
from zero_ref.doctor.trials import FROZEN, Step

Grad = torch.Tensor | None


def scaled(grad: Grad, factor: float) -> Grad:
    """The gradient times a number; None stays None."""
    return None if grad is None else grad * factor


class Scaled(Mistake):
    """The mean gradient is multiplied by a number."""

    says = "gradients are scaled"
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
    """What was accumulated before the last micro-batch stays on its rank."""

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
        for loss in self.losses(step, 15):
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


class ZeroInPlaceOfNone(Mistake):
    """A parameter without a gradient is stepped with zeros."""

    says = "a parameter without a gradient is updated as if its gradient were 0"

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.unused or step.unused_on_first or step.freezes)

    def backward(self, step: Step) -> None:
        super().backward(step)
        for each in self.copies:
            for param in each.named().values():
                if param.grad is None:
                    param.grad = torch.zeros_like(param)


class DecaysWithoutGradient(ZeroInPlaceOfNone):
    """Weight decay takes parameters that have no gradient."""

    says = "a parameter without a gradient still decays"

    backward = Mistake.backward

    @torch.no_grad()
    def update(self, step: Step) -> None:
        for group in self.copies[0].optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    param.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))
        super().update(step)


class FrozenTrains(Mistake):
    """Freezing is not noticed."""

    says = "the frozen layer is trained on: that it was frozen is not noticed"
    unfreezes = True

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.freezes is not None)

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield cls.says, {}
        yield "the layer that was unfrozen is not trained again", {"unfreezes": False}

    def forward(self, step: Step) -> None:
        for each in self.copies:
            layer = each.model.get_submodule(FROZEN)
            if self.unfreezes:
                layer.requires_grad_(True)
            elif step.freezes is False:
                layer.requires_grad_(False)
        super().forward(step)


class MeanOfUsers(Mistake):
    """The divisor is the number of ranks that used the parameter."""

    says = "a gradient is divided by the number of ranks that used the parameter, not of all ranks"

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.unused_on_first)

    def reduced(self, name: str, rank: int) -> Grad:
        there = [part for part in self.summed(name) if part is not None]
        return mean(there) if there else None


class UnusedSkipped(Mistake):
    """A parameter that one rank did not use is not updated."""

    says = "a parameter that one rank did not use is not updated at all"
    applies = MeanOfUsers.applies

    def reduced(self, name: str, rank: int) -> Grad:
        parts = self.summed(name)
        return None if any(part is None for part in parts) else mean(parts)


class OldGradient(Mistake):
    """A parameter that was not used is updated by an earlier gradient."""

    says = "a parameter that was not used is updated with the gradient of an earlier step"
    applies = ZeroInPlaceOfNone.applies

    def backward(self, step: Step) -> None:
        super().backward(step)
        before: Tensors = getattr(self, "before", {})
        for name, param in self.copies[0].named().items():
            if param.grad is None and before.get(name) is not None and param.requires_grad:
                param.grad = before[name]
        self.before = self.gradients(self.copies[0])


class OneUseOfTied(Mistake):
    """Of a weight that two layers share, one layer's gradient is lost, or counts twice."""

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
            data = self.case.data(step, micro, rank, self.ranks)
            part = model({name: data[name] for name in lost}) * self.times
            yield loss + part - part.detach()


MISTAKES: tuple[type[Mistake], ...] = (
    Scaled, OneMicroBatch, OnlyLastReduced, ReducedAgain, OwnOnly, OwnDivided, OneRanksOnly, OneRankLost,
    NeverZeroed, InterruptedCounts, ZeroInPlaceOfNone, DecaysWithoutGradient, FrozenTrains,
    MeanOfUsers, UnusedSkipped, OldGradient, OneUseOfTied, OwnRangeAveraged, RoundedOnTheWay,
)  # fmt: skip
