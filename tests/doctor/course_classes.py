"""What Stanford's CS336 asks for, written from its text: a sharded optimizer, a DDP and an FSDP.

`test_doctor_class.py` breaks them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


class ShardedOptimizer(Optimizer):
    def __init__(self, params: Iterable[Any], optimizer_cls: type[Optimizer], **kwargs: Any) -> None:
        self.inner: Optimizer | None = None
        self.optimizer_cls, self.options = optimizer_cls, kwargs
        self.elements = [0] * dist.get_world_size()
        self.owner: dict[torch.Tensor, int] = {}
        super().__init__(params, kwargs)

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        group = self.param_groups[-1]
        for param in group["params"]:
            emptiest = self.elements.index(min(self.elements))
            self.owner[param] = emptiest
            self.elements[emptiest] += param.numel()
        own = [param for param in group["params"] if self.owner[param] == dist.get_rank()]
        local = {**group, "params": own}
        if self.inner is None:
            self.inner = self.optimizer_cls([local], **self.options)
        else:
            self.inner.add_param_group(local)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        assert self.inner is not None
        for outer, local in zip(self.param_groups, self.inner.param_groups):
            local.update({key: value for key, value in outer.items() if key != "params"})
        loss = self.inner.step(closure, **kwargs)
        for param, owner in self.owner.items():
            dist.broadcast(param.data, owner)
        return loss


class DDP(nn.Module):
    """Averages each gradient as soon as backward has it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.works: list[tuple[Any, nn.Parameter]] = []
        for param in module.parameters():
            dist.broadcast(param.data, 0)
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.start)

    def start(self, param: nn.Parameter) -> None:
        self.works.append((dist.all_reduce(param.grad, async_op=True), param))

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def finish_gradient_synchronization(self) -> None:
        for work, param in self.works:
            work.wait()
            param.grad /= dist.get_world_size()
        self.works.clear()


def get_ddp(module: nn.Module) -> DDP:
    return DDP(module)


class Gather(torch.autograd.Function):
    """A whole matrix of the ranks' shards; backward averages its gradient onto them."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        sent = shard.to(dtype)
        parts = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, sent)
        return torch.cat(parts)[: shape.numel()].view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        count = dist.get_world_size()
        flat = nn.functional.pad(grad.flatten(), (0, -grad.numel() % count))
        mine = torch.empty(len(flat) // count, dtype=flat.dtype)
        dist.reduce_scatter(mine, list(flat.chunk(count)))
        return mine.float() / count, None, None


class FSDP(nn.Module):
    """Keeps a shard of each matrix, and has the whole one while a layer computes."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module, self.dtype = module, compute_dtype or torch.float32
        rank, count = dist.get_rank(), dist.get_world_size()
        self.shapes: dict[nn.Module, torch.Size] = {}
        for param in module.parameters():
            dist.broadcast(param.data, 0)
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                self.shapes[layer] = layer.weight.shape
                flat = nn.functional.pad(layer.weight.data.flatten(), (0, -layer.weight.numel() % count))
                del layer.weight
                layer.shard = nn.Parameter(flat.chunk(count)[rank].clone())
                layer.register_forward_pre_hook(self.unshard)
                layer.register_forward_hook(self.reshard)

    def unshard(self, layer: nn.Module, _: Any) -> None:
        layer.weight = Gather.apply(layer.shard, self.shapes[layer], self.dtype)

    def reshard(self, layer: nn.Module, _: Any, output: Any) -> None:
        del layer.weight

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def finish_gradient_synchronization(self) -> None:
        for name, param in self.module.named_parameters():
            if not name.endswith("shard") and param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        whole = {name: param for name, param in self.module.named_parameters() if not name.endswith("shard")}
        for name, layer in self.module.named_modules():
            if layer in self.shapes:
                whole[f"{name}.weight"] = Gather.apply(layer.shard, self.shapes[layer], torch.float32)
        return whole


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> FSDP:
    return FSDP(module, compute_dtype)


def fsdp_on_after_backward(fsdp: FSDP, optimizer: Optimizer) -> None:
    fsdp.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp: FSDP) -> dict[str, torch.Tensor]:
    return fsdp.gather_full_params()
