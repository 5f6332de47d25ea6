"""Mistakes in what is saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zero_ref.doctor.mistake import Mistake, Patient, optimizers_in
from zero_ref.doctor.plain import Copy


class Loads(Mistake):
    """A mistake of loading."""

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return patient.any_step(lambda step: step.reloads)


class StateReset(Loads):
    """Part of the state begins anew."""

    says = "the optimizer's state is reset by loading"
    lost: Callable[[str], bool]

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "the optimizer's state, its moments, is reset by loading", {"lost": lambda key: True}
        yield "moments are reset by loading, and the step count is kept", {"lost": lambda key: key != "step"}
        yield "the step count is reset by loading, and moments are kept", {"lost": lambda key: key == "step"}
        for key in ("exp_avg", "exp_avg_sq"):
            yield f"of the state {key} is reset by loading", {"lost": key.__eq__}

    @torch.no_grad()
    def loaded(self, of: Copy) -> None:
        for inner in optimizers_in(of.optimizer):
            for param, state in list(inner.state.items()):
                kept = {key: value for key, value in state.items() if not self.lost(key)}
                if not kept:
                    del inner.state[param]
                    continue
                for key, value in state.items():
                    if self.lost(key) and isinstance(value, torch.Tensor):
                        value.zero_()


class MastersFromRounded(Loads):
    """Masters are made anew of the rounded parameters."""

    says = "masters are not loaded: they begin at the rounded parameters"

    @classmethod
    def applies(cls, patient: Patient) -> bool:
        return super().applies(patient) and patient.masters

    @torch.no_grad()
    def loaded(self, of: Copy) -> None:
        for param, master in zip(of.model.parameters(), of.stepped.parameters()):
            master.copy_(param)


class ValuesNotLoaded(Loads):
    """Parameters are those of a new model."""

    says = "parameters are not loaded: they are those that training began with"

    @torch.no_grad()
    def loaded(self, of: Copy) -> None:
        begun = self.parts[0].traces[0][0].tensors
        for name, param in of.named().items():
            value = begun.get(name)
            if value is not None:
                param.copy_(value)


class StateOfOneParameterLate(Loads):
    """State goes to the parameter after the one that it belongs to."""

    says = "state is loaded into another parameter"
    by: int

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "state is loaded into the parameters in another order", {"by": 1}

    def loaded(self, of: Copy) -> None:
        for inner in optimizers_in(of.optimizer):
            states = copy.copy(dict(inner.state))
            of_shape: dict[Any, list[Any]] = {}
            for param in states:
                of_shape.setdefault(tuple(param.shape), []).append(param)
            for params in of_shape.values():
                for number, param in enumerate(params):
                    inner.state[param] = states[params[number - self.by]]


class LoadingSteps(Loads):
    """Loading makes a step with gradients of 0, to have a state to load into."""

    says = "loading makes a step with gradients of 0: parameters decay"
    with_state: bool

    @classmethod
    def variants(cls, patient: Patient) -> Iterator[tuple[str, dict[str, Any]]]:
        yield cls.says, {"with_state": False}
        yield f"{cls.says}, and moments too", {"with_state": True}

    def loaded(self, of: Copy) -> None:
        saved = copy.deepcopy(of.optimizer.state_dict())
        if not self.with_state:
            of.optimizer.load_state_dict(saved | {"state": {}})
        for param in of.named().values():
            param.grad = torch.zeros_like(param)
        of.step()
        if not self.with_state:
            of.optimizer.load_state_dict(saved)


class StateOfRankZero(Loads):
    """Each element's state is that of the first rank's part."""

    says = "every rank loads the state of rank 0's part"

    @torch.no_grad()
    def loaded(self, of: Copy) -> None:
        for inner in optimizers_in(of.optimizer):
            for state in inner.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.numel() > 1:
                        flat = value.flatten()
                        size = -(-flat.numel() // self.ranks)
                        value.copy_(flat[:size].repeat(self.ranks)[: flat.numel()].view_as(value))


MISTAKES: tuple[type[Mistake], ...] = (
    StateReset,
    MastersFromRounded,
    ValuesNotLoaded,
    StateOfOneParameterLate,
    StateOfRankZero,
    LoadingSteps,
)
