"""Mistakes with parameters that have no gradient: frozen, or not used on some ranks or all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zero_ref.doctor.mistake import Mistake, Patient
from zero_ref.doctor.mistakes_of_gradients import Grad
from zero_ref.doctor.plain import mean
from zero_ref.doctor.trace import Tensors
from zero_ref.doctor.trials import FROZEN, Step


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


MISTAKES: tuple[type[Mistake], ...] = (
    ZeroInPlaceOfNone,
    DecaysWithoutGradient,
    FrozenTrains,
    MeanOfUsers,
    UnusedSkipped,
    OldGradient,
)
