"""The package's paths on ranks, as programs that run on the pretend device and on the CPU alike.

Each takes a `Place` and trains a small model. On the device `place.watch` notes what goes wrong within its
block; on the CPU it does nothing, and the parameters at the end are what the device's have to equal.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretend_device as device
import pretend_group
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from zero_ref import (
    OSS,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    load_sharded,
    reduce_to_owners,
    save_sharded,
)

SIZES = (12, 40, 33, 7)
"""Inputs, hidden features and outputs: sizes that are no multiples of anything."""

STEPS = 3
"""The first step compares facts between ranks, and makes state; the others are watched."""


ANY = ""
"""Allows waits at any place."""


@dataclass
class Place:
    """The device and group of a program, and the errors that were found there."""

    device: torch.device
    group: Any
    rank: int
    found: dict[str, list[str]] = field(default_factory=dict)

    @property
    def has_cpu(self) -> bool:
        """Whether control messages are on the CPU."""
        return bool(getattr(self.group, "has_cpu", False))

    @contextlib.contextmanager
    def watch(self, *allowed: str, at_most: int | None = None) -> Iterator[None]:
        """Note what goes wrong within; `allowed` are places of documented waits, of so many at most."""
        if self.device.type == "cpu":
            yield
            return
        gc.collect()  # else what is freed within may have been used before
        device.gpu.forget()
        yield
        gc.collect()
        # Ranks compare facts before updates 1, 2, 4, 8, ...; inputs come from the host.
        documented = [place for place in device.gpu.waits if any(name in place for name in allowed)]
        if at_most is not None and len(documented) > at_most:
            self.found["too many waits"] = documented
        allowed = (*allowed, "agreement.py:", "host at paths.py")
        for kind, places in device.gpu.findings().items():
            # A call that torch makes for the program, as Join does, frees what torch's group still holds.
            ignored = {"waits": allowed, "frees": ("at paths.py",)}.get(kind, ())
            new = [place for place in places if not any(name in place for name in ignored)]
            self.found.setdefault(kind, []).extend(new)
        self.found = {kind: places for kind, places in self.found.items() if places}
        device.gpu.forget()

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        torch.manual_seed(0)
        layers = [part for sizes in itertools.pairwise(SIZES) for part in (nn.Linear(*sizes), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).to(self.device, dtype)

    def loss(self, model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        inputs = torch.randn(8, SIZES[0], generator=generator).to(dtype)
        return model(inputs.to(self.device, non_blocking=True)).square().sum()


Program = Callable[..., list[torch.Tensor]]
PATHS: dict[str, Program] = {}


def path(program: Program) -> Program:
    PATHS[program.__name__] = program
    return program


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().cpu().float() for param in model.parameters()]


def adamw(params: Any, place: Place, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, process_group=place.group, lr=1e-2, **options)


@path
def step(place: Place, rounded: bool = False, **options: Any) -> list[torch.Tensor]:
    """A step by itself: gradients are there."""
    model = place.model()
    if rounded:
        adam = {"lr": 1e-2, "broadcast_dtype": torch.bfloat16}
        zero: Any = OSS(model.parameters(), torch.optim.AdamW, place.group, **adam)
    else:
        zero = adamw(model.parameters(), place, **options)
    for number in range(STEPS):
        place.loss(model, number).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=place.group)
        with place.watch() if number else contextlib.nullcontext():
            zero.step()
            zero.zero_grad()
    return values(model)


def ddp(place: Place, model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=place.group, **options)


def alternating(numels: list[int], world_size: int) -> list[list[int]]:
    """Neighbours have different owners, so that an owner has several runs of a bucket of DDP."""
    return [list(range(rank, len(numels), world_size)) for rank in range(world_size)]


@path
def after_ddp(place: Place, hook: str = "none", clip: bool = False, **options: Any) -> list[torch.Tensor]:
    """DDP reduces, everywhere or to owners; then clipping and a step."""
    model = place.model()
    wrapped = ddp(place, model, bucket_cap_mb=0.003)
    zero = adamw(model.parameters(), place, **options)
    if hook != "none":
        by = "pairs" if hook == "pairs" else None  # by reduce, where NCCL carries the bucket
        wrapped.register_comm_hook(None, reduce_to_owners(zero, scaled=hook == "scaled", by=by))
    for number in range(STEPS):
        # A norm that clips is read by the host, once; so is the search for infinities, where messages are.
        waits = clip + (hook == "scaled" and place.has_cpu)
        watched = place.watch("grad_norm.py", "share_infinities", at_most=waits)
        with watched if number else contextlib.nullcontext():
            place.loss(wrapped, number).backward()
            if clip:
                clip_grad_norm_(zero, 1.0)
            zero.step()
            zero.zero_grad()
    return values(model)


@path
def two_optimizers(place: Place, **options: Any) -> list[torch.Tensor]:
    """One hook and one norm for both. Ranks send their norms as a text, which the host reads."""
    model = place.model()
    params = list(model.parameters())
    wrapped = ddp(place, model, bucket_cap_mb=0.003)
    zeros = [adamw(params[first::2], place, **options) for first in range(2)]
    wrapped.register_comm_hook(None, reduce_to_owners(zeros))
    for number in range(STEPS):
        with place.watch("grad_norm.py", "gather_bytes") if number else contextlib.nullcontext():
            place.loss(wrapped, number).backward()
            clip_grad_norm_(zeros, 1.0)
            for zero in zeros:
                zero.step()
                zero.zero_grad()
    return values(model)


@path
def in_backward(
    place: Place, interleaved: bool, owners: bool, by: str | None = None, **options: Any
) -> list[torch.Tensor]:
    """The update within DDP's backward, and a forward right after it."""
    model = place.model()
    wrapped = ddp(place, model, bucket_cap_mb=0.003)
    zero = adamw(model.parameters(), place, overlap_with_ddp=True, **options)
    inner = reduce_to_owners(zero, by=by) if owners else allreduce_hook
    with_step = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    state = None if owners else place.group
    wrapped.register_comm_hook(state, with_step(inner, wrapped, zero))
    for number in range(STEPS):
        with place.watch() if number else contextlib.nullcontext():
            place.loss(wrapped, number).backward()
            zero.step()
            zero.zero_grad()
            place.loss(model, number).detach()
    return values(model)


@path
def sharded(
    place: Place,
    backwards: int = 1,
    in_forward: bool = False,
    replicas: bool = False,
    scaled: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Gradients without DDP, reduced into shards; with replicas in groups of two ranks."""
    model = place.model()
    own, across = place.group, None
    if replicas:
        own, across = groups_of_two(place)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=own, lr=1e-2, **options
    )
    wrapped = ShardedDataParallel(model, zero, gather_in_forward=in_forward, replicas=across, scaled=scaled)
    for number in range(STEPS):
        waits = (backwards > 1) + backwards * (scaled and place.has_cpu)
        watched = place.watch("grad_norm.py", "share_infinities", at_most=waits)
        with watched if number else contextlib.nullcontext():
            for backward in range(backwards):
                is_last = backward == backwards - 1 or backwards == 2
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    place.loss(wrapped, 10 * number + backward).backward()
            if backwards > 1:
                clip_grad_norm_(zero, 1.0)
            zero.step()
            zero.zero_grad()
    with place.watch():
        place.loss(wrapped, 0).detach()
    wrapped.wait_for_parameters()
    return values(model)


def groups_of_two(place: Place) -> tuple[Any, Any]:
    """This rank's group of neighbours, and that of the ranks with its position in other groups."""
    size, mine = dist.get_world_size(place.group), []
    near = [[rank, rank + 1] for rank in range(0, size, 2)]
    far = [list(range(place, size, 2)) for place in range(2)]
    for ranks in (*near, *far):
        new = dist.new_group if place.device.type == "cpu" else pretend_group.new_group
        group = new(ranks=ranks)
        if place.rank in ranks:
            mine.append(group)
    return mine[0], mine[1]


@path
def masters(place: Place, **options: Any) -> list[torch.Tensor]:
    """A 16-bit model with 32-bit copies."""
    model = place.model(torch.bfloat16)
    zero = adamw(model.parameters(), place, master_dtype=torch.float32, **options)
    wrapped = ShardedDataParallel(model, zero)
    for number in range(STEPS):
        with place.watch() if number else contextlib.nullcontext():
            place.loss(wrapped, number, torch.bfloat16).backward()
            zero.step()
            zero.zero_grad()
    return values(model)


@path
def offload(place: Place, **options: Any) -> list[torch.Tensor]:
    """State in the host's memory: the local step waits for its gradients, a piece at a time."""
    model = place.model()
    zero = adamw(model.parameters(), place, state_device="cpu", **options)
    wrapped = ddp(place, model)
    mode = device.HostUse() if place.device.type != "cpu" else contextlib.nullcontext()
    for number in range(STEPS):
        place.loss(wrapped, number).backward()
        with place.watch("offload.py") if number else contextlib.nullcontext(), mode:
            zero.step()
            zero.zero_grad()
    return values(model)


@path
def state(place: Place, **options: Any) -> list[torch.Tensor]:
    """Gather, load, cut anew, save in shards, freeze and extend between steps."""
    model = place.model()
    wrapped = ddp(place, model)
    zero = adamw(model.parameters(), place, **options)

    def iteration(number: int) -> None:
        place.loss(wrapped, number).backward()
        zero.step()
        zero.zero_grad()

    with place.watch(ANY):  # the host waits as it needs
        iteration(0)
        zero.consolidate_state_dict(to=0)
        zero.consolidate_state_dict(to="all")
        zero.load_state_dict(zero.state_dict())
        iteration(1)
        folder = [tempfile.mkdtemp()] if place.rank == 0 else [None]
        dist.broadcast_object_list(folder)  # the default group is Gloo
        save_sharded(zero, Path(folder[0] or "") / "save")
        iteration(2)
        load_sharded(zero, Path(folder[0] or "") / "save")
        first = next(model.parameters()).requires_grad_(False)
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        zero.step()
        first.requires_grad_(True)
        extra = nn.Parameter(torch.ones(70, device=place.device))
        zero.add_param_group({"params": [extra]})
        for param in (*model.parameters(), extra):
            param.grad = torch.ones_like(param)
        zero.step()
    with place.watch():
        zero.step()
    dist.barrier()  # no rank still reads the folder
    if place.rank == 0:
        shutil.rmtree(folder[0] or "")
    return [*values(model), extra.detach().cpu()]


@path
def uneven(place: Place, **options: Any) -> list[torch.Tensor]:
    """A Join in which rank 1 runs out of data first."""
    model = place.model()
    zero = adamw(model.parameters(), place, **options)
    wrapped = ddp(place, model)
    with place.watch(ANY), Join([wrapped, zero]):  # who waits for whom is known only there
        for number in range(4 - place.rank):
            place.loss(wrapped, number).backward()
            zero.step()
            zero.zero_grad()
    return values(model)


@path
def averaged(place: Place) -> list[torch.Tensor]:
    """Local SGD: parameters are averaged, gradients are not."""
    model = place.model()
    averager = PeriodicModelAverager(period=2, warmup_steps=0, process_group=place.group)
    local = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), averager)
    for number in range(2 * STEPS):
        with place.watch("_average"):  # ranks compare at averages 1, 2, 4, ...
            place.loss(model, number).backward()
            local.step()
            local.zero_grad()
    return values(model)
