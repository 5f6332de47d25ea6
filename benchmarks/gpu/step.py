"""AdamW's step on flat shards, against what a plain copy reads and writes on the same device."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks import contenders
from benchmarks.contenders import ADAMW_BYTES
from benchmarks.gpu.budget import Budget, Found, alone
from benchmarks.results import Spread, spread
from benchmarks.rounds import WARM_UP, Case
from benchmarks.training import WithGiven
from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm import devices
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.rules import equal_shares
from zero_ref.simulator.models import ParamShape, shapes

MASTERS_BYTES = 2 + 4 + ADAMW_BYTES + 4 + 2
"""A step of 16-bit parameters by 32-bit masters here: the gradient is read and written as 32 bits, AdamW runs
on the masters, and these are read and written back as 16 bits. Three kernels, one after the other."""

LEAST_MASTERS_BYTES = ADAMW_BYTES + 2
"""The bytes that a single kernel would move, given 32-bit gradients: AdamW's, and the 16-bit result."""

COPIED_BYTES = 2**30
COPY = "copy"


def step(
    device: torch.device,
    budget: Budget,
    *,
    models: Sequence[str | tuple[ParamShape, ...]] = ("gpt2", "gpt2-medium"),
    copied_bytes: int = COPIED_BYTES,
    rounds: int = 15,
) -> Found:
    """The step of one rank that owns all, in float32 and on masters, beside AdamW alone and a plain copy.

    Gradients lie in the flat tensors of ShardedDataParallel, so a step is one fused kernel for each range of
    the partition. All contenders and the copy take turns, and a share of the copy's bandwidth is a median of
    ratios, one from each round.

    Args:
        models: the parameters' shapes, or names of `models.MODELS`; the largest for which there is memory
            and time is the one that counts.
        copied_bytes: how much the copy moves: half of it is read, half written.
    """
    listed: list[Found] = []
    with alone(device):
        for model in models:
            of_shapes = shapes(model) if isinstance(model, str) else model
            numel = sum(one.numel for one in of_shapes)
            total = devices.total_memory(device)
            name = model if isinstance(model, str) else f"{len(of_shapes)} tensors"
            # Ours, AdamW alone and ours on masters, with gradients and casts: 20, 16 and 24 bytes an element.
            if budget.over or (total is not None and 60 * numel + copied_bytes > 0.9 * total):
                listed.append({"model": name, "left_out": "no time was left" if budget.over else "too large"})
                continue
            cases, copy = _steps(device, of_shapes, copied_bytes)
            taken = in_turns(device, cases, rounds, meanwhile=copy)
            listed += [_step_row(name, numel, what, taken, copied_bytes) for what in BYTES_OF_STEP]
            del cases, copy
            gc.collect()
            devices.release_memory(device)
    return {"steps": listed}


class Time(NamedTuple):
    """Milliseconds of one call, for the device from its first kernel to its last, and for the host."""

    device_ms: float
    host_ms: float


QUEUED = 8
"""Copies of a GiB that are queued before what is timed. They take longer than the host needs for a step."""


def in_turns(
    device: torch.device,
    cases: Mapping[str, Case],
    rounds: int,
    *,
    meanwhile: Callable[[], object],
    seed: int = 0,
) -> dict[str, list[Time]]:
    """Time every case once in each round, in an order drawn anew, after rounds that do not count.

    Before each there is other work in the device's queue, as a step finds backward's. So the device does not
    wait for the host, and two events around the case say what it took by itself. A CPU has no queue.

    Args:
        meanwhile: queues the other work, a part of it each time.
    """
    times: dict[str, list[Time]] = {name: [] for name in cases}
    drawn = random.Random(seed)
    for number in range(WARM_UP + rounds):
        for name in drawn.sample(list(cases), len(cases)):
            case = cases[name]
            case.before()
            devices.synchronize()
            for _ in range(QUEUED if devices.is_accelerator(device) else 0):
                meanwhile()
            with devices.timing_events(device) as elapsed_ms:
                began = time.perf_counter()
                case.run()
                host_ms = 1e3 * (time.perf_counter() - began)
            device_ms = elapsed_ms()
            case.after()
            if number >= WARM_UP:
                times[name].append(Time(host_ms if device_ms is None else device_ms, host_ms))
    return times


BYTES_OF_STEP = {
    "zero_ref, float32": (ADAMW_BYTES, ADAMW_BYTES),
    "torch's fused AdamW, float32": (ADAMW_BYTES, ADAMW_BYTES),
    "zero_ref, bfloat16 with float32 masters": (MASTERS_BYTES, LEAST_MASTERS_BYTES),
}
"""By contender: bytes a parameter that its kernels move, and that one kernel for the same would move."""


def _steps(
    device: torch.device, of_shapes: Sequence[ParamShape], copied_bytes: int
) -> tuple[dict[str, Case], Callable[[], object]]:
    """All contenders, and the copy alone."""
    ours, whole, masters = BYTES_OF_STEP
    numel = sum(one.numel for one in of_shapes)
    flat = torch.zeros(numel, device=device, requires_grad=True)
    flat.grad = torch.full_like(flat, 1e-3)
    source = torch.ones(copied_bytes // 8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    cases = {
        ours: _sharded_step(device, of_shapes, torch.float32),
        whole: Case(AdamW([flat], fused=True).step),
        masters: _sharded_step(device, of_shapes, torch.bfloat16),
        COPY: Case(copy),
    }
    return cases, copy


def _sharded_step(device: torch.device, of_shapes: Sequence[ParamShape], dtype: torch.dtype) -> Case:
    """A step with gradients that a backward under ShardedDataParallel has just left in the shards."""
    params = [nn.Parameter(torch.zeros(one.shape, dtype=dtype, device=device)) for one in of_shapes]
    given = [torch.full_like(param, 1e-3, requires_grad=False) for param in params]
    zero = ZeroRedundancyOptimizer(
        params,
        AdamW,
        partition=equal_shares,
        master_dtype=torch.float32 if dtype != torch.float32 else None,
        **contenders.BEST,
    )
    model = ShardedDataParallel(WithGiven(nn.ParameterList(params), given), zero)
    return Case(zero.step, before=lambda: model().backward(), after=zero.zero_grad)


def _step_row(
    model: str, numel: int, what: str, taken: Mapping[str, Sequence[Time]], copied_bytes: int
) -> Found:
    moved, least = BYTES_OF_STEP[what]
    ms, copy_ms = ([one.device_ms for one in taken[name]] for name in (what, COPY))

    def share(an_element: int) -> Spread:
        return spread(
            [(an_element * numel / one) / (copied_bytes / of_copy) for one, of_copy in zip(ms, copy_ms)]
        )

    return {
        "model": model,
        "what": what,
        "parameters": numel,
        "ms": ms,
        "host_ms": [one.host_ms for one in taken[what]],
        "copy_ms": copy_ms,
        "bytes_a_parameter": moved,
        "gb_per_s": numel * moved / statistics.median(ms) / 1e6,
        "copy_gb_per_s": copied_bytes / statistics.median(copy_ms) / 1e6,
        "share_of_copy": list(share(moved)),
        "least_bytes_a_parameter": least,
        "share_of_copy_by_least_bytes": list(share(least)),
    }
