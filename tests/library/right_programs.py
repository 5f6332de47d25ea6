"""Programs that are right, in many ways: about none of them has the doctor anything to say.

`RIGHT` has their factories by name, each with what the doctor is given of the plain loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed.optim as torchs
from library.planted import OPTIONS, Hooked
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from zero_ref import OSS, ShardedDataParallel, ZeroRedundancyOptimizer, reduce_to_owners
from zero_ref.doctor import Program
from zero_ref.plan.choice import RULES
from zero_ref.stairs import buckets, owners
from zero_ref_course.gallery import all_exhibits
from zero_ref_course.gallery.exhibits import ADAMW
from zero_ref_course.gallery.gradients import Buffered, Wrapped
from zero_ref_course.gallery.loads import MainCopies, WithMasters
from zero_ref_course.gallery.right import LR, Sharded
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
OF_STAIRS = ("scheduler", "group added", "save and load", "another world size")


def without(*trials: str, **plain: Any) -> dict[str, Any]:
    """Return the arguments of the plain loop, and the trials that a library refuses by its own error."""
    return {**(plain or ADAMW), "without": trials}


RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "DDP": (Wrapped, ADAMW),
    "torch's ZeRO": (torchs_zero, without("mixed dtypes")),
    "torch's ZeRO, buckets": (partial(torchs_zero, parameters_as_bucket_view=True), without("mixed dtypes")),
    "FSDP2": (
        Fsdp2,
        without("save and load", "another world size", "group added", "unused parameters", "mixed dtypes"),
    ),
    **{f"partition {rule}": (partial(ours, partition=rule), ADAMW) for rule in RULES},
    "buckets": (partial(ours, partition="even", parameters_as_bucket_view=True), ADAMW),
    "momentum": (momentum, SGD),
    "no wrapper": (alone, ADAMW),
    "OSS": (oss, without("save and load", "another world size")),
    "ShardedDataParallel": (to_shards, without("group added")),
    "new parameters in forward": (partial(to_shards, gather_in_forward=True), without("group added")),
    "may change": (partial(to_shards, may_change=True), ADAMW),
    "gradients to owners": (to_owners, without("group added")),
    "masters": (with_masters, {**ADAMW, "masters": True}),
    "two groups": (groups, {"reference": plain_by_kind}),
    "state on the CPU": (partial(ours, state_device="cpu"), ADAMW),
    "stair owners": (partial(Stair, owners), without(*OF_STAIRS)),
    # One flat tensor has one dtype: that stair says so.
    "stair buckets": (partial(Stair, buckets), without(*OF_STAIRS, "mixed dtypes")),
    "the museum's": (Sharded, ADAMW),
    "a gradient buffer": (Buffered, ADAMW),
    "copies of gradients": (ThroughCopies, ADAMW),
    "copies of values": (MainCopies, ADAMW),
    "Muon": (ShardedMuon, MUON),
    "Muon in pieces": (MuonInPieces, MUON),
    "Muon at owners": (
        muon_at_owners,
        without("mixed dtypes", from_plain=torch.optim.Muon, options={"lr": 0.05}),
    ),
    "eps passed on": (EPS.mended, EPS.plain),
    "by hooks": (Hooked, ADAMW | {"options": OPTIONS}),
    "groups by kind": (ByKind, {"reference": plain_by_kind}),
    "the museum's masters": (
        WithMasters,
        {**ADAMW, "masters": True, "options": {"lr": 2.0**-12, "weight_decay": 6.0}},
    ),
}
