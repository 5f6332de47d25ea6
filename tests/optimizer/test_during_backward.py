"""An optimizer for each parameter, which a hook of the program's own steps during backward."""

from __future__ import annotations

from typing import Any

import torch
from library.training import caught
from torch import nn, optim
from torch.optim import Optimizer

from zero_ref import ShardedDataParallel, ZeroRedundancyOptimizer
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def step_in_hooks(optimizers: dict[nn.Parameter, Any], comm: Collectives | None = None) -> None:
    def step(param: torch.Tensor) -> None:
        if comm is not None and param.grad is not None:
            comm.all_reduce(param.grad).wait()
        optimizer: Optimizer = optimizers[param]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)


def one_each(model: nn.Module, comm: Collectives) -> dict[nn.Parameter, Any]:
    return {param: ZeroRedundancyOptimizer([param], optim.SGD, comm, lr=0.1) for param in model.parameters()}


def data(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def test_gradients_that_are_averaged_only_later_are_refused_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> str:
        model = make_model()
        step_in_hooks(one_each(model, comm))
        return caught(lambda: model(data(comm.rank)).square().sum().backward())

    for message in virtual.run(on_rank, 2):
        assert "ValueError: ranks disagree, so none can make update 1 of optimizer" in message
        assert "[gradient of parameter 0: " in message
        assert "during backward, as in a hook by register_post_accumulate_grad_hook" in message


def test_a_step_before_sharded_data_parallel_has_reduced_is_refused_by_name_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> str:
        model = make_model()
        optimizers = one_each(model, comm)
        ddp = ShardedDataParallel(model, [*optimizers.values()])
        step_in_hooks(optimizers)
        return caught(lambda: ddp(data(comm.rank)).square().sum().backward())

    for message in virtual.run(on_rank, 2):
        assert "during backward, as in a hook by register_post_accumulate_grad_hook" in message


def test_a_hook_that_averages_the_gradient_itself_trains_as_plain() -> None:
    plain = make_model()
    optimizer = optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(plain(data(rank)).square().sum() for rank in range(2)).backward()
        optimizer.step()

    def on_rank(comm: Collectives) -> list[torch.Tensor]:
        model = make_model()
        step_in_hooks(one_each(model, comm), comm)
        for _ in range(2):
            model(data(comm.rank)).square().sum().backward()
        return [param.detach() for param in model.parameters()]

    for ours in virtual.run(on_rank, 2):
        for param, expected in zip(ours, plain.parameters(), strict=True):
            # Two backwards add up in another order than one of both batches.
            torch.testing.assert_close(param, expected.detach())
