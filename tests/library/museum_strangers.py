"""Six mistakes that are not in the museum. The doctor has to find each at the right place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref.doctor import Program
from zero_ref_course.gallery.right import Owned

LR = 0.05


class Swapped(Owned):
    """The first elements of two parameters' gradients change places, as windows of a bucket may."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        first, second = [
            param.grad.view(-1)[:4] for _, param in self.numbered()[:2] if param.grad is not None
        ]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
        super().step()


class Truncated(torch.optim.Optimizer):
    """Each rank updates a slice of every parameter; what is left over by the division is updated by
    nobody.
    """

    def __init__(self, params: Any, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(params, options)
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.slices = [nn.Parameter(self.slice_of(param.data)) for param in self.params]
        self.local = optimizer_class(self.slices, **options)

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        share = whole.numel() // dist.get_world_size()
        return whole.reshape(-1)[dist.get_rank() * share :][:share].clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for param, mine in zip(self.params, self.slices):
            mine.grad = None if param.grad is None else self.slice_of(param.grad)
        self.local.step()
        for param, mine in zip(self.params, self.slices):
            flat = torch.empty(mine.numel() * dist.get_world_size(), dtype=param.dtype)
            dist.all_gather_into_tensor(flat, mine.data)
            param.data.view(-1)[: flat.numel()] = flat


class FixedRate(Owned):
    """The local optimizer keeps the learning rate of its construction; a scheduler changes another
    dictionary.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert self.local is not None
        self.local.step()
        self.publish()


class LocalSquares(torch.optim.Optimizer):
    """Averages Adam's moments over the ranks in place of the gradients.

    A mean of squares is no square of a mean.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(param, param.grad, group["lr"])

    def step_one(self, param: nn.Parameter, grad: torch.Tensor, lr: float) -> None:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        for name, beta, value in (("first", 0.9, grad), ("second", 0.999, grad.square())):
            moment = state.setdefault(name, torch.zeros_like(param))
            moment.mul_(beta).add_(value, alpha=1 - beta)
            dist.all_reduce(moment)
            moment.div_(dist.get_world_size())
        first = state["first"] / (1 - 0.9 ** state["step"])
        second = state["second"] / (1 - 0.999 ** state["step"])
        param.mul_(1 - lr * 0.01).sub_(lr * first / (second.sqrt() + 1e-8))


class NormOfBefore(Program):
    """Clips by the norm of the step before, which is there without waiting; the first step by its own."""

    before: torch.Tensor | None = None

    def clip(self, max_norm: float) -> None:
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        known = norm if self.before is None else self.before
        for grad in grads:
            grad.mul_((max_norm / known).clamp(max=1.0).to(grad.dtype))
        self.before = norm


def norm_of_before(model: nn.Module) -> Any:
    return NormOfBefore(Owned(model.parameters(), torch.optim.AdamW, lr=LR), model, averaged_by="doctor")


def in_16_bits(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations that are no strings
    """DDP's hook: the mean of the ranks' gradients, computed in bfloat16."""
    short = bucket.buffer().bfloat16().div_(dist.get_world_size())
    dist.all_reduce(short)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(short))
    return future


def swapped(model: nn.Module) -> Any:
    ddp = DDP(model)
    return Swapped(ddp.parameters(), torch.optim.AdamW, lr=LR), ddp


def truncated(model: nn.Module) -> Any:
    ddp = DDP(model)
    return Truncated(ddp.parameters(), torch.optim.AdamW, lr=LR), ddp


def fixed_rate(model: nn.Module) -> Any:
    ddp = DDP(model)
    return FixedRate(ddp.parameters(), torch.optim.AdamW, lr=LR), ddp


def rounded_on_the_way(model: nn.Module) -> Any:
    """Gradients travel in 16 bits, which are enough for the doctor's whole numbers up to 256, and not for
    more.
    """
    ddp = DDP(model)
    ddp.register_comm_hook(None, in_16_bits)
    return Owned(ddp.parameters(), torch.optim.AdamW, lr=LR), ddp


def local_squares(model: nn.Module) -> Any:
    return LocalSquares(model.parameters(), lr=LR), model
