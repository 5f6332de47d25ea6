"""Programs that are right, in many ways: about none of them has the doctor anything to say.

`RIGHT` has their factories by name, each with what the doctor is given of the plain loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.optim as torchs
from library.planted import OPTIONS, Hooked
from library.wrong_programs import (
    OWN,
    ClippedBeforeUnscaling,
    GathersLate,
    Hybrid,
    Wrapped as OwnWrapper,
    by_tokens,
    token_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zero_ref import OSS, ShardedDataParallel, ZeroRedundancyOptimizer, reduce_to_owners
from zero_ref.doctor import Program
from zero_ref.doctor.adapters import FSDP2
from zero_ref.doctor.program import average
from zero_ref.plan.choice import RULES
from zero_ref.stairs import buckets, owners
from zero_ref_course.gallery import all_exhibits
from zero_ref_course.gallery.exhibits import ADAMW
from zero_ref_course.gallery.gradients import Buffered, Wrapped
from zero_ref_course.gallery.loads import MainCopies, WithMasters
from zero_ref_course.gallery.right import LR, Owned, Sharded
from zero_ref_course.gallery.steps import (
    MUON,
    ByKind,
    MuonInPieces,
    ShardedMuon,
    ThroughCopies,
    plain_by_kind,
)

SGD: dict[str, Any] = {"from_plain": torch.optim.SGD, "options": {"lr": LR, "momentum": 0.9}}


def ddp_of(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=True, **options)


def torchs_zero(model: nn.Module, **options: Any) -> Any:
    ddp = ddp_of(model)
    return torchs.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=LR, **options), ddp


def ours(model: nn.Module, **options: Any) -> Any:
    ddp = ddp_of(model)
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=LR, **options), ddp


def momentum(model: nn.Module) -> Any:
    ddp = ddp_of(model)
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, lr=LR, momentum=0.9, partition="even"
    ), ddp


def alone(model: nn.Module) -> Any:
    """An optimizer and no wrapper: the doctor averages."""
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, partition="even")


def oss(model: nn.Module) -> Any:
    ddp = ddp_of(model)
    return OSS(ddp.parameters(), torch.optim.AdamW, lr=LR), ddp


def to_shards(model: nn.Module, **options: Any) -> Any:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, partition="even")
    return optimizer, ShardedDataParallel(model, optimizer, **options)


def to_owners(model: nn.Module) -> Any:
    ddp = ddp_of(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=LR)
    ddp.register_comm_hook(None, reduce_to_owners(optimizer))
    return optimizer, ddp


def with_masters(model: nn.Module) -> Any:
    ddp = ddp_of(model)
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, master_dtype=torch.float32, lr=LR
    ), ddp


def groups(model: nn.Module) -> Any:
    ddp = ddp_of(model)
    params = list(ddp.parameters())
    decay, rest = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    given = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    return ZeroRedundancyOptimizer(given, torch.optim.AdamW, lr=LR, partition="balanced"), ddp


def muon_at_owners(model: nn.Module) -> Any:
    ddp = ddp_of(model)
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Muon, lr=0.05), ddp


class Fsdp2(Program):
    """Parameters are DTensors, gathered where they are used."""

    def __init__(self, model: nn.Module) -> None:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        super().__init__(torch.optim.AdamW(model.parameters(), lr=LR), model)


class Stair(Program):
    """A stair has one idea: its optimizer has neither groups nor zero_grad, and loads nothing."""

    def __init__(self, module: Any, model: nn.Module) -> None:
        ddp = ddp_of(model)
        optimizer = module.MinimalZero(ddp.parameters(), torch.optim.AdamW, lr=LR)
        super().__init__(optimizer, model, ddp)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)


EPS = all_exhibits()["EpsNotPassedOn"]
RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "DDP": (Wrapped, ADAMW),
    "torch's ZeRO": (torchs_zero, ADAMW),
    "torch's ZeRO, buckets": (partial(torchs_zero, parameters_as_bucket_view=True), ADAMW),
    # torch clips no DTensors together with other gradients.
    "FSDP2": (Fsdp2, {**ADAMW, "without": ("group added",)}),
    **{f"partition {rule}": (partial(ours, partition=rule), ADAMW) for rule in RULES},
    "buckets": (partial(ours, partition="even", parameters_as_bucket_view=True), ADAMW),
    "momentum": (momentum, SGD),
    "no wrapper": (alone, ADAMW),
    "OSS": (oss, ADAMW),
    "ShardedDataParallel": (to_shards, ADAMW),
    "new parameters in forward": (partial(to_shards, gather_in_forward=True), ADAMW),
    "may change": (partial(to_shards, may_change=True), ADAMW),
    "gradients to owners": (to_owners, ADAMW),
    "masters": (with_masters, {**ADAMW, "masters": True}),
    "two groups": (groups, {"reference": plain_by_kind}),
    "state on the CPU": (partial(ours, state_device="cpu"), ADAMW),
    "stair owners": (partial(Stair, owners), ADAMW),
    # One flat tensor has one dtype: that stair says so, and raises nothing.
    "stair buckets": (partial(Stair, buckets), {**ADAMW, "without": ("mixed dtypes",)}),
    "the museum's": (Sharded, ADAMW),
    "a gradient buffer": (Buffered, ADAMW),
    "copies of gradients": (ThroughCopies, ADAMW),
    "copies of values": (MainCopies, ADAMW),
    "Muon": (ShardedMuon, MUON),
    "Muon in pieces": (MuonInPieces, MUON),
    "Muon at owners": (muon_at_owners, {"from_plain": torch.optim.Muon, "options": {"lr": 0.05}}),
    "eps passed on": (EPS.mended, EPS.plain),
    "by hooks": (Hooked, ADAMW | {"options": OPTIONS}),
    "groups by kind": (ByKind, {"reference": plain_by_kind}),
    "the museum's masters": (
        WithMasters,
        {**ADAMW, "masters": True, "options": {"lr": 2.0**-12, "weight_decay": 6.0}},
    ),
}

# ------------------------------------------------- conventions that programs have, and models of their own

DECAYING: dict[str, Any] = {"from_plain": torch.optim.AdamW, "options": OPTIONS}


class MeanOfMicroBatches(Hooked):
    """As most training loops do, it divides by the number of micro-batches."""

    micro_batches = 0

    def backward(self, loss):
        super().backward(loss)
        self.micro_batches += 1

    def end_of_backward(self):
        super().end_of_backward()
        for param in self.everything():
            param.grad /= self.micro_batches
        self.micro_batches = 0


class Predivided(Hooked):
    """Divided by the root of the number of ranks before the sum, and again after it."""

    def end_of_backward(self):
        root = dist.get_world_size() ** 0.5
        for param in self.everything():
            param.grad /= root
        average([*self.model.parameters(), *self.added.parameters()])
        for param in self.everything():
            param.grad *= root


class ScaledLoss(ClippedBeforeUnscaling):
    def clip(self, max_norm):
        self.unscale()
        Hooked.clip(self, max_norm)


def on_a_mesh(model):
    ranks = dist.get_world_size()
    shape = (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return fsdp2(model, mesh=mesh)


def in_bfloat16(model):
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp2(model, **options):
    for layer in model.children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return FSDP2(torch.optim.AdamW(model.parameters(), **OPTIONS), model)


def in_16_bits(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations that are no strings
    """DDP's hook: the mean of the ranks' gradients, computed in bfloat16."""
    short = bucket.buffer().bfloat16().div_(dist.get_world_size())
    dist.all_reduce(short)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(short))
    return future


def rounded_on_the_way(model: nn.Module) -> Any:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, in_16_bits)
    return Owned(ddp.parameters(), torch.optim.AdamW, lr=LR), ddp


def bucket_views(model):
    ddp = ddp_of(model, gradient_as_bucket_view=True)
    return torch.optim.AdamW(ddp.parameters(), **OPTIONS), ddp


def of_ddp(model, optimizer=torch.optim.AdamW, **options):
    ddp = DistributedDataParallel(model)
    return model, optimizer([p for p in ddp.parameters() if p.requires_grad], **options or OPTIONS), ddp


def ddp_tutorial():
    """As the tutorial of torch's DDP has it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    return of_ddp(model, torch.optim.SGD, lr=0.001)


def zero_tutorial():
    """As the tutorial of torch's ZeroRedundancyOptimizer has it, but smaller."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(6)], nn.Linear(10, 5))
    ddp = DistributedDataParallel(model)
    return model, torchs.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01), ddp


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)).tanh())


def tied():
    torch.manual_seed(3)
    return of_ddp(Tied())


def even_tokens(rank, number):
    return torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(1000 * rank + number))


def with_batch_norm():
    torch.manual_seed(3)
    return of_ddp(nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)))


def frozen_base():
    """A layer is frozen for good, and a small one beside it trains."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5))
    model[0].requires_grad_(False)
    return of_ddp(model)


def points(rank, number):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(8, 10, generator=generator), torch.randn(8, 5, generator=generator)


def squared(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def summed(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def of_all_tokens(model, batch):
    """The sum over a rank's tokens, divided by the mean number of tokens of all ranks."""
    total = nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")
    count, ranks = torch.tensor(float(batch[1].numel())), 1
    if isinstance(model, DistributedDataParallel):
        ranks = dist.get_world_size()
        dist.all_reduce(count)
    return total * ranks / count


def uneven_points(rank, number):
    return tuple(tensor[: 3 + 2 * rank] for tensor in points(rank, number))


ADAM = {"from_plain": torch.optim.Adam, "options": {"lr": 0.01}}
POINTS = {"batch": points, "loss": squared}
RIGHT |= {
    "token weights": (by_tokens, DECAYING | OWN),
    "values that arrive in forward": (GathersLate, DECAYING),
    "pairs of ranks": (Hybrid, DECAYING),
    "a wrapper of one's own": (OwnWrapper, DECAYING),
    "mean over micro-batches": (MeanOfMicroBatches, DECAYING),
    "predivided by the root": (Predivided, DECAYING),
    "a loss scale": (ScaledLoss, DECAYING),
    "a mesh of two dimensions": (on_a_mesh, DECAYING | {"ranks": (2, 4)}),
    "bfloat16 by a policy": (in_bfloat16, DECAYING | {"gradients": torch.bfloat16}),
    "bfloat16 on the way": (rounded_on_the_way, {**ADAMW, "gradients": torch.bfloat16}),
    "gradients as bucket views": (bucket_views, DECAYING),
    "torch's tutorial of DDP": (
        ddp_tutorial,
        {"from_plain": torch.optim.SGD, "options": {"lr": 0.001}} | POINTS,
    ),
    "torch's tutorial of ZeRO": (zero_tutorial, ADAM | POINTS),
    "tied weights": (tied, DECAYING | {"batch": even_tokens, "loss": token_loss}),
    "batch norm": (with_batch_norm, DECAYING | POINTS),
    "a frozen layer": (frozen_base, DECAYING | POINTS),
    "tokens in the loss": (zero_tutorial, ADAM | {"batch": uneven_points, "loss": of_all_tokens}),
    "a sum as loss": (ddp_tutorial, {"from_plain": torch.optim.SGD, "options": {"lr": 0.001}} | POINTS
                      | {"loss": summed}),
}  # fmt: skip
