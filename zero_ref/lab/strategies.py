"""A model made ready to be trained under a recipe: what wraps it, its optimizer, and what records its calls.

For each recipe that the simulator prices, what a user of it would write. A recipe's `prefetch` and
`averaged_itemsize` are for paper only: `fully_shard` fetches ahead as torch has it. Of its optimizers AdamW
is trained: in the parameters' own dtype, or, where it is `MIXED_ADAMW`, on 32-bit masters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.lab import meter, ranks, stage_3
from zero_ref.lab.config import keeps_masters
from zero_ref.local_sgd.averagers import ModelAverager
from zero_ref.local_sgd.optimizer import PostLocalSGDOptimizer, PostLocalSGDState, post_localSGD_hook
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call, ordinary
from zero_ref.simulator.recipe import Recipe
from zero_ref.stairs.parameters import MinimalZero

IN_BACKWARD = {"after_backward": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
"""The hooks of the ways that make the update in backward."""


@dataclass(frozen=True)
class Trainable:
    """The objects that a training loop needs.

    Args:
        model: is called with a batch, and returns its loss.
        optimizer: of the model's parameters.
        calls: filled while `recording` lasts.
        no_sync, all_reduce_last: as the recipe's.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    calls: list[Call] = field(default_factory=list)
    no_sync: bool = False
    all_reduce_last: bool = False

    @property
    def cuts_by_itself(self) -> bool:
        """Whether the reader's optimizer has owners of its own, so that their state is not predicted."""
        return False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Add what this rank sends, but for checks, to `calls`."""
        with meter.recording_distributed() as calls:
            yield
        self.calls.extend(calls)

    def held(self) -> meter.HeldBytes:
        """Return the bytes that this rank holds between iterations."""
        return meter.held_bytes(self.model.parameters(), self.optimizer)

    def passing(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """A forward and backward, one of several before an update, happens in this, and reduces or not."""
        if is_last or not (self.no_sync or isinstance(self.model, DistributedDataParallel)):
            return contextlib.nullcontext()
        return self.model.no_sync()  # type: ignore[operator]


class Observed(Trainable):
    """DDP's all-reduces and the optimizer's messages are recorded where they are made."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.calls.clear()
        yield
        self.calls[:] = ordinary(self.calls)


class Stair(Trainable):
    """The last of the stairs, whose calls are those of any program."""

    def held(self) -> meter.HeldBytes:
        """The shares; a block's whole parameters too, if they were still there."""
        zero: Any = self.optimizer
        shards = [shard for block in zero.blocks for shard in block.shards]
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        params = [*self.model.parameters(), *shards]
        return meter.HeldBytes(
            meter.memory_of(params), meter.memory_of(gradients), meter.state_bytes(zero.local)
        )


class Sharded(Trainable):
    """Parameters are torch's DTensors."""

    @contextlib.contextmanager
    def passing(self, is_last: bool) -> Iterator[None]:
        """As `Trainable.passing`."""
        model: Any = self.model
        model.set_requires_gradient_sync(is_last or not self.no_sync)
        if self.all_reduce_last:
            model.set_requires_all_reduce(is_last)
        yield

    def held(self) -> meter.HeldBytes:
        return stage_3.held_bytes(self.model.parameters(), self.optimizer)


def trainable(
    recipe: Recipe, model: nn.Module, learning_rate: float = 1e-3, *, bucket_cap_mb: float | None = None
) -> Trainable:
    """The model under this recipe, with AdamW.

    Args:
        model: on its device; at stage 3 its `blocks` are sharded one by one, and then the rest.
        bucket_cap_mb: of DDP.
    Raises:
        ValueError: the recipe keeps masters that it cannot have, or its groups do not fit.
    Collective: all ranks of the default group.
    """
    keeps_masters(recipe)  # or say why it cannot
    if recipe.is_stair:
        blocks: Any = model.blocks
        stair: Any = MinimalZero(model, torch.optim.AdamW, blocks=blocks, lr=learning_rate)
        return Stair(model, stair)
    reduce_dtype = None if recipe.reduce_dtype is None else getattr(torch, recipe.reduce_dtype)
    if recipe.stage == 3:
        stage_3.shard(model, recipe.group_of(dist.get_world_size()), reduce_dtype)
        adam = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        return Sharded(model, adam, no_sync=recipe.no_sync, all_reduce_last=recipe.all_reduce_last)
    if recipe.without_ddp:
        return _without_ddp(recipe, model, learning_rate, reduce_dtype)
    # Reduced to their owners, gradients leave the buckets: windows of these would free nothing.
    ddp = DistributedDataParallel(
        model, gradient_as_bucket_view=not recipe.to_owners, bucket_cap_mb=bucket_cap_mb
    )
    optimizer = make_optimizer(recipe, model, learning_rate)
    if recipe.averaging is not None:
        averager = ModelAverager(recipe.averaging)
        ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)
        return Trainable(ddp, PostLocalSGDOptimizer(optimizer, averager))
    made = Observed(ddp, optimizer)
    hook: Callable[..., Any] = meter.recording_all_reduce(made.calls, reduce_dtype)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.collectives.observers.append(made.calls.append)
        if recipe.to_owners:
            hook = reduce_to_owners(optimizer, by=recipe.reduced_by)
        if recipe.way in IN_BACKWARD:
            hook = IN_BACKWARD[recipe.way](hook, ddp, optimizer)
    ddp.register_comm_hook(None, hook)
    return made


class BehindAStep(Observed):
    """An iteration as the simulator has it, which begins with what the step before has sent."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with super().recording():
            yield
        self.calls.sort(key=lambda call: call.op not in ("all_gather", "broadcast"))


def _without_ddp(
    recipe: Recipe, model: nn.Module, learning_rate: float, reduce_dtype: torch.dtype | None
) -> Trainable:
    replicas, group = None, None
    world_size = dist.get_world_size()
    if (sharing := recipe.group_of(world_size)) < world_size:
        shape = world_size // sharing, sharing
        mesh = init_device_mesh(ranks.device().type, shape, mesh_dim_names=("replicas", "shard"))
        replicas, group = mesh["replicas"].get_group(), mesh["shard"].get_group()
    optimizer = make_optimizer(recipe, model, learning_rate, group)
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    in_forward = recipe.way == "in_forward"
    sharded = ShardedDataParallel(
        model, optimizer, replicas=replicas, gather_in_forward=in_forward, reduce_dtype=reduce_dtype
    )
    made = (BehindAStep if in_forward else Observed)(sharded, optimizer, no_sync=recipe.no_sync)
    optimizer.collectives.observers.append(made.calls.append)
    if sharded.replicas is not None:
        sharded.replicas.observers.append(made.calls.append)
    return made


def make_optimizer(
    recipe: Recipe,
    model: nn.Module,
    learning_rate: float = 1e-3,
    group: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """AdamW, whole on every rank or sharded by the recipe's partition.

    Args:
        group: the ranks that share the state; None for all.
    Raises:
        ValueError: the recipe puts on the CPU what no ZeroRedundancyOptimizer does.
    Collective: all ranks of the default group.
    """
    if recipe.offload is not None and not (
        recipe.partition and recipe.offload == "state" and recipe.offload_fraction == 1
    ):
        raise ValueError(
            f"strategy {recipe.name!r} with offload={recipe.offload!r} is simulated and not trained here: a "
            "ZeroRedundancyOptimizer keeps the whole state on the CPU, by state_device=."
        )
    masters, params = keeps_masters(recipe), list(model.parameters())
    if recipe.partition is None and not masters:
        return torch.optim.AdamW(params, lr=learning_rate)
    # torch's AdamW has no masters. Kept whole, they are those of a group in which this rank is alone.
    alone = recipe.partition is None
    return ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        dist.new_subgroups(1)[0] if alone else group,
        overlap_with_ddp=recipe.way in IN_BACKWARD,
        lr=learning_rate,
        partition="sorted_greedy" if recipe.partition is None else recipe.partition,
        parameters_as_bucket_view=recipe.flat,
        master_dtype=torch.float32 if masters else None,
        state_device="cpu" if recipe.offload else None,
        broadcast_buffer_size=recipe.broadcast_buffer_size,
    )
