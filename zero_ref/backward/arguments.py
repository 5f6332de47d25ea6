"""The checks of `ShardedDataParallel`'s arguments, which each rank makes before it compares them with others.

`stairs/owners.py` checks nothing. Here a mistake on one rank must be reported to all ranks, so these
functions only raise, and the constructor passes the error on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_ref.comm.agreement import MAY_DIFFER
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.comm.process_group import ProcessGroupCollectives, global_ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

FAIRSCALE = ("auto_refresh_trainable", "reduce_fp16", "warn_on_trainable_params_changed")
"""Options that `ShardedDataParallel` accepts for programs written for FairScale."""


@dataclass(frozen=True)
class WrapperOptions:
    """The options of `ShardedDataParallel`. Ranks compare every field but those marked by `MAY_DIFFER`.

    Args:
        broadcast_buffers, sync_models_at_startup, reduce_buffer_size, reduce_dtype, scaled, may_change,
            gather_in_forward: as `ShardedDataParallel`.
        replicas: whether there are any.
        reduce_fp16: FairScale's name for `reduce_dtype=torch.float16`.
        auto_refresh_trainable, warn_on_trainable_params_changed: FairScale's.
    Raises:
        ValueError: gradients cannot be averaged in the dtype.
    """

    broadcast_buffers: bool
    sync_models_at_startup: bool
    reduce_buffer_size: int
    reduce_dtype: torch.dtype | None
    scaled: bool
    may_change: bool
    gather_in_forward: bool
    replicas: bool
    reduce_fp16: bool = False
    auto_refresh_trainable: bool = field(
        default=True, metadata={MAY_DIFFER: "no effect: a change of `requires_grad` is always noticed"}
    )
    warn_on_trainable_params_changed: bool = field(
        default=True, metadata={MAY_DIFFER: "no effect: such a change is no reason for a warning"}
    )

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are sent; None for the parameters' own."""
        return torch.float16 if self.reduce_fp16 else self.reduce_dtype


def listed_optimizers(given: Any) -> list[Any]:
    """The argument `sharded_optimizer` as a list, whatever it is."""
    if isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable):
        return [given]
    return list(given)


def check_names(options: Iterable[str]) -> None:
    """Refuse options that are not FairScale's.

    Raises:
        TypeError: names the first one.
    """
    for name in options:
        if name not in FAIRSCALE:
            raise TypeError(
                f"ShardedDataParallel got an unexpected option {name!r}. Besides those of its own it accepts "
                f"{', '.join(FAIRSCALE)} of FairScale's."
            )


def groups_of(
    optimizers: Iterable[Any], process_group: dist.ProcessGroup | Collectives | None
) -> list[Collectives]:
    """The groups of the optimizers, each once; if there is no optimizer, the group that was passed in."""
    groups = {
        getattr(zero.collectives, "group", zero.collectives): zero.collectives
        for zero in optimizers
        if isinstance(zero, ZeroRedundancyOptimizer)
    }
    if not groups:
        with contextlib.suppress(Exception):
            return [as_collectives(process_group)]
    return [*groups.values()]


def replicas_of(
    optimizers: Sequence[Any], replicas: dist.ProcessGroup | DeviceMesh | Collectives
) -> Collectives:
    """The calls between this rank and its replicas.

    Raises:
        ValueError: another rank of the optimizers' group is among the replicas.
    """
    comm = as_collectives(replicas)
    for zero in optimizers:
        own = getattr(zero, "collectives", None)
        if not isinstance(own, ProcessGroupCollectives) or not isinstance(comm, ProcessGroupCollectives):
            continue  # in other networks the place of a rank in its group tells
        ours, theirs = global_ranks(own), global_ranks(comm)
        is_same = own.group is comm.group and dist.get_world_size() > 1
        if is_same or len(set(ours) & set(theirs)) > 1:
            raise ValueError(
                f"replicas is the group of ranks {theirs}, and the optimizer shards over {ours}: only this "
                "rank may be in both. Pass the ranks that own the same slices in other groups, such as "
                'mesh["replicas"] beside mesh["shard"].'
            )
    return comm


def check_dtype(dtype: Any) -> None:
    """Refuse a dtype in which gradients cannot be averaged.

    Raises:
        ValueError: it is no floating-point dtype.
    """
    is_fit = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    if dtype is not None and not is_fit:
        raise ValueError(
            f"reduce_dtype takes a floating-point dtype such as torch.bfloat16, not {dtype!r}, which has no "
            "fractions for an average."
        )


def check_optimizers(
    optimizers: Sequence[Any], process_group: dist.ProcessGroup | Collectives | None
) -> None:
    """Refuse optimizers to which gradients cannot be sent.

    Args: as `ShardedDataParallel`.
    Raises:
        TypeError: one is not a ZeroRedundancyOptimizer.
        ValueError: there is none; one is over another group, or was constructed with options that do not fit.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"sharded_optimizer takes a ZeroRedundancyOptimizer, or a list of them, not "
                f"{type(optimizer).__name__}: gradients go to the owners that it has."
            )
        if process_group is not None and process_group is not optimizer.process_group:
            raise ValueError(
                "process_group is another group than the optimizer's, whose ranks own the gradients. Leave "
                "it out, or construct the optimizer on that group."
            )
        if optimizer.registered.options.overlap_with_ddp:
            raise ValueError(
                "an optimizer with overlap_with_ddp=True is stepped by hooks of DistributedDataParallel. "
                "Construct it without."
            )
    if not optimizers:
        raise ValueError("sharded_optimizer is an empty list: gradients need an owner.")
