"""Exhibits: state that is lost when a save is loaded, and values that parameters, copies and ranks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_ref_course.gallery.exhibits import exhibit
from zero_ref_course.gallery.gradients import Wrapped
from zero_ref_course.gallery.right import Owned, Sharded

# ------------------------------------------------------------------------------------------------- moments


class OwnedBy(Sharded):
    """A program whose optimizer is of the class `kind`; right if that class is."""

    kind: type[Owned] = Owned

    def sharded(self, params: Any, optimizer_class: Any, options: dict[str, Any]) -> Owned:
        return self.kind(params, optimizer_class, **options)


class ByTemplate(Owned):
    """Loads only into entries that its state has already; a new optimizer has none before its first step."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        assert self.local is not None
        for group, before in zip(self.param_groups, saved["param_groups"]):
            group.update(before)
        for number, param in self.numbered():
            template = self.local.state.get(param, {})
            for name in template:
                template[name] = saved["state"][number][name]


@exhibit(
    "https://github.com/KempnerInstitute/KempnerForge/pull/115",
    year=2026,
    trial="save and load",
    phase="step",
    says="an empty state",
)
class MomentsReset(OwnedBy):
    """Loading filled only moments that existed already. A new optimizer has none before its first step, so
    nothing was loaded, and the moments began at 0.
    """

    kind = ByTemplate


PADDING = 8
"""The elements of padding behind each bucket, so that the next bucket begins at a boundary."""


class ByOffset(Owned):
    """Packs each moment without the padding between buckets, and reads by offsets that count the padding."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        numbers = dict(self.numbered())
        state = {number: dict(of_param) for number, of_param in saved["state"].items()}
        for name in ("exp_avg", "exp_avg_sq"):
            packed = torch.cat([of_param[name].flatten().float() for of_param in state.values()])
            packed = torch.cat([packed, torch.zeros(PADDING * len(state))])
            start = 0
            for number, of_param in state.items():
                size = numbers[number].numel()
                of_param[name] = packed[start:][:size].view_as(numbers[number]).to(of_param[name].dtype)
                start += size + PADDING * (number % 2)  # two parameters a bucket
        super().load_state_dict({**saved, "state": state})


@exhibit(
    "https://github.com/NVIDIA/Megatron-LM/pull/5077",
    year=2026,
    trial="save and load",
    phase="step",
    says="",
)
class ShiftedMoments(OwnedBy):
    """State was packed without the padding behind each bucket and read with it, so only the first bucket was
    right.
    """

    kind = ByOffset


@exhibit(
    "https://github.com/pytorch/pytorch/pull/125708",
    year=2024,
    trial="save and load",
    phase="load",
    says="",
)
class LoadingSteps(Sharded):
    """To have a state to load into, loading made a step with gradients of 0.

    The gradients moved nothing, but weight decay shrank the weights.
    """

    def set_values(self, values: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        super().set_values(values, buffers)
        for param in self.params():
            param.grad = torch.zeros_like(param)
        self.step()
        self.zero_grad()


@exhibit(
    "https://github.com/NVIDIA/Megatron-LM/pull/6920",
    year=2026,
    trial="save and load",
    phase="load",
    says="values of the start",
)
class NotSentAfterLoading(Sharded):
    """After loading, each rank put its own share of the parameters into the model. The loop that should send
    it to the other ranks did nothing.
    """

    def set_values(self, values: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        mine = {
            name: values[name] if self.optimizer.is_mine(param) else param.detach().clone()
            for name, param in self.model.named_parameters()
        }
        super().set_values(mine, buffers)


# ------------------------------------------------------------------------------------------------- masters


class OnMasters(torch.optim.AdamW):
    """Right: steps a 32-bit master of every parameter that has 16 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        short = [p for group in self.param_groups for p in group["params"] if p.dtype is torch.bfloat16]
        values = {param: (param.data, param.grad) for param in short}
        for param, (value, grad) in values.items():
            param.grad = None
            # AdamW makes the rest of the state where there is none.
            param.data = self.state[param].pop("master", value.float())
            param.grad = None if grad is None else grad.float()
        super().step()
        for param, (value, grad) in values.items():
            param.grad = None
            self.state[param]["master"] = param.data
            param.data = value.copy_(param.data)
            param.grad = grad


SHRINKING: dict[str, Any] = {"lr": 2.0**-12, "weight_decay": 6.0}
"""A step takes a seven-hundredth from a weight, and 16 bits hold no finer change than a 256th."""


class WithMasters(Sharded):
    """Right: 32-bit masters for 16-bit parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, OnMasters, **SHRINKING)


@exhibit(
    "https://github.com/vllm-project/speculators/pull/765",
    year=2026,
    trial="mixed dtypes",
    phase="forward",
    says="",
    mended=WithMasters,
    plain={"from_plain": torch.optim.AdamW, "options": SHRINKING, "masters": True, "steps": 40},
)
class NoMasters(Sharded):
    """Everything had 16 bits, so a weight of 1 could not move by less than 1/256: the norms' weights were 1.0
    after the whole training.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, **SHRINKING)


class MainCopies(Sharded):
    """Right: the optimizer has copies of the values, which it steps and publishes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.main: dict[nn.Parameter, torch.Tensor] = {}
        self.copy_values()

    def copy_values(self) -> None:
        """Copy the model's values to the optimizer."""
        self.main = {param: param.detach().clone() for param in self.params()}

    def step(self) -> None:
        for param in self.params():
            param.data.copy_(self.main.setdefault(param, param.detach().clone()))
        super().step()
        MainCopies.copy_values(self)

    def set_values(self, values: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        super().set_values(values, buffers)
        self.copy_values()


@exhibit(
    "https://github.com/NovaSky-AI/SkyRL/pull/2149",
    "https://github.com/NVIDIA/Megatron-LM/pull/5071",
    year=2026,
    trial="save and load",
    phase="step",
    says="",
    mended=MainCopies,
)
class StaleMasters(MainCopies):
    """Loading changed the model and not the optimizer's copies.

    The next step wrote the old values back over the new.
    """

    def copy_values(self) -> None:
        self.main = self.main or {param: param.detach().clone() for param in self.params()}


# ----------------------------------------------------------------------------------- weights and buffers


@exhibit(
    "https://github.com/verl-project/verl/issues/7834",
    year=2026,
    trial="tied weights",
    phase="backward",
    says="",
)
class Untied(Sharded):
    """New storage was made for every parameter, so head and embedding were no longer tied, and each got only
    a part of the gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        seen: set[nn.Parameter] = set()
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if param in seen:
                    setattr(module, name, nn.Parameter(param.detach().clone()))
                seen.add(param)
        super().__init__(model)


@exhibit(
    "https://github.com/facebookresearch/fvcore/issues/152",
    "https://github.com/facebookresearch/detectron2/issues/5409",
    year=2024,
    trial="buffers",
    phase="forward",
    says="",
    mended=Wrapped,
)
class BuffersOfEachRank(Wrapped):
    """Each rank kept statistics of its own data in buffers, so the ranks evaluated different models with
    equal parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, broadcast_buffers=False)
