"""Mistakes in the update: another class, other options, a cut matrix, masters, the scheduler, buffers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, optim

from zero_ref.doctor.mistake import OTHERS, Mistake, Patient, optimizers_in, updates_elements
from zero_ref.doctor.on_rank import options_of
from zero_ref.doctor.plain import Copy
from zero_ref.doctor.trials import Step

DECOUPLED = "decoupled_weight_decay"
"""The option that tells torch's AdamW, which is a kind of Adam, from Adam."""


def class_defaults(optimizer: Any) -> dict[str, Any]:
    """The options with which a class is made if none are given."""
    parameters = inspect.signature(type(optimizer).__init__).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def in_words(option: str, value: Any) -> str:
    """An option with its value."""
    return f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"


class OptionsLost(Mistake):
    """Options are not passed on, and are at the class's defaults."""

    says = "options are not passed on"
    lost: dict[str, Any]

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        lost: dict[str, Any] = {}
        for inner in optimizers_in(patient.optimizer()):
            for option, default in class_defaults(inner).items():
                given = [group.get(option) for group in inner.param_groups if option in group]
                if any(value != default for value in given) and option not in ("params", "foreach", "fused"):
                    lost[option] = default
        for option, default in lost.items():
            yield (
                f"{option} is not passed on: {in_words(option, default)}, the class's default, is used",
                {"lost": {option: default}},
            )
        if len(lost) > 1:
            yield "no option is passed on: all are at the class's defaults", {"lost": lost}
        for option in ("weight_decay", "momentum"):
            if any(group.get(option) for group in patient.optimizer().param_groups) and lost.get(option, 1):
                yield f"{option} is not applied: it is 0", {"lost": {option: 0.0}}

    def make(self, model: nn.Module) -> Any:
        optimizer = super().make(model)
        for group in optimizer.param_groups:
            group.update({option: value for option, value in self.lost.items() if option in group})
        return optimizer


class OtherOptions(OptionsLost):
    """The program's optimizer has other options than the plain loop's, and says so in its groups."""

    says = "the program's optimizer has other options than the plain loop's"
    last_resort = True

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        plain = options_of(patient.optimizer())
        other = {
            option: value
            for option, value in patient.options.items()
            if option in plain and value != plain[option]
        }
        if other:
            ours, theirs = (
                ", ".join(in_words(option, of[option]) for option in other) for of in (other, plain)
            )
            yield f"the program's optimizer has {ours}, and the plain loop's has {theirs}", {"lost": other}


class OptionOfAnotherGroup(Mistake):
    """A group is stepped with the options of another."""

    says = "a group is stepped with another group's options"
    source: int
    option: str

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        groups = patient.optimizer().param_groups
        for source, of_source in enumerate(groups):
            for option, value in of_source.items():
                if option != "params" and any(
                    option in group and group[option] is not value and group[option] != value
                    for group in groups
                ):
                    yield (
                        f"{option} of group {source}, {value}, is used for another group",
                        {"source": source, "option": option},
                    )

    def make(self, model: nn.Module) -> Any:
        optimizer = super().make(model)
        value = optimizer.param_groups[self.source][self.option]
        for group in optimizer.param_groups:
            if self.option in group:
                group[self.option] = value
        return optimizer


class AddedOptionsLost(Mistake):
    """The group that was added has the options of the others."""

    says = "the options of the group that was added are not passed on"
    lost: tuple[str, ...]

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.adds)

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        options = tuple(patient.case.added_options)
        for option in options:
            yield f"{option} of the group that was added is not passed on", {"lost": (option,)}
        if len(options) > 1:
            yield "the options of the group that was added are not passed on", {"lost": options}

    def forward(self, step: Step) -> None:
        if step.adds:
            groups = self.copies[0].optimizer.param_groups
            groups[-1].update({option: groups[0][option] for option in self.lost})
        super().forward(step)


class AnotherClass(Mistake):
    """Another class steps, with the options that it knows."""

    says = "another class steps"
    steps_by: type[optim.Optimizer]
    keeps_options: bool

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        inner = {type(one) for one in optimizers_in(patient.optimizer())}
        names = " and ".join(sorted(one.__name__ for one in inner))
        for other in OTHERS:
            if other not in inner or len(inner) > 1:
                for keeps in (True, False):
                    options = "" if keeps else ", with its own defaults but lr"
                    yield (
                        f"{other.__name__} steps in place of {names}{options}",
                        {"steps_by": other, "keeps_options": keeps},
                    )

    def make(self, model: nn.Module) -> Any:
        before = super().make(model)
        known = set(inspect.signature(self.steps_by.__init__).parameters)
        if not self.keeps_options:
            known = {"lr"}
        groups = []
        for group in before.param_groups:
            options = {key: value for key, value in group.items() if key in known - {DECOUPLED}}
            groups.append(options | {"params": group["params"]})
        made: Any = self.steps_by
        return made(groups)


class CutMatrix(Mistake):
    """The class steps pieces of a matrix, as if each were a parameter."""

    says = "the update is computed from a piece of each matrix, and not from the whole"
    dim: int

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield f"{cls.says}: each rank's rows", {"dim": 0}
        yield f"{cls.says}: each rank's columns", {"dim": 1}

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return not updates_elements(patient)

    def make(self, model: nn.Module) -> Any:
        optimizer = super().make(model)
        self.pieces: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        for group in optimizer.param_groups:
            group["params"] = [piece for param in group["params"] for piece in self.cut(param)]
        for inner in optimizers_in(optimizer):
            for group in inner.param_groups:
                if any(param is whole for param in group["params"] for whole, _ in self.pieces):
                    group["params"] = [piece for param in group["params"] for piece in self.cut(param)]
        return optimizer

    def cut(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Pieces that are views of a matrix."""
        if param.dim() != 2:
            return [param]
        pieces = [nn.Parameter(piece) for piece in param.detach().chunk(self.ranks, self.dim)]
        self.pieces.append((param, pieces))
        return pieces

    def update(self, step: Step) -> None:
        for param, pieces in self.pieces:
            grads = [None] * len(pieces) if param.grad is None else param.grad.chunk(self.ranks, self.dim)
            for piece, grad in zip(pieces, grads):
                piece.grad = grad
        super().update(step)


class OtherMasters(Mistake):
    """Masters are used where the plain loop has none, or the other way round."""

    says = "masters are not used: 16-bit parameters are stepped as they are"

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return any(param.dtype.itemsize < 4 for param in patient.model.parameters())

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        used = "16-bit parameters are stepped by 32-bit masters: tell the doctor with masters=True"
        yield cls.says if patient.masters else used, {}

    def __init__(self, patient: Patient, **chosen: Any) -> None:
        super().__init__(patient, **chosen)
        self.masters = not patient.masters
        self.copies = [Copy(copy.deepcopy(patient.model), self.make, self.masters)]


class ValuesRounded(Mistake):
    """Values lose bits on their way to other ranks."""

    says = "values are rounded to 16 bits"
    dtype: torch.dtype

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        for dtype in (torch.bfloat16, torch.float16):
            yield f"new values are rounded to {str(dtype).removeprefix('torch.')}", {"dtype": dtype}

    @torch.no_grad()
    def update(self, step: Step) -> None:
        super().update(step)
        for param in self.copies[0].named().values():
            param.copy_(param.to(self.dtype))


class ValuesRoundedWhenSent(ValuesRounded):
    """Owners keep exact values, others have rounded ones."""

    says = "values are rounded when they are sent"

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        for says, chosen in ValuesRounded.variants(patient):
            yield f"{says} when they are sent; owners keep exact ones", chosen

    def update(self, step: Step) -> None:
        Mistake.update(self, step)

    def note(self, step: int, phase: Any, of_copy: Any) -> None:
        super().note(step, phase, of_copy)
        if phase == "step":
            for trace in self.parts[-1].traces:
                for name, value in trace[-1].tensors.items():
                    if value is not None:
                        trace[-1].tensors[name] = value.to(self.dtype).to(value.dtype)


class SteppedTwice(Mistake):
    """An update is made twice."""

    says = "the update is made twice in a step"

    def update(self, step: Step) -> None:
        super().update(step)
        super().update(step)


class StepCountOff(Mistake):
    """The number of steps in the state is another, and bias correction with it."""

    says = "the state's step count is wrong"
    by: float

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "the state's step count advances twice in a step", {"by": 1.0}
        yield (
            "the state's step count does not advance: bias correction stays that of the first step",
            {"by": -1.0},
        )

    def update(self, step: Step) -> None:
        super().update(step)
        for state in self.copies[0].optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] += self.by


class NotScheduled(Mistake):
    """The scheduler does not reach the update."""

    says = "the scheduler's learning rate does not reach the update"
    how: str

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.factor is not None)

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "the scheduler's learning rate does not reach the update: the first one stays", {"how": "never"}
        yield "the scheduler's learning rate reaches the update a step late", {"how": "late"}
        yield "the scheduler's factors are multiplied with each other", {"how": "again"}
        yield "the scheduler advances once for every rank in a step", {"how": "by rank"}

    def schedule(self, of: Copy, factor: float) -> None:
        before = getattr(self, "before", 1.0)
        self.before = factor if self.how == "late" else before * factor
        factors = {"never": 1.0, "late": before, "again": self.before, "by rank": factor**self.ranks}
        of.set_lr_factor(factors[self.how])


class BuffersApart(Mistake):
    """Each rank keeps buffers of its own."""

    says = "buffers are not synchronised: each rank's forward uses its own"

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return any(True for _ in patient.model.buffers())

    def source_of_buffers(self, rank: int) -> int:
        return rank


MISTAKES: tuple[type[Mistake], ...] = (
    OptionsLost, OtherOptions, OptionOfAnotherGroup, AddedOptionsLost, AnotherClass, CutMatrix, OtherMasters,
    NotScheduled, BuffersApart, ValuesRounded, ValuesRoundedWhenSent, SteppedTwice, StepCountOff,
)  # fmt: skip
