"""A sharded optimizer with the interface that Stanford's CS336 asks for; `test_sharded_class` breaks it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
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
