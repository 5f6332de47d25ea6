"""Exhibits: the step. It has another class or other options, or a piece of a matrix, or no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref_course.gallery.exhibits import exhibit
from zero_ref_course.gallery.right import LR, MuonAndAdamW, Owned, Sharded, orthogonalized

MUON: dict[str, Any] = {"from_plain": MuonAndAdamW, "options": {"lr": LR}}


class ShardedMuon(Sharded):
    """Right: matrices by Muon, the rest by AdamW, each parameter whole at its owner."""

    optimizer_class: type[torch.optim.Optimizer] = MuonAndAdamW

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, self.optimizer_class)


# --------------------------------------------------------------------------------------- another class


class LeftToTheWrapper(MuonAndAdamW):
    """Assumes that the gradients of matrices have been orthogonalized already."""

    def step_matrix(self, param: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad)


@exhibit(
    "https://github.com/deepspeedai/DeepSpeed/issues/8441",
    year=2026,
    trial="plain",
    phase="step",
    says="times the gradient",
    mended=ShardedMuon,
    plain=MUON,
)
class MuonIsSGD(ShardedMuon):
    """Muon's step left it to the ZeRO wrapper to orthogonalize the update.

    By default there is no such wrapper, so the step was plain gradient descent.
    """

    optimizer_class = LeftToTheWrapper


class AsStored(MuonAndAdamW):
    """Tests the parameter as it is stored, which is flat, for being a matrix."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        matrices = [
            param for group in self.param_groups for param in group["params"] if self.stored(param).ndim == 2
        ]
        assert not matrices  # a flat tensor has one dimension: nothing is left for Muon
        torch.optim.AdamW.step(self)

    def stored(self, param: nn.Parameter) -> torch.Tensor:
        """The part of a parameter that a rank keeps while it is sharded, as a flat tensor."""
        return param.data.flatten()[: param.numel() // dist.get_world_size()]


@exhibit(
    "https://github.com/deepspeedai/DeepSpeed/pull/8438",
    year=2026,
    trial="plain",
    phase="step",
    says="",
    mended=ShardedMuon,
    plain=MUON,
)
class MuonIsAdamW(ShardedMuon):
    """A sharded parameter is stored flat, and a flat tensor is no matrix: Muon was never chosen, and AdamW
    stepped all parameters.
    """

    optimizer_class = AsStored


# ------------------------------------------------------------------------------------ a piece of a matrix


class InPieces(MuonAndAdamW):
    """Each rank has a range of all matrices laid end to end, updates it, and sends it to the others."""

    def ranges(self) -> dict[nn.Parameter, list[slice]]:
        """The range of each rank in each matrix."""
        matrices = [param for group in self.param_groups for param in group["params"] if param.ndim == 2]
        share = -(-sum(param.numel() for param in matrices) // dist.get_world_size())
        found, start = {}, 0
        for param in matrices:
            edges = [
                min(max(rank * share - start, 0), param.numel()) for rank in range(dist.get_world_size() + 1)
            ]
            edges[-1] = param.numel()
            found[param] = [slice(a, b) for a, b in pairwise(edges)]
            start += param.numel()
        return found

    def step_matrix(self, param: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        super().step_matrix(param, grad, group)
        for rank, part in enumerate(self.ranges()[param]):
            if part.start < part.stop:
                dist.broadcast(param.data.view(-1)[part], group_src=rank)


class MuonInPieces(Sharded):
    """Right: every rank sees the whole averaged gradient, and updates a range of the matrices."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, InPieces)

    def sharded(self, params: Iterable[nn.Parameter], optimizer_class: Any, options: dict[str, Any]) -> Any:
        return optimizer_class(params, **options)


@exhibit(
    "https://github.com/deepspeedai/DeepSpeed/issues/7807",
    "https://github.com/deepspeedai/DeepSpeed/pull/8090",
    "https://github.com/deepspeedai/DeepSpeed/pull/8141",
    "https://github.com/deepspeedai/DeepSpeed/pull/8091",
    year=2026,
    trial="plain",
    phase="backward",
    says="of its own data alone: it is not reduced",
    mended=MuonInPieces,
    plain=MUON,
)
class HalfReduced(MuonInPieces):
    """Each rank got averaged gradients for its own range of elements only.

    A matrix in two ranges was orthogonalized from a mixture of averaged and local gradients.
    """

    def end_of_backward(self) -> None:
        local = {param: param.grad.clone() for param in self.params() if param.grad is not None}
        super().end_of_backward()
        for param, parts in self.optimizer.ranges().items():  # type: ignore[attr-defined]
            if param in local:
                mixed = local[param].view(-1)
                mine = parts[dist.get_rank()]
                mixed[mine] = param.grad.view(-1)[mine]
                param.grad = mixed.view_as(param)


class Rows(MuonAndAdamW):
    """Orthogonalizes the rows that this rank has."""

    def step_matrix(self, param: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
        momentum.mul_(0.9).add_(grad)
        for rows, of_momentum in zip(self.cut(param), self.cut(momentum)):
            rows.sub_(group["lr"] * orthogonalized(of_momentum))

    def cut(self, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of each rank."""
        return matrix.data.chunk(dist.get_world_size())


@exhibit(
    "https://github.com/deepspeedai/DeepSpeed/issues/8437",
    year=2026,
    trial="plain",
    phase="step",
    says="",
    mended=ShardedMuon,
    plain=MUON,
)
class RowsOfARank(ShardedMuon):
    """Each rank orthogonalized only its own rows, which does not give those of the orthogonalized matrix."""

    optimizer_class = Rows


# ------------------------------------------------------------------------------------------------ options


@exhibit(
    "https://github.com/nvidia-cosmos/cosmos-rl/pull/511",
    year=2026,
    trial="plain",
    phase="step",
    says="has eps=",
    mended=lambda model: Sharded(model, eps=2.0**-10),
    plain={"from_plain": torch.optim.AdamW, "options": {"lr": LR, "eps": 2.0**-10}},
)
class EpsNotPassedOn(Sharded):
    """The epsilon of the configuration was read and never given to the optimizer, which took its default."""

    def __init__(self, model: nn.Module, eps: float = 2.0**-10) -> None:
        super().__init__(model)
        self.eps = eps


class TakesParametersOnly(Owned):
    """Takes only the parameters from the program's groups, and builds groups of its own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({"params": param_group["params"]})


@exhibit(
    "https://github.com/deepspeedai/DeepSpeed/pull/8440",
    year=2026,
    trial="group added",
    phase="step",
    says="has lr=",
)
class GroupsDiscarded(Sharded):
    """The optimizer took only the parameters from the program's groups, and used its own lr and decay for all
    of them.
    """

    def sharded(self, params: Iterable[nn.Parameter], optimizer_class: Any, options: dict[str, Any]) -> Owned:
        return TakesParametersOnly(params, optimizer_class, **options)


DECAY = 0.5


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices, with weight decay, and biases and other vectors, without."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": DECAY},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def plain_by_kind(model: nn.Module) -> torch.optim.Optimizer:
    """The plain optimizer with the groups of `by_kind`."""
    return torch.optim.AdamW(by_kind(model), lr=LR)


class ByKind(Sharded):
    """Right: the two groups of `by_kind`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.optimizer = Owned(by_kind(model), torch.optim.AdamW, lr=LR)


@exhibit(
    "https://github.com/ServiceNow/Fast-LLM/pull/545",
    "https://github.com/verl-project/verl/issues/5070",
    year=2026,
    trial="plain",
    phase="step",
    says="times the value before the step",
    mended=ByKind,
    plain={"reference": plain_by_kind},
)
class EverythingDecays(Sharded):
    """A refactoring lost `weight_decay=False` where biases and norms are made, so weight decay shrank them
    like matrices.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, weight_decay=DECAY)


@exhibit(
    "https://github.com/huggingface/accelerate/issues/2926",
    year=2024,
    trial="scheduler",
    phase="step",
    says="has lr=",
)
class SteppedByEveryRank(Sharded):
    """The wrapped scheduler advanced once for each rank in every step: two ranks decayed twice as fast."""

    def set_lr_factor(self, factor: float) -> None:
        super().set_lr_factor(factor ** dist.get_world_size())


# ----------------------------------------------------------------------------- parameters without gradients


class ThroughCopies(Sharded):
    """Right: the optimizer has copies of the parameters, as on another device, and gradients are copied to
    them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.kept: dict[nn.Parameter, torch.Tensor | None] = {}

    def step(self) -> None:
        for param in self.params():
            self.copy_gradient(param)
        for param in self.params():
            param.grad = self.kept[param]
        super().step()

    def copy_gradient(self, param: nn.Parameter) -> None:
        """Copy the gradient of a parameter, also if it is None."""
        self.kept[param] = param.grad


@exhibit(
    "https://github.com/NVIDIA/Megatron-LM/pull/6871",
    year=2026,
    trial="unused parameters",
    phase="step",
    says="gradients of the step before where there are none",
    mended=ThroughCopies,
)
class StaleCopy(ThroughCopies):
    """If a parameter had no gradient, its copy kept the gradient of the step before, and was updated with
    that again.
    """

    def copy_gradient(self, param: nn.Parameter) -> None:
        if param.grad is not None:
            self.kept[param] = param.grad.clone()
        self.kept.setdefault(param, None)


class DecaysWithout(torch.optim.AdamW):
    """Decays every parameter, and then moves those that have a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
        super().step()


@exhibit(
    "https://github.com/KellerJordan/Muon/issues/54",
    year=2025,
    trial="frozen layer",
    phase="step",
    says="times the value before the step",
)
class DecaysWithoutGradient(Sharded):
    """Weight decay was applied to all parameters, also to those without a gradient: a frozen layer shrank."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, DecaysWithout)


@exhibit(
    "https://github.com/huggingface/accelerate/issues/3209",
    "https://github.com/huggingface/accelerate/issues/3256",
    year=2024,
    trial="plain",
    phase="step",
    says="they did not move",
)
class OldParameters(Sharded):
    """The optimizer was made before the model was wrapped, with parameters that the wrapper then replaced, so
    the model did not move.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().clone()))
