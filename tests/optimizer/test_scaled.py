"""A gradient scaler that adds up over ranks, with gradients that only owners have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from library.training import caught
from torch import nn, optim
from torch.amp.grad_scaler import OptState

from zero_ref import OSS, ShardedDataParallel, ZeroRedundancyOptimizer
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual


class AddingScaler(torch.amp.GradScaler):
    """Calls what FairScale's `ShardedGradScaler` calls, in its order."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__("cpu", init_scale=8.0, growth_interval=2)
        self.comm = comm

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():  # type: ignore[attr-defined]
            self.comm.all_reduce(found).wait()

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer._step_supports_amp_scaling:
            result = optimizer.step(*args, **kwargs, grad_scaler=self)
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
            return result
        return super().step(optimizer, *args, **kwargs)


INFINITE_AT = 2


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    drawing = torch.Generator().manual_seed(0)  # virtual ranks are threads, and share torch's own
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.5, 0.5, generator=drawing)
    return model


def data(rank: int, step: int) -> torch.Tensor:
    """Integers, whose sums are exact; in one step an infinite one on rank 0."""
    drawn = torch.randint(-3, 4, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank)).float()
    if step == INFINITE_AT and rank == 0:
        drawn[0, 0] = torch.inf
    return drawn


def plain(ranks: int) -> list[torch.Tensor]:
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.125)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(data(rank, step)).sum() / ranks).backward()
        if step != INFINITE_AT:
            optimizer.step()
    return [param.detach() for param in model.parameters()]


def on_rank(comm: Collectives, first_unscaled: bool) -> list[torch.Tensor]:
    model = make_model()
    optimizer = OSS(model.parameters(), optim.SGD, comm, lr=0.125)
    ddp, scaler = ShardedDataParallel(model, optimizer), AddingScaler(comm)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(ddp(data(comm.rank, step)).sum()).backward()
        if first_unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16.0  # two steps doubled it, the infinite one halved it, two doubled it
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize(("ranks", "first_unscaled"), [(2, False), (2, True), (3, False)])
def test_a_scaler_that_adds_up_over_ranks_trains_as_plain(ranks: int, first_unscaled: bool) -> None:
    for ours in virtual.run(on_rank, ranks, first_unscaled):  # the third rank owns nothing
        for param, expected in zip(ours, plain(ranks), strict=True):
            torch.testing.assert_close(param, expected)


def test_gradients_of_parts_of_parameters_are_refused_with_the_way_out_on_all_ranks() -> None:
    def refused(comm: Collectives) -> str:
        model = nn.Linear(64, 64)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, comm, partition="even", lr=0.1)
        ddp, scaler = ShardedDataParallel(model, optimizer), AddingScaler(comm)
        scaler.scale(ddp(torch.ones(1, 64)).sum()).backward()
        return caught(lambda: scaler.step(optimizer))

    for message in virtual.run(refused, 2):
        assert "ShardedDataParallel(..., scaled=True)" in message
