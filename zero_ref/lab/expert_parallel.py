"""A model whose experts are spread over ranks, made ready to be trained under a recipe.

There are two sets of parameters, and each has ranks of its own. Router, attention and all else are on every
rank: their gradients are averaged over all ranks, and their state is sharded among all. Where N ranks share
the experts of a block, the experts of rank r are also on the ranks r + N, r + 2N and so on: among these alone
their gradients are averaged and their state is sharded. So each set has an optimizer of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import PendingCall
from zero_ref.lab import meter, ranks, stage_3
from zero_ref.lab.config import check_spread
from zero_ref.lab.experts import Experts
from zero_ref.lab.strategies import Trainable, make_optimizer
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call, ordinary
from zero_ref.simulator.expert_parallel import check_experts
from zero_ref.simulator.layers import ParamShape, is_of_experts
from zero_ref.simulator.recipe import Recipe


@dataclass(frozen=True)
class Spread(Trainable):
    """What a training loop needs of a model whose experts are on several ranks.

    Args:
        optimizer: of all parameters but the experts.
        of_experts: the optimizer of this rank's experts.
        replicas: how many ranks have the same experts as this one.
        all_to_alls, calls_of_experts: filled while `recording` lasts.
    """

    of_experts: torch.optim.Optimizer = field(kw_only=True)
    replicas: int = field(kw_only=True)
    all_to_alls: list[Call] = field(default_factory=list)
    calls_of_experts: list[Call] = field(default_factory=list)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return self.optimizer, self.of_experts

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Fill `calls`: first those of the ranks that share experts, then those of all ranks, then those of
        the ranks that have the same experts.

        Each process group makes its calls in this order. Which call comes first of two of different groups is
        up to autograd.
        """
        kinds = self.all_to_alls, self.calls, self.calls_of_experts
        for calls in kinds:
            calls.clear()
        yield
        self.calls[:] = ordinary([call for calls in kinds for call in calls])

    def held(self) -> meter.HeldBytes:
        return self._sum_of_both(meter.held_bytes)

    def _sum_of_both(self, held_bytes: Callable[..., meter.HeldBytes]) -> meter.HeldBytes:
        of_each = []
        for optimizer in self.optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            of_each.append(held_bytes(params, optimizer))
        return meter.HeldBytes(*map(sum, zip(*of_each)))

    def expert_rows(self) -> tuple[int, ...]:
        return tuple(one.rows for one in self.model.modules() if isinstance(one, Experts))


class SpreadAndSharded(Spread):
    """Parameters are torch's DTensors: those of a block's experts over other ranks than its other ones."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """As in `Spread`."""
        with (
            super().recording(),
            meter.recording_distributed(within=dist.get_world_size()) as calls,
            meter.recording_distributed(within=self.replicas) as calls_of_experts,
        ):
            yield
            self.calls.extend(calls)
            self.calls_of_experts.extend(calls_of_experts)

    def held(self) -> meter.HeldBytes:
        return self._sum_of_both(stage_3.held_bytes)


def spread(
    recipe: Recipe,
    model: nn.Module,
    expert_parallel: int,
    learning_rate: float = 1e-3,
    *,
    bucket_cap_mb: float | None = None,
) -> Spread:
    """The model under this recipe with AdamW, the experts of each block divided among consecutive ranks.

    Args:
        model: on its device, with all experts and the same on all ranks. It keeps those of this rank.
        expert_parallel: so many consecutive ranks share the experts of each block.
        bucket_cap_mb: of DDP.
    Raises:
        ValueError: the recipe is none of `config.SPREAD_UNDER`, or has an option that is not combined with
            expert parallelism; the ranks or the experts cannot be divided.
    Collective: all ranks of the default group.
    """
    check_spread(recipe)
    shapes = [ParamShape(name, tuple(param.shape)) for name, param in model.named_parameters()]
    check_experts(shapes, expert_parallel, 1.0, dist.get_world_size())
    shape = dist.get_world_size() // expert_parallel, expert_parallel
    mesh = init_device_mesh(ranks.device().type, shape, mesh_dim_names=("replicas", "experts"))
    sharing, replicas = as_collectives(mesh["experts"].get_group()), mesh["replicas"].get_group()
    for module in model.modules():
        if isinstance(module, Experts):
            module.keep_own(sharing)
    if recipe.stage == 3:
        stage_3.shard(model, with_same_experts=mesh["replicas"])
    names = [name for name, _ in model.named_parameters() if is_of_experts(name)]
    dense = [param for name, param in model.named_parameters() if name not in names]
    experts = [model.get_parameter(name) for name in names]
    optimizers = (
        make_optimizer(recipe, model, learning_rate, params=dense),
        make_optimizer(recipe, model, learning_rate, replicas, params=experts),
    )

    kind = SpreadAndSharded if recipe.stage == 3 else Spread
    wrapped = model if recipe.stage == 3 else _wrapped(recipe, model, optimizers, names, bucket_cap_mb)
    made = kind(wrapped, optimizers[0], of_experts=optimizers[1], replicas=shape[0])
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(None, meter.recording_all_reduce(made.calls))
        AveragedGradients(experts, replicas, made.calls_of_experts)
    sharing.observers.append(made.all_to_alls.append)
    for one, calls in zip(optimizers, (made.calls, made.calls_of_experts)):
        if isinstance(one, ZeroRedundancyOptimizer):
            one.collectives.observers.append(calls.append)
    return made


def _wrapped(
    recipe: Recipe,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names_of_experts: Sequence[str],
    bucket_cap_mb: float | None,
) -> nn.Module:
    """The model in ShardedDataParallel, or in a DDP that leaves the experts alone."""
    if recipe.without_ddp:
        zeros = [one for one in optimizers if isinstance(one, ZeroRedundancyOptimizer)]
        # At the start, rank 0 would send all ranks its own experts.
        return ShardedDataParallel(model, zeros, sync_models_at_startup=False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names_of_experts)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)


class AveragedGradients:
    """Gradients that are averaged over a group as soon as each is complete; all are when backward returns.

    What DDP does for the parameters that it knows, without buckets.

    Args:
        params: hold this object by their hooks.
        calls: each all-reduce is added to it.
    Collective: all ranks of the group, in backward. Cost: an all-reduce of each gradient; none on one rank.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup, calls: list[Call]) -> None:
        self.comm, self.pending = as_collectives(group), list[PendingCall]()
        self.comm.observers.append(calls.append)
        self.task = -1
        if self.comm.world_size > 1:
            for param in params:
                param.register_post_accumulate_grad_hook(self._start)

    def _start(self, param: torch.Tensor) -> None:
        if self.task != (task := torch._C._current_graph_task_id()):  # the first gradient of a backward
            self.task, self.pending = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        assert param.grad is not None
        self.pending.append(self.comm.all_reduce(param.grad.mul_(1 / self.comm.world_size)))

    def _wait(self) -> None:
        for call in self.pending:
            call.wait()
