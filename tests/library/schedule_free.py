"""A schedule-free optimizer in few lines, and a program that switches it, for tests of both packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from library.training import Backward, OnMasters
from torch import nn
from torch.optim import Optimizer


class Free(Optimizer):
    """Schedule-free SGD: it trains at y and is evaluated at x, the average of what it has been through.

    As pytorch_optimizer's, its methods write through `.data`, which leaves no trace in versions.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    def _switch(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                weight = 1 - (group["beta"] if train_mode else 1 / group["beta"])
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.data.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.detach().clone())
                    param.lerp_(z, 1 / group["k"])
                    param.sub_(param.grad, alpha=group["lr"] * (1 - group["beta"]))
                    z.sub_(param.grad, alpha=group["lr"])


class FreeOnMasters(OnMasters):
    """A reference for a schedule-free optimizer with masters, which must equal it."""

    def train(self) -> None:
        self.switch("train")

    def eval(self) -> None:
        self.switch("eval")

    @torch.no_grad()
    def switch(self, method: str) -> None:
        self.copy_options(self.param_groups, self.optim.param_groups)
        getattr(self.optim, method)()
        for param, master in self.pairs:
            if master is not param:
                self.publish(param, master)
        self.copy_options(self.optim.param_groups, self.param_groups)


def switching(model: nn.Module, optimizer: Any, backward: Backward) -> Iterator[None]:
    """A script that evaluates after every other update, in each call a second time for nothing."""
    optimizer.train()
    for step in range(4):
        backward(step)
        optimizer.step()
        yield
        if step % 2:
            for switch in (optimizer.eval, optimizer.eval, optimizer.train, optimizer.train):
                switch()
                yield
    optimizer.eval()
    yield
