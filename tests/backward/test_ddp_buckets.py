"""The bucket rule against DistributedDataParallel itself, on two Gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.lab import ranks
from zero_ref.lab.meter import DDPRecorder
from zero_ref.plan.calls import Call
from zero_ref.simulator.models import from_module, ready_order
from zero_ref.simulator.schedule import ddp_buckets, schedule

pytestmark = pytest.mark.ranks

MIB = 2**20


# Each makes a model and an input for it.
Made = tuple[nn.Module, torch.Tensor]


def linear_layers() -> Made:
    """36 MB: several buckets also under the default caps."""
    layers = [layer for _ in range(9) for layer in (nn.Linear(1000, 1000), nn.ReLU())]
    return nn.Sequential(*layers), torch.ones(2, 1000)


class Transformer(nn.Module):
    """A block with norms, biases and a tied head; some parameters are registered out of the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 500, bias=False)
        self.tokens = nn.Embedding(500, 64)
        self.head.weight = self.tokens.weight
        self.positions = nn.Embedding(16, 64)
        self.norm, self.last_norm = nn.LayerNorm(64), nn.LayerNorm(64)
        self.project, self.attend = nn.Linear(64, 64), nn.Linear(64, 192)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        query, key, value = self.attend(self.norm(x)).chunk(3, dim=-1)
        x = x + self.project(nn.functional.scaled_dot_product_attention(query, key, value)) * self.scale
        return self.head(self.last_norm(x))


def transformer() -> Made:
    return Transformer(), torch.arange(16).view(1, 16)


def convolutions() -> Made:
    layers = [
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 32, 3),
        nn.GroupNorm(4, 32),
        nn.Conv2d(32, 8, 3),
    ]
    return nn.Sequential(*layers), torch.ones(2, 3, 10, 10)


class Mixed(nn.Module):
    """Two dtypes by turns, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
        self.layers = nn.ModuleList(nn.Linear(40, 40, dtype=dtype) for dtype in dtypes)
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def mixed() -> Made:
    return Mixed(), torch.ones(2, 40)


def buckets_of_iterations(make: Callable[[], Made], iterations: int, **options: Any) -> list[list[list[int]]]:
    """On a rank: for each iteration, the parameters of each bucket that DDP reduces, in order."""
    torch.manual_seed(0)
    model, batch = make()
    ddp = DistributedDataParallel(model, **options)
    number = {id(param): index for index, param in enumerate(model.parameters())}
    seen: list[list[int]] = []

    def reduce(_, bucket):  # DDP refuses annotations that are strings, as all are in this file
        seen.append([number[id(param)] for param in bucket.parameters()])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, reduce)
    of_iteration = []
    for _ in range(iterations):
        ddp(batch).sum().backward()
        of_iteration.append(list(seen))
        seen.clear()
    return of_iteration


CASES = [
    pytest.param(linear_layers, 5, id="linear-5-MiB"),
    pytest.param(transformer, 0.02, id="transformer-0.02-MiB"),
    pytest.param(transformer, 0.0001, id="transformer-one-each"),
    pytest.param(convolutions, 0.005, id="convolutions-0.005-MiB"),
    pytest.param(mixed, 0.01, id="mixed-0.01-MiB"),
]


@pytest.mark.parametrize(("make", "cap_mb"), CASES)
def test_from_the_second_iteration_on_ddp_reduces_the_buckets_that_we_foresee(
    make: Callable[[], Made], cap_mb: float | None
) -> None:
    # The prediction is made here, in one process: shapes, and the order in which one backward goes.
    model, batch = make()
    params = from_module(model)
    order = ready_order(model, lambda: model(batch).sum().backward())
    foreseen = ddp_buckets(params, order, None if cap_mb is None else int(cap_mb * MIB))

    options = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
    for first, *later in ranks.run(buckets_of_iterations, 2, make, 4, backend="gloo", **options):
        dtypes = {param.dtype for param in params if param.trainable}
        assert len(first) == len(dtypes), "the first iteration has one bucket for each dtype"
        assert later == [foreseen] * 3


def test_the_default_order_is_right_for_a_stack_of_linear_layers() -> None:
    model, _ = linear_layers()
    foreseen = ddp_buckets(from_module(model))
    assert len(foreseen) > 2
    for of_iteration in ranks.run(buckets_of_iterations, 2, linear_layers, 3, backend="gloo"):
        assert of_iteration[2] == foreseen


def recorded_calls(iterations: int) -> list[Call]:
    model, batch = transformer()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # type: ignore[arg-type]
    recorder = DDPRecorder(ddp)
    for _ in range(iterations):
        recorder.calls.clear()
        ddp(batch).sum().backward()
    return recorder.calls


def test_the_calls_that_the_meter_records_are_the_schedules() -> None:
    model, batch = transformer()
    params = from_module(model)
    order = ready_order(model, lambda: model(batch).sum().backward())
    plan = schedule("ddp", params, 2, ddp_buckets=ddp_buckets(params, order, int(0.02 * MIB)))
    assert plan.collectives > 1
    for calls in ranks.run(recorded_calls, 2, 3, backend="gloo"):
        assert tuple(calls) == plan.calls
